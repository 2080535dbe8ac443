"""Rows: the same for any number of workers, in the plan's order, with the right pictures; never a hang."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

from mmds.data import loader as loader_module
from mmds.data.loader import Step, StepLoader, load_sample
from mmds.data.mixture import Mixture
from mmds.data.rows import IGNORE, Row, filler_row
from mmds.errors import ConfigError, DataError
from mmds.planner import RunPlan
from tests.data.raw_sets import GEOMETRY, chat_tokenizer, prepared_set

PICTURES = [1, 0, 2, 3, 0, 1, 1, 2, 0, 1, 4, 0, 1, 1, 0, 2, 1, 0, 0, 3, 1, 2, 0, 1]
ROW = 160  # tokens; two or three samples
TOKENIZER = chat_tokenizer()


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Mixture:
    """24 samples in two sources; picture number n of each source is grey n, and its sample's text says so."""
    folder = tmp_path_factory.mktemp("loader")
    half = len(PICTURES) // 2
    sets = [
        prepared_set(folder / name, part) for name, part in (("a", PICTURES[:half]), ("b", PICTURES[half:]))
    ]
    return Mixture(["a", "b"], sets)


def plan_of(mixture: Mixture, rows_per_step: int, **schedule: int) -> RunPlan:
    lengths = mixture.lengths(GEOMETRY)
    return RunPlan(
        lengths, row_tokens=ROW, rows_per_step=rows_per_step, seed=5, **(schedule or {"epochs": 2})
    )


def loader_of(mixture: Mixture, rows_per_step: int = 2, **options: Any) -> StepLoader:
    """One rank that runs every row, unless told otherwise."""
    schedule = {name: options.pop(name) for name in ("epochs", "steps") if name in options}
    settings = {"rank": 0, "world": 1, "accumulation": rows_per_step, "workers": 0, **options}
    return StepLoader(mixture, plan_of(mixture, rows_per_step, **schedule), GEOMETRY, **settings)


def keys(steps: list[Step]) -> list[list[tuple[str, ...]]]:
    return [[row.sample_keys for row in step.rows] for step in steps]


def assert_same_rows(first: list[Step], second: list[Step]) -> None:
    assert [step.index for step in first] == [step.index for step in second]
    for one, other in zip(first, second, strict=True):
        assert len(one.rows) == len(other.rows)
        for a, b in zip(one.rows, other.rows, strict=True):
            for field in fields(Row):
                x, y = getattr(a, field.name), getattr(b, field.name)
                if isinstance(x, torch.Tensor):
                    assert x.dtype == y.dtype and torch.equal(x, y), field.name
                else:
                    assert x == y, field.name


def segments(row: Row) -> Iterator[tuple[str, str, list[int]]]:
    """(key, decoded text without slots, greys of its pictures) of each sample of a row."""
    owner = torch.bucketize(row.slots, row.cu_seqlens[1:].long(), right=True)
    image_of_slot = torch.repeat_interleave(torch.arange(len(row.slot_counts)), row.slot_counts)
    is_slot = torch.zeros(len(row.input_ids), dtype=torch.bool)
    is_slot[row.slots] = True
    bounds = row.cu_seqlens.tolist()
    for s, key in enumerate(row.sample_keys):
        part = slice(bounds[s], bounds[s + 1])
        text = TOKENIZER.decode(row.input_ids[part][~is_slot[part]].tolist())
        images = image_of_slot[owner == s].unique().tolist()
        greys = []
        for image in images:
            values = row.pixels[image].unique().tolist()
            assert len(values) == 1, "a picture of one grey must stay one"
            greys.append(values[0])
        yield key, text, greys


def assert_pictures_belong(row: Row) -> int:
    """Check that each sample has the pictures that its text names; returns the number of samples."""
    count = 0
    for _, text, greys in segments(row):
        named = text.split("greys")[1].split(" end")[0].split()
        assert greys == [int(word) for word in named]
        count += 1
    return count


@pytest.mark.parametrize("workers", [1, 3])
def test_rows_are_the_same_for_any_number_of_workers(mixture: Mixture, workers: int) -> None:
    alone = list(loader_of(mixture))
    assert len(alone) == len(loader_of(mixture)) > 4
    assert_same_rows(alone, list(loader_of(mixture, workers=workers)))


@pytest.mark.parametrize("workers", [0, 2])
def test_every_sample_comes_once_an_epoch_with_its_own_pictures(mixture: Mixture, workers: int) -> None:
    steps = list(loader_of(mixture, workers=workers, epochs=3))
    seen = [key for step in steps for row in step.rows for key in row.sample_keys]
    assert sorted(seen) == sorted([mixture.key(i) for i in range(len(mixture))] * 3)
    assert sum(assert_pictures_belong(row) for step in steps for row in step.rows) == 3 * len(mixture)
    assert any(len(row.sample_keys) > 2 and len(row.pixels) > 2 for step in steps for row in step.rows)


def test_a_row_holds_what_its_samples_hold(mixture: Mixture) -> None:
    lengths = mixture.lengths(GEOMETRY)
    order = {mixture.key(i): i for i in range(len(mixture))}
    for step in loader_of(mixture, epochs=1):
        for row in step.rows:
            wanted = [order[key] for key in row.sample_keys]
            assert row.cu_seqlens.diff().tolist() == lengths[wanted].tolist()
            assert row.input_ids.numel() <= ROW and row.padded == 0
            stored = [mixture.read(i) for i in wanted]
            assert int((row.labels != IGNORE).sum()) == sum(int(sample.supervised.sum()) for sample in stored)
            assert row.image_names == tuple(
                f"sample {sample.key} image {k} ({path})"
                for sample in stored
                for k, path in enumerate(sample.image_paths)
            )
            for sample, start in zip(stored, row.cu_seqlens.tolist(), strict=False):
                assert row.position_ids[start] == 0, sample.key


def test_text_only_rows_have_no_picture(tmp_path: Path) -> None:
    mixture = Mixture(["t"], [prepared_set(tmp_path, [0] * 6)])
    for step in loader_of(mixture, epochs=1):
        for row in step.rows:
            assert row.pixels.shape == (0, 3, 28, 28)
            assert row.visual_tokens == 0 and row.image_names == ()


@pytest.mark.parametrize("pictures", [[1] * 7, [0] * 99 + [1], [5, 0, 0]])
def test_any_share_of_pictures_keeps_every_sample(tmp_path: Path, pictures: list[int]) -> None:
    mixture = Mixture(["m"], [prepared_set(tmp_path, pictures)])
    steps = list(loader_of(mixture, epochs=1))
    assert sum(assert_pictures_belong(row) for step in steps for row in step.rows) == len(pictures)


@pytest.mark.parametrize("world,accumulation", [(1, 4), (2, 2), (4, 1)])
def test_ranks_share_out_the_rows_of_a_step(mixture: Mixture, world: int, accumulation: int) -> None:
    whole = keys(list(loader_of(mixture, 4)))
    ranks = [
        keys(list(loader_of(mixture, 4, rank=rank, world=world, accumulation=accumulation)))
        for rank in range(world)
    ]
    for step, rows in enumerate(whole):
        assert all(len(rank[step]) == accumulation for rank in ranks)
        assert [ranks[r][step][m] for m in range(accumulation) for r in range(world)] == rows


@pytest.mark.parametrize("workers", [0, 2])
def test_a_later_start_gives_the_rows_of_the_uninterrupted_run(mixture: Mixture, workers: int) -> None:
    whole = list(loader_of(mixture))
    per_epoch = plan_of(mixture, 2).epoch(0).steps
    for start in (1, per_epoch - 1, per_epoch, per_epoch + 2):
        assert_same_rows(whole[start:], list(loader_of(mixture, start_step=start, workers=workers)))
    middle = list(loader_of(mixture, start_step=2, stop_step=5, workers=workers))
    assert_same_rows(whole[2:5], middle)
    assert len(loader_of(mixture, start_step=2, stop_step=5)) == 3


def test_a_loader_can_be_iterated_again(mixture: Mixture) -> None:
    loader = loader_of(mixture, workers=1)
    assert_same_rows(list(loader), list(loader))


def test_loading_leaves_the_random_streams_alone(mixture: Mixture) -> None:
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    for _ in loader_of(mixture, workers=1, steps=2):
        pass
    assert torch.equal(torch.rand(4), expected)


def test_rows_own_their_memory(mixture: Mixture) -> None:
    step = next(iter(loader_of(mixture, workers=1)))
    for row in step.rows:
        tensors = [getattr(row, field.name) for field in fields(Row)]
        assert not any(value.is_shared() for value in tensors if isinstance(value, torch.Tensor))
        row.input_ids[0] = 1  # writable, without a warning


def test_ranks_that_do_not_fit_the_plan_are_refused(mixture: Mixture) -> None:
    with pytest.raises(ConfigError, match=r"2 ranks x 2 micro-steps .* 6 rows"):
        loader_of(mixture, 6, world=2, accumulation=2)


# Samples that go bad between preparation and training.


@pytest.fixture
def damaged(tmp_path: Path) -> Mixture:
    """12 samples; the second picture of s5 and the only one of s8 are overwritten in the shard."""
    shards = prepared_set(tmp_path, [1, 0, 1, 0, 2, 3, 0, 1, 1, 0, 2, 1])
    tar = shards.path / shards.index.manifest.shards[0]
    content = tar.read_bytes()
    for sample, image in ((5, 1), (8, 0)):
        data = shards.read(sample).image_bytes[image]
        assert content.count(data) == 1
        content = content.replace(data, b"x" * len(data))
    tar.write_bytes(content)
    return Mixture(["m"], [shards])


@pytest.mark.parametrize("workers", [0, 2])
def test_a_bad_sample_is_an_error_that_names_sample_and_image(damaged: Mixture, workers: int) -> None:
    with pytest.raises(
        DataError, match=r"^sample m:s(5 image 1 \(p6\.png\)|8 image 0 \(p9\.png\)): not an image.*skip"
    ) as error:
        list(loader_of(damaged, workers=workers))
    assert "Traceback" not in str(error.value)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_skipped_sample_leaves_the_plan_in_lockstep(damaged: Mixture, workers: int) -> None:
    plan = plan_of(damaged, 2)
    steps = list(loader_of(damaged, on_bad="skip", workers=workers))
    assert len(steps) == plan.total_steps
    skipped = []
    for step in steps:
        assert len(step.rows) == 2
        for micro, row in enumerate(step.rows):
            planned = [damaged.key(int(i)) for i in plan.rows_for(step.index, micro, 0, world=1)]
            gone = [key for key, _ in row.bad]
            kept = [key for key in planned if key not in gone]
            assert list(row.sample_keys) == (kept or [""])
            if kept:
                assert_pictures_belong(row)
            skipped += row.bad
    assert sorted(key for key, _ in skipped) == ["m:s5", "m:s5", "m:s8", "m:s8"]
    assert all(f"sample {key} image" in reason for key, reason in skipped)


def test_a_row_of_bad_samples_only_is_the_filler_row(damaged: Mixture) -> None:
    lengths = damaged.lengths(GEOMETRY)
    plan = RunPlan(lengths, row_tokens=int(lengths.max()), rows_per_step=12, seed=0, epochs=1)
    rows = next(
        iter(StepLoader(damaged, plan, GEOMETRY, rank=0, world=1, accumulation=12, workers=0, on_bad="skip"))
    ).rows
    fillers = [row for row in rows if row.bad and row.sample_keys == ("",)]
    assert len(fillers) == 2
    for row in fillers:
        expected = filler_row(GEOMETRY, bad=row.bad)
        assert torch.equal(row.labels, expected.labels) and row.padded == expected.padded == 1
        assert row.supervised == 0 and row.pixels.shape[0] == 0


def test_too_many_skipped_samples_end_the_run(damaged: Mixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader_module, "FEW_BAD", 3)
    with pytest.raises(
        DataError, match=r"4 of \d+ samples read so far are bad, above 5%; the last: sample m:s"
    ):
        list(loader_of(damaged, on_bad="skip", epochs=9))
    assert len(list(loader_of(damaged, on_bad="skip", max_bad_share=0.5, epochs=9))) >= 9


# Workers that fail.


def fail_on(monkeypatch: pytest.MonkeyPatch, key: str, action: Any) -> None:
    """Run `action` in place of loading one sample (forked workers inherit this)."""
    whole = load_sample

    def broken(mixture: Mixture, i: int, *arguments: Any) -> Any:
        return action() if mixture.key(i) == key else whole(mixture, i, *arguments)

    monkeypatch.setattr(loader_module, "load_sample", broken)


@pytest.fixture
def no_workers_stay() -> Iterator[None]:
    """Fails the test when a process that it started is still there ten seconds after its end."""
    before = set(multiprocessing.active_children())
    yield
    deadline = time.monotonic() + 10
    while set(multiprocessing.active_children()) - before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not set(multiprocessing.active_children()) - before


@pytest.mark.usefixtures("no_workers_stay")
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("on_bad", ["raise", "skip"])
def test_an_unforeseen_error_names_the_sample(
    mixture: Mixture, monkeypatch: pytest.MonkeyPatch, workers: int, on_bad: str
) -> None:
    fail_on(monkeypatch, "b:s3", lambda: 1 // 0)
    with pytest.raises(DataError, match=r"sample b:s3 cannot be loaded(?s:.*)ZeroDivisionError"):
        list(loader_of(mixture, workers=workers, on_bad=on_bad))


@pytest.mark.usefixtures("no_workers_stay")
@pytest.mark.parametrize("workers", [1, 3])
def test_a_killed_worker_ends_the_run_and_names_its_row(
    mixture: Mixture, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    fail_on(monkeypatch, "b:s3", lambda: os.kill(os.getpid(), signal.SIGKILL))
    start = time.monotonic()
    with pytest.raises(
        DataError, match=r"a loader process was lost \(.*\) while it loaded the row of samples [ab]:s"
    ):
        list(loader_of(mixture, workers=workers))
    assert time.monotonic() - start < 60


@pytest.mark.usefixtures("no_workers_stay")
def test_a_worker_that_hangs_ends_the_run_and_names_its_row(
    mixture: Mixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_on(monkeypatch, "b:s3", lambda: time.sleep(600))
    start = time.monotonic()
    with pytest.raises(DataError, match=r"lost \(.*timed out.*\) while it loaded the row of .*b:s3"):
        list(loader_of(mixture, workers=1, timeout=2))
    assert time.monotonic() - start < 60


@pytest.mark.usefixtures("no_workers_stay")
@pytest.mark.parametrize("ending", ["exhausted", "abandoned", "failed"])
def test_workers_end_with_the_iteration(mixture: Mixture, ending: str) -> None:
    before = set(multiprocessing.active_children())
    steps = iter(loader_of(mixture, workers=2))
    next(steps)
    workers = set(multiprocessing.active_children()) - before
    assert len(workers) == 2
    if ending == "exhausted":
        list(steps)
    elif ending == "abandoned":
        del steps
    else:
        with pytest.raises(KeyError):
            steps.throw(KeyError("step failed"))
    for worker in workers:
        worker.join(timeout=10)
        assert not worker.is_alive()
