"""How long a row spends in each stage of its making, on the monotonic clock."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Stage = Literal["read", "decode", "collate"]

Tell = Callable[[Stage, int, int, str, int], None]
"""Hears of every stage as it begins: stage, sample, image (-1 = none), its path, monotonic nanoseconds."""


@dataclass(frozen=True, kw_only=True)
class RowSeconds:
    """Seconds that one row took: to read stored bytes, to decode and resize pictures, to pack them."""

    read: float = 0.0
    decode: float = 0.0
    collate: float = 0.0


class StageClock:
    """Adds up the stages of one row. Costs one reading of the clock a stage, so it always runs."""

    def __init__(self, tell: Tell | None = None) -> None:
        """tell: called as each stage begins."""
        self._tell = tell
        self._spent: dict[str, int] = {}
        self._stage: Stage | None = None
        self._since = 0

    def enter(self, stage: Stage, sample: int = -1, image: int = -1, path: str = "") -> None:
        """A stage begins, and the one before ends. sample: its number in the mixture; image: within it."""
        now = self._leave()
        self._stage = stage
        if self._tell is not None:
            self._tell(stage, sample, image, path, now)

    def finish(self) -> RowSeconds:
        """The row is made; what each of its stages took."""
        self._leave()
        self._stage = None
        return RowSeconds(**{stage: spent / 1e9 for stage, spent in self._spent.items()})

    def _leave(self) -> int:
        now = time.monotonic_ns()
        if self._stage is not None:
            self._spent[self._stage] = self._spent.get(self._stage, 0) + now - self._since
        self._since = now
        return now
