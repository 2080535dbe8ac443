"""How a finished row gets from a loader process to the training process.

Through memory files that both hold open, so that taking a row never needs the other side: torch's own way asks
the process that made a tensor for it, and waits forever for one that is stuck. Only a ticket goes through the
queue, small enough to arrive whole or not at all. /dev/shm is not used.
"""

from __future__ import annotations

import os
import pickle
from dataclasses import dataclass
from typing import Any

import numpy as np

_SERIAL = 8  # bytes at the beginning of a file that say whose content it is


@dataclass(frozen=True, kw_only=True)
class Ticket:
    """Where an object lies. worker: who left it; serial: its number among that worker's; sizes: bytes of its parts."""

    worker: int
    serial: int
    sizes: tuple[int, ...]


class Handover:
    """A few memory files for each loader process, used in turn; their memory is kept, so that it is laid out only once.

    Loader processes must be forked after this has been made.
    """

    def __init__(self, workers: int, slots: int) -> None:
        """slots: objects of one worker that may be on their way; one more overwrites the oldest."""
        self._files = [[os.memfd_create(f"mmds-row-{w}") for _ in range(slots)] for w in range(workers)]
        self._left = 0

    def leave(self, worker: int, item: Any) -> Ticket:
        """Write an object for the other side. Raises OSError when memory runs out."""
        self._left += 1
        buffers: list[pickle.PickleBuffer] = []
        head = pickle.dumps(item, protocol=5, buffer_callback=buffers.append)
        parts = [memoryview(head), *(buffer.raw() for buffer in buffers)]
        file, offset = self._file(worker, self._left), 0
        for part in [memoryview(self._left.to_bytes(_SERIAL)), *parts]:
            while part:
                written = os.pwrite(file, part, offset)
                part, offset = part[written:], offset + written
        return Ticket(worker=worker, serial=self._left, sizes=tuple(part.nbytes for part in parts))

    def take(self, ticket: Ticket) -> Any:
        """The object, in memory of its own."""
        file, offset = self._file(ticket.worker, ticket.serial), _SERIAL
        parts = []
        for size in ticket.sizes:
            part = np.empty(size, dtype=np.uint8)
            left = part.data
            while left:
                count = os.preadv(file, [left], offset)
                left, offset = left[count:], offset + count
            parts.append(part)
        assert os.pread(file, _SERIAL, 0) == ticket.serial.to_bytes(_SERIAL), (
            "overwritten before it was taken"
        )
        return pickle.loads(parts[0].data, buffers=[part.data for part in parts[1:]])

    def _file(self, worker: int, serial: int) -> int:
        return self._files[worker][serial % len(self._files[worker])]

    def __del__(self) -> None:
        for files in self._files:
            for file in files:
                os.close(file)
