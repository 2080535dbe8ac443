"""Planning in a process of its own: the same steps, no wait, and no harm when that process is gone."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator

import numpy as np
import pytest

from mmds.errors import DataError
from mmds.plan_state import PlannedStep, PlanState
from mmds.planner import RunPlan
from tests.test_schemes import ROW, random_sizes, scheme_of

PLANNER = "mmds-planner"


def planners() -> list[int]:
    """Process ids of living planning processes."""
    return [process.pid or 0 for process in multiprocessing.active_children() if process.name == PLANNER]


@pytest.fixture(autouse=True)
def none_stays() -> Iterator[None]:
    assert not planners()
    yield
    assert not planners()


def plan(n: int = 9000, **options) -> RunPlan:
    return RunPlan(scheme_of("cost", random_sizes(n, seed=2), 8, **options), epochs=2)


def test_steps_are_those_that_are_planned_here_in_any_order_of_asking() -> None:
    here, beside = plan(), plan()
    whole = [here.step_rows(step, world=4) for step in range(here.total_steps)]
    assert len(whole) > 300
    beside.begin_ahead()
    assert len(planners()) == 1
    assert [beside.step_rows(step, world=4) for step in range(200)] == whole[:200]
    for step in (3, 299, 150, 20, 21, 22, 170):
        assert beside.step_rows(step, world=4) == whole[step]
    beside.begin_ahead()
    assert len(planners()) == 1
    assert [beside.step_rows(step, world=4) for step in range(len(whole))] == whole
    beside.end_ahead()
    beside.end_ahead()
    assert not planners() and beside.step_rows(5, world=4) == whole[5]


def test_the_next_steps_are_there_before_they_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planning is slowed to half a second a time; a training step takes a second for as many steps."""
    run = plan()
    steps = run.scheme.steps

    def slow(state: PlanState, most: int, *, world: int) -> list[PlannedStep]:
        time.sleep(0.5)
        return steps(state, min(most, 4), world=world)

    monkeypatch.setattr(run.scheme, "steps", slow)
    run.begin_ahead()
    run.step_rows(0)  # nobody could know of it before
    waits = []
    for step in range(1, 17):
        time.sleep(0.25)
        asked = time.monotonic()
        run.step_rows(step)
        waits.append(time.monotonic() - asked)
    run.end_ahead()
    assert max(waits) < 0.2, waits


def test_when_the_process_is_killed_planning_goes_on_here_and_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    here, beside = plan(), plan()
    whole = [here.step_rows(step) for step in range(300)]
    beside.begin_ahead()
    assert beside.step_rows(0) == whole[0]
    (pid,) = planners()
    os.kill(pid, signal.SIGKILL)
    with caplog.at_level(logging.WARNING, logger="mmds"):
        assert [beside.step_rows(step) for step in range(300)] == whole
    assert sum("the planning process is gone" in record.message for record in caplog.records) == 1
    beside.end_ahead()


def test_a_plan_that_is_forgotten_takes_its_process_with_it() -> None:
    run = plan()
    run.begin_ahead()
    del run
    assert not planners()


def test_an_error_of_planning_is_raised_here() -> None:
    sizes = random_sizes(9000, seed=2)
    sizes.tokens[np.arange(8990, 9000)] = ROW + 1
    run = RunPlan(scheme_of("cost", sizes, 8, on_long="raise", names="key-{}".format), steps=5000)
    run.begin_ahead()
    with pytest.raises(DataError, match=r"sample key-89\d\d"):
        for step in range(5000):
            run.step_rows(step)
    run.end_ahead()
