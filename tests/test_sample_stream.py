"""Sources merged into one stream: shares hold in every stretch, every sample comes as often as said, any place can be gone on from."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from mmds.errors import ConfigError
from mmds.sample_stream import SampleStream, Source, StreamState


def drawn(
    stream: SampleStream, count: int, *, chunk: int = 97, state: StreamState | None = None
) -> np.ndarray:
    """The next `count` samples in small chunks, epoch after epoch."""
    state, parts, left = state or stream.start, [], count
    while left:
        numbers, state = stream.take(state, min(chunk, left))
        parts.append(numbers)
        left -= len(numbers)
        if not len(numbers):
            state = stream.next_epoch(state)
    return np.concatenate(parts)


def by_source(stream: SampleStream, numbers: np.ndarray) -> np.ndarray:
    return np.searchsorted(stream.starts, numbers, side="right") - 1


WEIGHTS = [
    (1.0, 1.0),
    (0.7, 0.3),
    (5.0, 3.0, 2.0),
    (0.9, 0.08, 0.02),
    (1.0,),
    (1 / 3, 1 / 3, 1 / 3),
    (0.995, 0.005),
]


@pytest.mark.parametrize("weights", WEIGHTS)
def test_weights_hold_in_every_window_of_a_thousand_samples(weights: tuple[float, ...]) -> None:
    sources = [
        Source(name=f"s{i}", count=50 + 1000 * i, weight=w, epochs=None) for i, w in enumerate(weights)
    ]
    stream = SampleStream(sources, seed=3)
    origin = by_source(stream, drawn(stream, 30_000))
    for source, weight in enumerate(weights):
        running = np.cumsum([0, *(origin == source)])
        in_window = running[1000:] - running[:-1000]
        assert np.abs(in_window - 1000 * weight / sum(weights)).max() <= 2


def test_a_weighted_source_is_gone_through_evenly_and_each_time_in_another_order() -> None:
    stream = SampleStream(
        [
            Source(name="a", count=40, weight=0.5, epochs=None),
            Source(name="b", count=1000, weight=0.5, epochs=None),
        ],
        seed=0,
    )
    numbers = drawn(stream, 400)
    small = numbers[numbers < 40]
    turns = [small[start : start + 40].tolist() for start in range(0, 200, 40)]
    assert all(sorted(turn) == list(range(40)) for turn in turns)
    assert all(a != b for a, b in pairwise(turns))
    assert stream.epoch_samples is None


@pytest.mark.parametrize("counts", [(10,), (30, 20, 1), (1000, 3), (5000, 70, 20_000)])
def test_every_sample_of_an_epoch_comes_once_and_sources_are_spread_evenly(counts: tuple[int, ...]) -> None:
    stream = SampleStream([Source(name=f"s{i}", count=n) for i, n in enumerate(counts)], seed=1)
    total = sum(counts)
    numbers = drawn(stream, 2 * total)
    for epoch in (numbers[:total], numbers[total:]):
        assert np.array_equal(np.sort(epoch), np.arange(total))
        origin = by_source(stream, epoch)
        for source, count in enumerate(counts):
            due = np.arange(1, total + 1) * count / total
            assert np.abs(np.cumsum(origin == source) - due).max() <= 2
    assert not np.array_equal(numbers[:total], numbers[total:])


def test_epochs_of_a_source_repeat_it_or_take_a_share_that_changes_with_the_epoch() -> None:
    sources = [Source(name="twice", count=50, epochs=2.0), Source(name="half", count=100, epochs=0.5)]
    stream = SampleStream(sources, seed=2)
    assert stream.epoch_samples == 150
    numbers = drawn(stream, 300)
    first, second = numbers[:150], numbers[150:]
    for epoch in (first, second):
        assert np.bincount(epoch[epoch < 50], minlength=50).tolist() == [2] * 50
        half = epoch[epoch >= 50]
        assert len(half) == len(set(half.tolist())) == 50
    assert set(first[first >= 50].tolist()) != set(second[second >= 50].tolist())


def test_the_place_alone_decides_what_follows_whatever_the_chunks_were() -> None:
    def stream() -> SampleStream:
        return SampleStream([Source(name="a", count=700), Source(name="b", count=333)], seed=5)

    whole = drawn(stream(), 2066)
    assert np.array_equal(drawn(stream(), 2066, chunk=1), whole)
    numbers, place = stream().take(stream().start, 500)
    assert np.array_equal(numbers, whole[:500])
    assert np.array_equal(drawn(stream(), 1000, state=place), whole[500:1500])


def test_adding_a_source_leaves_the_others_order_alone() -> None:
    one = SampleStream([Source(name="a", count=300)], seed=5)
    two = SampleStream([Source(name="a", count=300), Source(name="b", count=100)], seed=5)
    both = drawn(two, 400)
    assert np.array_equal(both[both < 300], drawn(one, 300))


def test_samples_held_out_never_come_and_all_others_do() -> None:
    rng = np.random.default_rng(0)
    held = np.sort(rng.choice(500, 60, replace=False))
    sources = [
        Source(name="a", count=500, held_out=held),
        Source(name="b", count=40, held_out=np.array([0, 39])),
    ]
    stream = SampleStream(sources, seed=1)
    assert stream.epoch_samples == 440 + 38
    wanted = sorted((set(range(500)) - set(held.tolist())) | set(range(501, 539)))
    assert np.sort(drawn(stream, 478)).tolist() == wanted


def test_blocks_keep_neighbours_together() -> None:
    stream = SampleStream([Source(name="far", count=10_000, block=100)], seed=5)
    numbers = drawn(stream, 10_000)
    assert np.array_equal(np.sort(numbers), np.arange(10_000))
    assert all(len(set((numbers[s : s + 800] // 100).tolist())) <= 8 for s in range(0, 10_000, 800))


def test_a_billion_samples_begin_at_once() -> None:
    stream = SampleStream([Source(name="all", count=10**9), Source(name="more", count=10**8)], seed=5)
    numbers = drawn(stream, 5000)
    assert len(set(numbers.tolist())) == 5000
    assert numbers.max() > 10**9 // 2


def test_an_empty_source_cannot_have_a_weight() -> None:
    with pytest.raises(ConfigError, match='"b" has a weight and no sample'):
        SampleStream([Source(name="a", count=3, weight=1.0), Source(name="b", count=0, weight=1.0)], seed=0)


def test_a_mix_has_weights_everywhere_or_nowhere() -> None:
    with pytest.raises(ConfigError, match=r"mmds\.data\.mix: give every entry a weight, or none"):
        SampleStream([Source(name="a", count=3, weight=1.0, epochs=None), Source(name="b", count=3)], seed=0)
