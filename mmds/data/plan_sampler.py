"""The planner as a standard batch sampler of torch, for training loops of another make."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import Sampler

from mmds.plan_state import PlannedStep, PlanState
from mmds.schemes import Scheme


class PlanSampler(Sampler[list[int]]):
    """Batches of one rank: each is a row, a list of sample numbers; a step is `rows / world` of them, one a micro-step.

    `DataLoader(dataset, batch_sampler=PlanSampler(scheme, rank=r, world=w), collate_fn=...)`. Every rank gets equally many; a batch is
    empty where an epoch has fewer samples left than rows. One iteration is one epoch, `set_epoch` says which.
    """

    def __init__(self, scheme: Scheme, *, rank: int, world: int) -> None:
        """Raises ValueError when the ranks cannot share out the rows of a step."""
        if scheme.rows % world or not 0 <= rank < world:
            raise ValueError(
                f"rank {rank} of {world} ranks cannot take equal parts of {scheme.rows} rows a step"
            )
        self._scheme, self._rank, self._world = scheme, rank, world
        self._begin = scheme.epoch_start(0)
        self._given = 0
        self._lengths: dict[PlanState, int] = {}

    @property
    def epoch(self) -> int:
        """The epoch that an iteration goes through."""
        return self._begin.stream.epoch

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of an epoch, counted from 0; its order differs from the others'. The epoch that it is in: nothing changes."""
        if epoch != self.epoch:
            self._begin = self._scheme.epoch_start(epoch)
            self._given = 0

    def __iter__(self) -> Iterator[list[int]]:
        """The batches from the place that was loaded, else all of the epoch; then the next iteration is of the whole epoch again."""
        begin, self._given = self._begin, 0
        for step in self._steps(begin):
            for row in step.rows[self._rank :: self._world]:
                self._given += 1
                yield list(row)
        self._begin = self._scheme.epoch_start(begin.stream.epoch)

    def __len__(self) -> int:
        """Batches from the place of the next iteration to the end of the epoch; counted once by going through it."""
        if self._begin not in self._lengths:
            state, steps = self._begin, 0
            while state.stream.epoch == self.epoch:
                state, steps = self._scheme.skip(state), steps + 1
            self._lengths = {self._begin: steps * (self._scheme.rows // self._world)}
        return self._lengths[self._begin]

    def state_dict(self, consumed: int | None = None) -> dict[str, Any]:
        """From where to go on, on any number of ranks. consumed: batches of this iteration that were trained on; None: all that were given,
        which is too many when a loader has fetched ahead. Raises ValueError inside a step, where ranks and micro-steps would not fit."""
        consumed = self._given if consumed is None else consumed
        steps, inside = divmod(consumed, self._scheme.rows // self._world)
        if inside or not 0 <= consumed <= self._given:
            raise ValueError(
                f"{consumed} batches of this iteration are no whole number of steps of {self._scheme.rows // self._world} that were given"
            )
        state = self._begin
        for _ in range(steps):
            state = self._scheme.skip(state)
        return {"epoch": self.epoch, "place": state.to_json()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there; at the end of an epoch, from the beginning of the next one. The next iteration begins there."""
        self._begin = PlanState.from_json(state["place"])
        self._given = 0

    def _steps(self, begin: PlanState) -> Iterator[PlannedStep]:
        state, epoch = begin, begin.stream.epoch
        while state.stream.epoch == epoch:
            for step in self._scheme.steps(state, 64, world=self._world):
                state = step.after
                yield step
                if state.stream.epoch != epoch:
                    return
