"""Rows that are equal in encoder and in decoder cost, under caps of tokens, patches and images: see `mmds.balance`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mmds.balance import FILL, Needs, Placed, Sizes, even_rows, place, take
from mmds.cost import CostModel
from mmds.packing import IntArray, Samples
from mmds.plan_state import PlannedStep, PlanState
from mmds.sample_sizes import SampleSizes
from mmds.sample_stream import StreamState
from mmds.schemes.scheme import Scheme, Taken

TOGETHER = 512  # rows that are evened out in one go: more cost less time a sample, and more at a time
FULL = 0.9  # of what a window holds: an epoch's last step with less counts as not filled


class CostScheme(Scheme):
    """A window of the next samples makes a step; what fits in none of its rows is first in the next one."""

    ahead = True

    def __init__(self, *arguments: Any, cost: CostModel, objective: str = "zero3", **options: Any) -> None:
        """objective: "zero3" (ranks meet inside every layer) or "step" (once a step), see `balance.even_rows`. Else as for `Scheme`."""
        super().__init__(*arguments, cost=cost, **options)
        self.objective = objective
        self._ahead: _Ahead | None = None

    def steps(self, state: PlanState, most: int, *, world: int) -> list[PlannedStep]:
        """Steps of about TOGETHER rows."""
        windows: list[_Window] = []
        for _ in range(min(most, max(1, TOGETHER // self.rows))):
            windows.append(self._window(windows[-1].after if windows else state))
        evened = even_rows(
            [window.placed for window in windows],
            self.limits,
            rows=self.rows,
            world=world,
            objective=self.objective,
        )
        return [
            PlannedStep(
                rows=tuple(tuple(window.numbers[list(row)].tolist()) for row in step.rows), after=window.after
            )
            for window, step in zip(windows, evened, strict=True)
        ]

    def skip(self, state: PlanState) -> PlanState:
        """What is left over follows from placing alone."""
        return self._window(state).after

    def _window(self, state: PlanState) -> _Window:
        left = np.array(state.open[0] if state.open else (), dtype=np.int64)
        ahead = self._look_ahead(state.stream)
        if ahead.ended and not len(left) and not sum(state.stream.taken):
            self._check_enough(len(ahead.kept), ahead.dropped)
        numbers = np.concatenate([left, ahead.numbers])
        parts = [self.sizes(left), ahead.sizes]
        sizes = self._costed(SampleSizes.joined(parts))
        own = len(numbers)
        if ahead.ended and self._last_step == "repeat" and self._windows(sizes) < 1:
            again = self._again(state.stream.epoch, sizes)
            numbers = np.concatenate([numbers, again])
            sizes = self._costed(SampleSizes.joined([*parts, self.sizes(again)]))
        count = self._count(sizes, len(left), ahead.ended) if len(numbers) == own else len(numbers)
        placed = self._place(sizes[:count], len(left))
        if placed.leftovers and count == own and count >= 2 * self.rows:
            count = max(count // 2, len(left), self.rows)  # else a last step of a few samples would follow
            placed = self._place(sizes[:count], len(left))
        over = [i for i in placed.leftovers if i < own]  # a sample that was to come once more need not
        after = self._after(state, ahead, min(count, own) - len(left), tuple(numbers[over].tolist()))
        after = replace(
            after, repeated=after.repeated + count - min(count, own) - (len(placed.leftovers) - len(over))
        )
        rest = np.concatenate([numbers[over], numbers[count:]])
        if ahead.ended and self._last_step == "drop" and len(rest) and self._windows(self.sizes(rest)) < FULL:
            after = replace(
                after,
                stream=self.stream.next_epoch(after.stream),
                open=(),
                dropped=state.dropped + ahead.dropped,
                unfinished=state.unfinished + len(rest),
            )
        return _Window(numbers=numbers[:count], placed=placed, after=after)

    def _after(self, state: PlanState, ahead: _Ahead, fetched: int, leftovers: Samples) -> PlanState:
        """The place after a window that took `fetched` samples from the stream."""
        ends = ahead.ended and fetched == len(ahead.kept)
        passed = len(ahead.every) if ends else int(ahead.kept[fetched - 1]) + 1 if fetched else 0
        stream = self.stream.behind(state.stream, ahead.every[:passed])
        return replace(
            state,
            step=state.step + 1,
            stream=self.stream.next_epoch(stream) if ends and not leftovers else stream,
            open=(leftovers,) if leftovers else (),
            dropped=state.dropped + passed - fetched,
        )

    def _place(self, sizes: Sizes, carried: int) -> Placed:
        return place(sizes, self.limits, rows=self.rows, objective=self.objective, carried=carried)

    def _count(self, sizes: Sizes, carried: int, ended: bool) -> int:
        """Samples of the window; where all that is left of an epoch makes more than one step and less than two, half of it."""
        count = take(sizes, self.limits, self.rows, carried=carried)
        rest = self._windows(sizes)
        if not ended or self._last_step != "share" or count == len(sizes) or rest > 2:
            return count
        half = np.max(
            [np.cumsum(need) / (cap * self.rows) for cap, need in self.limits.capped(sizes).values()], axis=0
        )
        at = int(np.searchsorted(half, half[-1] / 2))
        return min(count, max(at, carried, self.rows)) if len(sizes) >= 2 * self.rows else count

    def _windows(self, sizes: Needs) -> float:
        """How many windows these samples fill, by what is scarcest."""
        capped = self.limits.capped(sizes).values()
        return max(float(need.sum()) / (FILL * cap * self.rows) for cap, need in capped)

    def _look_ahead(self, stream: StreamState) -> _Ahead:
        """Samples after this place that fill two windows, or all that the epoch still has. Those looked at for the step before stay at hand."""
        known = self._ahead
        ahead = known.behind(stream) if known is not None and known.holds(stream) else _Ahead.empty(stream)
        while not ahead.ended and (not len(ahead.kept) or self._windows(ahead.sizes) <= 2):
            ahead = ahead.with_more(self._next_samples(ahead.end, max(16 * self.rows, 1024)))
            if not ahead.ended:
                self._check_any(len(ahead.kept), len(ahead.every))
        self._ahead = ahead
        return ahead

    def _again(self, epoch: int, sizes: Sizes) -> IntArray:
        """Samples from the beginning of the epoch that fill the window up."""
        stream, capped = self.epoch_start(epoch).stream, self.limits.capped(sizes)
        room = {name: FILL * cap * self.rows - int(need.sum()) for name, (cap, need) in capped.items()}
        first = self._next_samples(stream, 16 * self.rows + 1024)
        needs = self.limits.capped(first.sizes)
        fits = [int(np.searchsorted(np.cumsum(need), room[name])) for name, (_, need) in needs.items()]
        return first.numbers[: max(min(fits), self.rows - len(sizes))]


@dataclass(frozen=True, kw_only=True)
class _Window:
    """numbers: samples at hand, int64 [n], of which those placed make the step."""

    numbers: IntArray
    placed: Placed
    after: PlanState


@dataclass(frozen=True, kw_only=True)
class _Ahead(Taken):
    """The samples after a place of the stream, `start`."""

    start: StreamState

    @staticmethod
    def empty(start: StreamState) -> _Ahead:
        none = np.zeros(0, dtype=np.int64)
        return _Ahead(
            start=start, every=none, kept=none, sizes=SampleSizes.joined([]), end=start, ended=False
        )

    def with_more(self, taken: Taken) -> _Ahead:
        """With the samples that follow."""
        return _Ahead(
            start=self.start,
            every=np.concatenate([self.every, taken.every]),
            kept=np.concatenate([self.kept, len(self.every) + taken.kept]),
            sizes=SampleSizes.joined([self.sizes, taken.sizes]),
            end=taken.end,
            ended=taken.ended,
        )

    def holds(self, stream: StreamState) -> bool:
        """Whether a place lies between the start and the end."""
        return stream.epoch == self.start.epoch and 0 <= self._distance(stream) <= len(self.every)

    def behind(self, stream: StreamState) -> _Ahead:
        """What is left from a later place on."""
        gone = self._distance(stream)
        first = int(np.searchsorted(self.kept, gone))
        return replace(
            self,
            start=stream,
            every=self.every[gone:],
            kept=self.kept[first:] - gone,
            sizes=self.sizes[first:],
        )

    def _distance(self, stream: StreamState) -> int:
        return sum(stream.taken) - sum(self.start.taken)
