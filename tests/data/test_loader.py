"""Rows: the same for any number of workers, in the plan's order, with the right pictures; never a hang."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import fields
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mmds.data import loader as loader_module
from mmds.data import row_maker as row_maker_module
from mmds.data.handover import Handover
from mmds.data.loader import Step, StepLoader
from mmds.data.mixture import Mixture
from mmds.data.rows import IGNORE, Row, build_row, filler_row
from mmds.errors import ConfigError, DataError
from mmds.planner import RunPlan, plan_lengths
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
    lengths = mixture.sizes(GEOMETRY).tokens
    return plan_lengths(
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
    lengths = mixture.sizes(GEOMETRY).tokens
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
    per_epoch = plan_of(mixture, 2, epochs=1).total_steps
    for start in (1, per_epoch - 1, per_epoch, per_epoch + 2):
        assert_same_rows(whole[start:], list(loader_of(mixture, start_step=start, workers=workers)))
    middle = list(loader_of(mixture, start_step=2, stop_step=5, workers=workers))
    assert_same_rows(whole[2:5], middle)
    assert len(loader_of(mixture, start_step=2, stop_step=5)) == 3


@pytest.mark.parametrize("workers", [0, 2])
def test_rows_prepared_ahead_are_not_consumed(mixture: Mixture, workers: int) -> None:
    whole = list(loader_of(mixture))
    for consumed in (1, 2, len(whole) - 1):
        first = list(islice(loader_of(mixture, workers=workers), consumed))
        rest = list(loader_of(mixture, workers=workers, start_step=consumed))
        assert_same_rows(whole, first + rest)


@pytest.mark.parametrize("workers", [1, 3])
def test_two_rows_a_worker_are_prepared_ahead(
    mixture: Mixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, workers: int
) -> None:
    made = tmp_path / "made"

    def noted(samples: Any, *arguments: Any, **options: Any) -> Row:
        with made.open("a") as stream:
            stream.write("row\n")
        return build_row(samples, *arguments, **options)

    monkeypatch.setattr(row_maker_module, "build_row", noted)
    steps = iter(loader_of(mixture, workers=workers, epochs=9))
    next(steps)
    expected = 2 + 2 * workers  # a step of two rows, and what is ahead
    deadline = time.monotonic() + 20
    while len(made.read_text().splitlines()) < expected and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.2)
    assert len(made.read_text().splitlines()) == expected


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_loader_can_be_iterated_again(mixture: Mixture, workers: int, persistent: bool) -> None:
    loader = loader_of(mixture, workers=workers, persistent=persistent)
    expected = list(loader_of(mixture))
    assert_same_rows(expected, list(loader))
    assert_same_rows(expected[:2], list(islice(loader, 2)))  # left in the middle, with rows ahead
    assert_same_rows(expected, list(loader))
    loader.close()


def test_pixels_stay_bytes_until_the_device(mixture: Mixture) -> None:
    for step in loader_of(mixture, workers=1, steps=2):
        for row in step.rows:
            assert row.pixels.dtype == torch.uint8 and row.pixels.is_contiguous()


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("pin", [False, True])
def test_every_tensor_is_pinned_when_asked(
    mixture: Mixture, monkeypatch: pytest.MonkeyPatch, workers: int, pin: bool
) -> None:
    """Page-locked memory needs a CUDA driver; a copy stands for it here."""
    pinned: list[int] = []

    def pin_memory(tensor: torch.Tensor) -> torch.Tensor:
        copy = tensor.clone()
        pinned.append(copy.data_ptr())
        return copy

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
    steps = list(loader_of(mixture, workers=workers, pin_memory=pin, steps=3))
    assert_same_rows(list(loader_of(mixture, steps=3)), steps)
    for step in steps:
        for row in step.rows:
            values = [getattr(row, field.name) for field in fields(Row)]
            tensors = [value for value in values if isinstance(value, torch.Tensor)]
            assert len(tensors) == 7
            assert all((tensor.data_ptr() in pinned) == pin for tensor in tensors)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_pinned_rows_are_page_locked(mixture: Mixture) -> None:
    for step in loader_of(mixture, workers=1, pin_memory=True, steps=2):
        for row in step.rows:
            values = [getattr(row, field.name) for field in fields(Row)]
            assert all(value.is_pinned() for value in values if isinstance(value, torch.Tensor))


@pytest.mark.parametrize("workers", [0, 2])
def test_every_row_says_what_its_stages_took(
    mixture: Mixture, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    delays = {"read": 0.03, "decode": 0.02, "collate": 0.05}
    after(monkeypatch, Mixture, "read", lambda *_: time.sleep(delays["read"]))
    after(monkeypatch, row_maker_module, "load_pieces", lambda *_: time.sleep(delays["decode"]))
    after(monkeypatch, row_maker_module, "build_row", lambda *_: time.sleep(delays["collate"]))
    start = time.monotonic()
    steps = list(loader_of(mixture, workers=workers, steps=2))
    wall = time.monotonic() - start
    total = 0.0
    for step in steps:
        for row, took in zip(step.rows, step.seconds, strict=True):
            assert took.read >= delays["read"] * len(row.sample_keys)
            assert took.decode >= delays["decode"] * len(row.image_names)
            assert took.collate >= delays["collate"]
            total += took.read + took.decode + took.collate
    assert total <= max(workers, 1) * wall


def test_one_row_can_be_made_alone(damaged: Mixture, mixture: Mixture) -> None:
    for step in list(loader_of(mixture))[:3]:
        for micro, row in enumerate(step.rows):
            alone = loader_of(mixture).row(step.index, micro)
            assert alone.sample_keys == row.sample_keys and torch.equal(alone.pixels, row.pixels)
    whole = loader_of(damaged)
    with pytest.raises(DataError, match=r"sample m:s(5 image 1|8 image 0)"):
        [whole.row(step, micro) for step in range(len(whole)) for micro in range(2)]


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


def test_what_is_handed_over_is_whole_and_its_own() -> None:
    handover = Handover(1, slots=2)
    large = {"pixels": np.arange(3_000_000, dtype=np.int32), "none": np.zeros((0, 3)), "key": "x" * 100_000}
    first, second = handover.leave(0, large), handover.leave(0, "second")
    taken = handover.take(first)
    assert np.array_equal(taken["pixels"], large["pixels"]) and taken["none"].shape == (0, 3)
    assert taken["key"] == large["key"]
    handover.leave(0, {"pixels": np.zeros(3_000_000, dtype=np.int32)})
    assert np.array_equal(taken["pixels"], large["pixels"])
    assert handover.take(second) == "second"
    with pytest.raises(AssertionError, match="overwritten"):
        handover.take(first)
    assert len(pickle.dumps(first)) < 512, "a ticket passes a pipe whole or not at all"


def test_handing_over_leaves_no_file_open(mixture: Mixture) -> None:
    list(loader_of(mixture, workers=2, steps=2))
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        list(loader_of(mixture, workers=2, steps=2))
    assert len(os.listdir("/proc/self/fd")) <= before


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
    lengths = damaged.sizes(GEOMETRY).tokens
    plan = plan_lengths(lengths, row_tokens=int(lengths.max()), rows_per_step=12, seed=0, epochs=1)
    rows = next(
        iter(StepLoader(damaged, plan, GEOMETRY, rank=0, world=1, accumulation=12, workers=0, on_bad="skip"))
    ).rows
    fillers = [row for row in rows if row.bad and row.sample_keys == ("",)]
    assert len(fillers) == 2
    for row in fillers:
        expected = filler_row(GEOMETRY, bad=row.bad)
        assert torch.equal(row.labels, expected.labels) and row.padded == expected.padded == 1
        assert row.supervised == 0 and row.pixels.shape[0] == 0


@pytest.mark.parametrize("workers", [0, 2])
def test_too_many_skipped_samples_end_the_run_with_their_reasons(
    damaged: Mixture, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    monkeypatch.setattr(loader_module, "FEW_BAD", 3)
    with pytest.raises(DataError, match=r"4 of \d+ samples read so far are bad, above 5%") as error:
        list(loader_of(damaged, on_bad="skip", epochs=9, workers=workers))
    reasons = str(error.value).splitlines()[1:]
    assert sorted(reason.split(":")[1] for reason in reasons) == [
        "s5 image 1 (p6.png)",
        "s5 image 1 (p6.png)",
        "s8 image 0 (p9.png)",
        "s8 image 0 (p9.png)",
    ]
    assert all("not an image" in reason for reason in reasons)


def test_a_tolerated_share_of_skipped_samples_goes_on(
    damaged: Mixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader_module, "FEW_BAD", 3)
    assert len(list(loader_of(damaged, on_bad="skip", max_bad_share=0.5, epochs=9))) >= 9


# Workers that fail.


def after(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, action: Any) -> None:
    """Run `action` on the arguments before the function itself (forked workers inherit this)."""
    whole = getattr(owner, name)

    def changed(*arguments: Any, **options: Any) -> Any:
        action(*arguments)
        return whole(*arguments, **options)

    monkeypatch.setattr(owner, name, changed)


def at_sample(monkeypatch: pytest.MonkeyPatch, key: str, action: Any) -> None:
    """Run `action` when the stored bytes of a sample are about to be read."""
    after(monkeypatch, Mixture, "read", lambda mixture, i: action() if mixture.key(i) == key else None)


def at_picture(monkeypatch: pytest.MonkeyPatch, data: bytes, action: Any) -> None:
    """Run `action` when a picture is about to be decoded."""
    after(monkeypatch, row_maker_module, "load_pieces", lambda given, *_: action() if given == data else None)


def picture_of(mixture: Mixture, key: str, number: int) -> bytes:
    """An encoded picture of a sample."""
    (i,) = (i for i in range(len(mixture)) if mixture.key(i) == key)
    return mixture.read(i).image_bytes[number]


@pytest.fixture
def no_workers_stay() -> Iterator[None]:
    """Fails the test when a process that it started is still there ten seconds after its end."""
    before = set(multiprocessing.active_children())
    handler = signal.getsignal(signal.SIGCHLD)
    yield
    deadline = time.monotonic() + 10
    while set(multiprocessing.active_children()) - before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not set(multiprocessing.active_children()) - before
    left = signal.getsignal(signal.SIGCHLD)
    assert left is handler or "torch" in getattr(left, "__module__", ""), "a handler of ours stays behind"
    assert not [t for t in threading.enumerate() if t.name == "mmds-loader-watchdog" and lives_on(t)]


def lives_on(thread: threading.Thread) -> bool:
    thread.join(timeout=5)
    return thread.is_alive()


@pytest.mark.usefixtures("no_workers_stay")
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("on_bad", ["raise", "skip"])
def test_an_unforeseen_error_names_the_sample(
    mixture: Mixture, monkeypatch: pytest.MonkeyPatch, workers: int, on_bad: str
) -> None:
    at_sample(monkeypatch, "b:s3", lambda: 1 // 0)
    with pytest.raises(DataError, match=r"sample b:s3 cannot be loaded(?s:.*)ZeroDivisionError"):
        list(loader_of(mixture, workers=workers, on_bad=on_bad))


def fate(mixture: Mixture, **options: Any) -> str:
    """The error that ends an iteration, within a minute."""
    start = time.monotonic()
    with pytest.raises(DataError) as error:
        list(loader_of(mixture, **options))
    assert time.monotonic() - start < 60
    return str(error.value)


@pytest.mark.usefixtures("no_workers_stay")
@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize(
    ("number", "means"),
    [
        (signal.SIGKILL, r"signal 9; the machine may be out of memory"),
        (signal.SIGBUS, r"signal 7, bus error: .* or /dev/shm is full, \d+ of \d+ MiB free"),
        (signal.SIGSEGV, r"signal 11, Segmentation fault"),
    ],
)
def test_a_killed_worker_ends_the_run_and_names_what_it_was_at(
    mixture: Mixture, monkeypatch: pytest.MonkeyPatch, workers: int, number: int, means: str
) -> None:
    at_picture(monkeypatch, picture_of(mixture, "a:s10", 2), lambda: os.kill(os.getpid(), number))
    assert re.fullmatch(
        rf"loader process \d+ was killed \({means}[^;]*\) while it was decoding sample a:s10 image 2 \(p14\.png\), "
        r"for the row of samples ([ab]:s\d+, )*a:s10(, [ab]:s\d+)*",
        fate(mixture, workers=workers),
    )


@pytest.mark.usefixtures("no_workers_stay")
def test_a_worker_that_is_killed_while_a_step_trains_ends_the_run_at_once(mixture: Mixture) -> None:
    steps = iter(loader_of(mixture, workers=1, epochs=9))
    before = set(multiprocessing.active_children())
    next(steps)
    (worker,) = set(multiprocessing.active_children()) - before
    died = rf"^loader process {worker.pid} was killed \(signal 9;.* of samples [ab]:s\d+"
    with pytest.raises(DataError, match=died):
        os.kill(worker.pid or 0, signal.SIGKILL)
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            time.sleep(0.01)  # the training step
    with pytest.raises(DataError, match=died):
        next(steps)  # even if somebody has swallowed the first error


@pytest.mark.usefixtures("no_workers_stay")
@pytest.mark.parametrize("status", [0, 3])
def test_a_worker_that_exits_by_itself_ends_the_run(
    mixture: Mixture, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    at_sample(monkeypatch, "b:s3", lambda: os._exit(status))
    expected = (
        rf"^loader process \d+ ended by itself with exit status {status} while it was reading sample b:s3"
    )
    assert re.match(expected, fate(mixture, workers=1, timeout=2))


@pytest.mark.usefixtures("no_workers_stay")
@pytest.mark.parametrize("stuck", ["asleep", "stopped", "deaf"])
def test_a_worker_that_hangs_ends_the_run_and_names_what_it_is_at(
    mixture: Mixture, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, stuck: str
) -> None:
    def hang() -> None:
        if stuck == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        if stuck == "deaf":
            signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        time.sleep(600)

    at_picture(monkeypatch, picture_of(mixture, "a:s10", 2), hang)
    said = fate(mixture, workers=2, timeout=2)
    doing = r"loader process \d+ has been decoding sample a:s10 image 2 \(p14\.png\) for (\d+\.\d) s"
    found = re.match(
        rf"no row has arrived for 2 s \(.*timed out.*\): {doing}; the row of samples .*a:s10.* is due", said
    )
    assert found and 1.5 <= float(found[1]) < 10
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    found = re.fullmatch(rf"waiting for a row for 0\.\d s: {doing}", warnings[-1])
    assert found and 0.1 <= float(found[1]) < 2
    assert len(warnings) <= 2, "one line a wait"  # a slow machine may have waited before


@pytest.mark.usefixtures("no_workers_stay")
def test_a_hanging_read_names_the_sample(mixture: Mixture, monkeypatch: pytest.MonkeyPatch) -> None:
    at_sample(monkeypatch, "a:s5", lambda: time.sleep(600))
    assert re.search(r"has been reading sample a:s5 for \d", fate(mixture, workers=1, timeout=1))


def test_without_workers_a_long_wait_is_logged(
    mixture: Mixture, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    at_sample(monkeypatch, "b:s3", lambda: time.sleep(1))
    assert list(loader_of(mixture, workers=0, timeout=3))
    warnings = [record.getMessage() for record in caplog.records]
    assert any("has been reading sample b:s3 for 0." in warning for warning in warnings)


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


@pytest.mark.usefixtures("no_workers_stay")
@pytest.mark.parametrize("ending", ["closed", "forgotten", "killed"])
def test_persistent_workers_serve_every_iteration_until_the_end(mixture: Mixture, ending: str) -> None:
    before = set(multiprocessing.active_children())
    loader = loader_of(mixture, workers=2, persistent=True)
    list(loader)
    workers = set(multiprocessing.active_children()) - before
    assert len(workers) == 2
    list(islice(loader, 1))
    assert set(multiprocessing.active_children()) - before == workers
    if ending == "closed":
        loader.close()
    elif ending == "forgotten":
        del loader
    else:
        with pytest.raises(DataError, match="killed"):
            for step in loader:
                if step.index == 1:
                    for worker in workers:
                        worker.kill()
                        worker.join()
        assert_same_rows(list(loader_of(mixture)), list(loader))  # with new workers
        loader.close()
    for worker in workers:
        worker.join(timeout=10)
        assert not worker.is_alive()


def test_other_children_may_fail_meanwhile(mixture: Mixture) -> None:
    """A child that is none of ours may end as it likes while rows are loaded."""
    for step in loader_of(mixture, workers=1, steps=3):
        assert (
            subprocess.run([sys.executable, "-c", f"raise SystemExit({step.index})"]).returncode == step.index
        )
