"""The plan: every sample once, equal rows on all ranks, one answer everywhere, a new order each epoch."""

from __future__ import annotations

import numpy as np
import pytest

from mmds.errors import ConfigError, DataError
from mmds.planner import EpochPlan, RunPlan, plan_epoch

ROW = 1000


def random_lengths(n: int, seed: int, longest: int = ROW) -> np.ndarray:
    """n lengths: mostly short, a few near the row length."""
    rng = np.random.default_rng([n, seed])
    return np.minimum(rng.lognormal(5, 1.2, n).astype(np.int64) + 1, longest)


def plan(lengths: np.ndarray, rows_per_step: int, *, epoch: int = 0, seed: int = 7, **kwargs) -> EpochPlan:
    return plan_epoch(lengths, row_tokens=ROW, rows_per_step=rows_per_step, seed=seed, epoch=epoch, **kwargs)


def row_lengths(p: EpochPlan, lengths: np.ndarray) -> list[int]:
    return [int(lengths[p.row(r)].sum()) for r in range(p.rows)]


GRID = [(world, acc) for world in (1, 2, 3, 4) for acc in (1, 2, 3, 4)]


@pytest.mark.parametrize("world,accumulation", GRID)
def test_every_sample_is_in_exactly_one_row_and_all_ranks_get_equally_many(
    world: int, accumulation: int
) -> None:
    per_step = world * accumulation
    for n in range(per_step, 51):
        lengths = random_lengths(n, seed=world)
        run = RunPlan(lengths, row_tokens=ROW, rows_per_step=per_step, seed=3, epochs=1)
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
        p = plan(lengths, per_step)
        sizes = np.diff(p.row_starts)
        assert p.rows % per_step == 0
        if (sizes == 0).any():
            assert sizes.max() == 1
            assert (sizes[:-per_step] > 0).all(), "an empty row outside the last step"
        assert (sizes[-per_step:] > 0).any(), "a step without any sample"


def test_one_sample_a_row_still_fills_whole_steps() -> None:
    lengths = np.full(5, ROW, dtype=np.int64)  # five samples, each as long as a row, four rows a step
    p = plan(lengths, 4)
    assert p.steps == 2
    assert sorted(np.diff(p.row_starts).tolist()) == [0, 0, 0, 1, 1, 1, 1, 1]


def test_the_last_step_is_shared_out_instead_of_leaving_ranks_idle() -> None:
    lengths = np.full(40, 100, dtype=np.int64)  # 4 full rows; 8 rows a step
    p = plan(lengths, 8)
    assert p.steps == 1
    assert row_lengths(p, lengths) == [500] * 8


def test_the_plan_is_a_function_of_seed_and_epoch_alone() -> None:
    lengths = random_lengths(300, seed=0)
    first, again = plan(lengths, 4), plan(lengths.copy(), 4)
    assert np.array_equal(first.samples, again.samples)
    assert np.array_equal(first.row_starts, again.row_starts)
    assert not np.array_equal(first.samples, plan(lengths, 4, epoch=1).samples)
    assert not np.array_equal(first.samples, plan(lengths, 4, seed=8).samples)


def test_the_shuffle_does_not_follow_the_file_order() -> None:
    p = plan(np.full(1000, 10, dtype=np.int64), 1)
    neighbours = np.abs(np.diff(p.samples)) == 1
    assert neighbours.mean() < 0.02


def test_the_same_rows_make_a_step_on_any_number_of_ranks() -> None:
    run = RunPlan(random_lengths(200, seed=5), row_tokens=ROW, rows_per_step=12, seed=0, epochs=2)
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
    p = plan(lengths, 8)
    assert lengths.sum() / (p.rows * ROW) > 0.96


def test_a_long_sample_is_dropped_and_listed_or_named() -> None:
    lengths = np.array([10, ROW + 1, 20, 5 * ROW, ROW], dtype=np.int64)
    p = plan(lengths, 1)
    assert p.dropped.tolist() == [1, 3]
    assert sorted(p.samples.tolist()) == [0, 2, 4]
    with pytest.raises(DataError, match=r"2 of 5 samples .* sample key-1 \(1001 tokens\).*on_long_sample"):
        plan(lengths, 1, on_long="raise", names="key-{}".format)


@pytest.mark.parametrize("lengths", [[5, 5, 5], [5, 5, 5, ROW + 1, ROW + 1], []])
def test_fewer_usable_samples_than_rows_of_a_step_is_an_error_that_says_both_counts(
    lengths: list[int],
) -> None:
    usable = sum(length <= ROW for length in lengths)
    with pytest.raises(ConfigError, match=f"needs 4 rows .* only {usable} usable") as error:
        plan(np.array(lengths, dtype=np.int64), 4)
    assert ("2 more are longer" in str(error.value)) == (len(lengths) == 5)


def test_a_run_passes_through_its_epochs_without_gap_or_repeat() -> None:
    lengths = random_lengths(60, seed=4)
    run = RunPlan(lengths, row_tokens=ROW, rows_per_step=2, seed=1, epochs=3)
    orders = []
    step = 0
    for epoch in range(3):
        steps = plan_epoch(lengths, row_tokens=ROW, rows_per_step=2, seed=1, epoch=epoch).steps
        order = []
        for within in range(steps):
            assert run.position(step) == (epoch, within)
            order += [i for micro in (0, 1) for i in run.rows_for(step, micro, 0, world=1).tolist()]
            step += 1
        assert sorted(order) == list(range(60))
        orders.append(order)
    assert run.total_steps == step
    assert orders[0] != orders[1] != orders[2]
    with pytest.raises(IndexError):
        run.rows_for(step, 0, 0, world=1)


def test_a_run_by_steps_ends_there_and_repeats_the_data_as_often_as_needed() -> None:
    lengths = random_lengths(30, seed=6)
    epoch_steps = plan_epoch(lengths, row_tokens=ROW, rows_per_step=3, seed=0, epoch=0).steps
    run = RunPlan(lengths, row_tokens=ROW, rows_per_step=3, seed=0, steps=5 * epoch_steps)
    assert run.total_steps == 5 * epoch_steps
    assert run.position(run.total_steps - 1)[0] >= 3


def test_asking_from_a_later_step_gives_what_the_uninterrupted_run_gave() -> None:
    lengths = random_lengths(80, seed=9)

    def rows(run: RunPlan, start: int) -> list[list[int]]:
        return [
            run.rows_for(s, 0, r, world=2).tolist() for s in range(start, run.total_steps) for r in (0, 1)
        ]

    whole = rows(RunPlan(lengths, row_tokens=ROW, rows_per_step=2, seed=1, epochs=4), 0)
    for start in (1, len(whole) // 4, len(whole) // 2 - 1):
        fresh = RunPlan(lengths, row_tokens=ROW, rows_per_step=2, seed=1, epochs=4)
        assert rows(fresh, start) == whole[2 * start :]


@pytest.mark.parametrize("kwargs", [{}, {"epochs": 1, "steps": 1}, {"epochs": 0}, {"steps": -1}])
def test_a_run_has_epochs_or_steps_and_at_least_one(kwargs: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=r"schedule\.epochs"):
        RunPlan(random_lengths(10, seed=0), row_tokens=ROW, rows_per_step=1, seed=0, **kwargs)


@pytest.mark.parametrize("micro,rank", [(2, 0), (0, 2), (0, -1), (-1, 0)])
def test_a_row_that_the_step_does_not_have_is_refused(micro: int, rank: int) -> None:
    run = RunPlan(random_lengths(50, seed=0), row_tokens=ROW, rows_per_step=4, seed=0, epochs=1)
    with pytest.raises(IndexError, match="4 rows a step"):
        run.rows_for(0, micro, rank, world=2)
