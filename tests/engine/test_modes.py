"""Resolution modes, connectors and positions under ZeRO: two ranks, some without an image, train as one process without DeepSpeed.

The single process runs each sample alone, in a row of its own; that the parts equal their originals is shown in tests/model.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mmds.config import load_config
from mmds.data.rows import build_row
from mmds.geometry import Geometry
from mmds.model.build import build_decoder, build_light, find_source
from mmds.model.mllm import Mllm
from tests import tiny
from tests.engine.modes import ENCODER_VISION, EPS, MODES, RATE, STEPS, Mode, samples_of
from tests.engine.reference import compare
from tests.spawn import run_ranks

by_name = pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("modes")
    tiny.write_decoder(folder / "decoder")
    tiny.write_encoder(folder / "encoder", model_cfg={"embed_dim": 16, "vision_cfg": ENCODER_VISION})
    run_ranks("tests/engine/worker_modes.py", [str(folder)], world=2, timeout=600)
    return folder


def one_process(work: Path, mode: Mode, geometry: Geometry) -> list[tuple[float, dict[str, Tensor]]]:
    """Loss and gradients of each step."""
    config = load_config(work / f"{mode.name}.json")
    source = find_source(config.init_from, config.model)
    encoder, connector = build_light(source, seed=config.seed)
    decoder = build_decoder(source, dtype=torch.float32, seed=config.seed)
    model = Mllm(connector=connector, decoder=decoder, encoder=encoder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, eps=EPS, weight_decay=0.0)
    steps = []
    for step in range(STEPS):
        samples = list(samples_of(step, geometry))
        targets = sum(int(sample.supervised[1:].sum()) for sample in samples)
        total = torch.stack([model(build_row([sample], geometry))[0] for sample in samples]).sum() / targets
        optimizer.zero_grad()
        total.backward()
        grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        steps.append((float(total.detach()), grads))
        optimizer.step()
    return steps


@by_name
def test_two_ranks_train_as_one_process(work: Path, mode: Mode) -> None:
    found: dict[str, Any] = torch.load(work / f"{mode.name}.pt", weights_only=False)
    for ours, (loss, grads) in zip(found["steps"], one_process(work, mode, found["geometry"]), strict=True):
        assert ours["report"]["loss"] == pytest.approx(loss, rel=1e-5)
        assert ours["grads"].keys() == grads.keys()
        assert compare(ours["grads"], grads) == []
        assert all(bool(grad.any()) for grad in grads.values()), "every parameter of every part acts"
    assert found["outside"] == [], "under ZeRO-3 a part called by itself would meet no other rank"


@by_name
def test_the_pictures_differ_in_size_where_the_mode_lets_them(work: Path, mode: Mode) -> None:
    geometry = torch.load(work / f"{mode.name}.pt", weights_only=False)["geometry"]
    plans = {
        plan
        for step in range(STEPS)
        for row in samples_of(step, geometry)
        for plan in build_row([row], geometry).plans
    }
    assert (len(plans) == 1) == (geometry.mode == "fixed")
