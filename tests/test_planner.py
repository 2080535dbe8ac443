"""The plan: every sample once, equal rows on all ranks, one answer everywhere, a new order each epoch."""

from __future__ import annotations

import json

import numpy as np
import pytest

from mmds import planner
from mmds.errors import ConfigError, DataError
from mmds.plan_state import PlannedStep, PlanState
from mmds.planner import RunPlan, plan_lengths

ROW = 1000


def random_lengths(n: int, seed: int, longest: int = ROW) -> np.ndarray:
    """n lengths: mostly short, a few near the row length."""
    rng = np.random.default_rng([n, seed])
    return np.minimum(rng.lognormal(5, 1.2, n).astype(np.int64) + 1, longest)


def plan(lengths: np.ndarray, rows_per_step: int, *, seed: int = 7, **options) -> RunPlan:
    options = {"epochs": 1, **options}
    return plan_lengths(lengths, row_tokens=ROW, rows_per_step=rows_per_step, seed=seed, **options)


def rows_of(run: RunPlan) -> list[tuple[int, ...]]:
    """All rows of a run in order."""
    return [row for step in range(run.total_steps) for row in run.step_rows(step)]


def samples_of(run: RunPlan) -> list[int]:
    """All samples of a run in order."""
    return [i for row in rows_of(run) for i in row]


GRID = [(world, acc) for world in (1, 2, 3, 4) for acc in (1, 2, 3, 4)]


@pytest.mark.parametrize("world,accumulation", GRID)
def test_every_sample_is_in_exactly_one_row_and_all_ranks_get_equally_many(
    world: int, accumulation: int
) -> None:
    per_step = world * accumulation
    for n in range(per_step, 51):
        lengths = random_lengths(n, seed=world)
        run = plan_lengths(lengths, row_tokens=ROW, rows_per_step=per_step, seed=3, epochs=1)
        seen: list[int] = []
        rows_of_rank = [0] * world
        for step in range(run.total_steps):
            for micro in range(accumulation):
                for rank in range(world):
                    row = run.rows_for(step, micro, rank, world=world)
                    assert lengths[row].sum() <= ROW
                    seen += row.tolist()
                    rows_of_rank[rank] += 1
        assert sorted(seen) == list(range(n))
        assert rows_of_rank == [run.total_steps * accumulation] * world


@pytest.mark.parametrize("n", range(1, 51))
def test_a_row_is_empty_only_when_every_other_row_is_down_to_one_sample(n: int) -> None:
    lengths = random_lengths(n, seed=1)
    for per_step in range(1, min(n, 16) + 1):
        sizes = [len(row) for row in rows_of(plan(lengths, per_step))]
        assert len(sizes) % per_step == 0
        if 0 in sizes:
            assert max(sizes) == 1
            assert 0 not in sizes[:-per_step], "an empty row outside the last step"
        assert any(sizes[-per_step:]), "a step without any sample"


def test_one_sample_a_row_still_fills_whole_steps() -> None:
    lengths = np.full(5, ROW, dtype=np.int64)  # five samples, each as long as a row, four rows a step
    run = plan(lengths, 4)
    assert run.total_steps == 2
    assert sorted(len(row) for row in rows_of(run)) == [0, 0, 0, 1, 1, 1, 1, 1]


def test_the_last_step_is_shared_out_instead_of_leaving_ranks_idle() -> None:
    lengths = np.full(40, 100, dtype=np.int64)  # 4 full rows; 8 rows a step
    run = plan(lengths, 8)
    assert run.total_steps == 1
    assert [int(lengths[list(row)].sum()) for row in run.step_rows(0)] == [500] * 8


def test_the_plan_is_a_function_of_seed_and_epoch_alone() -> None:
    lengths = random_lengths(300, seed=0)
    first = rows_of(plan(lengths, 4))
    assert rows_of(plan(lengths.copy(), 4)) == first
    assert rows_of(plan(lengths, 4, seed=8)) != first
    two = rows_of(plan(lengths, 4, epochs=2))
    assert two[: len(first)] == first and two[len(first) :] != first


def test_the_shuffle_does_not_follow_the_file_order() -> None:
    order = np.array(samples_of(plan(np.full(1000, 10, dtype=np.int64), 1)))
    assert (np.abs(np.diff(order)) == 1).mean() < 0.02


def test_the_same_rows_make_a_step_on_any_number_of_ranks() -> None:
    run = plan_lengths(random_lengths(200, seed=5), row_tokens=ROW, rows_per_step=12, seed=0, epochs=2)
    for step in range(run.total_steps):
        by_world = []
        for world in (1, 2, 3, 4, 6, 12):
            rows = [
                tuple(run.rows_for(step, micro, rank, world=world).tolist())
                for micro in range(12 // world)
                for rank in range(world)
            ]
            by_world.append(rows)
        assert all(rows == by_world[0] for rows in by_world)


def test_rows_are_well_filled() -> None:
    lengths = random_lengths(20_000, seed=2)
    assert lengths.sum() / (len(rows_of(plan(lengths, 8))) * ROW) > 0.96


def test_a_long_sample_is_dropped_and_counted_or_named() -> None:
    lengths = np.array([10, ROW + 1, 20, 5 * ROW, ROW], dtype=np.int64)
    run = plan(lengths, 1)
    assert run.preview().dropped == 2
    assert sorted(samples_of(run)) == [0, 2, 4]
    with pytest.raises(DataError, match=r"1,000 tokens: .*sample key-1 \(1,001 tokens\).*on_long_sample"):
        plan(lengths, 1, on_long="raise", names="key-{}".format)


def test_a_mix_by_steps_in_which_every_sample_is_too_long_ends() -> None:
    with pytest.raises(ConfigError, match="only 0 usable samples"):
        plan(np.full(7, ROW + 1), 1, epochs=None, steps=3).step_rows(0)


@pytest.mark.parametrize("lengths", [[5, 5, 5], [5, 5, 5, ROW + 1, ROW + 1], []])
def test_fewer_usable_samples_than_rows_of_a_step_is_an_error_that_says_both_counts(
    lengths: list[int],
) -> None:
    usable = sum(length <= ROW for length in lengths)
    with pytest.raises(ConfigError, match=f"needs 4 rows .* only {usable} usable") as error:
        plan(np.array(lengths, dtype=np.int64), 4)
    assert ("2 more are larger" in str(error.value)) == (len(lengths) == 5)


def test_a_run_passes_through_its_epochs_without_gap_or_repeat() -> None:
    lengths = random_lengths(60, seed=4)
    run = plan(lengths, 2, seed=1, epochs=3)
    order = samples_of(run)
    orders = [order[:60], order[60:120], order[120:]]
    assert all(sorted(epoch) == list(range(60)) for epoch in orders)
    assert orders[0] != orders[1] != orders[2]
    with pytest.raises(IndexError):
        run.rows_for(run.total_steps, 0, 0, world=1)


def test_a_run_by_steps_ends_there_and_repeats_the_data_as_often_as_needed() -> None:
    lengths = random_lengths(30, seed=6)
    epoch_steps = plan(lengths, 3).total_steps
    run = plan(lengths, 3, epochs=None, steps=5 * epoch_steps)
    assert run.total_steps == 5 * epoch_steps
    seen = np.bincount(samples_of(run), minlength=30)
    assert seen.min() >= 4 and seen.max() - seen.min() <= 1


@pytest.mark.parametrize("n", [80, 3000])
def test_asking_from_a_later_step_gives_what_the_uninterrupted_run_gave(n: int) -> None:
    lengths = random_lengths(n, seed=9)
    whole = rows_of(plan(lengths, 2, epochs=4))
    for start in (1, len(whole) // 8, len(whole) // 2 - 1):
        fresh = plan(lengths, 2, epochs=4)
        assert [row for step in range(start, fresh.total_steps) for row in fresh.step_rows(step)] == whole[
            2 * start :
        ]


def watch(run: RunPlan, planned: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Note every step that the run plans."""
    steps = run.scheme.steps

    def noted(state: PlanState, most: int, *, world: int) -> list[PlannedStep]:
        planned.append(state.step)
        return steps(state, most, world=world)

    monkeypatch.setattr(run.scheme, "steps", noted)


def test_a_run_goes_on_from_a_saved_place_without_planning_what_came_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lengths = random_lengths(20_000, seed=3)
    first = plan(lengths, 4, epochs=None, steps=10_000)
    whole = [first.step_rows(step) for step in range(700)]
    for step in (1, 63, 64, 500):
        saved = json.loads(json.dumps(first.state_at(step).to_json()))
        assert saved["step"] <= step < saved["step"] + planner.ANCHOR
        later = plan(lengths, 4, epochs=None, steps=10_000)
        later.restore(PlanState.from_json(saved))
        planned: list[int] = []
        watch(later, planned, monkeypatch)
        assert [later.step_rows(s) for s in range(step, 520)] == whole[step:520]
        assert min(planned) == saved["step"]


def test_going_back_far_plans_again_from_the_beginning_and_gives_the_same() -> None:
    run = plan(random_lengths(5000, seed=1), 1, epochs=None, steps=3000)
    early = [run.step_rows(step) for step in range(3)]
    run.step_rows(2999)
    assert [run.step_rows(step) for step in range(3)] == early


def test_the_preview_is_of_the_first_steps_and_changes_nothing() -> None:
    lengths = random_lengths(500, seed=1, longest=ROW + 1)
    lengths[7] = ROW + 1
    run = plan(lengths, 2)
    preview = run.preview(3)
    rows = [row for step in range(3) for row in run.step_rows(step)]
    assert (preview.steps, preview.rows, preview.samples) == (3, 6, sum(map(len, rows)))
    assert preview.tokens == sum(int(lengths[list(row)].sum()) for row in rows)
    whole = run.preview(10**6)
    assert (whole.steps, whole.samples) == (run.total_steps, int((lengths <= ROW).sum()))
    assert whole.dropped == int((lengths > ROW).sum())


@pytest.mark.parametrize("kwargs", [{}, {"epochs": 1, "steps": 1}, {"epochs": 0}, {"steps": -1}])
def test_a_run_has_epochs_or_steps_and_at_least_one(kwargs: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=r"schedule\.epochs"):
        plan_lengths(random_lengths(10, seed=0), row_tokens=ROW, rows_per_step=1, seed=0, **kwargs)


@pytest.mark.parametrize("micro,rank", [(2, 0), (0, 2), (0, -1), (-1, 0)])
def test_a_row_that_the_step_does_not_have_is_refused(micro: int, rank: int) -> None:
    run = plan_lengths(random_lengths(50, seed=0), row_tokens=ROW, rows_per_step=4, seed=0, epochs=1)
    with pytest.raises(IndexError, match="4 rows a step"):
        run.rows_for(0, micro, rank, world=2)
