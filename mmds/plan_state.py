"""Where a plan stands between two steps: everything that decides the steps after it, in plain numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from mmds.packing import Samples
from mmds.sample_stream import StreamState


@dataclass(frozen=True, kw_only=True)
class PlanState:
    """A place between two steps. It says nothing of ranks, so that a plan may go on with another number of them.

    step: steps planned. stream: samples taken. open: taken and in no step yet: rows being filled, oldest first (scheme `cost`: one tuple,
    what was left over). ready: whole rows that wait for their step. Samples so far: dropped (above a cap alone), unfinished (left out at
    the end of an epoch), repeated (at the end of an epoch). ended: the stream has no more samples in this epoch.
    """

    step: int
    stream: StreamState
    open: tuple[Samples, ...] = ()
    ready: tuple[Samples, ...] = ()
    dropped: int = 0
    unfinished: int = 0
    repeated: int = 0
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
class PlannedStep:
    """rows: samples of each row of the step; row `micro * world + rank` is that rank's in that micro-step. after: where the plan goes on."""

    rows: tuple[Samples, ...]
    after: PlanState
