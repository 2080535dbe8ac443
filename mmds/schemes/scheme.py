"""What every scheme has: a stream of samples, their sizes, the caps of a row, and what is done with samples that fit in no row."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from mmds.balance import Limits, Sizes
from mmds.cost import CostModel
from mmds.errors import ConfigError, DataError
from mmds.packing import IntArray, Samples, complete_last_step
from mmds.plan_state import PlannedStep, PlanState
from mmds.sample_sizes import Measure, SampleSizes
from mmds.sample_stream import SampleStream, StreamState

CHUNK = 256  # samples taken from the stream at a time


@dataclass(frozen=True, kw_only=True)
class Taken:
    """Samples of the stream one after the other.

    every: their numbers, int64 [k]. kept: places among them of those that fit in a row, int64 [n]. sizes: of the kept. end: the place after
    them. ended: the epoch has no more.
    """

    every: IntArray
    kept: IntArray
    sizes: SampleSizes
    end: StreamState
    ended: bool

    @property
    def numbers(self) -> IntArray:
        """Of the kept, int64 [n]."""
        return self.every[self.kept]

    @property
    def dropped(self) -> int:
        """Samples that fit in no row."""
        return len(self.every) - len(self.kept)


class Scheme(ABC):
    """A pure function from a place in the plan to the steps after it.

    In an epoch every sample is in exactly one row, except for those that are above a cap alone, and for what `last_step` says.
    """

    ahead = False
    """Whether planning takes long enough to be worth a process beside the training."""

    def __init__(
        self,
        stream: SampleStream,
        measure: Measure,
        limits: Limits,
        *,
        rows: int,
        on_long: str = "drop",
        last_step: str = "share",
        names: Callable[[int], str] | None = None,
        cost: CostModel | None = None,
    ) -> None:
        """measure: sample numbers -> sizes. rows: of a step, over all ranks and micro-steps. on_long: a sample that is above a cap of a row
        alone is "drop"ped and counted, or "raise"s a DataError with its name once it is met.

        last_step: when the last samples of an epoch do not fill a step, they are "share"d out over all its rows; or the epoch ends a
        step earlier ("drop", counted); or samples from the epoch's beginning come once more ("repeat", counted). names: number ->
        name, for errors. cost: FLOPs or seconds of samples, for schemes and reports that look at them.
        """
        assert rows > 0 and on_long in ("drop", "raise") and last_step in ("share", "drop", "repeat")
        self.stream, self.limits, self.rows = stream, limits, rows
        self.cost = cost
        self._measure, self._on_long, self._last_step, self._names = measure, on_long, last_step, names

    @abstractmethod
    def steps(self, state: PlanState, most: int, *, world: int) -> list[PlannedStep]:
        """The next steps from a place on: at least one and at most `most`, as many as are planned well together.

        How many come at a time changes nothing in them. world: ranks, a divisor of `rows`; the samples of a step do not depend on it.
        """

    def skip(self, state: PlanState) -> PlanState:
        """The place after the next step."""
        return self.steps(state, 1, world=1)[0].after

    @property
    def start(self) -> PlanState:
        """The first place."""
        return PlanState(step=0, stream=self.stream.start)

    def epoch_start(self, epoch: int) -> PlanState:
        """Where an epoch begins, counted from 0; its steps do not depend on those before it."""
        return PlanState(step=0, stream=StreamState(epoch=epoch, taken=self.stream.start.taken))

    def sizes(self, samples: Sequence[int] | IntArray) -> SampleSizes:
        """Sizes of these samples."""
        return self._measure(np.asarray(samples, dtype=np.int64))

    def costs(self, samples: Sequence[int] | IntArray) -> Sizes:
        """What these samples need and cost. Only where the plan knows costs."""
        return self._costed(self.sizes(samples))

    def _costed(self, sizes: SampleSizes) -> Sizes:
        assert self.cost is not None
        flops = self.cost.flops(sizes.sums)
        return Sizes(
            tokens=sizes.tokens,
            patches=sizes.patches,
            images=sizes.images,
            encoder=np.asarray(flops.vision),
            decoder=np.asarray(flops.decoder),
        )

    def _next_samples(self, stream: StreamState, count: int) -> Taken:
        """The next samples of an epoch; fewer than `count` only where it ends. Raises DataError for one that fits in no row under "raise"."""
        numbers, end = self.stream.take(stream, count)
        sizes = self._measure(numbers)
        over = np.zeros(len(numbers), dtype=bool)
        for cap, need in self.limits.capped(sizes).values():
            over |= need > cap
        if over.any() and self._on_long == "raise":
            raise DataError(too_large(numbers[over], sizes[over], self.limits, self._names))
        return Taken(
            every=numbers, kept=np.flatnonzero(~over), sizes=sizes[~over], end=end, ended=len(numbers) < count
        )

    def _check_enough(self, kept: int, dropped: int) -> None:
        """Raise ConfigError when a whole epoch has fewer samples than a step has rows."""
        if kept < self.rows:
            raise ConfigError(too_few(kept, dropped, self.limits, self.rows))

    def _check_any(self, kept: int, taken: int) -> None:
        """Raise ConfigError when an endless mix has given nothing that fits in a row."""
        if not kept and taken > 2 * int(self.stream.starts[-1]):
            raise ConfigError(too_few(0, int(self.stream.starts[-1]), self.limits, self.rows))

    def _finish(self, rows: list[Samples], epoch: int) -> tuple[list[Samples], int, int]:
        """The last rows of an epoch as whole steps by `last_step`, samples left out, and samples repeated."""
        full = len(rows) - len(rows) % self.rows
        if full == len(rows):
            return rows, 0, 0
        if self._last_step == "drop" and full:
            return rows[:full], sum(map(len, rows[full:])), 0
        if self._last_step == "repeat":
            again = self._first_rows(epoch, self.rows - len(rows) + full)
            return rows + again, 0, sum(map(len, again))
        flat = [i for row in rows for i in row]
        lengths = dict(zip(flat, self.sizes(flat).tokens.tolist(), strict=True))
        return complete_last_step(rows, lengths, self.rows), 0, 0

    def _first_rows(self, epoch: int, count: int) -> list[Samples]:
        """Rows of the first samples of an epoch, one after the other in its order; the order begins anew where it ends."""
        rows: list[Samples] = []
        row: list[int] = []
        room = self.limits.tokens
        while True:
            first = self._next_samples(self.epoch_start(epoch).stream, CHUNK * (count + 1))
            for sample, length in zip(first.numbers.tolist(), first.sizes.tokens.tolist(), strict=True):
                if length > room:
                    rows.append(tuple(row))
                    row, room = [], self.limits.tokens
                    if len(rows) == count:
                        return rows
                row.append(sample)
                room -= length


def too_large(
    numbers: IntArray, sizes: SampleSizes, limits: Limits, names: Callable[[int], str] | None
) -> str:
    """What to say of samples that are above a cap of a row alone: their numbers, int64 [k], and sizes."""
    caps = limits.capped(sizes)
    shown = []
    for at, number in enumerate(numbers[:5]):
        needs = ", ".join(f"{need[at]:,} {kind}" for kind, (cap, need) in caps.items() if need[at] > cap)
        shown.append(f"sample {names(int(number)) if names else f'number {number}'} ({needs})")
    row = ", ".join(f"{cap:,} {kind}" for kind, (cap, _) in caps.items())
    return (
        f"{len(numbers)} samples are larger than a row of {row}: {', '.join(shown)}{' and others' if len(numbers) > 5 else ''}. "
        "Raise mmds.data.row_tokens (or mmds.planner.row_patches, row_images), lower mmds.data.max_pixels, or set "
        'mmds.data.on_long_sample to "drop".'
    )


def too_few(kept: int, dropped: int, limits: Limits, rows: int) -> str:
    """What to say of an epoch with fewer usable samples than a step has rows."""
    without = f" ({dropped} more are larger than a row of {limits.tokens:,} tokens)" if dropped else ""
    return (
        f"one step needs {rows} rows (train_batch_size), but the data holds only {kept} usable "
        f"samples{without}. Lower train_batch_size or add data."
    )
