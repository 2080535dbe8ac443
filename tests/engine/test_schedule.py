"""The rate factor of every step of a run, and the length of the warm-up."""

from __future__ import annotations

import math

import pytest

from mmds.config import ScheduleSection
from mmds.engine.schedule import rate_factor, warmup_steps


def factors(total: int, warmup: int, decay: str) -> list[float]:
    return [rate_factor(step, total=total, warmup=warmup, decay=decay) for step in range(total)]


def test_warm_up_rises_evenly_reaches_the_full_rate_and_wastes_no_step_at_zero() -> None:
    assert factors(10, 4, "constant")[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_cosine_and_linear_take_over_where_the_warm_up_ends() -> None:
    assert factors(6, 2, "cosine") == pytest.approx(
        [0.5, 1.0, 1.0, 0.5 + 0.5 * math.sqrt(0.5), 0.5, 0.5 - 0.5 * math.sqrt(0.5)]
    )
    assert factors(6, 2, "linear") == pytest.approx([0.5, 1.0, 1.0, 0.75, 0.5, 0.25])


@pytest.mark.parametrize("decay", ["cosine", "linear"])
def test_decay_falls_at_every_step_and_ends_at_zero_after_the_last(decay: str) -> None:
    values = factors(50, 0, decay)
    assert values[0] == 1.0
    assert all(earlier > later > 0.0 for earlier, later in zip(values, values[1:], strict=False))
    assert rate_factor(50, total=50, warmup=0, decay=decay) == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize("decay", ["cosine", "linear", "constant"])
@pytest.mark.parametrize(("total", "warmup"), [(1, 0), (1, 1), (3, 3), (7, 2)])
def test_every_step_of_a_run_of_any_length_has_a_factor_above_zero_and_at_most_one(
    decay: str, total: int, warmup: int
) -> None:
    assert all(0.0 < factor <= 1.0 for factor in factors(total, warmup, decay))
    # A scheduler asks once more after the last update.
    assert 0.0 <= rate_factor(total, total=total, warmup=warmup, decay=decay) <= 1.0


def test_warm_up_is_given_in_steps_or_as_a_share_that_is_rounded_up() -> None:
    assert warmup_steps(ScheduleSection(steps=100, warmup_steps=7), 100) == 7
    assert warmup_steps(ScheduleSection(steps=100, warmup_steps=0), 100) == 0
    assert warmup_steps(ScheduleSection(epochs=1, warmup_ratio=0.03), 101) == 4
    assert warmup_steps(ScheduleSection(epochs=1, warmup_ratio=0.0), 101) == 0
    assert warmup_steps(ScheduleSection(epochs=1, warmup_ratio=1.0), 101) == 101
