"""Position ids of one sample, from 0: one axis (`1d`), or time, row and column (`mrope`).

mrope (Qwen2-VL, arXiv 2409.12191, section 2.1): text counts on all three axes alike; the tokens of an image share one time and
have their row and column on the other two, both counted from where the text stopped; the text after it goes on from the largest.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from mmds.geometry import Grid

Positions = npt.NDArray[np.int64]


def text_positions(length: int) -> Positions:
    """int64 [T]."""
    return np.arange(length, dtype=np.int64)


def mrope_positions(is_slot: npt.NDArray[np.bool_], grids: Sequence[Grid]) -> Positions:
    """int64 [3, T] of a sample whose slots are True in `is_slot` [T].

    grids: rows and columns of visual tokens of each image, in order; their products add up to the number of slots.
    """
    positions = np.empty((3, len(is_slot)), dtype=np.int64)
    token, position = 0, 0
    for rows, columns in grids:
        text = int(np.argmax(is_slot[token:]))  # tokens before the image
        positions[:, token : token + text] = np.arange(position, position + text)
        token, position = token + text, position + text
        end = token + rows * columns
        positions[0, token:end] = position
        positions[1, token:end] = position + np.repeat(np.arange(rows), columns)
        positions[2, token:end] = position + np.tile(np.arange(columns), rows)
        token, position = end, position + max(rows, columns)
    positions[:, token:] = np.arange(position, position + len(is_slot) - token)
    return positions
