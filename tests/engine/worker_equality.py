"""Two ranks, ZeRO-3: every stage, ranks text-only on alternate micro-steps; loss and gradients go to a file for the test to judge.

usage: worker_equality.py WORKDIR
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from deepspeed.utils import safe_get_full_grad

from mmds.config import load_config
from mmds.engine.assemble import assemble
from mmds.engine.launch import start_ranks, stop_ranks
from mmds.engine.zero import whole_tensors
from mmds.model.build import build_geometry, build_light, find_source
from tests.engine.cases import CASES, rows_of


def main(work: Path) -> None:
    ranks = start_ranks()
    for name, case in CASES.items():
        config = load_config(work / f"{name}.json")
        source = find_source(config.init_from, config.model)
        encoder, connector = build_light(source, seed=config.seed)
        geometry = build_geometry(encoder.spec, connector.name, max_pixels=config.max_pixels)
        if ranks.first:
            torch.save(connector.state_dict(), work / f"{name}.connector.pt")
        engine = assemble(config, source, encoder, connector, ranks, total_steps=10)
        before = {n: v.detach().clone() for n, v in whole_tensors(engine.model)}
        grads: dict[str, torch.Tensor] = {}
        step = engine.ds.step

        def spying_step(engine=engine, grads=grads, step=step) -> None:
            for n, p in engine.model.named_parameters():
                full = safe_get_full_grad(p) if p.requires_grad else None
                if full is not None:
                    grads[n] = full.detach().clone()
            step()

        engine.ds.step = spying_step
        report = engine.step(
            [rows_of(case, geometry, ranks.rank, micro)[0] for micro in range(case.accumulation)]
        )
        after = {n: v.detach().clone() for n, v in whole_tensors(engine.model)}
        if ranks.first:
            changed = [n for n in after if not torch.equal(after[n], before[n])]
            torch.save({"grads": grads, "changed": changed}, work / f"{name}.pt")
            (work / f"{name}.result.json").write_text(json.dumps(report.__dict__))
        engine.ds.destroy()
    stop_ranks()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
