"""Samples into rows of at most `row_tokens` tokens: first-fit, and whole steps at the end of an epoch."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]
Samples = tuple[int, ...]
Lengths = Callable[[IntArray], IntArray]

OPEN_ROWS = 16  # rows filled at a time: more fill better, and make neighbouring rows less alike


class Packer:
    """First-fit over a few open rows; when a sample fits in none of them the fullest is closed."""

    def __init__(self, rows: tuple[Samples, ...], lengths: Lengths, row_tokens: int) -> None:
        """rows: open already, oldest first."""
        self._row_tokens = row_tokens
        self._rows = [list(row) for row in rows]
        flat = lengths(np.array([i for row in rows for i in row], dtype=np.int64))
        ends = np.cumsum([0, *(len(row) for row in rows)])
        self._room = [row_tokens - int(flat[a:b].sum()) for a, b in zip(ends, ends[1:], strict=False)]

    @property
    def open(self) -> tuple[Samples, ...]:
        """Rows that are being filled."""
        return tuple(tuple(row) for row in self._rows)

    @property
    def empty(self) -> bool:
        """Whether no row is being filled."""
        return not self._rows

    def add(self, samples: IntArray, lengths: IntArray) -> list[Samples]:
        """Place samples in order, each at most a row long. Returns the rows that were closed meanwhile."""
        closed: list[Samples] = []
        rows, room = self._rows, self._room
        for sample, length in zip(samples.tolist(), lengths.tolist(), strict=True):
            for slot, free in enumerate(room):
                if free >= length:
                    rows[slot].append(sample)
                    room[slot] -= length
                    break
            else:
                if len(rows) == OPEN_ROWS:
                    fullest = room.index(min(room))
                    closed.append(tuple(rows.pop(fullest)))
                    room.pop(fullest)
                rows.append([sample])
                room.append(self._row_tokens - length)
        return closed

    def close(self) -> list[Samples]:
        """All open rows, oldest first."""
        closed = [tuple(row) for row in self._rows]
        self._rows, self._room = [], []
        return closed


def complete_last_step(rows: list[Samples], lengths: Mapping[int, int], rows_per_step: int) -> list[Samples]:
    """Make the row count a multiple of `rows_per_step` by splitting rows, the largest first.

    Rows of the last step are split first, so that its ranks stay equally busy, then earlier ones; a row
    stays empty only when every other row is down to one sample.
    """
    full = len(rows) - len(rows) % rows_per_step
    if full == len(rows):
        return rows
    head, tail = rows[:full], rows[full:]
    tail = _split_largest(tail, lengths, rows_per_step)
    missing = rows_per_step - len(tail)
    if missing:
        grown = _split_largest(head, lengths, len(head) + missing)
        head, tail = grown[: len(head)], tail + grown[len(head) :]
    return head + tail + [() for _ in range(rows_per_step - len(tail))]


def _split_largest(rows: list[Samples], lengths: Mapping[int, int], wanted: int) -> list[Samples]:
    """Split rows near their middle until there are `wanted` or none holds two; new ones go to the end."""

    def tokens(row: Samples) -> int:
        return sum(lengths[i] for i in row)

    rows = list(rows)
    heap = [(-tokens(row), index) for index, row in enumerate(rows) if len(row) > 1]
    heapq.heapify(heap)
    while heap and len(rows) < wanted:
        _, index = heapq.heappop(heap)
        ends = np.cumsum([lengths[i] for i in rows[index]])
        cut = 1 + int(np.argmin(np.abs(2 * ends[:-1] - ends[-1])))
        rows.append(rows[index][cut:])
        rows[index] = rows[index][:cut]
        for part in (index, len(rows) - 1):
            if len(rows[part]) > 1:
                heapq.heappush(heap, (-tokens(rows[part]), part))
    return rows
