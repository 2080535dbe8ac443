"""ZeRO-3 on two ranks gives the loss and every gradient of a single process without DeepSpeed, packing or mmds attention."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from mmds.model.build import build_geometry
from mmds.model.connector import Connector
from mmds.model.encoder import EncoderSection, build_encoder
from mmds.stages import STAGES
from tests import tiny
from tests.engine.cases import ALL_TEXT, CASES, Case, rows_of, write_config
from tests.engine.reference import compare, stock_llm, stock_nll
from tests.spawn import run_ranks


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All cases, run by one pair of ranks."""
    folder = tmp_path_factory.mktemp("equality")
    tiny.write_decoder(folder / "decoder")
    tiny.write_encoder(folder / "encoder")
    for name, case in CASES.items():
        write_config(folder, name, case, folder)
    run_ranks("tests/engine/worker_equality.py", [str(folder)], timeout=400)
    return folder


def reference(work: Path, name: str, case: Case) -> tuple[float, int, dict[str, torch.Tensor]]:
    """Loss, supervised tokens and gradients (as mmds names them) of the step, from stock parts."""
    encoder = build_encoder(EncoderSection(name=f"local-dir:{work / 'encoder'}"))
    connector = Connector(case.connector, encoder_width=encoder.spec.width, decoder_width=48)
    connector.load_state_dict(torch.load(work / f"{name}.connector.pt"))
    llm = stock_llm(str(work / "decoder"))
    geometry = build_geometry(encoder.spec, case.connector, max_pixels=None)
    mean, std = torch.tensor(encoder.spec.mean), torch.tensor(encoder.spec.std)
    nll, count = torch.zeros(()), 0
    for rank in range(2):
        for micro in range(case.accumulation):
            for sample in rows_of(case, geometry, rank, micro)[1]:
                nll = nll + stock_nll(
                    llm, encoder.visual, connector.net, sample, layer=encoder.spec.layer, mean=mean, std=std
                )
                count += int(sample.supervised[1:].sum())
    (nll / count).backward()
    parts = {"encoder.": encoder, "connector.": connector, "decoder.llm.": llm}
    grads = {
        prefix + n: torch.zeros_like(p) if p.grad is None else p.grad
        for prefix, part in parts.items()
        for n, p in part.named_parameters()
    }
    return float(nll) / count, count, grads


def trained(name: str, case: Case) -> bool:
    part = name.split(".")[0] + ".*"
    return dict(STAGES[case.stage].rates)[part] is not None


@pytest.mark.parametrize("name", CASES)
def test_loss_gradients_and_norm_equal_the_stock_reference(work: Path, name: str) -> None:
    case = CASES[name]
    loss, count, grads = reference(work, name, case)
    ours: dict[str, Any] = torch.load(work / f"{name}.pt")
    report = json.loads((work / f"{name}.result.json").read_text())
    wanted = {n: g for n, g in grads.items() if trained(n, case)}
    assert report["supervised"] == count
    assert report["loss"] == pytest.approx(loss, rel=1e-5)
    assert set(ours["grads"]) == set(wanted)
    assert compare(ours["grads"], wanted) == []
    norm = torch.stack([g.norm() for g in wanted.values()]).norm()
    assert report["grad_norm"] == pytest.approx(float(norm), rel=1e-4, abs=1e-9)


@pytest.mark.parametrize("name", CASES)
def test_every_declared_parameter_changed_and_every_other_is_bit_equal(work: Path, name: str) -> None:
    case = CASES[name]
    ours: dict[str, Any] = torch.load(work / f"{name}.pt")
    acting = {n for n, g in ours["grads"].items() if float(g.abs().max()) > 0}
    assert set(ours["changed"]) == acting
    if case.pictures != ALL_TEXT:
        assert acting == set(ours["grads"])


@pytest.mark.parametrize("name", [n for n, c in CASES.items() if c.pictures == ALL_TEXT])
def test_without_any_picture_encoder_and_connector_gradients_are_exactly_zero(work: Path, name: str) -> None:
    grads = torch.load(work / f"{name}.pt")["grads"]
    visual = [n for n in grads if not n.startswith("decoder.")]
    assert visual
    assert all(float(grads[n].abs().max()) == 0.0 for n in visual)
    assert not set(torch.load(work / f"{name}.pt")["changed"]) & set(visual)
