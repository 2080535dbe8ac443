"""How all ranks end when one fails: soon, with the failing rank's message whole and after everything that the others print.

The ranks talk over a key-value store, since the process group may be stuck in a collective that the failing rank will never
join. The first rank that fails claims the failure. Each of the others prints one line and waits; then the first prints its message
and all end. A rank that waits in a collective learns of the claim from a thread that looks every moment.

The store lives in the process of rank 0 (or in torchrun's). A call to a store that has gone makes torch print a page about it, so
rank 0 leaves last.
"""

from __future__ import annotations

import contextlib
import json
import logging
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import torch.distributed as dist

from mmds.engine.machine import explain
from mmds.errors import MmdsError

HEAR_S = 5.0
"""Longest wait of the failing rank for the others' lines, seconds."""
TELL_S = 10.0
"""Longest wait of the others for the failing rank's message, seconds."""
LEAVE_S = 5.0
"""Seconds that a rank in a collective gets to leave it by itself once the failing rank has gone, and rank 0 waits for the others."""
LOOK_S = 0.25
"""Seconds between two looks for a failure."""

_FAILED, _HEARD, _TOLD, _LEFT = "failed", "heard", "told", "left"

log = logging.getLogger("mmds")


class StoppedByOther(MmdsError):
    """This rank stops because another one has failed, which the message names."""


class Ending:
    """The agreement of one rank with the others on how to end; holds a thread until `close`."""

    def __init__(self, store: dist.Store, *, rank: int, world: int) -> None:
        """store: shared by all ranks of this start of the run, with keys of its own."""
        self._store, self._rank, self._world = store, rank, world
        self._ends = threading.Lock()  # held for good by the thread that speaks for this rank
        self._closed = threading.Event()  # the main thread has come to its end
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._watcher.start()

    def close(self) -> None:
        """Every rank has ended well and comes here: look no more, and let rank 0 go last."""
        self._closed.set()
        self._watcher.join()
        with contextlib.suppress(RuntimeError):
            self._part(lambda: self._world - 1)

    def fail(self, error: BaseException) -> NoReturn:
        """End this process with exit code 1 and, through their watchers, all others; never returns."""
        with contextlib.suppress(ValueError):  # a launcher that ends the rest would cut the message short
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        self._closed.set()
        if self._ends.acquire(blocking=False):
            try:
                self._lead_or_follow(error)
                self._part(self._others_heard)
            except RuntimeError:  # of the store: it has ended, and with it the process of rank 0
                _say(f"rank {self._rank} failed:\n{describe(error)}")
        else:
            self._watcher.join()
            _note(_trace(error))
        leave()

    def _lead_or_follow(self, error: BaseException) -> None:
        if isinstance(error, StoppedByOther):
            self._follow(str(error).splitlines()[0])
            return
        mine = first_line(error)
        first = self._store.compare_set(_FAILED, "", f"{self._rank} {mine}").decode()
        rank, _, theirs = first.partition(" ")
        if int(rank) == self._rank:
            self._lead(describe(error))
        elif isinstance(error, MmdsError) and mine != theirs:
            self._follow(f"it failed too:\n{describe(error)}")
        else:  # an echo: a collective that broke off, or the same mistake found by every rank
            self._follow(_because(first))
            _note(_trace(error))

    def _lead(self, text: str) -> None:
        self._wait(lambda: self._others_heard() >= self._world - 1, HEAR_S)
        _say(f"rank {self._rank} on {socket.gethostname()} failed:\n{text}")
        _tell_torchrun(text)
        self._store.set(_TOLD, text)

    def _follow(self, words: str) -> None:
        _say(f"rank {self._rank} stopped: {words}")
        self._store.add(_HEARD, 1)
        self._wait(lambda: self._store.check([_TOLD]), TELL_S)
        if self._store.check([_TOLD]):
            _tell_torchrun(self._store.get(_TOLD).decode(errors="replace"))

    def _others_heard(self) -> int:
        """Ranks that follow; as many as rank 0 must see leave, whether it leads or follows."""
        return self._store.add(_HEARD, 0)

    def _part(self, others: Callable[[], int]) -> None:
        """The last word to the store; rank 0 waits for that of `others`."""
        if self._rank:
            self._store.add(_LEFT, 1)
        else:
            self._wait(lambda: self._store.add(_LEFT, 0) >= others(), LEAVE_S)

    def _watch(self) -> None:
        """Wait for a failure elsewhere; then follow, also when this rank's main thread never comes back from a collective."""
        try:
            while not self._store.check([_FAILED]):
                if self._closed.wait(LOOK_S):
                    return
            words, patience = _because(self._store.get(_FAILED).decode()), LEAVE_S
        except RuntimeError:
            if self._closed.wait(LEAVE_S):
                return
            words, patience = "the process of rank 0 has ended without a word", 0.0
        if not self._ends.acquire(blocking=False):
            return
        with contextlib.suppress(RuntimeError):
            self._follow(words)
            self._part(self._others_heard)
        if not self._closed.wait(patience):
            leave()

    def _wait(self, done: Callable[[], bool], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not done() and time.monotonic() < deadline:
            time.sleep(LOOK_S / 5)


def describe(error: BaseException) -> str:
    """What a user is told of an error: one of mmds by its message, another with advice if there is some, else its traceback."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    known = explain(error) or error
    if isinstance(known, MmdsError):
        return f"{type(known).__name__}: {known}"
    return _trace(error)


def first_line(error: BaseException) -> str:
    """What was being done (see `Ranks.together`), type and message of an error, cut to one line."""
    return ": ".join([*getattr(error, "__notes__", []), f"{type(error).__name__}: {error}"]).splitlines()[0]


def _say(text: str) -> None:
    """This rank's last words: what else it prints (a bar's last stand, torch's pages on a broken connection) would bury others'."""
    print_whole(text)
    _note(text)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)


def _tell_torchrun(text: str) -> None:
    """Leave the message where torchrun looks for it; its own last words then repeat what it found with whatever rank ended first."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file:
        with contextlib.suppress(OSError):
            extra = {"py_callstack": text, "timestamp": str(int(time.time()))}
            Path(file).write_text(json.dumps({"message": {"message": text, "extraInfo": extra}}), "utf-8")


def print_whole(text: str) -> None:
    """Write lines to the terminal in one piece, on lines of their own even where a progress bar stands."""
    sys.stdout.flush()
    sys.stderr.flush()
    data = f"\n{text}\n".encode(errors="replace")
    while data:
        data = data[os.write(2, data) :]


def leave() -> NoReturn:
    """End this process at once with exit code 1: an orderly exit could wait for ranks that are gone."""
    for child in multiprocessing.active_children():  # the loader's
        child.terminate()
    logging.shutdown()
    os._exit(1)


def _note(text: str) -> None:
    """Into the rank's log, where there is one; without, `logging` would print it again."""
    if log.handlers:
        log.error("%s", text)


def _trace(error: BaseException) -> str:
    return "".join(traceback.format_exception(error)).rstrip()


def _because(claim: str) -> str:
    rank, _, what = claim.partition(" ")
    return f"rank {rank} failed: {what}"
