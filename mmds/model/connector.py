"""Connectors: from encoder features to visual tokens of the decoder's width, all images of a row in one call.

A new connector is one class with `forward(features [P, c], grids) -> tokens [V, d]` and one entry in CONNECTORS. Shapes: P patches of
all pieces (an image is one piece, or an overview and tiles), piece by piece in reading order; V visual tokens; c encoder width; d
decoder width. grids: rows and columns of patches of each piece.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from mmds.config_types import ConnectorSection
from mmds.errors import ConfigError, SpliceError
from mmds.geometry import Grid, ImagePlan, arrangement
from mmds.model.recompute import Checkpoint, recompute_blocks
from mmds.model.resampler import Resampler

QUERIES = 64
"""Visual tokens that the resampler makes of an image, unless the config says other."""


class Linear(nn.Module):
    """One affine map for each patch (LLaVA's first projector)."""

    def __init__(self, c: int, d: int) -> None:
        super().__init__()
        self.proj = nn.Linear(c, d)

    def forward(self, features: Tensor, grids: Sequence[Grid]) -> Tensor:
        """[P, c] -> [P, d]."""
        projected: Tensor = self.proj(features)
        return projected


class Mlp2x(nn.Module):
    """Linear, GELU, linear for each patch (LLaVA-1.5, section 3.2)."""

    def __init__(self, c: int, d: int) -> None:
        super().__init__()
        self.up = nn.Linear(c, d)
        self.act = nn.GELU()
        self.down = nn.Linear(d, d)

    def forward(self, features: Tensor, grids: Sequence[Grid]) -> Tensor:
        """[P, c] -> [P, d]."""
        projected: Tensor = self.down(self.act(self.up(features)))
        return projected


class MergeMlp(nn.Module):
    """Join 2x2 neighbouring patches, norm before, MLP after (Qwen2-VL's merger, arXiv 2409.12191)."""

    def __init__(self, c: int, d: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(c, eps=1e-6)
        self.up = nn.Linear(4 * c, 4 * c)
        self.act = nn.GELU()
        self.down = nn.Linear(4 * c, d)

    def forward(self, features: Tensor, grids: Sequence[Grid]) -> Tensor:
        """[P, c] -> [P/4, d], in reading order of the 2x2 blocks."""
        merged = merge_neighbours(self.norm(features), grids, 2)
        projected: Tensor = self.down(self.act(self.up(merged)))
        return projected


class PixelShuffle(nn.Module):
    """Join 2x2 neighbouring patches, then norm over all four and MLP (InternVL 1.5, arXiv 2404.16821)."""

    def __init__(self, c: int, d: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4 * c)
        self.up = nn.Linear(4 * c, d)
        self.act = nn.GELU()
        self.down = nn.Linear(d, d)

    def forward(self, features: Tensor, grids: Sequence[Grid]) -> Tensor:
        """[P, c] -> [P/4, d], in reading order of the 2x2 blocks."""
        merged = merge_neighbours(features, grids, 2)
        projected: Tensor = self.down(self.act(self.up(self.norm(merged))))
        return projected


def merge_neighbours(features: Tensor, grids: Sequence[Grid], merge: int) -> Tensor:
    """[P, c] -> [P / merge^2, merge^2 * c]: blocks in reading order in each piece, and each block's patches in reading order."""
    order, start = [], 0
    for rows, columns in grids:
        numbers = start + np.arange(rows * columns).reshape(rows // merge, merge, columns // merge, merge)
        order.append(numbers.transpose(0, 2, 1, 3).ravel())
        start += rows * columns
    index = torch.from_numpy(np.concatenate(order)).to(features.device, non_blocking=True)
    return features[index].reshape(-1, merge * merge * features.shape[1])


@dataclass(frozen=True, kw_only=True)
class Kind:
    """An entry of CONNECTORS.

    build: constructor from encoder width, decoder width and queries. merge: patches joined per side. fixed: makes `queries` tokens of
    any piece.
    """

    build: Callable[[int, int, int], nn.Module]
    merge: int = 1
    fixed: bool = False


CONNECTORS: dict[str, Kind] = {
    "linear": Kind(build=lambda c, d, _: Linear(c, d)),
    "mlp2x": Kind(build=lambda c, d, _: Mlp2x(c, d)),
    "merge_mlp": Kind(build=lambda c, d, _: MergeMlp(c, d), merge=2),
    "pixel_shuffle": Kind(build=lambda c, d, _: PixelShuffle(c, d), merge=2),
    "resampler": Kind(build=Resampler, fixed=True),
}


class Connector(nn.Module):
    """One of CONNECTORS by name, and the learned separator that ends each row of tiles.

    section: name and queries. separator: with resolution `anyres` a parameter [d], else None.
    """

    def __init__(
        self, section: ConnectorSection, *, encoder_width: int, decoder_width: int, separator: bool = False
    ) -> None:
        super().__init__()
        kind = kind_of(section)
        self.section = section
        self.net = kind.build(encoder_width, decoder_width, queries_of(section))
        self.separator = nn.Parameter(torch.empty(decoder_width)) if separator else None
        if self.separator is not None:
            nn.init.normal_(self.separator, std=1 / math.sqrt(decoder_width))  # as LLaVA-NeXT begins

    def forward(self, features: Tensor, plans: Sequence[ImagePlan]) -> Tensor:
        """[P, c] of these images -> visual tokens [V, d] in the order of their slots. Raises SpliceError when the counts differ."""
        patches = sum(plan.patches for plan in plans)
        if features.shape[0] != patches:
            raise SpliceError(
                f"{features.shape[0]} patch features were given for {len(plans)} images whose plans have {patches} patches"
            )
        tokens: Tensor = self.net(features, [plan.grid for plan in plans for _ in range(plan.pieces)])
        if self.separator is None:
            planned = sum(plan.visual_tokens for plan in plans)
            if tokens.shape[0] != planned:
                raise SpliceError(
                    f"the connector made {tokens.shape[0]} visual tokens of {len(plans)} images, {planned} are planned"
                )
            return tokens
        table = torch.cat([tokens, self.separator[None].to(tokens.dtype)])
        order, start = [], 0
        for plan in plans:
            places = arrangement(plan)
            order.append(np.where(places < 0, len(tokens), places + start))
            start += plan.patches // kind_of(self.section).merge ** 2
        if start != len(tokens):
            raise SpliceError(
                f"the connector made {len(tokens)} tokens of the pieces of {len(plans)} images, {start} are planned"
            )
        return table[torch.from_numpy(np.concatenate(order)).to(table.device, non_blocking=True)]

    def set_recompute(self, every: int, checkpoint: Checkpoint) -> None:
        """Recompute the connector, which is one block, in the backward pass; every = 0: do not."""
        recompute_blocks([self.net], every, checkpoint)


def kind_of(section: ConnectorSection) -> Kind:
    """The entry of a connector. Raises ConfigError for a name that is none."""
    if section.name not in CONNECTORS:
        raise ConfigError(f"mmds.model.connector: {section.name!r} is none of {', '.join(CONNECTORS)}")
    return CONNECTORS[section.name]


def queries_of(section: ConnectorSection) -> int:
    """Visual tokens that the connector makes of any piece; 0 = as many as merged patches."""
    return (section.queries or QUERIES) if kind_of(section).fixed else 0
