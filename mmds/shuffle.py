"""Orders of the numbers 0 to n - 1 that hold no list of them: any stretch can be asked for on its own.

A list of a billion numbers would be 8 GB in every process. Here a number is computed from its position, by a small keyed
network that is one-to-one whatever its round function is (M. Luby and C. Rackoff, "How to construct pseudorandom permutations
from pseudorandom functions", 1988), walked on until it falls below n (J. Black and P. Rogaway, "Ciphers with arbitrary finite
domains", 2002).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]

ROUNDS = 6
SMALL = 1 << 14  # up to here a list costs nothing, and every order of it is equally likely


class Order(Protocol):
    """An order of the numbers below `count`."""

    count: int

    def __call__(self, positions: IntArray) -> IntArray:
        """Numbers at these positions, int64, same shape."""


class Shuffle:
    """A random order of 0 to count - 1, decided by its key; constant memory."""

    def __init__(self, count: int, key: Sequence[int]) -> None:
        """key: non-negative integers, such as (seed, source, epoch)."""
        self.count = count
        sequence = np.random.SeedSequence(list(key))
        self._list: IntArray | None = None
        if count <= SMALL:
            # RandomState's stream never changes between numpy versions.
            random = np.random.RandomState(np.random.MT19937(sequence))
            self._list = random.permutation(count).astype(np.int64)
            return
        self._half = np.uint64(((count - 1).bit_length() + 1) // 2)
        self._mask = (np.uint64(1) << self._half) - np.uint64(1)
        self._keys = sequence.generate_state(ROUNDS, np.uint64)

    def __call__(self, positions: IntArray) -> IntArray:
        """int64 positions in [0, count) -> numbers, same shape."""
        if self._list is not None:
            return self._list[positions]
        values = self._once(positions.astype(np.uint64))
        while (outside := values >= self.count).any():
            values[outside] = self._once(values[outside])
        return values.astype(np.int64)

    def _once(self, values: NDArray[np.uint64]) -> NDArray[np.uint64]:
        left, right = values >> self._half, values & self._mask
        for key in self._keys:
            left, right = right, left ^ (_mixed(right ^ key) & self._mask)
        joined: NDArray[np.uint64] = left << self._half | right
        return joined


class BlockShuffle:
    """A random order in which neighbours stay near each other: blocks in random order, then samples within a window of blocks.

    For object stores, where a block is one read: at most `window` blocks are in use at a time.
    """

    def __init__(self, count: int, key: Sequence[int], *, block: int, window: int) -> None:
        """block: samples of a block; window: blocks whose samples are shuffled together."""
        assert block > 0 and window > 0
        self.count, self._key, self._block = count, tuple(key), block
        self._window = window * block
        blocks = -(-count // block)
        self._blocks = Shuffle(blocks, (*key, 1))
        # Only the last block is short; from its place in the order on, positions are shifted by what it lacks.
        self._lacks = blocks * block - count
        self._short_at = (
            int(np.flatnonzero(self._blocks(np.arange(blocks)) == blocks - 1)[0]) if self._lacks else blocks
        )
        self._recent: dict[int, IntArray] = {}

    def __call__(self, positions: IntArray) -> IntArray:
        """int64 positions in [0, count) -> numbers, same shape."""
        windows = positions // self._window
        mixed = np.empty_like(positions)
        for window in np.unique(windows):
            inside = windows == window
            start = int(window) * self._window
            mixed[inside] = start + self._within(int(window))[positions[inside] - start]
        return self._unmixed(mixed)

    def _within(self, window: int) -> IntArray:
        """The order of one window's positions."""
        if window not in self._recent:
            size = min(self._window, self.count - window * self._window)
            random = np.random.RandomState(np.random.MT19937(np.random.SeedSequence([*self._key, 2, window])))
            if len(self._recent) > 2:
                self._recent.clear()
            self._recent[window] = random.permutation(size).astype(np.int64)
        return self._recent[window]

    def _unmixed(self, positions: IntArray) -> IntArray:
        """Positions in the order of whole blocks -> numbers."""
        short_end = (self._short_at + 1) * self._block - self._lacks
        shifted = (
            np.where(positions >= short_end, positions + self._lacks, positions) if self._lacks else positions
        )
        return self._blocks(shifted // self._block) * self._block + shifted % self._block


def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Every bit depends on every bit (finaliser of splitmix64: G. Steele et al., 2014)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
