"""The run folder: its lock, its lines, who writes them, and the scalars made of them."""

from __future__ import annotations

import json
import logging
import math
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import numpy as np
import pytest
import torch

from mmds import monitor
from mmds.config import Config
from mmds.data.rows import filler_row
from mmds.engine import Engine, Ranks, StepReport, Waited
from mmds.errors import CheckpointError, DataError
from mmds.geometry import Geometry
from mmds.monitor import RunFolder, measures_wait, plan_summary, record, scalars, step_metrics
from mmds.planner import Balance, RunPlan, plan_lengths
from mmds.run_data import RunData

T = TypeVar("T")
CPU = torch.device("cpu")
REPORT = StepReport(
    step=3,
    loss=2.5,
    token_nll=2.25,
    grad_norm=0.75,
    rates={"connector": 1e-3, "decoder": 2e-5},
    real=600,
    visual=200,
    supervised=120,
    padded=1,
    images=5,
    bad=0,
    applied=True,
    skipped_steps=0,
    skipped_in_a_row=0,
    suspects=(),
)
GEOMETRY = Geometry(mode="fixed", image_size=28, patch_size=14, merge=1)


class PlainRanks(Ranks):
    """Ranks without a process group; every rank holds the same value."""

    def gather(self, value: T) -> list[T]:
        return [value] * self.world


FIRST = PlainRanks(rank=0, world=2, local_rank=0, device=CPU)
SECOND = PlainRanks(rank=1, world=2, local_rank=1, device=CPU)


def config(*, stop_after_skipped: int = 5, measure_wait: int = 50) -> Config:
    """What the monitor asks of a config."""
    planner = SimpleNamespace(scheme="token_budget", measure_wait=measure_wait)
    data = SimpleNamespace(row_tokens=200)
    asked = SimpleNamespace(data=data, planner=planner, stop_after_skipped=stop_after_skipped)
    return cast(Config, asked)


def data_of(config: Config, plan: RunPlan | None = None) -> RunData:
    """What the monitor asks of a run's data."""
    asked = SimpleNamespace(config=config, plan=plan, text_share=0.25, balance=lambda step: None)
    return cast(RunData, asked)


class Curves:
    """Stands for the engine: keeps the scalars that it is asked to write."""

    rows_per_step, step_index = 4, 2

    def __init__(self, ranks: Ranks) -> None:
        self.ranks, self.points = ranks, []

    def write_events(self, values: Mapping[str, float], step: int) -> None:
        """Remember them."""
        self.points.append((step, dict(values)))


@pytest.fixture(autouse=True)
def logs_closed() -> Iterator[None]:
    yield
    logger = logging.getLogger("mmds")
    for handler in logger.handlers[:]:
        handler.close()
        logger.removeHandler(handler)


@pytest.fixture
def other_process() -> Iterator[int]:
    """The process id of something that runs, and is not this process."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    yield process.pid
    process.kill()
    process.wait()


def opened(path: Path, ranks: Ranks = FIRST) -> RunFolder:
    return RunFolder(path, ranks)


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def leave_lock(path: Path, *, host: str | None = None, pid: int, age: float) -> Path:
    """A lock as another run would have left it, last beaten `age` seconds ago."""
    path.mkdir(exist_ok=True)
    lock = path / "run.lock"
    lock.write_text(json.dumps({"host": host or socket.gethostname(), "pid": pid}))
    os.utime(lock, (time.time() - age, time.time() - age))
    return lock


def ended_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_a_live_run_holds_its_folder_and_a_refused_start_changes_nothing(
    tmp_path: Path, other_process: int
) -> None:
    lock = leave_lock(tmp_path, pid=other_process, age=5)
    before = lock.read_text()
    with pytest.raises(CheckpointError) as error:
        opened(tmp_path)
    assert str(tmp_path) in str(error.value) and str(other_process) in str(error.value)
    assert lock.read_text() == before
    assert not (tmp_path / "config.json").exists() and not (tmp_path / "starts.jsonl").exists()


def test_a_run_on_another_host_holds_its_folder_while_its_heart_beats(tmp_path: Path) -> None:
    leave_lock(tmp_path, host="elsewhere", pid=1, age=2 * monitor.BEAT_S)
    with pytest.raises(CheckpointError, match="elsewhere"):
        opened(tmp_path)
    leave_lock(tmp_path, host="elsewhere", pid=1, age=4 * monitor.BEAT_S)
    opened(tmp_path).close()


def test_a_lock_without_a_heartbeat_or_without_its_process_is_taken(
    tmp_path: Path, other_process: int
) -> None:
    for pid, age in ((other_process, 4 * monitor.BEAT_S), (ended_pid(), 0)):
        lock = leave_lock(tmp_path, pid=pid, age=age)
        run = opened(tmp_path)
        assert json.loads(lock.read_text())["pid"] == os.getpid()
        assert time.time() - lock.stat().st_mtime < monitor.BEAT_S
        run.close()


@pytest.mark.parametrize("text", ["", '{"host": "x', "[]"])
def test_a_torn_lock_counts_by_its_age_alone(tmp_path: Path, text: str) -> None:
    lock = leave_lock(tmp_path, pid=1, age=0)
    lock.write_text(text)
    with pytest.raises(CheckpointError, match="in use"):
        opened(tmp_path)
    os.utime(lock, (0, 0))
    opened(tmp_path).close()


def test_closing_gives_the_folder_back_and_another_rank_does_not(tmp_path: Path) -> None:
    run = opened(tmp_path)
    opened(tmp_path, SECOND).close()
    assert (tmp_path / "run.lock").is_file()
    run.close()
    assert not (tmp_path / "run.lock").exists()


def test_the_heart_beats_until_the_run_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitor, "BEAT_S", 0.05)
    run = opened(tmp_path)
    lock = tmp_path / "run.lock"
    os.utime(lock, (0, 0))
    deadline = time.monotonic() + 10
    while lock.stat().st_mtime == 0 and time.monotonic() < deadline:
        time.sleep(0.02)
    assert lock.stat().st_mtime > time.time() - 10
    run.close()
    time.sleep(0.2)
    assert not lock.exists()


def test_a_folder_below_a_file_cannot_be_opened(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="file/run cannot be written"):
        opened(tmp_path / "file" / "run")


def test_rank_0_alone_writes_and_every_rank_has_a_log_of_its_own(tmp_path: Path) -> None:
    run = opened(tmp_path, SECOND)
    run.event("saved", step=1)
    run.metrics({"step": 1})
    run.bad_sample(1, "key", "reason")
    run.write_json("plan.json", {})
    run.forget_after(0)
    run.close()
    assert [p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("*") if p.is_file()] == [
        "logs/rank-00001.log"
    ]


def test_a_start_adds_a_line_with_command_versions_and_ranks_and_changes_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("of the run before")
    for _ in range(2):
        opened(tmp_path).close()
    first, second = lines(tmp_path / "starts.jsonl")
    assert (tmp_path / "config.json").read_text() == "of the run before"
    assert first["ranks"] == 2 and first["command"] == sys.argv and first["host"] == socket.gethostname()
    assert first["versions"]["torch"] == torch.__version__.split("+")[0]
    assert second["time"] >= first["time"]


def test_an_accepted_start_writes_config_and_plan_and_says_where_it_goes_on(tmp_path: Path) -> None:
    run = opened(tmp_path)
    for step in (1, 2, 3):
        run.metrics({"step": step})
    run.begin(2, {"train_batch_size": 4}, {"samples": 9}, resumed="step-2")
    run.close()
    assert json.loads((tmp_path / "config.json").read_text()) == {"train_batch_size": 4}
    assert json.loads((tmp_path / "plan.json").read_text()) == {"samples": 9}
    assert [line["step"] for line in lines(tmp_path / "metrics.jsonl")] == [1, 2]
    (event,) = lines(tmp_path / "events.jsonl")
    assert (event["event"], event["step"], event["resumed"]) == ("start", 2, "step-2")


def test_events_go_to_their_file_and_to_the_logs(tmp_path: Path) -> None:
    run = opened(tmp_path)
    run.event("saved", step=500, path="x")
    run.close()
    (event,) = lines(tmp_path / "events.jsonl")
    assert (event["event"], event["step"], event["path"]) == ("saved", 500, "x")
    assert "saved step=500 path=x" in (tmp_path / "train.log").read_text()
    assert "saved step=500 path=x" in (tmp_path / "logs/rank-00000.log").read_text()


def test_going_on_from_a_step_forgets_later_lines_and_only_those(tmp_path: Path) -> None:
    run = opened(tmp_path)
    run.forget_after(0)  # no file yet
    for step in range(1, 6):
        run.metrics({"step": step, "loss": step / 10})
    run.forget_after(3)
    run.metrics({"step": 4, "loss": 9})
    run.close()
    assert [(line["step"], line["loss"]) for line in lines(tmp_path / "metrics.jsonl")] == [
        (1, 0.1),
        (2, 0.2),
        (3, 0.3),
        (4, 9),
    ]


@pytest.mark.parametrize("torn", ['{"step": 2, "lo', '{"step": 2, "rates": {"connector": 0.1}'])
def test_a_line_that_a_kill_cut_short_is_forgotten(tmp_path: Path, torn: str) -> None:
    run = opened(tmp_path)
    run.metrics({"step": 1, "loss": 0.1})
    with (tmp_path / "metrics.jsonl").open("a") as stream:
        stream.write(torn)
    run.forget_after(1)
    run.metrics({"step": 2, "loss": 0.2})
    run.close()
    assert [line["step"] for line in lines(tmp_path / "metrics.jsonl")] == [1, 2]


def test_a_line_of_metrics_keeps_kinds_of_tokens_apart_and_says_speed_and_fill() -> None:
    line = step_metrics(REPORT, seconds=2.0, row_capacity=800)
    assert line["tokens"] == {"real": 600, "visual": 200, "supervised": 120, "padded": 1}
    assert (line["fill"], line["tokens_per_second"], line["seconds"]) == (0.75, 300.0, 2.0)
    assert (line["step"], line["loss"], line["grad_norm"], line["rates"]) == (3, 2.5, 0.75, REPORT.rates)
    assert json.loads(json.dumps(line)) == line


def test_every_number_of_a_line_is_a_scalar_under_one_tag() -> None:
    line = step_metrics(REPORT, seconds=2.0, row_capacity=800)
    flat = scalars(line)
    assert flat == {
        "train/loss": 2.5,
        "train/token_nll": 2.25,
        "train/grad_norm": 0.75,
        "train/skipped_steps": 0,
        "rate/connector": 1e-3,
        "rate/decoder": 2e-5,
        "tokens/real": 600,
        "tokens/visual": 200,
        "tokens/supervised": 120,
        "tokens/padded": 1,
        "tokens/fill": 0.75,
        "speed/tokens_per_second": 300.0,
        "speed/seconds_per_step": 2.0,
        "data/images": 5,
        "data/bad_samples": 0,
    }
    numbers = [line[key] for key in line if key not in ("step", "rates", "tokens", "imbalance", "wait")]
    assert sorted([*numbers, *line["rates"].values(), *line["tokens"].values()]) == sorted(flat.values())


def test_a_step_is_written_down_once_as_line_and_as_scalars(tmp_path: Path) -> None:
    run, engine = opened(tmp_path), Curves(FIRST)
    line = record(run, cast(Engine, engine), REPORT, [filler_row(GEOMETRY)], 2.0, data_of(config()))
    run.close()
    assert lines(tmp_path / "metrics.jsonl") == [line]
    assert engine.points == [(3, scalars(line))]
    assert line["fill"] == 0.75  # 4 rows of 200
    assert not (tmp_path / "bad_samples.jsonl").exists()


def test_bad_samples_are_listed_by_name_and_a_skipped_update_is_an_event(tmp_path: Path) -> None:
    run, engine = opened(tmp_path), Curves(FIRST)
    row = filler_row(GEOMETRY, bad=[("chat:cut", "truncated picture")])
    skipped = {"applied": False, "skipped_steps": 1, "skipped_in_a_row": 1, "suspects": ("chat:hot",)}
    report = StepReport(**{**REPORT.__dict__, **skipped, "bad": 2})
    record(run, cast(Engine, engine), report, [row], 2.0, data_of(config(stop_after_skipped=2)))
    run.close()
    assert lines(tmp_path / "bad_samples.jsonl") == [
        {"step": 3, "sample": "chat:cut", "reason": "truncated picture"} for _ in range(2)
    ]
    events = {event["event"]: event for event in lines(tmp_path / "events.jsonl")}
    assert events["bad_samples"]["count"] == 2
    skip = events["update_skipped"]
    assert (skip["step"], skip["reason"], skip["samples"]) == (3, "non-finite gradient", ["chat:hot"])


@pytest.mark.parametrize("rank", [FIRST, SECOND])
def test_too_many_skipped_updates_in_a_row_end_every_rank_after_they_are_written_down(
    tmp_path: Path, rank: Ranks
) -> None:
    run = RunFolder(tmp_path, rank)
    engine = Curves(rank)
    skipped = {"applied": False, "skipped_steps": 5, "skipped_in_a_row": 2, "suspects": ("a", "b")}
    report = StepReport(**{**REPORT.__dict__, **skipped})
    record(run, cast(Engine, engine), report, [], 2.0, data_of(config(stop_after_skipped=3)))
    with pytest.raises(DataError, match=r"step 3: 2 steps in a row .*stop_after_skipped.*: a, b\."):
        record(run, cast(Engine, engine), report, [], 2.0, data_of(config(stop_after_skipped=2)))
    run.close()
    if rank.first:
        assert len(lines(tmp_path / "metrics.jsonl")) == 2


def test_the_plan_in_numbers_adds_up() -> None:
    lengths = np.array([60, 50, 40, 30, 200, 20, 10, 90], dtype=np.int64)
    plan = plan_lengths(lengths, row_tokens=100, rows_per_step=2, seed=1, epochs=3)
    summary = plan_summary(data_of(config(), plan))
    first = summary["first_steps"]
    assert summary["samples"] == 8 and summary["held_out"] == 0
    assert summary["steps"] == plan.total_steps == first["steps"]
    assert (first["samples"], first["tokens"], first["dropped_as_too_large"]) == (21, 900, 3)  # three epochs
    assert summary["whole_run"] == {"dropped_as_too_large": 3, "unfinished": 0, "repeated": 0}
    assert math.isclose(first["fill"], 900 / (100 * first["steps"] * summary["rows_per_step"]))
    assert summary["text_only_share"] == 0.25 and summary["row"]["tokens"] == 100
    assert summary["fingerprint"] == plan.fingerprint
    other = plan_summary(
        data_of(config(), plan_lengths(lengths, row_tokens=100, rows_per_step=2, seed=2, epochs=3))
    )
    assert other["fingerprint"] != summary["fingerprint"] and other["digest"] != summary["digest"]
    assert "whole_run" not in plan_summary(
        data_of(config(), plan_lengths(lengths, row_tokens=100, rows_per_step=2, seed=2, steps=3))
    )


def test_every_so_many_steps_the_wait_is_measured() -> None:
    measured = [step for step in range(12) if measures_wait(config(measure_wait=4), step)]
    assert measured == [3, 7, 11]
    assert not any(measures_wait(config(measure_wait=0), step) for step in range(12))


def test_balance_and_wait_stand_in_the_line_and_as_scalars() -> None:
    waited = Waited(seconds=10.0, waits=(0.0, 4.0))
    report = StepReport(**{**REPORT.__dict__, "waited": waited})
    line = step_metrics(
        report, seconds=12.0, row_capacity=800, balance=Balance(cost=3.0, mean=2.0, bound=1.25)
    )
    assert line["imbalance"] == {"predicted": 1.5, "bound": 1.25, "measured": 10.0 / 8.0}
    assert line["wait"] == {"share": 0.2, "seconds": [0.0, 4.0]}
    found = {tag: value for tag, value in scalars(line).items() if tag.startswith("balance/")}
    assert found == {
        "balance/predicted": 1.5,
        "balance/bound": 1.25,
        "balance/measured": 1.25,
        "balance/wait_share": 0.2,
    }
