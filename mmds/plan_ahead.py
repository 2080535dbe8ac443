"""Steps planned in a process of their own, before they are asked for, so that planning takes no time from training.

A thread would take the interpreter's lock from the one that launches kernels. The process holds no device and sends plain numbers;
when it is gone, planning goes on in this process.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import signal
import weakref
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

from mmds.plan_state import PlannedStep, PlanState
from mmds.schemes import Scheme

LOOK = 5.0  # seconds between two looks whether the process that asks is still there

log = logging.getLogger("mmds")

Request = tuple[PlanState, int, int]
"""From where, how many steps at most, on how many ranks."""


class PlanAhead:
    """One process that plans what was asked for; one request at a time."""

    def __init__(self, scheme: Scheme) -> None:
        """Starts the process. scheme: shared with it as it is now."""
        self._scheme = scheme
        self._asked: Request | None = None
        here, there = multiprocessing.get_context("fork").Pipe()
        self._pipe: Connection | None = here
        self._process: Any = multiprocessing.get_context("fork").Process(
            target=_serve, args=(there, here, scheme, os.getpid()), daemon=True, name="mmds-planner"
        )
        self._process.start()
        there.close()
        self._end = weakref.finalize(self, _end, self._process)

    def ask(self, state: PlanState, most: int, *, world: int) -> None:
        """Begin to plan the steps after `state`; `steps` fetches them."""
        if self._pipe is None or self._asked is not None:
            return
        with self._or_without():
            self._pipe.send((state, most, world))
            self._asked = (state, most, world)

    def steps(self, state: PlanState, most: int, *, world: int) -> list[PlannedStep]:
        """As `Scheme.steps`: what was asked for before, if it is that; else planned now."""
        wanted = (state, most, world)
        if self._asked is None:
            self.ask(state, most, world=world)
        asked, self._asked = self._asked, None
        if self._pipe is not None and asked is not None:
            with self._or_without():
                answer: list[PlannedStep] | Exception = self._pipe.recv()
                if asked == wanted and isinstance(answer, list):
                    return answer
        return self._scheme.steps(state, most, world=world)  # raises what went wrong there, if anything did

    def close(self) -> None:
        """End the process."""
        if self._pipe is not None:
            self._pipe.close()
            self._pipe = None
        self._end()

    @contextlib.contextmanager
    def _or_without(self) -> Iterator[None]:
        try:
            yield
        except (EOFError, OSError) as error:
            self._pipe, self._asked = None, None
            log.warning(
                "the planning process is gone (%s, exit code %s); planning goes on in this one, which may make training wait",
                type(error).__name__,
                self._process.exitcode,
            )


def _end(process: Any) -> None:
    process.terminate()
    process.join()


def _serve(pipe: Connection, parents: Connection, scheme: Scheme, parent: int) -> None:
    """Answer requests until the pipe is closed or the process that asks has gone."""
    parents.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ctrl-C reaches the whole group; the parent decides
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # whatever the parent does on it
    with contextlib.suppress(EOFError, OSError):
        while os.getppid() == parent:
            if not pipe.poll(LOOK):
                continue
            state, most, world = pipe.recv()
            try:
                answer: list[PlannedStep] | Exception = scheme.steps(state, most, world=world)
            except Exception as error:
                answer = error
            pipe.send(answer)
