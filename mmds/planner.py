"""Which samples make which row of which rank in which micro-step: a pure function of sizes, seed and epoch.

    sample   one conversation                     row    samples back to back, at most `row_tokens` long
    step     rows_per_step rows over all ranks    n, R   samples and rows of an epoch

Row `step * rows_per_step + micro * world + rank` belongs to that rank's micro-step, so a step holds the same
rows on any number of ranks. Every process plans for itself and gets the same answer: no communication.
"""

from __future__ import annotations

import hashlib
import heapq
import json
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from mmds.errors import ConfigError, DataError

IntArray = NDArray[np.int64]

OPEN_ROWS = 16  # rows filled at a time: more fill better, and make neighbouring rows less alike


@dataclass(frozen=True, kw_only=True)
class EpochPlan:
    """The rows of one epoch, as plain arrays.

    samples: int64 [n], sample indices in row order. row_starts: int64 [R + 1]; row r holds the samples from
    row_starts[r] to row_starts[r + 1]. rows_per_step: R is a multiple of it. dropped: int64 [d], ascending:
    samples that are longer than a row.
    """

    samples: IntArray
    row_starts: IntArray
    rows_per_step: int
    dropped: IntArray

    @property
    def rows(self) -> int:
        """Rows of the epoch, R."""
        return len(self.row_starts) - 1

    @property
    def steps(self) -> int:
        """Optimizer steps of the epoch."""
        return self.rows // self.rows_per_step

    def row(self, index: int) -> IntArray:
        """Sample indices of a row, int64 [k]; k = 0 only in the last step, when samples ran out."""
        return self.samples[self.row_starts[index] : self.row_starts[index + 1]]


def plan_epoch(
    lengths: IntArray,
    *,
    row_tokens: int,
    rows_per_step: int,
    seed: int,
    epoch: int,
    on_long: str = "drop",
    names: Callable[[int], str] | None = None,
) -> EpochPlan:
    """Shuffle the samples and pack them into rows of at most `row_tokens` (scheme `token_budget`).

    lengths: int64 [n], tokens of each sample with its slots expanded. rows_per_step: rows of all ranks and
    micro-steps. on_long: a sample longer than a row is "drop"ped (and listed in the plan) or "raise"s.
    names: index -> name, for errors. Every other sample is in exactly one row. Raises DataError for a long
    sample under "raise", ConfigError when fewer samples than rows_per_step remain.
    """
    assert row_tokens > 0 and rows_per_step > 0 and on_long in ("drop", "raise")
    lengths = np.asarray(lengths, dtype=np.int64)
    assert lengths.ndim == 1 and (lengths > 0).all(), "lengths must be one positive number a sample"
    long = lengths > row_tokens
    dropped = np.flatnonzero(long)
    if len(dropped) and on_long == "raise":
        raise DataError(_too_long(lengths, dropped, row_tokens, names))
    kept = np.flatnonzero(~long)
    if len(kept) < rows_per_step:
        raise ConfigError(_too_few(len(kept), len(dropped), row_tokens, rows_per_step))
    order = kept[_permutation(len(kept), seed, epoch)]
    rows = _pack(order, lengths, row_tokens)
    rows = _complete_last_step(rows, lengths, rows_per_step)
    starts = np.cumsum([0, *(len(row) for row in rows)], dtype=np.int64)
    samples = np.fromiter((i for row in rows for i in row), dtype=np.int64, count=len(order))
    return EpochPlan(samples=samples, row_starts=starts, rows_per_step=rows_per_step, dropped=dropped)


class RunPlan:
    """All rows of a run, epoch after epoch, planned when first asked for.

    Give `epochs`, or `steps` (which may end inside an epoch and takes as many as it needs). The arguments
    alone decide the answer: a resumed run asks from its step on and gets what the uninterrupted run got.
    """

    def __init__(
        self,
        lengths: IntArray,
        *,
        row_tokens: int,
        rows_per_step: int,
        seed: int,
        epochs: int | None = None,
        steps: int | None = None,
        on_long: str = "drop",
        names: Callable[[int], str] | None = None,
    ) -> None:
        """Plan the first epoch; arguments and errors as for `plan_epoch`."""
        if (epochs is None) == (steps is None):
            raise ConfigError("give either schedule.epochs or schedule.steps, not both")
        if (epochs or steps or 0) < 1:
            raise ConfigError(f"schedule.epochs and schedule.steps must be at least 1, got {epochs or steps}")
        self._plan = partial(
            plan_epoch,
            lengths,
            row_tokens=row_tokens,
            rows_per_step=rows_per_step,
            seed=seed,
            on_long=on_long,
            names=names,
        )
        self._epochs, self._steps = epochs, steps
        self.lengths, self.row_tokens = lengths, row_tokens
        inputs = [row_tokens, rows_per_step, seed, epochs, steps, on_long]
        digest = hashlib.sha256(json.dumps(inputs).encode())
        digest.update(np.ascontiguousarray(lengths, dtype=np.int64).tobytes())
        self.fingerprint = digest.hexdigest()  # of all that decides the plan
        self._ends: list[int] = []  # steps of the run up to the end of each epoch planned so far
        self._recent: dict[int, EpochPlan] = {}  # a run touches at most two epochs at a time
        self.rows_per_step = rows_per_step
        self.dropped: IntArray = self.epoch(0).dropped

    def epoch(self, epoch: int) -> EpochPlan:
        """The plan of one epoch, counted from 0."""
        if epoch not in self._recent:
            self._recent[epoch] = self._plan(epoch=epoch)
            if len(self._recent) > 2:
                del self._recent[next(iter(self._recent))]
        return self._recent[epoch]

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the run."""
        if self._steps is not None:
            return self._steps
        assert self._epochs is not None
        while len(self._ends) < self._epochs:
            self._extend()
        return self._ends[self._epochs - 1]

    def position(self, step: int) -> tuple[int, int]:
        """(epoch, step within the epoch) of a step of the run. Raises IndexError outside the run."""
        if not 0 <= step < self.total_steps:
            raise IndexError(f"step {step} of a run of {self.total_steps} steps")
        while not self._ends or self._ends[-1] <= step:
            self._extend()
        epoch = bisect_right(self._ends, step)
        return epoch, step - (self._ends[epoch - 1] if epoch else 0)

    def rows_for(self, step: int, micro: int, rank: int, *, world: int) -> IntArray:
        """Sample indices, int64 [k], of the row of `rank` of `world` in micro-step `micro` of `step`."""
        if not 0 <= rank < world or micro < 0 or (micro + 1) * world > self.rows_per_step:
            raise IndexError(f"micro-step {micro}, rank {rank} of {world}, {self.rows_per_step} rows a step")
        epoch, within = self.position(step)
        return self.epoch(epoch).row(within * self.rows_per_step + micro * world + rank)

    def _extend(self) -> None:
        """Plan the next epoch and note where it ends."""
        plan = self.epoch(len(self._ends))
        self._ends.append(plan.steps + (self._ends[-1] if self._ends else 0))


def _permutation(count: int, seed: int, epoch: int) -> IntArray:
    """A shuffle of 0..count-1. RandomState's stream never changes between numpy versions."""
    if seed < 0 or epoch < 0:
        raise ConfigError(f"seed and epoch must not be negative, got {seed} and {epoch}")
    bits = np.random.MT19937(np.random.SeedSequence([seed, epoch]))
    return np.random.RandomState(bits).permutation(count).astype(np.int64)


def _pack(order: IntArray, lengths: IntArray, row_tokens: int) -> list[list[int]]:
    """First-fit over a few open rows; when a sample fits in none of them the fullest is closed."""
    closed: list[list[int]] = []
    rows: list[list[int]] = []  # open rows, oldest first
    room: list[int] = []  # tokens that still fit in each open row
    for sample, length in zip(order.tolist(), lengths[order].tolist(), strict=True):
        for slot, free in enumerate(room):
            if free >= length:
                rows[slot].append(sample)
                room[slot] -= length
                break
        else:
            if len(rows) == OPEN_ROWS:
                fullest = room.index(min(room))
                closed.append(rows.pop(fullest))
                room.pop(fullest)
            rows.append([sample])
            room.append(row_tokens - length)
    return closed + rows


def _complete_last_step(rows: list[list[int]], lengths: IntArray, rows_per_step: int) -> list[list[int]]:
    """Make the row count a multiple of `rows_per_step` by splitting rows, the largest first.

    Rows of the last step are split first, so that its ranks stay equally busy, then earlier ones; a row
    stays empty only when every other row is down to one sample.
    """
    full = len(rows) - len(rows) % rows_per_step
    if full == len(rows):
        return rows
    head, tail = rows[:full], rows[full:]
    tail = _split_largest(tail, lengths, rows_per_step)
    missing = rows_per_step - len(tail)
    if missing:
        grown = _split_largest(head, lengths, len(head) + missing)
        head, tail = grown[: len(head)], tail + grown[len(head) :]
    return head + tail + [[] for _ in range(rows_per_step - len(tail))]


def _split_largest(rows: list[list[int]], lengths: IntArray, wanted: int) -> list[list[int]]:
    """Split rows near their middle until there are `wanted` or none holds two; new ones go to the end."""
    rows = list(rows)
    heap = [(-int(lengths[row].sum()), index) for index, row in enumerate(rows) if len(row) > 1]
    heapq.heapify(heap)
    while heap and len(rows) < wanted:
        _, index = heapq.heappop(heap)
        ends = np.cumsum(lengths[rows[index]])
        cut = 1 + int(np.argmin(np.abs(2 * ends[:-1] - ends[-1])))
        rows.append(rows[index][cut:])
        rows[index] = rows[index][:cut]
        for part in (index, len(rows) - 1):
            if len(rows[part]) > 1:
                heapq.heappush(heap, (-int(lengths[rows[part]].sum()), part))
    return rows


def _too_long(lengths: IntArray, long: IntArray, row_tokens: int, names: Callable[[int], str] | None) -> str:
    shown = ", ".join(
        f"sample {names(int(i)) if names else f'number {i}'} ({lengths[i]} tokens)" for i in long[:5]
    )
    return (
        f"{len(long)} of {len(lengths)} samples are longer than a row of {row_tokens} tokens: {shown}"
        f"{' and others' if len(long) > 5 else ''}. Raise mmds.data.row_tokens, lower mmds.data.max_pixels, "
        'or set mmds.data.on_long_sample to "drop".'
    )


def _too_few(kept: int, dropped: int, row_tokens: int, rows_per_step: int) -> str:
    without = f" ({dropped} more are longer than row_tokens = {row_tokens})" if dropped else ""
    return (
        f"one step needs {rows_per_step} rows (train_batch_size), but the data holds only {kept} usable "
        f"samples{without}. Lower train_batch_size or add data."
    )
