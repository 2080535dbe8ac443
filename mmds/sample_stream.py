"""Which sample comes when: several sources merged into one stream, by weight or epoch after epoch, in constant memory.

Sources are merged evenly, so that their shares hold in every stretch of the stream; within a source the order is random. A place in
the stream is a `StreamState` of a few numbers, the same in every process.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from mmds.errors import ConfigError
from mmds.shuffle import BlockShuffle, Order, Shuffle

IntArray = NDArray[np.int64]

WINDOW = 8  # blocks whose samples are mixed, where the order has to keep neighbours together


@dataclass(frozen=True, kw_only=True)
class Source:
    """One entry of the mix. name: unique. count: its samples, numbered from 0. held_out: those that never come, ascending.

    weight: its share of the stream, relative to the other sources'; epochs: how often each of its samples comes in an epoch of the run
    (a fraction takes that share of them). Exactly one of the two. block: samples that are read together, 0 = any order.
    """

    name: str
    count: int
    held_out: IntArray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    weight: float | None = None
    epochs: float | None = 1.0
    block: int = 0

    @property
    def coming(self) -> int:
        """Samples that the stream takes from."""
        return self.count - len(self.held_out)

    def number(self, ranks: IntArray) -> IntArray:
        """The rank-th of the samples that are not held out, for each rank: int64, same shape."""
        before = self.held_out - np.arange(
            len(self.held_out)
        )  # samples that come and stand before each held-out one
        return ranks + np.searchsorted(before, ranks, side="right")


@dataclass(frozen=True, kw_only=True)
class StreamState:
    """A place in a stream. epoch: from 0; taken: samples of each source since the epoch began."""

    epoch: int
    taken: tuple[int, ...]


class SampleStream:
    """The merged sources as one sequence of sample numbers; source i's samples are numbered after those of the sources before it."""

    def __init__(self, sources: Sequence[Source], *, seed: int) -> None:
        """Raises ConfigError unless all sources have a weight, or all have epochs."""
        weighted = {source.weight is not None for source in sources}
        if len(weighted) != 1:
            raise ConfigError("mmds.data.mix: give every entry a weight, or none of them")
        self.sources, self.seed = tuple(sources), seed
        self.starts = np.cumsum([0, *(source.count for source in sources)], dtype=np.int64)
        if weighted == {True}:
            for source in sources:
                if not source.coming:
                    raise ConfigError(f'mmds.data.mix "{source.name}" has a weight and no sample')
            self._quota: IntArray | None = None
            self._shares = np.array([source.weight for source in sources], dtype=np.float64)
        else:
            counts = [round(source.coming * (source.epochs or 0.0)) for source in sources]
            self._quota = np.array(counts, dtype=np.int64)
            self._shares = self._quota.astype(np.float64)
        self._shares = self._shares / (self._shares.sum() or 1.0)
        self._orders: dict[tuple[int, int, int], Order] = {}

    @property
    def start(self) -> StreamState:
        """The first place."""
        return StreamState(epoch=0, taken=(0,) * len(self.sources))

    @property
    def epoch_samples(self) -> int | None:
        """Samples of an epoch; None when weights make the stream endless."""
        return None if self._quota is None else int(self._quota.sum())

    def take(self, state: StreamState, count: int) -> tuple[IntArray, StreamState]:
        """The next samples, int64 [at most count], and the place after them. None are left where an epoch ends: see `next_epoch`."""
        taken = np.array(state.taken, dtype=np.int64)
        picks = self._merge(taken, count)
        numbers = np.empty(len(picks), dtype=np.int64)
        for source in range(len(self.sources)):
            mine = picks == source
            ranks = taken[source] + np.arange(int(mine.sum()))
            numbers[mine] = self.starts[source] + self._numbers(source, ranks, state.epoch)
            taken[source] += len(ranks)
        return numbers, StreamState(epoch=state.epoch, taken=tuple(taken.tolist()))

    def behind(self, state: StreamState, numbers: IntArray) -> StreamState:
        """The place after these samples, int64 [k], which are the next ones from `state` on."""
        sources = np.searchsorted(self.starts, numbers, side="right") - 1
        taken = np.array(state.taken) + np.bincount(sources, minlength=len(self.sources))
        return StreamState(epoch=state.epoch, taken=tuple(taken.tolist()))

    def next_epoch(self, state: StreamState) -> StreamState:
        """Where the epoch after this place begins."""
        return StreamState(epoch=state.epoch + 1, taken=self.start.taken)

    def _merge(self, taken: IntArray, count: int) -> IntArray:
        """Source of each of the next samples: sample k of a source with share s is due at (k + 1/2) / s."""
        sources, due = [], []
        for source, share in enumerate(self._shares):
            ahead = int((count + len(self._shares)) * share) + 2
            left = ahead if self._quota is None else min(ahead, int(self._quota[source] - taken[source]))
            sources.append(np.full(left, source, dtype=np.int64))
            due.append((taken[source] + np.arange(left) + 0.5) / (share or 1.0))
        order = np.lexsort((np.concatenate(sources), np.concatenate(due)))
        return np.concatenate(sources)[order][:count]

    def _numbers(self, source: int, ranks: IntArray, epoch: int) -> IntArray:
        """Numbers within a source, in its own order; after its last sample it begins anew in another order."""
        count = self.sources[source].coming
        rounds = ranks // count if count else ranks
        numbers = np.empty(len(ranks), dtype=np.int64)
        for turn in np.unique(rounds):
            inside = rounds == turn
            numbers[inside] = self._order(source, epoch, int(turn))(ranks[inside] % count)
        return self.sources[source].number(numbers)

    def _order(self, source: int, epoch: int, turn: int) -> Order:
        key = (source, epoch, turn)
        if key not in self._orders:
            if len(self._orders) > 4 * len(self.sources):
                self._orders.clear()
            entry = self.sources[source]
            seeds = (self.seed, crc32(entry.name.encode()), epoch, turn)
            self._orders[key] = (
                BlockShuffle(entry.coming, seeds, block=entry.block, window=WINDOW)
                if entry.block
                else Shuffle(entry.coming, seeds)
            )
        return self._orders[key]
