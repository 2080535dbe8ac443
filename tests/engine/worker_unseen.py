"""Pairs of runs in the same ranks, one plain and one in which something must leave no trace; what each did goes to a file for the test.

usage: worker_unseen.py WORKDIR
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from mmds.config import load_config
from mmds.engine import Engine, Ranks
from mmds.engine.assemble import assemble
from mmds.engine.launch import start_ranks, stop_ranks
from mmds.errors import ConfigError
from mmds.geometry import Geometry
from mmds.model.build import build_geometry, build_light, find_source
from tests.engine.layouts import TOTAL, rows_of, write_config
from tests.engine.spy import measured_step
from tests.engine.unseen import REHEARSED, Case
from tests.engine.worker_layouts import weights


def main(work: Path) -> None:
    ranks = start_ranks()
    for case in REHEARSED:
        result = {"plain": run(work, case, ranks), "rehearsed": run(work, case, ranks, rehearse=True)}
        if ranks.first:
            torch.save(result, work / f"{case.name}.pt")
    said = refuse(work, REHEARSED[0], ranks)
    (work / f"said-{ranks.rank}.json").write_text(json.dumps(said))
    stop_ranks()


def build(work: Path, case: Case, ranks: Ranks) -> tuple[Engine, Geometry]:
    """The engine of a run, as train.py makes it; its random state is that of every other run."""
    file = work / f"{case.layout.name}.json"
    if ranks.first:
        write_config(work, case.layout)
        file.write_text(json.dumps(case.configured(json.loads(file.read_text()))))
    ranks.barrier()
    config = load_config(file)
    source = find_source(config.init_from, config.model)
    encoder, connector = build_light(source, seed=config.seed)
    geometry = build_geometry(encoder.spec, connector.section, max_pixels=config.max_pixels)
    engine = assemble(config, source, encoder, connector, ranks, total_steps=TOTAL)
    torch.manual_seed(ranks.rank)
    return engine, geometry


def run(work: Path, case: Case, ranks: Ranks, *, rehearse: bool = False) -> dict[str, Any]:
    """Two steps and what they lead to; with `rehearse` a row of another step is rehearsed before each."""
    engine, geometry = build(work, case, ranks)
    result: dict[str, Any] = {"steps": []}
    for step in range(2):
        if rehearse:
            engine.rehearse(rows_of(case.layout, 1, 0, geometry)[0])
        result["steps"].append(measured_step(engine, rows_of(case.layout, step, ranks.rank, geometry)))
    result["weights"] = weights(engine)
    result["samples"] = int(engine.ds.global_samples)
    result["state"] = optimizer_state(engine)
    engine.ds.destroy()
    return result


def optimizer_state(engine: Engine) -> list[torch.Tensor]:
    """Adam's state and the parameters that it updates (fp32 masters, partitions), of this rank."""
    inner = getattr(engine.ds.optimizer, "optimizer", engine.ds.optimizer)
    masters = [p for group in inner.param_groups for p in group["params"]]
    states = [v for state in inner.state.values() for v in state.values() if isinstance(v, torch.Tensor)]
    return [value.detach().clone() for value in (*masters, *states)]


def refuse(work: Path, case: Case, ranks: Ranks) -> str:
    """What is said when a forward pass runs out of memory."""
    engine, geometry = build(work, case, ranks)

    def no_memory(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")

    hook = engine.model.decoder.register_forward_pre_hook(no_memory)
    row = rows_of(case.layout, 1, 0, geometry)[0]
    with pytest.raises(ConfigError) as caught:
        engine.rehearse(row)
    hook.remove()
    engine.ds.destroy()
    numbers = (row.input_ids.numel(), sum(plan.patches for plan in row.plans), len(row.plans))
    return json.dumps([str(caught.value), numbers])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
