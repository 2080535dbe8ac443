"""Rotary positions of more than one axis: rows and columns in an encoder, time, rows and columns in a decoder.

Shapes: T tokens, H heads, D head size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mmds.geometry import Grid

_BASE = 10000.0


def rotary_angles(grid: Grid, head: int) -> Tensor:
    """fp32 [rows * columns, head / 2]: the first half of the angles turns with the row, the second with the column.

    As in Qwen2-VL's vision encoder (arXiv 2409.12191); head must be a multiple of 4.
    """
    rows, columns = grid
    frequencies = _BASE ** -(torch.arange(0, head // 2, 2).float() / (head // 2))
    row = torch.arange(rows).float()[:, None] * frequencies
    column = torch.arange(columns).float()[:, None] * frequencies
    return torch.cat([row.repeat_interleave(columns, 0), column.repeat(rows, 1)], dim=1)


def rotate_by(angles: Tensor, x: Tensor) -> Tensor:
    """[1, H, T, D] turned by fp32 angles [T, D / 2], dimension i with dimension i + D / 2, computed in fp32."""
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)
