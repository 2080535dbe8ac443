"""The planner behind torch's own DataLoader."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from torch.utils.data import DataLoader, Dataset

from mmds.data.plan_sampler import PlanSampler
from mmds.schemes import SCHEMES
from tests.test_schemes import random_sizes, scheme_of

SAMPLES = 800
SIZES = random_sizes(SAMPLES, seed=3)


class Numbers(Dataset[int]):
    def __getitem__(self, number: int) -> int:
        return number


def sampler(rank: int, world: int, *, rows: int = 8, name: str = "cost") -> PlanSampler:
    return PlanSampler(scheme_of(name, SIZES, rows), rank=rank, world=world)


def loaded(sampler: PlanSampler, workers: int = 0) -> list[list[int]]:
    loader: DataLoader[int] = DataLoader(
        Numbers(), batch_sampler=sampler, num_workers=workers, collate_fn=list
    )
    return list(loader)


@pytest.mark.parametrize("name", sorted(SCHEMES))
@pytest.mark.parametrize("workers", [0, 1, 3])
def test_a_loader_of_any_number_of_workers_gives_every_sample_once(name: str, workers: int) -> None:
    ranks = [loaded(sampler(rank, 4, name=name), workers) for rank in range(4)]
    assert len({len(batches) for batches in ranks}) == 1 and len(ranks[0]) == len(sampler(0, 4, name=name))
    assert Counter(i for batches in ranks for batch in batches for i in batch) == Counter(range(SAMPLES))
    assert ranks == [loaded(sampler(rank, 4, name=name)) for rank in range(4)]


def test_epochs_differ_and_an_epoch_is_the_same_again() -> None:
    one = sampler(0, 2)
    first = loaded(one)
    assert loaded(one) == first
    one.set_epoch(0)
    assert loaded(one) == first
    one.set_epoch(1)
    second = loaded(one)
    assert second != first
    other = sampler(0, 2)
    other.set_epoch(1)
    assert loaded(other) == second


@pytest.mark.parametrize("worlds", [(2, 2), (8, 6), (4, 1)])
def test_a_position_goes_on_on_any_number_of_ranks_with_every_sample_once(worlds: tuple[int, int]) -> None:
    """With prefetch: more batches were given than were trained on."""
    before, after = worlds
    rows = {6: 6}.get(after, 8)
    seen: Counter[int] = Counter()
    states = []
    for rank in range(before):
        one = sampler(rank, before)
        batches = iter(one)
        given = [next(batches) for _ in range(7 * (8 // before))]
        consumed = 5 * (8 // before)
        seen.update(i for batch in given[:consumed] for i in batch)
        states.append(json.dumps(one.state_dict(consumed)))
    assert len(set(states)) == 1
    for rank in range(after):
        one = sampler(rank, after, rows=rows)
        one.load_state_dict(json.loads(states[0]))
        left = loaded(one)
        seen.update(i for batch in left for i in batch)
        assert len(left) < len(one)  # the next iteration is of a whole epoch again
    assert seen == Counter(range(SAMPLES))


def test_at_the_end_of_an_epoch_the_next_one_is_gone_on_with() -> None:
    one = sampler(0, 2)
    loaded(one)
    batches = list(one)
    other = sampler(0, 2)
    other.load_state_dict(one.state_dict(len(batches)))
    assert other.epoch == 1
    one.set_epoch(1)
    assert loaded(other) == loaded(one)


def test_a_position_inside_a_step_and_unequal_ranks_are_refused() -> None:
    one = sampler(0, 2)
    batches = iter(one)
    next(batches)
    with pytest.raises(ValueError, match="no whole number of steps of 4"):
        one.state_dict()
    with pytest.raises(ValueError, match="no whole number"):
        one.state_dict(8)  # more than were given
    for rank, world in ((0, 3), (2, 2), (-1, 2)):
        with pytest.raises(ValueError, match="rows a step"):
            sampler(rank, world)
