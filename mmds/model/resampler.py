"""The resampler: learned queries read an image of any size into a fixed number of visual tokens.

Perceiver-style cross attention (Flamingo, arXiv 2204.14198, section 3.1.1), with the place of each patch added to its key as in
Qwen-VL (arXiv 2308.12966, section 2.1). All images of a row in one call; the queries of an image see its patches alone. Shapes:
P patches of all images, I images, Q queries, c encoder width, d decoder width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from mmds.errors import ConfigError
from mmds.geometry import Grid
from mmds.model.segments import segment_attention

LAYERS = 2
_BASE = 10000.0


class Resampler(nn.Module):
    """[P, c] -> [I * Q, d]: every image becomes Q tokens."""

    def __init__(self, c: int, d: int, queries: int) -> None:
        super().__init__()
        self.queries = nn.Parameter(torch.randn(queries, d) * d**-0.5)
        self.project = nn.Linear(c, d)
        self.norm = nn.LayerNorm(d)
        self.layers = nn.ModuleList(CrossLayer(d) for _ in range(LAYERS))
        self.norm_out = nn.LayerNorm(d)
        self.out = nn.Linear(d, d)

    def forward(self, features: Tensor, grids: Sequence[Grid]) -> Tensor:
        """features in reading order of each image; grids: rows and columns of each."""
        content = self.norm(self.project(features))
        places = torch.cat([sines_2d(grid, content.shape[1]) for grid in grids])
        keys = content + places.to(content, non_blocking=True)
        lengths = [rows * columns for rows, columns in grids]
        tokens = self.queries.to(content.dtype).repeat(len(grids), 1)
        for layer in self.layers:
            tokens = layer(tokens, keys, content, lengths)
        out: Tensor = self.out(self.norm_out(tokens))
        return out


class CrossLayer(nn.Module):
    """Queries attend to the patches of their own image, then an MLP; both residual, norms before."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.head = next(head for head in (128, 64, 32, 16, 8, 4, 2, 1) if d % head == 0)
        self.norm_q = nn.LayerNorm(d)
        self.q, self.k, self.v, self.proj = (nn.Linear(d, d) for _ in range(4))
        self.norm_mlp = nn.LayerNorm(d)
        self.up = nn.Linear(d, 4 * d)
        self.act = nn.GELU()
        self.down = nn.Linear(4 * d, d)

    def forward(self, tokens: Tensor, keys: Tensor, values: Tensor, lengths: Sequence[int]) -> Tensor:
        """tokens [I * Q, d], keys and values [P, d], lengths: patches of each image -> [I * Q, d]."""
        each = tokens.shape[0] // len(lengths)
        q, k, v = self.q(self.norm_q(tokens)), self.k(keys), self.v(values)
        heads = [x.unflatten(-1, (-1, self.head)).transpose(0, 1)[None] for x in (q, k, v)]
        read = segment_attention(heads[0], heads[1], heads[2], [each] * len(lengths), lengths)
        tokens = tokens + self.proj(read[0].transpose(0, 1).flatten(1))
        changed: Tensor = tokens + self.down(self.act(self.up(self.norm_mlp(tokens))))
        return changed


def sines_2d(grid: Grid, width: int) -> Tensor:
    """fp32 [rows * columns, width]: sines and cosines of the row in the first half, of the column in the second.

    Raises ConfigError unless the width is a multiple of 4.
    """
    if width % 4:
        raise ConfigError(
            f"mmds.model.connector: the resampler needs a decoder width that is a multiple of 4, not {width}"
        )
    rows, columns = grid
    frequencies = _BASE ** -(torch.arange(width // 4).float() / (width // 4))
    row, column = (torch.arange(n).float()[:, None] * frequencies for n in (rows, columns))
    by_row, by_column = (torch.cat([x.sin(), x.cos()], dim=1) for x in (row, column))
    return torch.cat([by_row.repeat_interleave(columns, 0), by_column.repeat(rows, 1)], dim=1)
