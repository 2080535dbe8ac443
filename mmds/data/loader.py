"""Rows of one rank, step by step: read, decoded and packed in worker processes, in the plan's order."""

from __future__ import annotations

import contextlib
import multiprocessing
from collections import deque
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

import torch
from torch.utils.data import DataLoader, Sampler

from mmds.data.handover import Handover, Ticket
from mmds.data.mixture import Mixture
from mmds.data.row_maker import Arrival, RowMaker, Samples, row_of
from mmds.data.rows import Row
from mmds.data.timing import RowSeconds, StageClock
from mmds.data.watchdog import Board, Watchdog
from mmds.errors import ConfigError, DataError
from mmds.geometry import Geometry
from mmds.planner import RunPlan

ROWS_AHEAD = 2  # rows that each worker prepares ahead
TIMEOUT = 600.0  # seconds without a row after which the workers are given up
MAX_BAD_SHARE = 0.05  # of the samples read so far; more than that is not a few bad samples
FEW_BAD = 20  # bad samples that are always tolerated under "skip", whatever their share
REASONS = 5  # of bad samples that the error of too many shows


@dataclass(frozen=True, kw_only=True)
class Step:
    """What one rank runs in one optimizer step. index: step of the run; rows: one a micro-step; seconds: of each row."""

    index: int
    rows: list[Row]
    seconds: tuple[RowSeconds, ...] = ()


class StepLoader:
    """Iterates the steps `start_step` to `stop_step` of a plan for one rank.

    Rows do not depend on `workers`, nor on where iteration starts: the position in the plan is the only
    state, so a loader that starts at the first step not consumed goes on without repeating or leaving out a
    row, however many were prepared ahead. Workers end with their iteration, or with `close` if `persistent`.
    """

    def __init__(
        self,
        mixture: Mixture,
        plan: RunPlan,
        geometry: Geometry,
        *,
        rank: int,
        world: int,
        accumulation: int,
        workers: int,
        on_bad: Literal["raise", "skip"] = "raise",
        start_step: int = 0,
        stop_step: int | None = None,
        max_bad_share: float = MAX_BAD_SHARE,
        timeout: float = TIMEOUT,
        pin_memory: bool = False,
        persistent: bool = False,
    ) -> None:
        """Nothing is read before iteration.

        accumulation: rows of this rank in a step. workers: processes, 0 = load in this one, nothing ahead.
        stop_step: None = all. on_bad: a sample that cannot be decoded is an error ("raise"), or is left out
        of its row and listed in `Row.bad` ("skip"), up to max_bad_share of the samples read so far. timeout:
        seconds without a row from the workers; a tenth of it is logged. pin_memory: rows in page-locked
        memory, for a CUDA device. persistent: keep the workers for the next iteration, until `close`. Raises
        ConfigError when world x accumulation is not the plan's number of rows a step.
        """
        if world * accumulation != plan.rows_per_step:
            raise ConfigError(
                f"{world} ranks x {accumulation} micro-steps are not the plan's {plan.rows_per_step} rows"
            )
        self._mixture, self._geometry, self._plan = mixture, geometry, plan
        self._on_bad = on_bad
        self._accumulation, self._workers, self._timeout = accumulation, workers, timeout
        self._max_bad_share, self._pin, self._persistent = max_bad_share, pin_memory, persistent
        self._steps = range(start_step, plan.total_steps if stop_step is None else stop_step)
        self._order = _RowOrder(plan, self._steps, rank, world, accumulation)
        self._kept: _Crew | None = None
        self._iterating = False

    def __len__(self) -> int:
        return len(self._steps)

    def __iter__(self) -> Iterator[Step]:
        """Raises DataError naming the sample, whatever is wrong with it; never waits beyond the timeout.

        A worker that is killed raises at once, also between two steps.
        """
        with contextlib.closing(self.rows()) as rows:
            for step in self._steps:
                made = list(islice(rows, self._accumulation))
                yield Step(index=step, rows=[row for row, _ in made], seconds=tuple(s for _, s in made))

    def rows(self) -> Generator[tuple[Row, RowSeconds], None, None]:
        """The rows of all steps, one by one, each with what it took. Raises as iteration over steps does."""
        assert not (self._persistent and self._iterating), "persistent workers serve one iteration at a time"
        if self._workers:
            self._plan.begin_ahead()
        crew, self._kept = self._kept or self._crew(), None
        rows = iter(crew.loader)
        crew.processes = crew.processes or crew.started()
        dog = Watchdog(crew.board, crew.processes, self._mixture.key, self._timeout)
        bad = _BadCount(self._max_bad_share)
        self._iterating, sound = True, False
        try:
            for samples in self._order:
                arrived = self._next(rows, crew.handover, dog, samples)
                if isinstance(arrived, str):
                    raise DataError(arrived)
                row = row_of(arrived[0], self._pin)
                bad.add(row, len(samples))
                sound = True  # whatever the consumer raises here, the workers can go on
                yield row, arrived[1]
                sound = False
            sound = True
        finally:
            dog.ending()
            if self._persistent and sound and dog.lost() is None:
                self._kept = crew
            del rows, crew  # unless kept, the last references: the workers end here
            dog.close()
            if self._kept is None:
                self._plan.end_ahead()
            self._iterating = False

    def row(self, step: int, micro: int) -> Row:
        """One row of this rank, made in this process. Raises DataError as iteration does."""
        return self.row_of(self._order.row(step, micro))

    def row_of(self, samples: Samples) -> Row:
        """The row of these samples, made in this process. Raises DataError as iteration does."""
        arrived = self._builder(Board(0), None).build(samples, StageClock())
        if isinstance(arrived, str):
            raise DataError(arrived)
        return row_of(arrived[0], self._pin)

    def close(self) -> None:
        """End persistent workers."""
        self._kept = None
        self._plan.end_ahead()

    def _next(
        self, rows: Iterator[Arrival | Ticket], handover: Handover, dog: Watchdog, samples: Samples
    ) -> Arrival:
        """The next row, or why there is none."""
        lost = dog.lost()
        if lost is None:
            try:
                with dog.waiting():
                    arrived = next(rows)
                return handover.take(arrived) if isinstance(arrived, Ticket) else arrived
            except (RuntimeError, OSError) as error:  # torch's own: a worker has ended, or the time is over
                lost = dog.lost() or (
                    f"no row has arrived for {self._timeout:g} s ({error}): {dog.overdue()}; the row of "
                    f"samples {dog.names(samples, len(samples))} is due. Look at the sample named first and "
                    "at its storage"
                )
        dog.end_processes()
        return lost

    def _crew(self) -> _Crew:
        board = Board(self._workers)
        handover = Handover(self._workers, slots=ROWS_AHEAD + 1)  # one more is being taken
        loader: DataLoader[Any] = DataLoader(
            self._builder(board, handover),
            batch_size=None,
            sampler=self._order,
            num_workers=self._workers,
            prefetch_factor=ROWS_AHEAD if self._workers else None,
            timeout=self._timeout if self._workers else 0,
            multiprocessing_context="fork" if self._workers else None,
            persistent_workers=self._persistent and self._workers > 0,
            collate_fn=_unchanged,
            generator=torch.Generator(),  # else every iteration would draw from the run's own random stream
        )
        return _Crew(loader, board, handover)

    def _builder(self, board: Board, handover: Handover | None) -> RowMaker:
        return RowMaker(self._mixture, self._geometry, self._on_bad, board, handover)


class _Crew:
    """A DataLoader, its processes once they are started, and what they share with this one."""

    def __init__(self, loader: DataLoader[Any], board: Board, handover: Handover) -> None:
        self.loader, self.board, self.handover = loader, board, handover
        self.processes: list[Any] = []
        self._before = set(multiprocessing.active_children())

    def started(self) -> list[Any]:
        """Processes that were started since."""
        return [process for process in multiprocessing.active_children() if process not in self._before]


class _BadCount:
    """Bad samples among those read so far."""

    def __init__(self, max_share: float) -> None:
        self._max_share = max_share
        self._seen = self._bad = 0
        self._reasons: deque[str] = deque(maxlen=REASONS)

    def add(self, row: Row, samples: int) -> None:
        """Count a row of so many planned samples. Raises DataError, with the last reasons, when too many are bad."""
        self._seen, self._bad = self._seen + samples, self._bad + len(row.bad)
        self._reasons.extend(reason for _, reason in row.bad)
        if self._bad > max(FEW_BAD, self._max_share * self._seen):
            reasons = "".join(f"\n  {reason}" for reason in self._reasons)
            raise DataError(
                f"{self._bad} of {self._seen} samples read so far are bad, above {self._max_share:.0%}. Mend the "
                f"data (scripts/prepare.py --check lists what is wrong); the last of them:{reasons}"
            )


class _RowOrder(Sampler[Samples]):
    """The samples of each of one rank's rows, in order. Evaluated in the main process only."""

    def __init__(self, plan: RunPlan, steps: range, rank: int, world: int, accumulation: int) -> None:
        self._plan, self._steps, self._accumulation = plan, steps, accumulation
        self._rank, self._world = rank, world

    def row(self, step: int, micro: int) -> Samples:
        return tuple(self._plan.rows_for(step, micro, self._rank, world=self._world).tolist())

    def __iter__(self) -> Iterator[Samples]:
        return (self.row(step, micro) for step in self._steps for micro in range(self._accumulation))

    def __len__(self) -> int:
        return len(self._steps) * self._accumulation


def _unchanged(item: Any) -> Any:
    return item
