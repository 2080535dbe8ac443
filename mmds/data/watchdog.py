"""Who is stuck, or was killed, and over which sample: known without the help of the process that is.

Every loader process notes in shared memory what it begins; the training process reads the notes when a row
does not come.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Any

import numpy as np

from mmds.data.timing import Stage
from mmds.errors import DataError

WARN_SHARE = 0.1  # of the timeout: after so long a wait a line in the log names what is being loaded

_ROW = 64  # samples of a row that a note holds
_NOTE = np.dtype(
    [
        ("pid", "i8"),
        ("since", "i8"),  # monotonic ns; this clock is the same in all processes of a machine
        ("stage", "S8"),  # empty while the process waits for work
        ("sample", "i8"),
        ("image", "i8"),
        ("path", "S256"),
        ("row_size", "i8"),
        ("row", "i8", (_ROW,)),
    ]
)
_DOING = {"read": "reading", "decode": "decoding", "collate": "packing"}

log = logging.getLogger("mmds")


@dataclass(frozen=True, kw_only=True)
class Note:
    """What a loader process does. since: monotonic seconds; sample and image: -1 for none; row: its first samples."""

    pid: int
    stage: str
    since: float
    sample: int
    image: int
    path: str
    row: tuple[int, ...]
    row_size: int


class Board:
    """A note for each loader process, in memory shared with those forked later. Each writes its own, anyone reads."""

    def __init__(self, workers: int) -> None:
        """workers: loader processes; with none, the process itself writes the only note."""
        self._memory = mmap.mmap(-1, max(workers, 1) * _NOTE.itemsize)

    def __len__(self) -> int:
        return len(self._memory) // _NOTE.itemsize

    def begin_row(self, worker: int, pid: int, samples: Sequence[int]) -> None:
        """Process `pid`, loader process number `worker`, has been given a row."""
        note = self._notes()[worker]
        note["pid"], note["row_size"] = pid, len(samples)
        note["row"][: len(samples)] = samples[:_ROW]

    def begin_stage(self, worker: int, stage: Stage, sample: int, image: int, path: str, now: int) -> None:
        """It begins a stage; now: monotonic ns."""
        note = self._notes()[worker]
        note["sample"], note["image"], note["since"] = sample, image, now
        note["path"], note["stage"] = path.encode(errors="replace")[:256], stage.encode()

    def end_row(self, worker: int) -> None:
        """It waits for work."""
        self._notes()[worker]["stage"] = b""

    def read(self, worker: int) -> Note:
        """The note of a loader process, whatever state that is in."""
        note = self._notes()[worker]
        size = int(note["row_size"])
        return Note(
            pid=int(note["pid"]),
            stage=note["stage"].decode(),
            since=int(note["since"]) / 1e9,
            sample=int(note["sample"]),
            image=int(note["image"]),
            path=note["path"].decode(errors="replace"),
            row=tuple(note["row"][: min(size, _ROW)].tolist()),
            row_size=size,
        )

    def _notes(self) -> Any:
        return np.frombuffer(self._memory, dtype=_NOTE)


class Watchdog:
    """Watches the loader processes while one iteration uses them.

    A wait of `WARN_SHARE` of the timeout is logged. A process that dies raises DataError in the main thread
    at once, wherever that is; `lost` and `overdue` say who it was and over which sample.
    """

    def __init__(
        self, board: Board, processes: Sequence[BaseProcess], name: Callable[[int], str], timeout: float
    ) -> None:
        """name: sample number -> name; timeout: seconds. Call `close` at the end."""
        self._board, self._processes, self._name, self._timeout = board, tuple(processes), name, timeout
        self._waiting_since: float | None = None
        self._lost: str | None = None
        self._state = "watching"
        self._closed = threading.Event()
        self._restore: Callable[[], None] | None = None
        self._catch_deaths()
        threading.Thread(target=self._warn, name="mmds-loader-watchdog", daemon=True).start()

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Around the wait for one row."""
        self._waiting_since = time.monotonic()
        try:
            yield
        finally:
            self._waiting_since = None

    def lost(self) -> str | None:
        """Which loader processes ended first, how, and over what; None while all live."""
        ended = [process for process in self._processes if process.exitcode is not None]
        if ended and self._lost is None:
            notes = {note.pid: note for note in map(self._board.read, range(len(self._board)))}
            self._lost = "; ".join(self._obituary(process, notes.get(process.pid or 0)) for process in ended)
        return self._lost

    def overdue(self) -> str:
        """What every loader process is doing, and for how long: the one longest at it first."""
        notes = [self._board.read(worker) for worker in range(len(self._board))]
        busy = sorted((note for note in notes if note.stage), key=lambda note: note.since)
        if not busy:
            return "no loader process has anything to do"
        now = time.monotonic()
        return "; ".join(
            f"loader process {note.pid} has been {self._doing(note)} for {now - note.since:.1f} s"
            for note in busy
        )

    def names(self, samples: Sequence[int], count: int) -> str:
        """The first samples of a row by name. count: of all."""
        shown = ", ".join(map(self._name, samples[:8]))
        return shown + (f" and {count - 8} more" if count > 8 else "")

    def end_processes(self) -> None:
        """Kill what is left of the loader processes. Only SIGKILL also ends one that is stopped or waits for a disk."""
        self.ending()
        for process in self._processes:
            if process.exitcode is None:
                process.kill()
        for process in self._processes:
            process.join(timeout=5)

    def ending(self) -> None:
        """From here on the loader processes are ended on purpose."""
        self._state = "ending"

    def close(self) -> None:
        """Stop watching."""
        self._state = "closed"
        self._closed.set()
        if self._restore is not None:
            self._restore()
        self._restore, self._processes = None, ()  # files that the processes hold open are closed now

    def _doing(self, note: Note) -> str:
        if note.stage == "collate":
            return f"packing the row of samples {self.names(note.row, note.row_size)}"
        image = f" image {note.image} ({note.path})" if note.image >= 0 else ""
        return f"{_DOING.get(note.stage, note.stage)} sample {self._name(note.sample)}{image}"

    def _obituary(self, process: BaseProcess, note: Note | None) -> str:
        assert process.exitcode is not None
        how = f"loader process {process.pid} {_manner(process.exitcode)}"
        if note is None:
            return f"{how} before it was given any work"
        row = f"the row of samples {self.names(note.row, note.row_size)}"
        if not note.stage:
            return f"{how} while it waited for work, after {row}"
        return f"{how} while it was {self._doing(note)}" + ("" if note.stage == "collate" else f", for {row}")

    def _warn(self) -> None:
        """Log one line for each wait that is long."""
        limit = self._timeout * WARN_SHARE
        warned: float | None = None
        while not self._closed.wait(limit / 4):
            since = self._waiting_since
            if since is not None and since != warned and time.monotonic() - since > limit:
                warned = since
                log.warning("waiting for a row for %.1f s: %s", time.monotonic() - since, self.overdue())

    def _catch_deaths(self) -> None:
        """Let torch's own news of a dead loader process, which comes as a signal, name samples.

        torch raises RuntimeError from a handler of SIGCHLD: in the middle of whatever the main thread does.
        """
        previous = signal.getsignal(signal.SIGCHLD)
        if threading.current_thread() is not threading.main_thread() or not callable(previous):
            return
        theirs = previous

        def handler(number: int, frame: FrameType | None) -> None:
            try:
                theirs(number, frame)
            except RuntimeError as error:
                if self._state == "closed":
                    raise
                if self._state == "watching":
                    reason = self.lost() or f"a loader process was lost ({error})"
                    self.end_processes()
                    raise DataError(reason) from None

        def restore() -> None:
            on_top = signal.getsignal(signal.SIGCHLD) is handler
            if on_top and threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGCHLD, theirs)

        signal.signal(signal.SIGCHLD, handler)
        self._restore = restore


def _manner(exitcode: int) -> str:
    """How a process ended, from `Process.exitcode`, with what that usually means."""
    if exitcode >= 0:
        return f"ended by itself with exit status {exitcode}"
    number = -exitcode
    if number == signal.SIGKILL:
        return "was killed (signal 9; the machine may be out of memory)"
    if number == signal.SIGBUS:
        shm = shutil.disk_usage("/dev/shm")
        return (
            "was killed (signal 7, bus error: a file that is read as memory was cut short or its disk failed, or "
            f"/dev/shm is full, {shm.free >> 20} of {shm.total >> 20} MiB free)"
        )
    return f"was killed (signal {number}, {signal.strsignal(number)})"
