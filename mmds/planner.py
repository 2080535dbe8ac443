"""Which samples make which row of which rank in which micro-step: a pure function of the stream, the sizes and the row.

    sample   one conversation                     row    samples back to back, under the caps of a row
    step     rows_per_step rows over all ranks    R      rows of a step

Row `micro * world + rank` of a step belongs to that rank's micro-step; the samples of a step are the same on any number of ranks. Every
process plans for itself and gets the same answer: no communication. Steps are planned one after the other as they are asked for,
so that a plan of a billion samples begins at once; a `PlanState` is a place from which to go on. How samples become rows is the
`Scheme`'s.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from mmds.balance import Limits, bound, sync_cost
from mmds.errors import ConfigError
from mmds.packing import IntArray, Samples
from mmds.plan_ahead import PlanAhead
from mmds.plan_state import PlannedStep, PlanState
from mmds.sample_sizes import Measure, text_only
from mmds.sample_stream import SampleStream, Source
from mmds.schemes import Scheme, TokenBudget

RECENT = 256  # steps that stay at hand; a loader asks for rows ahead of those in use
ANCHOR = 64  # steps between the places that are kept for going back
PREVIEWED = 2048  # rows of a preview: enough for a mean, few enough for any number of ranks


@dataclass(frozen=True, kw_only=True)
class Preview:
    """The first steps of a run in numbers: steps, rows (filler rows included), samples, their tokens, and samples left out as too large.

    digest: SHA-256 of the rows, the same in every process that plans the same.
    """

    steps: int
    rows: int
    samples: int
    tokens: int
    dropped: int
    digest: str


@dataclass(frozen=True, kw_only=True)
class Balance:
    """A step's predicted cost, what it would cost were all ranks equally busy, and the ratio of the two that no plan of it can beat."""

    cost: float
    mean: float
    bound: float

    @property
    def ratio(self) -> float:
        """1: no rank waits."""
        return self.cost / self.mean if self.mean else 1.0


class RunPlan:
    """All rows of a run, step after step.

    Give `epochs`, or `steps` (which may end inside an epoch and takes as many as it needs). The arguments alone decide the answer: a
    resumed run asks from its step on and gets what the uninterrupted run got.
    """

    def __init__(
        self,
        scheme: Scheme,
        *,
        epochs: int | None = None,
        steps: int | None = None,
        fingerprint: str = "",
    ) -> None:
        """Plans nothing yet, except where `epochs` asks how many steps they are. fingerprint: of all that decides the plan.

        Raises ConfigError when an epoch holds fewer samples than a step has rows.
        """
        if (epochs is None) == (steps is None):
            raise ConfigError("give either schedule.epochs or schedule.steps, not both")
        if (epochs or steps or 0) < 1:
            raise ConfigError(f"schedule.epochs and schedule.steps must be at least 1, got {epochs or steps}")
        if epochs is not None and scheme.stream.epoch_samples is None:
            raise ConfigError("a mix with weights has no epochs: give schedule.steps")
        self.scheme, self.stream, self.rows_per_step = scheme, scheme.stream, scheme.rows
        self.row_tokens = scheme.limits.tokens
        self.fingerprint = fingerprint
        self._epochs = epochs
        self._first = self._state = scheme.start
        self._anchors: OrderedDict[int, PlanState] = OrderedDict({0: self._first})
        self._recent: OrderedDict[int, tuple[Samples, ...]] = OrderedDict()
        self._world = 1
        self._ahead: PlanAhead | None = None
        self.end: PlanState | None = None
        """The place after the last step; None where the run has a number of steps, which are not looked at beforehand."""
        self.total_steps = steps if steps is not None else self._count_steps()

    def rows_for(self, step: int, micro: int, rank: int, *, world: int) -> IntArray:
        """Sample numbers, int64 [k], of the row of `rank` of `world` in micro-step `micro` of `step`; k = 0 for a filler row."""
        if not 0 <= rank < world or micro < 0 or (micro + 1) * world > self.rows_per_step:
            raise IndexError(f"micro-step {micro}, rank {rank} of {world}, {self.rows_per_step} rows a step")
        return np.array(self.step_rows(step, world=world)[micro * world + rank], dtype=np.int64)

    def step_rows(self, step: int, *, world: int = 1) -> tuple[Samples, ...]:
        """The rows of a step, `rows_per_step` of them, in the order of `world` ranks. Raises IndexError outside the run."""
        if not self._first.step <= step < self.total_steps:
            since = f", planned from step {self._first.step} on" if self._first.step else ""
            raise IndexError(f"step {step} of a run of {self.total_steps} steps{since}")
        if world != self._world:
            self._recent.clear()
            self._world = world
        if step not in self._recent:
            self._go_to(step)
            while step not in self._recent:
                self._keep(self._plan(self._state))
        return self._recent[step]

    def state_at(self, step: int) -> PlanState:
        """A place at or shortly before `step`, for `restore` to go on from."""
        near = max(place for place in self._anchors if place <= step)
        if near + ANCHOR <= step:
            self._go_to(min(step, self.total_steps))
        return self._anchors[max(place for place in self._anchors if place <= step)]

    def restore(self, state: PlanState) -> None:
        """Go on from a place where this plan, or one with the same fingerprint, has been."""
        self._anchors[state.step] = self._state = state

    def go_on(self, state: PlanState) -> None:
        """Go on from a place of a plan of the same data with another number of rows a step: what it has used stays used, and an epoch
        still ends when every sample has come once. Steps before it cannot be asked for. With `epochs` the number of steps is counted anew."""
        self._first = self._state = state
        self._anchors = OrderedDict({state.step: state})
        self._recent.clear()
        if self._epochs is not None:
            self.total_steps = self._count_steps()

    def preview(self, steps: int | None = None) -> Preview:
        """The first steps, or all of a shorter run. None: as many as have PREVIEWED rows, at most 100."""
        if steps is None:
            steps = min(100, max(1, PREVIEWED // self.rows_per_step))
        state, rows = self._first, list[Samples]()
        last = min(state.step + steps, self.total_steps)
        while state.step < last:
            for planned in self.scheme.steps(state, last - state.step, world=1):
                state = planned.after
                rows += planned.rows
        samples = np.array([i for row in rows for i in row], dtype=np.int64)
        return Preview(
            steps=state.step - self._first.step,
            rows=len(rows),
            samples=len(samples),
            tokens=int(self.scheme.sizes(samples).tokens.sum()),
            dropped=state.dropped,
            digest=hashlib.sha256(json.dumps([[list(row) for row in rows]]).encode()).hexdigest(),
        )

    def balance_of(self, step: int, *, world: int, objective: str) -> Balance | None:
        """How equal the rows of a step are by their predicted costs; None where the plan knows none. objective: as for `balance.even_rows`."""
        if self.scheme.cost is None:
            return None
        rows = self.step_rows(step, world=world)
        costs = self.scheme.costs([i for row in rows for i in row])
        row_of = np.repeat(np.arange(len(rows)), [len(row) for row in rows])
        encoder, decoder = (
            np.bincount(row_of, weights=each, minlength=len(rows)).astype(np.float64).reshape(-1, world)
            for each in (costs.encoder, costs.decoder)
        )
        if objective == "zero3":
            most, mean = sync_cost(encoder, decoder)
        else:
            each = (encoder + decoder).sum(axis=0)
            most, mean = float(each.max()), float(each.mean())
        return Balance(cost=most, mean=mean, bound=bound(costs, world=world, objective=objective).ratio)

    def begin_ahead(self) -> None:
        """From now on steps are planned in a process beside this one, before they are asked for, where the scheme takes long enough."""
        if self._ahead is None and self.scheme.ahead:
            self._ahead = PlanAhead(self.scheme)

    def end_ahead(self) -> None:
        """End that process."""
        if self._ahead is not None:
            self._ahead.close()
            self._ahead = None

    def _count_steps(self) -> int:
        """Steps until the last epoch has ended: each epoch is gone through once."""
        state = self._first
        while state.stream.epoch < (self._epochs or 1):
            state = self.scheme.skip(state)
        self.end = state
        return state.step

    def _go_to(self, step: int) -> None:
        """Bring the place to the step, from the latest known one before it."""
        places = [*self._anchors.values(), self._state]
        self._state = max((place for place in places if place.step <= step), key=lambda place: place.step)
        while self._state.step < step:
            self._move(self.scheme.skip(self._state))

    def _plan(self, state: PlanState) -> list[PlannedStep]:
        most = min(RECENT // 2, self.total_steps - state.step)
        if self._ahead is None:
            return self.scheme.steps(state, most, world=self._world)
        planned = self._ahead.steps(state, most, world=self._world)
        after = planned[-1].after
        if after.step < self.total_steps:
            self._ahead.ask(after, min(RECENT // 2, self.total_steps - after.step), world=self._world)
        return planned

    def _keep(self, planned: list[PlannedStep]) -> None:
        for step in planned:
            self._recent[step.after.step - 1] = step.rows
            self._recent.move_to_end(step.after.step - 1)
            self._move(step.after)
        while len(self._recent) > RECENT:
            self._recent.popitem(last=False)

    def _move(self, state: PlanState) -> None:
        self._state = state
        if state.step % ANCHOR == 0:
            self._anchors[state.step] = state
            if len(self._anchors) > RECENT // ANCHOR + 2:  # the beginning, and those of the steps at hand
                del self._anchors[next(place for place in self._anchors if place != self._first.step)]


def plan_lengths(
    lengths: IntArray,
    *,
    seed: int,
    row_tokens: int,
    rows_per_step: int,
    epochs: int | None = None,
    steps: int | None = None,
    names: Callable[[int], str] | None = None,
    **options: Any,
) -> RunPlan:
    """The plan of one source whose samples have these lengths, int64 [n], scheme `token_budget`; options: as for `Scheme`."""
    lengths = np.asarray(lengths, dtype=np.int64)
    assert lengths.ndim == 1 and (lengths > 0).all(), "lengths must be one positive number a sample"
    stream = SampleStream([Source(name="samples", count=len(lengths))], seed=seed)
    inputs = [seed, row_tokens, rows_per_step, epochs, steps, sorted(options.items())]
    digest = hashlib.sha256(json.dumps(inputs).encode() + lengths.tobytes()).hexdigest()
    measure: Measure = lambda numbers: text_only(lengths[numbers])  # noqa: E731
    scheme = TokenBudget(
        stream, measure, Limits(tokens=row_tokens), rows=rows_per_step, names=names, **options
    )
    return RunPlan(scheme, epochs=epochs, steps=steps, fingerprint=digest)
