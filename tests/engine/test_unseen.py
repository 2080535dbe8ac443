"""A rehearsal leaves no trace, and measuring the waits changes nothing: under every ZeRO stage the steps are those of a plain run, bit
for bit. What is measured is how long a rank has slept."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import tiny
from tests.engine.unseen import CASES, SLEEP_S, SLOW_RANK, Case
from tests.spawn import run_ranks


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unseen")
    tiny.write_decoder(folder / "decoder")
    tiny.write_encoder(folder / "encoder")
    run_ranks("tests/engine/worker_unseen.py", [str(folder)], world=2, timeout=600)
    return folder


by_name = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
measured = pytest.mark.parametrize("case", [c for c in CASES if c.measured], ids=lambda case: case.name)


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


@by_name
def test_a_rehearsal_leaves_no_trace(work: Path, case: Case) -> None:
    plain, rehearsed = result(work, case)["plain"], result(work, case)["rehearsed"]
    assert plain["steps"][0]["grads"] and plain["state"] and plain["steps"][0]["report"]["grad_norm"] > 0
    for key in plain:
        assert equal(plain[key], rehearsed[key]), key


@measured
def test_measuring_changes_no_number_and_leaves_no_hook(work: Path, case: Case) -> None:
    plain, timed = result(work, case)["plain"], result(work, case)["measured"]
    assert timed["hooks"] == plain["hooks"]
    for ours, theirs in zip(timed["steps"], plain["steps"], strict=True):
        assert ours["report"].pop("waited") is not None and theirs["report"]["waited"] is None
        assert equal(ours["report"], {k: v for k, v in theirs["report"].items() if k != "waited"})
        assert equal(ours["grads"], theirs["grads"])
    assert equal(timed["weights"], plain["weights"]) and equal(timed["state"], plain["state"])


@measured
def test_the_wait_for_a_slow_rank_is_what_it_slept_and_it_waits_for_nobody(work: Path, case: Case) -> None:
    timed = result(work, case)["measured"]
    waited, slept = timed["waited"], timed["slept"]
    passes = 2 * case.layout.accumulation  # of decoder blocks; under DeepSpeed's function hooks run again
    assert slept >= passes * SLEEP_S
    assert waited.waits[1 - SLOW_RANK] == pytest.approx(slept, rel=0.25)
    assert 0 <= waited.waits[SLOW_RANK] <= 0.25 * slept
    assert waited.seconds > slept
    assert waited.idle_share == pytest.approx(sum(waited.waits) / 2 / waited.seconds)
    assert waited.imbalance == pytest.approx(1 / (1 - waited.idle_share))


def test_dropout_acts_in_these_runs(work: Path) -> None:
    """Or a lost random state would not show: layouts whose losses are equal without dropout draw differently, and differ."""
    one, other = (
        result(work, case)["plain"]["steps"][1]["report"]["loss"]
        for case in CASES
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
