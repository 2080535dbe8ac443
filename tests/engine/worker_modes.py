"""Every mode, one after the other in the same ranks; what each step did goes to a file for the test to judge.

usage: worker_modes.py WORKDIR
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from mmds.config import load_config
from mmds.data.rows import build_row
from mmds.engine import Engine
from mmds.engine.assemble import assemble
from mmds.engine.launch import start_ranks, stop_ranks
from mmds.model.build import build_light, find_source, geometry_of
from tests.engine.modes import MODES, STEPS, samples_of, write_config
from tests.engine.spy import measured_step


def main(work: Path) -> None:
    ranks = start_ranks()
    for mode in MODES:
        if ranks.first:
            write_config(work, mode)
        ranks.barrier()
        config = load_config(work / f"{mode.name}.json")
        source = find_source(config.init_from, config.model)
        encoder, connector = build_light(source, seed=config.seed)
        geometry = geometry_of(source, encoder, connector, max_pixels=config.max_pixels)
        engine = assemble(config, source, encoder, connector, ranks, total_steps=10)
        result = {"steps": [], "geometry": geometry, "outside": calls_outside(engine)}
        for step in range(STEPS):
            samples = list(samples_of(step, geometry))
            rows = [build_row([samples[2 * micro + ranks.rank]], geometry) for micro in range(2)]
            result["steps"].append(measured_step(engine, rows))
        engine.ds.destroy()
        if ranks.first:
            torch.save(result, work / f"{mode.name}.pt")
    stop_ranks()


def calls_outside(engine: Engine) -> list[str]:
    """Names of parts as they are called from now on while DeepSpeed's own forward pass is not running."""
    outside: list[str] = []
    running: list[bool] = []
    engine.ds.register_forward_pre_hook(lambda *_: running.append(True))
    engine.ds.register_forward_hook(lambda *_: running.clear())
    for name, part in engine.model.named_children():
        part.register_forward_pre_hook(lambda *_, name=name: None if running else outside.append(name))
    return outside


if __name__ == "__main__":
    main(Path(sys.argv[1]))
