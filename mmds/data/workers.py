"""Work on chunks in several processes, results in the order of the input."""

from __future__ import annotations

import ctypes
import itertools
import os
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from typing import Any, TypeVar

import torch

from mmds.errors import DataError

Chunk = TypeVar("Chunk")
Result = TypeVar("Result")
Shared = TypeVar("Shared")

AHEAD = 3  # chunks under way, per process
_PR_SET_PDEATHSIG = 1  # Linux: the signal that a process gets when its parent is gone

_shared: Any = None  # in a worker process: what all chunks need


def in_order(
    work: Callable[[Chunk, Shared], Result],
    chunks: Iterable[Chunk],
    shared: Shared,
    workers: int | None,
) -> Iterator[Result]:
    """Yield work(chunk, shared) of every chunk, in order.

    workers: processes, None: one a core. One process, or a single chunk, is worked on right here. The
    processes are forked, so `shared` is not copied; they end with this one, whatever ends it. Raises
    DataError when one of them is killed.
    """
    count = workers or len(os.sched_getaffinity(0))
    source = iter(chunks)
    head = list(itertools.islice(source, 2))
    source = itertools.chain(head, source)
    if count == 1 or len(head) < 2:
        yield from (work(chunk, shared) for chunk in source)
        return
    pool = ProcessPoolExecutor(
        count, mp_context=get_context("fork"), initializer=_start, initargs=(os.getpid(), shared)
    )
    pending: deque[Future[Result]] = deque()
    try:
        for chunk in source:
            pending.append(pool.submit(_call, work, chunk))
            if len(pending) > AHEAD * count:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    except BrokenProcessPool as error:
        raise DataError(
            "a worker process was killed, most likely for want of memory; take fewer with --workers"
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _start(parent: int, shared: Any) -> None:
    """Make a worker end with its parent, and leave Ctrl-C to that one."""
    global _shared
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch.set_num_threads(1)  # the threads of the parent did not come along, and waiting for them has no end
    _shared = shared


def _call(work: Callable[[Any, Any], Result], chunk: Any) -> Result:
    return work(chunk, _shared)
