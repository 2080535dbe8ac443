"""What a run leaves behind for people: its folder, logs, one line a step, and scalars for TensorBoard.

Files are written by global rank 0 alone, except logs/rank-NNNNN.log, which each rank writes for itself.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tqdm import tqdm

from mmds.config import Config
from mmds.data.rows import Row
from mmds.engine import Engine, Ranks, StepReport
from mmds.errors import CheckpointError, DataError
from mmds.planner import Balance
from mmds.run_data import RunData

BEAT_S = 10.0
"""Seconds between heartbeats of run.lock; a lock is stale after three."""

log = logging.getLogger("mmds")


class RunFolder:
    """The output folder of one run, held by a lock while the run lives."""

    def __init__(self, path: Path, ranks: Ranks) -> None:
        """Create the folder, take its lock, open the logs and note the start; nothing that is there is changed.

        Raises CheckpointError when it cannot be written, or when another live run holds it.
        """
        self.path, self.ranks = path, ranks
        self._stop = threading.Event()
        try:
            (path / "logs").mkdir(parents=True, exist_ok=True)
            self._open_logs()
            if ranks.first:
                self._lock()
                self._append("starts.jsonl", _start_line(ranks))
        except OSError as error:
            raise CheckpointError(f"mmds.output_dir {path} cannot be written: {error}") from error

    def begin(self, step: int, config: Mapping[str, Any], plan: Mapping[str, Any], **facts: Any) -> None:
        """The run is accepted and goes on from `step`: write config.json and plan.json, drop later lines of metrics.jsonl."""
        self.forget_after(step)
        self.write_json("config.json", config)
        self.write_json("plan.json", plan)
        self.event("start", step=step, ranks=self.ranks.world, **facts)

    def close(self) -> None:
        """Give the lock back."""
        self._stop.set()
        if self.ranks.first:
            (self.path / "run.lock").unlink(missing_ok=True)

    def event(self, kind: str, **facts: Any) -> None:
        """A line of events.jsonl and of the log: saves, skips, guards."""
        if self.ranks.first:
            self._append("events.jsonl", {"time": time.time(), "event": kind, **facts})
            log.info("%s %s", kind, " ".join(f"{key}={value}" for key, value in facts.items()))

    def metrics(self, line: Mapping[str, Any]) -> None:
        """A line of metrics.jsonl, one a step."""
        if self.ranks.first:
            self._append("metrics.jsonl", line)

    def bad_sample(self, step: int, key: str, reason: str) -> None:
        """A line of bad_samples.jsonl."""
        if self.ranks.first:
            self._append("bad_samples.jsonl", {"step": step, "sample": key, "reason": reason})

    def forget_after(self, step: int) -> None:
        """Drop lines of metrics.jsonl later than `step`: the run goes on from there and will write them again."""
        file = self.path / "metrics.jsonl"
        if self.ranks.first and file.is_file():
            lines = [line for line in file.read_text(encoding="utf-8").splitlines() if _step_of(line) <= step]
            file.write_text("".join(line + "\n" for line in lines), encoding="utf-8")

    def write_json(self, name: str, data: Any) -> None:
        """Write a JSON file of the run folder."""
        if self.ranks.first:
            (self.path / name).write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")

    def _append(self, name: str, line: Mapping[str, Any]) -> None:
        with (self.path / name).open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(line) + "\n")

    def _open_logs(self) -> None:
        form = logging.Formatter("%(asctime)s %(levelname)s %(message)s")
        files = [self.path / "logs" / f"rank-{self.ranks.rank:05d}.log"]
        if self.ranks.first:
            files.append(self.path / "train.log")
        for old in log.handlers[:]:
            log.removeHandler(old)
            old.close()
        for file in files:
            handler = logging.FileHandler(file, encoding="utf-8")
            handler.setFormatter(form)
            log.addHandler(handler)
        log.setLevel(logging.INFO)

    def _lock(self) -> None:
        lock = self.path / "run.lock"
        mine = {"host": socket.gethostname(), "pid": os.getpid()}
        if lock.is_file():
            age = time.time() - lock.stat().st_mtime
            holder = _holder(lock)
            if age < 3 * BEAT_S and not _ended(holder):
                raise CheckpointError(
                    f"{self.path} is in use by {holder} (heartbeat {age:.0f} s ago); two runs would mix their files"
                )
        lock.write_text(json.dumps(mine), encoding="utf-8")
        threading.Thread(target=self._beat, args=(lock,), daemon=True).start()

    def _beat(self, lock: Path) -> None:
        while not self._stop.wait(BEAT_S):
            if lock.is_file():
                os.utime(lock)


def measures_wait(config: Config, step: int) -> bool:
    """Whether the wait of ranks is measured in a step, counted from 0: every `mmds.planner.measure_wait`-th, the first one not, which warms up."""
    every = config.planner.measure_wait
    return every > 0 and step % every == every - 1


def step_metrics(
    report: StepReport, *, seconds: float, row_capacity: int, balance: Balance | None = None
) -> dict[str, Any]:
    """One line of metrics.jsonl. seconds: wall time of the step; row_capacity: row_tokens x rows of the step; balance: predicted.

    imbalance: the step's time over what it would be were all ranks equally busy: predicted, the least that a plan could reach, and
    measured; wait: in a measured step, seconds that each rank waited and the share of all ranks' time.
    """
    waited = report.waited
    return {
        "step": report.step,
        "loss": report.loss,
        "token_nll": report.token_nll,
        "grad_norm": report.grad_norm,
        "rates": report.rates,
        "tokens": {
            "real": report.real,
            "visual": report.visual,
            "supervised": report.supervised,
            "padded": report.padded,
        },
        "fill": report.real / row_capacity,
        "images": report.images,
        "bad_samples": report.bad,
        "skipped_steps": report.skipped_steps,
        "imbalance": {
            "predicted": None if balance is None else balance.ratio,
            "bound": None if balance is None else balance.bound,
            "measured": None if waited is None else waited.imbalance,
        },
        "wait": None if waited is None else {"share": waited.idle_share, "seconds": list(waited.waits)},
        "seconds": seconds,
        "tokens_per_second": report.real / seconds,
    }


def record(
    run: RunFolder, engine: Engine, report: StepReport, rows: Sequence[Row], seconds: float, data: RunData
) -> dict[str, Any]:
    """Write a finished step everywhere: metrics.jsonl, TensorBoard, and what went wrong in it. Every rank calls it.

    rows: this rank's; seconds: wall time of the step. Returns the line of metrics.jsonl. Raises DataError on every rank, once that
    is written, after `stop_after_skipped` steps in a row without an update.
    """
    config = data.config
    capacity = engine.rows_per_step * config.data.row_tokens
    balance = data.balance(report.step - 1) if engine.ranks.first else None
    line = step_metrics(report, seconds=seconds, row_capacity=capacity, balance=balance)
    run.metrics(line)
    engine.write_events(scalars(line), report.step)
    if report.bad:
        for mine in engine.ranks.gather([bad for row in rows for bad in row.bad]):
            for key, reason in mine:
                run.bad_sample(report.step, key, reason)
        run.event("bad_samples", step=report.step, count=report.bad)
    if not report.applied:
        run.event(
            "update_skipped",
            step=report.step,
            reason="non-finite gradient",
            in_all=report.skipped_steps,
            samples=list(report.suspects),
        )
        if report.skipped_in_a_row >= config.stop_after_skipped:
            raise DataError(
                f"step {report.step}: {report.skipped_in_a_row} steps in a row gave a non-finite gradient and no update "
                f"(mmds.stop_after_skipped); the samples of the last one: {', '.join(report.suspects[:8])}"
                f"{', ...' if len(report.suspects) > 8 else ''}. Look at them with the dry run, lower the rates, or train in fp32 or bf16"
            )
    return line


def progress_bar(stage: str, engine: Engine, last: int) -> tqdm[Any]:
    """A bar over the steps up to `last`, on rank 0; silent elsewhere."""
    return tqdm(
        total=last, initial=engine.step_index, desc=stage, unit="step", disable=not engine.ranks.first
    )


def scalars(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The same line as TensorBoard scalars by tag."""
    flat = {
        "train/loss": metrics["loss"],
        "train/token_nll": metrics["token_nll"],
        "train/grad_norm": metrics["grad_norm"],
        "train/skipped_steps": metrics["skipped_steps"],
    }
    flat |= {f"rate/{name}": rate for name, rate in metrics["rates"].items()}
    flat |= {f"tokens/{kind}": count for kind, count in metrics["tokens"].items()}
    flat |= {
        "tokens/fill": metrics["fill"],
        "speed/tokens_per_second": metrics["tokens_per_second"],
        "speed/seconds_per_step": metrics["seconds"],
        "data/images": metrics["images"],
        "data/bad_samples": metrics["bad_samples"],
    }
    flat |= {f"balance/{kind}": ratio for kind, ratio in metrics["imbalance"].items() if ratio is not None}
    if metrics["wait"] is not None:
        flat["balance/wait_share"] = metrics["wait"]["share"]
    return flat


def plan_summary(data: RunData) -> dict[str, Any]:
    """plan.json: the plan in numbers, and a fingerprint of all that decides it (content, sizes, seed, row, batch).

    digest: of the rows of the first steps. An epoch's end is known beforehand only where the run has epochs.
    """
    plan, first = data.plan, data.plan.preview()
    summary = {
        "fingerprint": plan.fingerprint,
        "digest": first.digest,
        "scheme": data.config.planner.scheme,
        "row": vars(plan.scheme.limits),
        "samples": int(plan.stream.starts[-1]),
        "held_out": sum(len(source.held_out) for source in plan.stream.sources),
        "text_only_share": data.text_share,
        "steps": plan.total_steps,
        "rows_per_step": plan.rows_per_step,
        "first_steps": {
            "steps": first.steps,
            "samples": first.samples,
            "tokens": first.tokens,
            "fill": first.tokens / (first.rows * plan.row_tokens),
            "dropped_as_too_large": first.dropped,
        },
    }
    if plan.end is not None:
        left_out = {"dropped_as_too_large": plan.end.dropped, "unfinished": plan.end.unfinished}
        summary["whole_run"] = {**left_out, "repeated": plan.end.repeated}
    return summary


def _start_line(ranks: Ranks) -> dict[str, Any]:
    packages = ("mmds", "torch", "deepspeed", "transformers", "open_clip_torch")
    return {
        "time": time.time(),
        "command": sys.argv,
        "host": socket.gethostname(),
        "ranks": ranks.world,
        "device": str(ranks.device),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in packages},
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except ImportError:
        return "not installed"


def _step_of(line: str) -> float:
    """Step of a line of metrics; infinity when a kill has cut the line short."""
    try:
        return int(json.loads(line)["step"])
    except ValueError:
        return float("inf")


def _holder(lock: Path) -> dict[str, Any]:
    """What a lock says of its run; empty when a kill has cut it short."""
    try:
        return dict(json.loads(lock.read_text(encoding="utf-8")))
    except (ValueError, TypeError):
        return {}


def _ended(holder: Mapping[str, Any]) -> bool:
    """True when the lock's holder was a process of this host that no longer runs."""
    if holder.get("host") != socket.gethostname() or "pid" not in holder:
        return False
    try:
        os.kill(int(holder["pid"]), 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return int(holder["pid"]) == os.getpid()
