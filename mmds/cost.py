"""What a row or a sample costs: FLOPs of encoder, connector and decoder, from architecture numbers alone.

Counted as in PaLM (arXiv 2204.02311, appendix B): matrix products only, a multiply-add is 2 FLOPs. A product of x [n, i] and a matrix
[i, o] takes 2 n i o forward, as much again for the gradient of x, and as much again for the gradient of the matrix; which of the
three run is decided by what trains (`Training`). Not counted, because it is no product of matrices or below 0.1 %: norms, activations,
softmax, rotary angles, interpolated position tables.

Everything is linear in six sums over pieces and segments (`Sums`), so the cost of a part is six coefficients (`Terms`), and a row, a sample
and a million samples are computed by the same line. Letters: T tokens of a segment, n patches of a piece (an image, or its overview
and tiles), c encoder width, d decoder width, H heads, G key/value heads, D head size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from mmds.architecture import ConnectorShape, DecoderShape, EncoderShape, MeasuredTower, ModelShape
from mmds.config_types import RecomputeSection

Floats = npt.NDArray[np.float64]

WHOLE = 1_000_000
"""Trained blocks of a part of which everything trains, what lies outside its blocks included."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """What trains. encoder, decoder: blocks, counted from the last; 0 = frozen, WHOLE = all, with what lies outside of blocks (the
    patch convolution). head: the decoder's output matrix, of itself or as its tied embedding. adapters: weights of LoRA's matrices in the
    decoder, all of which train."""

    encoder: int = 0
    connector: bool = False
    decoder: int = 0
    head: bool = False
    adapters: int = 0

    @property
    def into_decoder(self) -> bool:
        """Whether gradients pass through the whole decoder, to its inputs."""
        return self.connector or self.encoder > 0


def whole_parts(*, encoder: bool, connector: bool, decoder: bool) -> Training:
    """Parts that train wholly or not at all, as the rows of the stage table say."""
    return Training(
        encoder=WHOLE if encoder else 0,
        connector=connector,
        decoder=WHOLE if decoder else 0,
        head=decoder,
    )


@dataclass(frozen=True, kw_only=True)
class Sums:
    """All that decides a cost, float64, 0-dim for a row or [samples] for many samples.

    tokens: of the decoder. squares: sum over segments of T^2 (of a sample: its own length squared). supervised: tokens that the head
    predicts. pieces: encoder inputs. patches: of all pieces. patch_squares: sum over pieces of n^2.
    """

    tokens: Floats
    squares: Floats
    supervised: Floats
    pieces: Floats
    patches: Floats
    patch_squares: Floats

    def __getitem__(self, at: int) -> Sums:
        """Those of one of many rows."""
        return Sums(**{name: np.asarray(values[at]) for name, values in vars(self).items()})


def row_sums(
    *, patches: Sequence[int], segments: Sequence[int], supervised: int, dummy_patches: int = 0
) -> Sums:
    """The sums of one row: patches of each piece, tokens of each segment, supervised tokens of all.

    dummy_patches: of the smallest encoder input, which a row without images sends through encoder and connector all the same
    (`Geometry.dummy`); 0 = leave it out.
    """
    pieces = patches or ([dummy_patches] if dummy_patches else [])
    n, t = np.asarray(pieces, np.float64), np.asarray(segments, np.float64)
    return Sums(
        tokens=np.asarray(t.sum()),
        squares=np.asarray((t**2).sum()),
        supervised=np.asarray(float(supervised)),
        pieces=np.asarray(float(n.size)),
        patches=np.asarray(n.sum()),
        patch_squares=np.asarray((n**2).sum()),
    )


@dataclass(frozen=True, kw_only=True)
class Terms:
    """FLOPs (or bytes) of a part per unit of each of the `Sums`."""

    tokens: float = 0.0
    squares: float = 0.0
    supervised: float = 0.0
    pieces: float = 0.0
    patches: float = 0.0
    patch_squares: float = 0.0

    def of(self, sums: Sums) -> Floats:
        """Their sum, in the shape of the sums."""
        total = np.zeros(np.shape(sums.tokens))
        for field in fields(self):
            if value := getattr(self, field.name):
                total = total + value * getattr(sums, field.name)
        return total


@dataclass(frozen=True, kw_only=True)
class Flops:
    """FLOPs by part, in the shape of the sums that they were computed from."""

    encoder: Floats
    connector: Floats
    decoder: Floats

    @property
    def vision(self) -> Floats:
        """Encoder and connector: what images cost before the decoder."""
        return self.encoder + self.connector

    @property
    def total(self) -> Floats:
        """All parts."""
        return self.encoder + self.connector + self.decoder


@dataclass(frozen=True, kw_only=True)
class CostModel:
    """Coefficients of each part in one run; made by `cost_model`, or by hand."""

    encoder: Terms
    connector: Terms
    decoder: Terms

    def flops(self, sums: Sums) -> Flops:
        """FLOPs of a row, or of each sample, forward, backward and recomputed."""
        return Flops(
            encoder=self.encoder.of(sums), connector=self.connector.of(sums), decoder=self.decoder.of(sums)
        )


def cost_model(
    shape: ModelShape,
    training: Training,
    *,
    recompute: RecomputeSection | None = None,
    stops_early: bool = True,
    causal_half: bool = False,
) -> CostModel:
    """The cost of rows of this model in a run in which this trains; Training() is evaluation, one forward.

    recompute: which blocks are computed once more in the backward pass; None = none. stops_early: recomputation ends once all that was
    to be kept is there, which skips a last product (torch's non-reentrant checkpoint; DeepSpeed's function does not). causal_half: count
    half of the decoder's attention, as kernels that skip what is masked; False counts as torch's math SDPA computes.
    """
    every = recompute or RecomputeSection(encoder=0, connector=0, decoder=0)
    return CostModel(
        encoder=encoder_terms(shape.encoder, training, every=every.encoder, stops_early=stops_early),
        connector=connector_terms(shape.connector, training, every=every.connector, stops_early=stops_early),
        decoder=decoder_terms(
            shape.decoder, training, every=every.decoder, stops_early=stops_early, causal_half=causal_half
        ),
    )


def encoder_terms(
    shape: EncoderShape | MeasuredTower, training: Training, *, every: int = 0, stops_early: bool = True
) -> Terms:
    """FLOPs of the encoder by piece, patch and squared patches.

    Forward of a piece of n patches, q prefix tokens, so t = n + q tokens: the patch convolution 2 n 3 p^2 c; in each block 2 t per weight of
    its matrices (`encoder_matrices`) and 4 H D t^2 for the two products of attention; t^2 = n^2 + 2 q n + q^2. Passes: blocks that
    train 3, blocks below them 1; the convolution, whose input needs no gradient, 2 when it trains.
    """
    if isinstance(shape, MeasuredTower):
        again = shape.forward / every if every and training.encoder else 0.0
        return Terms(patches=shape.forward + (shape.backward if training.encoder else 0.0) + again)
    matrices = [encoder_matrices(shape)] * shape.blocks
    last = shape.width * shape.mlp if shape.last_is_product and stops_early else 0
    per_token, per_pair = _block_products(
        matrices, [last] * shape.blocks, 2 * shape.heads * shape.head, trained=training.encoder, every=every
    )
    convolution = 3 * shape.patch**2 * shape.width * (2 if training.encoder >= WHOLE else 1)
    q = shape.prefix
    return Terms(
        pieces=2 * (per_token * q + per_pair * q**2),
        patches=2 * (convolution + per_token + per_pair * 2 * q),
        patch_squares=2 * per_pair,
    )


def encoder_matrices(shape: EncoderShape) -> int:
    """Weights of the matrices of one block: queries, keys, values, output (4 c H D) and two or three of the MLP (c x mlp)."""
    attention = 4 * shape.width * shape.heads * shape.head
    return attention + (3 if shape.gated else 2) * shape.width * shape.mlp


def connector_terms(
    shape: ConnectorShape, training: Training, *, every: int = 0, stops_early: bool = True
) -> Terms:
    """FLOPs of the connector by piece and patch.

    Forward: 2 x weights of each linear for each patch, merged patch (n / merge^2) or query, and 4 H D for each pair of a query and a patch.
    Passes: one more where the weights train, one more where the gradient of the input is needed: not by linears that read the features
    of a frozen encoder, except under DeepSpeed's checkpoint, which makes that gradient though nobody reads it. (A frozen
    resampler under a trained encoder is counted a little too high: its fixed queries need no gradient.)
    """
    back = training.into_decoder
    cross = shape.cross_attention * shape.queries * 2
    unread = bool(every) and not stops_early and training.connector
    totals = {"patch": 0.0, "merged": 0.0, "query": 0.0}
    for index, linear in enumerate(shape.linears):
        through = training.encoder > 0 or unread if linear.first else back
        passes = 1 + training.connector + through
        skipped = stops_early and index == len(shape.linears) - 1
        totals[linear.per] += linear.size * (passes + (bool(every) and back and not skipped))
    totals["patch"] += cross * (1 + 2 * back + (bool(every) and back))
    return Terms(
        patches=2 * (totals["patch"] + totals["merged"] / shape.merge**2),
        pieces=2 * totals["query"] * shape.queries,
    )


def decoder_terms(
    shape: DecoderShape,
    training: Training,
    *,
    every: int = 0,
    stops_early: bool = True,
    causal_half: bool = False,
) -> Terms:
    """FLOPs of the decoder by token, squared segment and supervised token.

    Forward: in each layer 2 per token and weight that the token meets (`decoder_matrices`), and 4 H D T^2 for the two products of
    attention in a segment, whatever G is; the head 2 d V for each supervised token. Passes: layers that train 3; frozen ones that
    gradients pass through on their way to the connector 2 of their matrices and 3 of attention, which needs the gradients of both its
    inputs; else 1. In sum, all trained: 6 N T + 12 L H D T^2, PaLM's appendix B. Adapters: 2 per token and weight, 3 passes, beside frozen
    layers that gradients pass through (what lies below the first adapter is counted a little too high).
    """
    matrices = [decoder_matrices(shape, layer) for layer in range(shape.layers)]
    # with adapters one of them follows the last product, and only its own second matrix is skipped (not counted: a rank's worth)
    skips = shape.last_is_product and stops_early and not training.adapters
    dense = shape.hidden * shape.intermediate if skips else 0
    last = [0 if layer in shape.moe_layers else dense for layer in range(shape.layers)]
    through = training.into_decoder or training.adapters > 0
    per_token, per_pair = _block_products(
        matrices,
        last,
        2 * shape.heads * shape.head,
        trained=training.decoder,
        carries=through,
        every=every,
    )
    again = sum(index % every == 0 for index in range(shape.layers)) / shape.layers if every else 0.0
    per_token += training.adapters * (3 + again)
    head_passes = 1 + training.head + (training.decoder > 0 or through)
    return Terms(
        tokens=2.0 * per_token,
        squares=2 * per_pair * (0.5 if causal_half else 1.0),
        supervised=2 * shape.hidden * shape.vocabulary * head_passes,
    )


def decoder_matrices(shape: DecoderShape, layer: int) -> int:
    """Weights of the matrices of a layer that one token meets: attention 2 d H D + 2 d G D; an MLP of three matrices where gated, else two;
    in a layer of experts the router d x experts, the active experts, and the shared ones with their gate."""
    attention = 2 * shape.hidden * shape.head * (shape.heads + shape.kv_heads)
    products = 3 if shape.gated else 2
    if layer not in shape.moe_layers:
        return attention + products * shape.hidden * shape.intermediate
    widths = shape.active * shape.expert_width + shape.shared_width
    return attention + shape.hidden * (products * widths + shape.experts + int(shape.shared_gate))


def _block_products(
    matrices: Sequence[int],
    last: Sequence[int],
    pair: int,
    *,
    trained: int,
    carries: bool = False,
    every: int = 0,
) -> tuple[float, float]:
    """Multiply-adds per token, and per pair of tokens of a segment, of a stack of blocks over all passes.

    matrices: weights of each block. last: those that recomputation skips. pair: multiply-adds of a pair forward. trained: blocks from
    the last. carries: gradients pass through the blocks below them too. every: every n-th block that back-propagates is recomputed.
    """
    per_token = per_pair = 0
    for index, (weights, skipped) in enumerate(zip(matrices, last, strict=True)):
        trains = index >= len(matrices) - trained
        back = trains or carries
        again = bool(every) and index % every == 0 and back
        per_token += weights * (1 + trains + back) + again * (weights - skipped)
        per_pair += pair * (1 + 2 * back + again)
    return per_token, per_pair
