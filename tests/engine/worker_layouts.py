"""Every layout of one world size, one after the other in the same ranks; what each step did goes to a file for the test to judge.

usage: worker_layouts.py WORKDIR WORLD
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mmds.config import load_config
from mmds.engine import Engine, Ranks
from mmds.engine.assemble import assemble
from mmds.engine.launch import start_ranks, stop_ranks
from mmds.engine.zero import whole_tensors
from mmds.geometry import Geometry
from mmds.model.build import build_geometry, build_light, find_source
from mmds.model.encoder import tower_blocks
from tests.engine import scripted
from tests.engine.layouts import TOTAL, Layout, of_world, rows_of, write_config
from tests.engine.spy import measured_step


def main(work: Path, world: int) -> None:
    ranks = start_ranks()
    for layout in of_world(world):
        engine, geometry = build(work, layout, ranks)
        passes = count_passes(engine)
        result: dict[str, Any] = {"before": weights(engine), "steps": []}
        if layout.lora and ranks.first:
            adapters = {name: value for name, value in result["before"].items() if ".lora_" in name}
            torch.save(adapters, work / "adapters.pt")
        for step in range(layout.first, layout.first + layout.steps):
            if layout.saved and step == 2:
                engine.save(work / layout.name, "saved")
                result["saved"] = weights(engine)
            passes.clear()
            result["steps"].append(measured_step(engine, rows_of(layout, step, ranks.rank, geometry)))
            result["steps"][-1]["passes"] = dict(passes)
        result["after"] = weights(engine)
        engine.ds.destroy()
        if layout.saved:
            resumed, _ = build(work, layout, ranks)
            resumed.load(work / layout.name, "saved")
            result["resumed"] = (
                measured_step(resumed, rows_of(layout, 2, ranks.rank, geometry)),
                weights(resumed),
            )
            resumed.ds.destroy()
        if ranks.first:
            torch.save(result, work / f"{layout.name}.pt")
    losses = scripted.losses(ranks)
    if ranks.first:
        (work / f"scripted-{world}.json").write_text(json.dumps(losses))
    stop_ranks()


def build(work: Path, layout: Layout, ranks: Ranks) -> tuple[Engine, Geometry]:
    """The engine of a run, as train.py makes it."""
    file = work / f"{layout.name}.json"
    if ranks.first:
        write_config(work, layout)
    ranks.barrier()
    config = load_config(file)
    source = find_source(config.init_from, config.model)
    encoder, connector = build_light(source, seed=config.seed)
    geometry = build_geometry(encoder.spec, connector.section, max_pixels=config.max_pixels)
    if ranks.first:
        torch.save(connector.state_dict(), work / f"{layout.stage}.connector.pt")
    return assemble(config, source, encoder, connector, ranks, total_steps=TOTAL), geometry


def count_passes(engine: Engine) -> dict[str, int]:
    """Forward passes by block from now on: its name -> how often it has run. Hooks sit inside the blocks, where recomputation acts."""
    passes: dict[str, int] = {}

    def watch(name: str, module: nn.Module) -> None:
        module.register_forward_pre_hook(
            lambda *_: passes.__setitem__(name, passes.get(name, 0) + 1), prepend=True
        )

    for name, module in blocks(engine):
        watch(name, module)
    return passes


def blocks(engine: Engine) -> Iterator[tuple[str, nn.Module]]:
    """A module of each block of each part, and the LM head."""
    encoder = engine.frozen.encoder if engine.frozen is not None else engine.model.encoder
    assert encoder is not None
    for index, block in enumerate(tower_blocks(encoder.visual)):
        yield f"encoder.{index}", block.attn
    yield "connector.0", engine.model.connector.net.up
    for index, layer in enumerate(engine.model.decoder.llm.model.layers):
        yield f"decoder.{index}", layer.self_attn
    yield "head.0", engine.model.decoder.llm.lm_head


def weights(engine: Engine) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in whole_tensors(engine.model)}


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
