"""Connectors: from encoder features to visual tokens of the decoder's width.

A new connector is one class with `forward([N, patches, d_encoder]) -> [N, visual tokens, d_decoder]`, its merge factor, and one
entry in CONNECTORS. Shapes: N images, g x g patches, c encoder width, d decoder width.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from mmds.errors import ConfigError
from mmds.model.recompute import Checkpoint, recompute_blocks


class Linear(nn.Module):
    """One affine map for each patch (LLaVA's first projector)."""

    def __init__(self, c: int, d: int) -> None:
        super().__init__()
        self.proj = nn.Linear(c, d)

    def forward(self, features: Tensor) -> Tensor:
        """[N, g*g, c] -> [N, g*g, d]."""
        projected: Tensor = self.proj(features)
        return projected


class Mlp2x(nn.Module):
    """Linear, GELU, linear for each patch (LLaVA-1.5, section 3.2)."""

    def __init__(self, c: int, d: int) -> None:
        super().__init__()
        self.up = nn.Linear(c, d)
        self.act = nn.GELU()
        self.down = nn.Linear(d, d)

    def forward(self, features: Tensor) -> Tensor:
        """[N, g*g, c] -> [N, g*g, d]."""
        projected: Tensor = self.down(self.act(self.up(features)))
        return projected


class MergeMlp(nn.Module):
    """Join 2x2 neighbouring patches, then norm and MLP (Qwen2-VL's merger, section 2.1)."""

    def __init__(self, c: int, d: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(c, eps=1e-6)
        self.up = nn.Linear(4 * c, 4 * c)
        self.act = nn.GELU()
        self.down = nn.Linear(4 * c, d)

    def forward(self, features: Tensor) -> Tensor:
        """[N, g*g, c] -> [N, g*g/4, d], in reading order of the 2x2 blocks."""
        merged = merge_neighbours(self.norm(features), 2)
        projected: Tensor = self.down(self.act(self.up(merged)))
        return projected


def merge_neighbours(features: Tensor, merge: int) -> Tensor:
    """[N, g*g, c] in reading order -> [N, (g/merge)^2, merge*merge*c]; each block's patches in reading order."""
    n, patches, c = features.shape
    g = int(patches**0.5)
    blocks = features.reshape(n, g // merge, merge, g // merge, merge, c).permute(0, 1, 3, 2, 4, 5)
    return blocks.reshape(n, (g // merge) ** 2, merge * merge * c)


CONNECTORS: dict[str, tuple[Callable[[int, int], nn.Module], int]] = {
    # name: (constructor from the encoder's and the decoder's width, patches merged per side)
    "linear": (Linear, 1),
    "mlp2x": (Mlp2x, 1),
    "merge_mlp": (MergeMlp, 2),
}


class Connector(nn.Module):
    """One of CONNECTORS by name."""

    def __init__(self, name: str, *, encoder_width: int, decoder_width: int) -> None:
        super().__init__()
        if name not in CONNECTORS:
            raise ConfigError(f"mmds.model.connector: {name!r} is none of {', '.join(CONNECTORS)}")
        build, self.merge = CONNECTORS[name]
        self.name = name
        self.net = build(encoder_width, decoder_width)

    def forward(self, features: Tensor) -> Tensor:
        """[N, patches, c] -> [N, visual tokens, d]."""
        visual: Tensor = self.net(features)
        return visual

    def set_recompute(self, every: int, checkpoint: Checkpoint) -> None:
        """Recompute the connector, which is one block, in the backward pass; every = 0: do not."""
        recompute_blocks([self.net], every, checkpoint)


def connector_merge(name: str) -> int:
    """Patches that the connector `name` merges per side."""
    if name not in CONNECTORS:
        raise ConfigError(f"mmds.model.connector: {name!r} is none of {', '.join(CONNECTORS)}")
    return CONNECTORS[name][1]
