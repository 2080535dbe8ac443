"""Architecture numbers of the three parts, as `cost` and `memory` need them; `mmds.model.shapes` reads them off real modules.

Letters: c encoder width, d decoder width, H heads, G key/value heads, D head size, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class EncoderShape:
    """A vision transformer up to its feature layer.

    blocks: those that are kept (blocks above the feature layer are dropped and cost nothing). width: c. mlp: hidden width. gated:
    whether the MLP has a gate (three matrices, not two). heads, head: number and size. prefix: class and register tokens of a piece.
    patch: pixels a side. last_is_product: whether a block ends with its MLP's last product (no layer scale, no norm behind it).
    """

    blocks: int
    width: int
    mlp: int
    heads: int
    head: int
    patch: int
    gated: bool = False
    prefix: int = 0
    last_is_product: bool = True


@dataclass(frozen=True, kw_only=True)
class MeasuredTower:
    """A tower of another make (ResNet, ConvNeXt), which takes squares of one size only: FLOPs per feature cell, counted once.

    forward: FLOPs. backward: FLOPs when all of it trains. kept: bytes that the backward pass needs, in bf16.
    """

    forward: float
    backward: float
    kept: float


@dataclass(frozen=True, kw_only=True)
class Linear:
    """An affine map of a connector.

    per: "patch", "merged" (a square of merge x merge patches) or "query" (of a piece). first: reads the encoder's features, with
    nothing that trains in between. activated: an activation follows.
    """

    per: str
    inputs: int
    outputs: int
    first: bool = False
    activated: bool = False

    @property
    def size(self) -> int:
        """Multiply-adds of one application."""
        return self.inputs * self.outputs


@dataclass(frozen=True, kw_only=True)
class ConnectorShape:
    """linears: in order of use, the last one last. merge: patches joined per side. queries: learned queries of a piece, 0 = none.
    cross_attention: heads x head size, summed over the layers in which the queries of a piece attend to its patches."""

    linears: tuple[Linear, ...]
    merge: int = 1
    queries: int = 0
    cross_attention: int = 0


@dataclass(frozen=True, kw_only=True)
class DecoderShape:
    """A causal language model.

    layers, hidden (d), heads (H), kv_heads (G), head (D), intermediate (hidden width of a dense MLP), gated, vocabulary (V, rows of the
    output matrix), tied (it is the embedding). Mixture of experts: moe_layers (indices), experts, active (per token), expert_width,
    shared_width (hidden width of experts that every token passes, 0 = none), shared_gate (they are weighted by a gate). qk_norm: queries and
    keys are normalised. last_is_product: whether a dense layer ends with its MLP's last product.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head: int
    intermediate: int
    vocabulary: int
    gated: bool = True
    tied: bool = False
    moe_layers: tuple[int, ...] = ()
    experts: int = 0
    active: int = 0
    expert_width: int = 0
    shared_width: int = 0
    shared_gate: bool = False
    qk_norm: bool = False
    last_is_product: bool = True


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """The three parts."""

    encoder: EncoderShape | MeasuredTower
    connector: ConnectorShape
    decoder: DecoderShape
