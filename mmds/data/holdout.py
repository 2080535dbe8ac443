"""Samples kept out of training, with every other sample that shows one of their pictures: scores on them are not memory."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]
Digests = NDArray[np.uint64]


def hold_out(
    image_starts: Sequence[IntArray], digests: Sequence[Digests], *, share: float, seed: int
) -> list[IntArray]:
    """Numbers of the samples of each source that are held out, ascending.

    image_starts: for each source int64 [n + 1], images of its sample i are image_starts[i] to image_starts[i + 1]; digests: for each
    source uint64 [m], of each image's content. share: of all samples, 0 to 1; a group of samples that share pictures is held out
    whole, and left in where it alone would exceed what is still wanted. The same answer for the same content and seed.
    """
    counts = [len(starts) - 1 for starts in image_starts]
    if not share:
        return [np.zeros(0, dtype=np.int64) for _ in counts]
    samples = np.concatenate(
        [
            np.repeat(np.arange(n), np.diff(starts)) + first
            for n, starts, first in _placed(counts, image_starts)
        ]
    )
    groups = _groups(sum(counts), samples, np.concatenate(digests))
    held = _choose(groups, round(share * sum(counts)), seed)
    ends = np.cumsum([0, *counts])
    return [np.flatnonzero(held[a:b]) for a, b in zip(ends, ends[1:], strict=False)]


def _placed(counts: Sequence[int], image_starts: Sequence[IntArray]) -> list[tuple[int, IntArray, int]]:
    firsts = np.cumsum([0, *counts])
    return list(zip(counts, image_starts, firsts.tolist(), strict=False))


def _groups(count: int, samples: IntArray, digests: Digests) -> IntArray:
    """int64 [count]: the lowest number among the samples that a sample is linked to by pictures, directly or through others.

    samples, digests: one entry an image, the sample that has it and its content.
    """
    labels = np.arange(count, dtype=np.int64)
    _, images = np.unique(digests, return_inverse=True)
    while True:
        of_image = np.full(int(images.max(initial=-1)) + 1, count, dtype=np.int64)
        np.minimum.at(of_image, images, labels[samples])
        lowered = labels.copy()
        np.minimum.at(lowered, samples, of_image[images])
        lowered = lowered[lowered]  # a label is itself a sample: go on from there at once
        if np.array_equal(lowered, labels):
            return labels
        labels = lowered


def _choose(groups: IntArray, wanted: int, seed: int) -> NDArray[np.bool_]:
    """Whether each sample is held out: whole groups in an order of chance, as long as they fit."""
    heads, sizes = np.unique(groups, return_counts=True)
    chance = np.array(
        [
            int.from_bytes(blake2b(f"{seed}:{head}".encode(), digest_size=8).digest(), "big")
            for head in heads.tolist()
        ],
        dtype=np.uint64,
    )
    chosen, total = [], 0
    for place in np.argsort(chance, kind="stable"):
        if total >= wanted:
            break
        if total + sizes[place] <= wanted:
            chosen.append(heads[place])
            total += int(sizes[place])
    return np.isin(groups, np.array(chosen, dtype=np.int64))
