"""What the sizes of a sample say before anything of it is read: all that planning needs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from mmds.cost import Sums

IntArray = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class SampleSizes:
    """Sizes of n samples, int64 [n] each, 0 for what a sample has none of.

    tokens: in a row, with its slots (at least 1). supervised: tokens that are trained on. images. pieces: encoder inputs of all its images.
    patches: of all pieces. patch_squares: sum over its pieces of patches squared.
    """

    tokens: IntArray
    supervised: IntArray
    images: IntArray
    pieces: IntArray
    patches: IntArray
    patch_squares: IntArray

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, samples: IntArray | slice | NDArray[np.bool_]) -> SampleSizes:
        """The sizes of some of them, in that order."""
        return SampleSizes(**{name: values[samples] for name, values in vars(self).items()})

    @property
    def sums(self) -> Sums:
        """What each sample costs is computed from these, float64 [n]."""
        tokens = self.tokens.astype(np.float64)
        return Sums(
            tokens=tokens,
            squares=tokens**2,
            supervised=self.supervised.astype(np.float64),
            pieces=self.pieces.astype(np.float64),
            patches=self.patches.astype(np.float64),
            patch_squares=self.patch_squares.astype(np.float64),
        )

    @staticmethod
    def joined(parts: Sequence[SampleSizes]) -> SampleSizes:
        """The samples of several arrays, one after the other; none: no samples."""
        names = [field.name for field in fields(SampleSizes)]
        none = [np.zeros(0, dtype=np.int64)]
        return SampleSizes(
            **{name: np.concatenate([getattr(part, name) for part in parts] or none) for name in names}
        )


Measure = Callable[[IntArray], SampleSizes]
"""Sample numbers, int64 [k] -> their sizes, in that order."""


def text_only(tokens: IntArray) -> SampleSizes:
    """Samples without images, of which every token is trained on. tokens: int64 [n]."""
    tokens = np.asarray(tokens, dtype=np.int64)
    none = np.zeros_like(tokens)
    return SampleSizes(
        tokens=tokens, supervised=tokens, images=none, pieces=none, patches=none, patch_squares=none
    )
