"""How fast rows come from a loader alone, and how many workers a training run needs."""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from mmds.data.loader import StepLoader
from mmds.data.timing import RowSeconds
from mmds.errors import DataError

MARGIN = 1.5  # the loader should be able to give so many times the rows that training takes
RECENT = 20  # steps of a run from which its need is taken


@dataclass(frozen=True, kw_only=True)
class Speed:
    """What one rank's loader gives with so many workers, per second; stages: mean of a row, in the process that makes it."""

    workers: int
    rows: float
    images: float
    tokens: float
    stages: RowSeconds


def measure(loader: StepLoader, *, workers: int, rows: int) -> Speed:
    """Take rows as fast as they come. workers: those of the loader; rows: how many to measure, fewer where the loader ends before.

    The first row of each worker is left out with the time until then: what remains is the pace of a long run. Raises DataError
    when nothing remains.
    """
    first = max(workers, 1)
    images = tokens = 0
    taken: list[RowSeconds] = []
    started = ended = 0.0
    for number, (row, seconds) in enumerate(islice(loader.rows(), first + rows), start=1):
        ended = time.monotonic()
        if number <= first:
            started = ended
            continue
        images, tokens = images + len(row.image_names), tokens + row.real_tokens
        taken.append(seconds)
    if not taken:
        raise DataError(f"the run has too few rows to measure {workers} workers; raise mmds.schedule")
    wall = ended - started
    return Speed(
        workers=workers,
        rows=len(taken) / wall,
        images=images / wall,
        tokens=tokens / wall,
        stages=RowSeconds(
            read=statistics.fmean(each.read for each in taken),
            decode=statistics.fmean(each.decode for each in taken),
            collate=statistics.fmean(each.collate for each in taken),
        ),
    )


def table(speeds: Sequence[Speed]) -> str:
    """A line for each count of workers."""
    lines = [
        f"{'workers':>7} {'rows/s':>9} {'images/s':>9} {'tokens/s':>11}   {'read':>9} {'decode':>9} {'collate':>9}  ms a row"
    ]
    for speed in speeds:
        stages = (speed.stages.read, speed.stages.decode, speed.stages.collate)
        lines.append(
            f"{speed.workers:>7} {speed.rows:>9.2f} {speed.images:>9.1f} {speed.tokens:>11,.0f}   "
            + " ".join(f"{1000 * stage:>9.2f}" for stage in stages)
        )
    return "\n".join(lines)


def advice(speeds: Sequence[Speed], need: float, *, cores: int) -> str:
    """How many workers suffice. need: rows a second that one rank takes; cores: of this machine."""
    wanted = MARGIN * need
    goal = f"{wanted:.2f} rows/s ({MARGIN:g} x the need of {need:.2f})"
    ahead = sorted((speed for speed in speeds if speed.workers), key=lambda speed: speed.workers)
    for speed in ahead:
        if speed.rows >= wanted:
            return f"mmds.data.workers = {speed.workers} suffices: {speed.rows:.2f} of {goal}"
    if not ahead:
        return f"{goal} are wanted; measure at least one worker (0 loads while training waits)"
    best = max(ahead, key=lambda speed: speed.rows)
    more = math.ceil(wanted / best.rows * best.workers)
    return (
        f"none of these counts gives {goal}; the best, {best.workers}, gives {best.rows:.2f}. If cores allow (here are {cores}), "
        f"about {more} would; else make pictures smaller beforehand"
    )


def need_of_gpu(flops: float, *, tflops: float, mfu: float) -> float:
    """Rows a second that one rank takes: flops: of a mean row, forward and backward; tflops: of its GPU; mfu: share that training reaches."""
    return tflops * 1e12 * mfu / flops


def need_of_run(folder: Path) -> tuple[float, int] | None:
    """Rows a second that one rank of a run has taken, and from how many steps that is known; None when it has trained no step.

    folder: the run's. The median of its last steps, so that the first ones and checkpoints do not count. A run that waited for its
    loader needed more than this.
    """
    try:
        seconds = pace_of_run(folder)
        ranks = int(_lines(folder / "starts.jsonl")[-1]["ranks"])
        rows = int(json.loads((folder / "plan.json").read_text(encoding="utf-8"))["rows_per_step"])
    except (FileNotFoundError, IndexError):
        return None
    if not seconds:
        return None
    return rows / ranks / statistics.median(seconds), len(seconds)


def pace_of_run(folder: Path) -> list[float]:
    """Seconds of the last steps of a run; empty when it has trained none."""
    try:
        return [step["seconds"] for step in _lines(folder / "metrics.jsonl")[-RECENT:]]
    except FileNotFoundError:
        return []


def _lines(file: Path) -> list[dict[str, float]]:
    """The objects of a JSONL file; one that is being written is left out."""
    whole = file.read_text(encoding="utf-8").rpartition("\n")[0]
    return [json.loads(line) for line in whole.splitlines()]
