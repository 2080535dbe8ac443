"""Which samples make which row of which rank in which micro-step: a pure function of the stream, the sizes and the row.

    sample   one conversation                     row    samples back to back, at most `row_tokens` long
    step     rows_per_step rows over all ranks    R      rows of a step

Row `micro * world + rank` of a step belongs to that rank's micro-step, so a step holds the same rows on any number of ranks. Every
process plans for itself and gets the same answer: no communication. Steps are planned one after the other as they are asked for,
so that a plan of a billion samples begins at once; a `PlanState` is a place from which to go on.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from mmds.errors import ConfigError, DataError
from mmds.packing import IntArray, Lengths, Packer, Samples, complete_last_step
from mmds.sample_stream import SampleStream, Source, StreamState

CHUNK = 256  # samples taken from the stream at a time
RECENT = 256  # steps that stay at hand; a loader asks for rows ahead of those in use
ANCHOR = 64  # steps between the places that are kept for going back


@dataclass(frozen=True, kw_only=True)
class PlanState:
    """A place between two steps: everything that decides the steps after it, in plain numbers.

    step: steps planned. stream: samples taken. open: rows being filled, oldest first. ready: rows that wait for their step.
    dropped: samples so far that are longer than a row. ended: the epoch has no more samples.
    """

    step: int
    stream: StreamState
    open: tuple[Samples, ...] = ()
    ready: tuple[Samples, ...] = ()
    dropped: int = 0
    ended: bool = False

    def to_json(self) -> dict[str, Any]:
        """A dict of plain JSON types."""
        return asdict(self)

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> PlanState:
        """The inverse of `to_json`."""
        rows = {name: tuple(tuple(row) for row in data[name]) for name in ("open", "ready")}
        stream = StreamState(epoch=data["stream"]["epoch"], taken=tuple(data["stream"]["taken"]))
        return PlanState(**{**data, **rows, "stream": stream})


@dataclass(frozen=True, kw_only=True)
class Preview:
    """The first steps of a run in numbers: steps, rows (filler rows included), samples, their tokens, and samples left out as too long."""

    steps: int
    rows: int
    samples: int
    tokens: int
    dropped: int


class RunPlan:
    """All rows of a run, step after step (scheme `token_budget`).

    Give `epochs`, or `steps` (which may end inside an epoch and takes as many as it needs). The arguments alone decide the answer: a
    resumed run asks from its step on and gets what the uninterrupted run got. In an epoch every sample is in exactly one row, except for
    those that are longer than a row.
    """

    def __init__(
        self,
        stream: SampleStream,
        lengths: Lengths,
        *,
        row_tokens: int,
        rows_per_step: int,
        epochs: int | None = None,
        steps: int | None = None,
        on_long: str = "drop",
        names: Callable[[int], str] | None = None,
        fingerprint: str = "",
    ) -> None:
        """Plans nothing yet, except where `epochs` asks how many steps they are.

        lengths: sample numbers, int64 [k] -> tokens of each with its slots expanded, int64 [k]. rows_per_step: rows of all ranks and
        micro-steps. on_long: a sample longer than a row is "drop"ped and counted, or "raise"s a DataError once it is met. names: number ->
        name, for errors. fingerprint: of all that decides the plan. Raises ConfigError when an epoch holds fewer samples than a step
        has rows.
        """
        assert row_tokens > 0 and rows_per_step > 0 and on_long in ("drop", "raise")
        if (epochs is None) == (steps is None):
            raise ConfigError("give either schedule.epochs or schedule.steps, not both")
        if (epochs or steps or 0) < 1:
            raise ConfigError(f"schedule.epochs and schedule.steps must be at least 1, got {epochs or steps}")
        if epochs is not None and stream.epoch_samples is None:
            raise ConfigError("a mix with weights has no epochs: give schedule.steps")
        self.stream, self.row_tokens, self.rows_per_step = stream, row_tokens, rows_per_step
        self.fingerprint = fingerprint
        self._lengths, self._on_long, self._names = lengths, on_long, names
        self._state = self._start = PlanState(step=0, stream=stream.start)
        self._anchors: OrderedDict[int, PlanState] = OrderedDict({0: self._start})
        self._recent: OrderedDict[int, list[Samples]] = OrderedDict()
        self.total_steps = steps if steps is not None else self._count_steps(epochs or 1)

    def rows_for(self, step: int, micro: int, rank: int, *, world: int) -> IntArray:
        """Sample numbers, int64 [k], of the row of `rank` of `world` in micro-step `micro` of `step`; k = 0 for a filler row."""
        if not 0 <= rank < world or micro < 0 or (micro + 1) * world > self.rows_per_step:
            raise IndexError(f"micro-step {micro}, rank {rank} of {world}, {self.rows_per_step} rows a step")
        return np.array(self.step_rows(step)[micro * world + rank], dtype=np.int64)

    def step_rows(self, step: int) -> list[Samples]:
        """The rows of a step, `rows_per_step` of them. Raises IndexError outside the run."""
        if not 0 <= step < self.total_steps:
            raise IndexError(f"step {step} of a run of {self.total_steps} steps")
        if step not in self._recent:
            places = [*self._anchors.values(), self._state]
            self._state = max((place for place in places if place.step <= step), key=lambda place: place.step)
            while self._state.step <= step:
                self._advance()
        return self._recent[step]

    def state_at(self, step: int) -> PlanState:
        """A place at or shortly before `step`, for `restore` to go on from."""
        self.step_rows(min(step, self.total_steps - 1))
        return self._anchors[max(place for place in self._anchors if place <= step)]

    def restore(self, state: PlanState) -> None:
        """Go on from a place where this plan, or one with the same fingerprint, has been."""
        self._anchors[state.step] = self._state = state

    def preview(self, steps: int = 100) -> Preview:
        """The first steps, or all of a shorter run."""
        state, planned = self._start, []
        for _ in range(min(steps, self.total_steps)):
            state, rows = self._next(state)
            planned += rows
        samples = np.array([i for row in planned for i in row], dtype=np.int64)
        tokens = int(self._lengths(samples).sum())
        return Preview(
            steps=state.step, rows=len(planned), samples=len(samples), tokens=tokens, dropped=state.dropped
        )

    def _count_steps(self, epochs: int) -> int:
        """Steps of that many epochs: each is packed once."""
        state = self._start
        while state.stream.epoch < epochs:
            state, _ = self._next(state)
        return state.step

    def _advance(self) -> None:
        """Plan one step and keep it at hand."""
        before = self._state
        self._state, self._recent[before.step] = self._next(before)
        if len(self._recent) > RECENT:
            self._recent.popitem(last=False)
        if self._state.step % ANCHOR == 0:
            self._anchors[self._state.step] = self._state
            if len(self._anchors) > RECENT // ANCHOR + 2:  # the beginning, and those of the steps at hand
                del self._anchors[next(place for place in self._anchors if place)]

    def _next(self, state: PlanState) -> tuple[PlanState, list[Samples]]:
        """The place after the next step, and that step's rows. A whole step stays in hand until the epoch has ended, so that its
        last step can be completed out of the one before."""
        packer = Packer(state.open, self._lengths, self.row_tokens)
        ready, stream, ended, dropped = list(state.ready), state.stream, state.ended, state.dropped
        while not ended and len(ready) < 2 * self.rows_per_step:
            numbers, stream = self.stream.take(stream, CHUNK)
            lengths = self._lengths(numbers)
            long = lengths > self.row_tokens
            if long.any():
                self._refuse_long(numbers[long], lengths[long], dropped, packer)
                dropped += int(long.sum())
            ready += packer.add(numbers[~long], lengths[~long])
            if ended := len(numbers) < CHUNK:
                ready = self._end_epoch(state, ready + packer.close(), dropped)
        rows, ready = ready[: self.rows_per_step], ready[self.rows_per_step :]
        if ended and not ready:
            stream, ended = self.stream.next_epoch(stream), False
        after = PlanState(
            step=state.step + 1,
            stream=stream,
            open=packer.open,
            ready=tuple(ready),
            dropped=dropped,
            ended=ended,
        )
        return after, rows

    def _end_epoch(self, state: PlanState, rows: list[Samples], dropped: int) -> list[Samples]:
        """The last rows of an epoch, completed to whole steps. Raises ConfigError when it holds fewer samples than one step needs."""
        samples = np.array([i for row in rows for i in row], dtype=np.int64)
        if len(samples) < self.rows_per_step and not state.ready and not state.open:
            raise ConfigError(
                too_few(len(samples), dropped - state.dropped, self.row_tokens, self.rows_per_step)
            )
        lengths = dict(zip(samples.tolist(), self._lengths(samples).tolist(), strict=True))
        return complete_last_step(rows, lengths, self.rows_per_step)

    def _refuse_long(self, numbers: IntArray, lengths: IntArray, dropped: int, packer: Packer) -> None:
        """Raise DataError for a long sample under "raise", ConfigError when a whole mix has given nothing else."""
        if self._on_long == "raise":
            raise DataError(too_long(numbers, lengths, self.row_tokens, self._names))
        if packer.empty and dropped > 2 * int(self.stream.starts[-1]):
            raise ConfigError(too_few(0, int(self.stream.starts[-1]), self.row_tokens, self.rows_per_step))


def too_long(
    numbers: IntArray, lengths: IntArray, row_tokens: int, names: Callable[[int], str] | None
) -> str:
    """What to say of samples that are longer than a row: their numbers and lengths, int64 [k] each."""
    shown = ", ".join(
        f"sample {names(int(i)) if names else f'number {i}'} ({length} tokens)"
        for i, length in zip(numbers[:5], lengths[:5], strict=True)
    )
    return (
        f"{len(numbers)} samples are longer than a row of {row_tokens} tokens: {shown}{' and others' if len(numbers) > 5 else ''}. "
        'Raise mmds.data.row_tokens, lower mmds.data.max_pixels, or set mmds.data.on_long_sample to "drop".'
    )


def too_few(kept: int, dropped: int, row_tokens: int, rows_per_step: int) -> str:
    """What to say of an epoch with fewer usable samples than a step has rows."""
    without = f" ({dropped} more are longer than row_tokens = {row_tokens})" if dropped else ""
    return (
        f"one step needs {rows_per_step} rows (train_batch_size), but the data holds only {kept} usable "
        f"samples{without}. Lower train_batch_size or add data."
    )


def plan_lengths(lengths: IntArray, *, seed: int, **options: Any) -> RunPlan:
    """The plan of one source whose samples have these lengths, int64 [n]; options: as for `RunPlan`."""
    lengths = np.asarray(lengths, dtype=np.int64)
    assert lengths.ndim == 1 and (lengths > 0).all(), "lengths must be one positive number a sample"
    stream = SampleStream([Source(name="samples", count=len(lengths))], seed=seed)
    inputs = [seed, sorted((name, str(value)) for name, value in options.items() if name != "names")]
    digest = hashlib.sha256(json.dumps(inputs).encode() + lengths.tobytes()).hexdigest()
    return RunPlan(stream, lambda numbers: lengths[numbers], fingerprint=digest, **options)
