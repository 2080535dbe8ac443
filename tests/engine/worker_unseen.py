"""Pairs of runs in the same ranks, one plain and one in which something must leave no trace; what each did goes to a file for the test.

usage: worker_unseen.py WORKDIR
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Iterator
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
from tests.engine.unseen import CASES, SLEEP_S, SLOW_RANK, Case
from tests.engine.worker_layouts import weights


def main(work: Path) -> None:
    ranks = start_ranks()
    for case in CASES:
        result = {"plain": run(work, case, ranks), "rehearsed": run(work, case, ranks, rehearse=True)}
        if case.measured:
            result["measured"] = run(work, case, ranks, measure=True)
        if ranks.first:
            torch.save(result, work / f"{case.name}.pt")
    said = refuse(work, CASES[0], ranks)
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


def run(
    work: Path, case: Case, ranks: Ranks, *, rehearse: bool = False, measure: bool = False
) -> dict[str, Any]:
    """Two steps and what they lead to; with `rehearse` a row of another step is rehearsed before each.

    With `measure`, waits are measured in both, and one rank sleeps in the second.
    """
    engine, geometry = build(work, case, ranks)
    result: dict[str, Any] = {"steps": [], "hooks": [hooks(engine)]}
    sleeps: list[float] = []
    for step in range(2):
        if rehearse:
            engine.rehearse(rows_of(case.layout, 1, 0, geometry)[0])
        rows = rows_of(case.layout, step, ranks.rank, geometry)
        with sleepy(engine, sleeps if measure and step == 1 else None, ranks):
            result["steps"].append(measured_step(engine, rows, measure_wait=measure))
        result["hooks"].append(hooks(engine))
    result["waited"] = result["steps"][1]["report"]["waited"]
    result["slept"] = ranks.max(sum(sleeps))[0]
    result["weights"] = weights(engine)
    result["samples"] = int(engine.ds.global_samples)
    result["state"] = optimizer_state(engine)
    engine.ds.destroy()
    return result


@contextlib.contextmanager
def sleepy(engine: Engine, sleeps: list[float] | None, ranks: Ranks) -> Iterator[None]:
    """Inside, the slow rank sleeps at the end of each pass of a decoder block, and notes it; not without a list."""

    def sleep(*_: Any) -> None:
        time.sleep(SLEEP_S)
        sleeps.append(SLEEP_S)

    layers = engine.model.decoder.llm.model.layers
    slow = sleeps is not None and ranks.rank == SLOW_RANK
    handles = [layer.register_forward_hook(sleep) for layer in layers if slow]
    yield
    for handle in handles:
        handle.remove()


def hooks(engine: Engine) -> tuple[int, list[str]]:
    """Hooks on the model's modules, and what the optimizer object has in the place of its class's methods."""
    counted = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in engine.model.modules())
    optimizer = engine.ds.optimizer
    return counted, sorted(
        name for name in vars(optimizer) if "reduce" in name and callable(vars(optimizer)[name])
    )


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
