"""Held-out samples: the share that was asked for, and no picture of theirs left in training."""

from __future__ import annotations

import numpy as np
import pytest

from mmds.data.holdout import hold_out


def linked(image_lists: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    """image_starts and digests of samples that show these pictures."""
    starts = np.cumsum([0, *map(len, image_lists)]).astype(np.int64)
    return starts, np.array([i for images in image_lists for i in images], dtype=np.uint64)


def random_source(rng: np.random.Generator, samples: int, pictures: int) -> list[list[int]]:
    return [rng.integers(0, pictures, rng.integers(0, 4)).tolist() for _ in range(samples)]


@pytest.mark.parametrize("pictures", [40, 3000, 100_000])
@pytest.mark.parametrize("share", [0.01, 0.1, 0.3])
def test_no_picture_is_on_both_sides_and_the_share_is_kept(pictures: int, share: float) -> None:
    rng = np.random.default_rng(pictures)
    sources = [random_source(rng, 700, pictures), random_source(rng, 300, pictures)]
    starts, digests = zip(*map(linked, sources), strict=True)
    held = hold_out(starts, digests, share=share, seed=3)
    shown: dict[bool, set[int]] = {True: set(), False: set()}
    for source, out in zip(sources, held, strict=True):
        assert out.tolist() == sorted(set(out.tolist()))
        for i, images in enumerate(source):
            shown[i in set(out.tolist())] |= set(images)
    assert not shown[True] & shown[False]
    count = sum(map(len, held))
    assert count <= round(share * 1000)
    if pictures > 1000:
        assert count >= 0.9 * share * 1000


def test_a_chain_of_shared_pictures_stays_together() -> None:
    """Sample i shares a picture with i + 1 only; a long chain is one group."""
    chain = [[i, i + 1] for i in range(500)]
    alone = [[1000 + i] for i in range(500)]
    starts, digests = linked(chain + alone)
    (held,) = hold_out([starts], [digests], share=0.4, seed=0)
    assert len(held) == 400 and held.min() >= 500, (
        "the chain is larger than what is wanted, so it stays in training"
    )
    (held,) = hold_out([starts], [digests], share=0.5, seed=0)
    assert set(held.tolist()) in (set(range(500)), set(range(500, 1000)))


def test_text_only_samples_are_held_out_like_others_and_the_seed_decides() -> None:
    starts = np.zeros(1001, dtype=np.int64)
    none = np.zeros(0, dtype=np.uint64)
    held = [hold_out([starts], [none], share=0.05, seed=seed)[0] for seed in (1, 1, 2)]
    assert len(held[0]) == 50
    assert np.array_equal(held[0], held[1]) and not np.array_equal(held[0], held[2])


def test_no_share_holds_nothing_out() -> None:
    starts, digests = linked([[1], [2]])
    assert [len(out) for out in hold_out([starts, starts], [digests, digests], share=0.0, seed=0)] == [0, 0]
