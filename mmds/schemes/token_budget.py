"""Rows of nearly equal tokens in the order of the stream: first-fit over a few open rows."""

from __future__ import annotations

import numpy as np

from mmds.packing import IntArray, Packer
from mmds.plan_state import PlannedStep, PlanState
from mmds.schemes.scheme import CHUNK, Scheme


class TokenBudget(Scheme):
    """Fills rows up to the token cap and looks at nothing else. A step holds the same rows on any number of ranks."""

    def steps(self, state: PlanState, most: int, *, world: int) -> list[PlannedStep]:
        """One step. A whole step stays in hand until the epoch has ended, so that its last step can be completed out of it."""
        packer = Packer(state.open, self._tokens, self.limits.tokens)
        ready, stream, ended, dropped = list(state.ready), state.stream, state.ended, state.dropped
        unfinished, repeated = state.unfinished, state.repeated
        fresh = not state.ready and not state.open
        while not ended and len(ready) < 2 * self.rows:
            taken = self._next_samples(stream, CHUNK)
            stream, ended, dropped = taken.end, taken.ended, dropped + taken.dropped
            ready += packer.add(taken.numbers, taken.sizes.tokens)
            if ended:
                ready += packer.close()
                if fresh:
                    self._check_enough(sum(map(len, ready)), dropped - state.dropped)
            elif packer.empty:
                self._check_any(len(ready), dropped)
        if ended and len(ready) % self.rows:
            ready, out, again = self._finish(ready, state.stream.epoch)
            unfinished, repeated = unfinished + out, repeated + again
        rows, ready = ready[: self.rows], ready[self.rows :]
        if ended and not ready:
            stream, ended = self.stream.next_epoch(stream), False
        after = PlanState(
            step=state.step + 1,
            stream=stream,
            open=packer.open,
            ready=tuple(ready),
            dropped=dropped,
            unfinished=unfinished,
            repeated=repeated,
            ended=ended,
        )
        return [PlannedStep(rows=tuple(rows), after=after)]

    def _tokens(self, samples: IntArray) -> IntArray:
        return self.sizes(samples).tokens if len(samples) else np.zeros(0, dtype=np.int64)
