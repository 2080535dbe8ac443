"""A rehearsal leaves no trace: under every ZeRO stage the steps after it are those of a run without one, bit for bit."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import tiny
from tests.engine.unseen import REHEARSED, Case
from tests.spawn import run_ranks


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unseen")
    tiny.write_decoder(folder / "decoder")
    tiny.write_encoder(folder / "encoder")
    run_ranks("tests/engine/worker_unseen.py", [str(folder)], world=2, timeout=600)
    return folder


@functools.cache
def result(work: Path, case: Case) -> dict[str, Any]:
    found: dict[str, Any] = torch.load(work / f"{case.name}.pt", weights_only=False)
    return found


def equal(ours: Any, theirs: Any) -> bool:
    """Bit for bit, through dicts and lists."""
    if isinstance(ours, torch.Tensor):
        return ours.dtype == theirs.dtype and torch.equal(ours, theirs)
    if isinstance(ours, dict):
        return ours.keys() == theirs.keys() and all(equal(ours[key], theirs[key]) for key in ours)
    if isinstance(ours, list):
        return len(ours) == len(theirs) and all(map(equal, ours, theirs))
    return bool(ours == theirs)


@pytest.mark.parametrize("case", REHEARSED, ids=lambda case: case.name)
def test_a_rehearsal_leaves_no_trace(work: Path, case: Case) -> None:
    plain, rehearsed = result(work, case)["plain"], result(work, case)["rehearsed"]
    assert plain["steps"][0]["grads"] and plain["state"] and plain["steps"][0]["report"]["grad_norm"] > 0
    for key in plain:
        assert equal(plain[key], rehearsed[key]), key


def test_dropout_acts_in_these_runs(work: Path) -> None:
    """Or a lost random state would not show: layouts whose losses are equal without dropout draw differently, and differ."""
    one, other = (
        result(work, case)["plain"]["steps"][1]["report"]["loss"]
        for case in REHEARSED
        if case.layout.stage == "instruct" and case.layout.zero in (0, 3)
    )
    assert one != pytest.approx(other, rel=1e-5)


def test_a_row_that_does_not_fit_is_refused_with_its_size_and_three_ways_out(work: Path) -> None:
    for rank in range(2):
        said, (tokens, patches, images) = json.loads(json.loads((work / f"said-{rank}.json").read_text()))
        assert f"{tokens:,} tokens, {patches:,} patches, {images} images" in said and images > 0
        assert "GiB" in said
        for key in ("mmds.data.row_tokens=", "mmds.data.max_pixels=", "activation_checkpointing={}"):
            assert f"--set '{key}" in said
