"""Orders without a list: one-to-one, random, the same everywhere, and neighbours together where a block is one read."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from mmds.shuffle import SMALL, BlockShuffle, Shuffle


@pytest.mark.parametrize("count", [1, 2, 3, 17, SMALL, SMALL + 1, 20_000, 65_536, 100_003])
def test_every_number_comes_exactly_once(count: int) -> None:
    order = Shuffle(count, (1, 2))(np.arange(count))
    assert np.array_equal(np.sort(order), np.arange(count))


def test_the_key_decides_the_order() -> None:
    positions = np.arange(50_000)
    first = Shuffle(50_000, (1, 2))(positions)
    assert np.array_equal(first, Shuffle(50_000, (1, 2))(positions))
    for key in ((1, 3), (2, 2), (1, 2, 0, 1)):
        assert (first == Shuffle(50_000, key)(positions)).mean() < 0.001


def test_any_stretch_alone_is_that_of_the_whole() -> None:
    shuffle = Shuffle(90_001, (5,))
    whole = shuffle(np.arange(90_001))
    assert np.array_equal(shuffle(np.arange(70_000, 70_100)), whole[70_000:70_100])


@pytest.mark.parametrize("count", [40_000, 1_000_003])
def test_the_order_looks_like_chance(count: int) -> None:
    """Neighbours and thirds are as in a true shuffle, within five deviations of chance."""
    order = Shuffle(count, (3, 1))(np.arange(count))
    rises = (np.diff(order) > 0).mean()
    assert abs(rises - 0.5) < 5 * np.sqrt(1 / (12 * count))
    table, _, _ = np.histogram2d(np.arange(count), order, bins=8)
    assert np.abs(table - count / 64).max() < 5 * np.sqrt(count / 64)
    assert abs(np.corrcoef(np.arange(count), order)[0, 1]) < 5 / np.sqrt(count)
    assert (np.abs(np.diff(order)) == 1).sum() < 20


def test_a_trillion_numbers_take_no_memory() -> None:
    tracemalloc.start()
    order = Shuffle(10**12, (0,))(np.arange(10**11, 10**11 + 1000))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**20
    assert len(set(order.tolist())) == 1000 and order.min() >= 0 and order.max() < 10**12


@pytest.mark.parametrize(
    ("count", "block", "window"), [(1000, 10, 4), (1003, 10, 4), (7, 10, 2), (100_001, 64, 8), (65, 64, 3)]
)
def test_blocks_come_in_random_order_and_a_window_holds_few_of_them(
    count: int, block: int, window: int
) -> None:
    order = BlockShuffle(count, (9,), block=block, window=window)(np.arange(count))
    assert np.array_equal(np.sort(order), np.arange(count))
    blocks = order // block
    for start in range(0, count, block * window):
        inside = blocks[start : start + block * window]
        assert len(set(inside.tolist())) <= window + 1  # the one short block shifts those after it
    if count > 1000:
        first = [int(b) for b in dict.fromkeys(blocks.tolist())]
        assert (np.diff(first) == 1).mean() < 0.1
        assert (np.diff(order) == 1).mean() < 0.1, "samples within a window are mixed"


def test_a_stretch_of_blocks_alone_is_that_of_the_whole() -> None:
    shuffle = BlockShuffle(10_007, (1, 5), block=32, window=4)
    whole = shuffle(np.arange(10_007))
    again = BlockShuffle(10_007, (1, 5), block=32, window=4)
    assert np.array_equal(again(np.arange(9_000, 9_300)), whole[9_000:9_300])
