"""Memory of a rank: what a micro-step keeps for its backward pass, and the states of the model. bf16 compute, fp32 masters.

Activations are counted as what autograd keeps (Korthikanti et al., arXiv 2205.05198, section 4, without dropout), with attention that keeps
queries, keys, values, its output and one fp32 number per head (no T x T matrix), as variable-length kernels do. Allocator slack,
communication buffers and the CUDA context are not in it. Letters as in `cost`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mmds.architecture import DecoderShape, EncoderShape, MeasuredTower, ModelShape
from mmds.config_types import RecomputeSection
from mmds.cost import WHOLE, Floats, Sums, Terms, Training

HALF, FULL = 2, 4
"""Bytes of a bf16 and of an fp32 number."""

SPARE = 1.5
"""DeepSpeed's factor for buffers in the CPU's memory (`additional_buffer_factor` of its estimators)."""


@dataclass(frozen=True, kw_only=True)
class ActivationBytes:
    """Bytes by part, in the shape of the sums.

    encoder, connector, decoder: kept from the forward pass until the part's own backward pass. head: at its fullest, logits of the supervised
    tokens and their gradients, which are gone before the layers go back. working: of the one block that is being recomputed.
    """

    encoder: Floats
    connector: Floats
    decoder: Floats
    head: Floats
    working: Floats

    @property
    def peak(self) -> Floats:
        """The most at one time: all that is kept, and the head or else a block at work."""
        return self.encoder + self.connector + self.decoder + np.maximum(self.head, self.working)


@dataclass(frozen=True, kw_only=True)
class StateBytes:
    """Weights, gradients, masters and optimizer states. device: of one rank. host: in the CPU's memory of one node."""

    device: int
    host: int


def activation_bytes(
    shape: ModelShape,
    sums: Sums,
    training: Training,
    *,
    recompute: RecomputeSection | None = None,
    keeps_inputs: bool = False,
) -> ActivationBytes:
    """What a micro-step of these rows keeps. recompute: these blocks keep their input alone; None = none. keeps_inputs: of frozen matrices
    too, as DeepSpeed's linear function does, which ZeRO-3 puts in the place of torch's.

    The head: bf16 logits (2), fp32 log-probabilities (4) and, going back, two fp32 gradients (8) less the bf16 logits by then: 12 bytes
    for each supervised token and vocabulary row.
    """
    every = recompute or RecomputeSection(encoder=0, connector=0, decoder=0)
    encoder, encoder_block = _encoder(shape.encoder, training, every.encoder)
    decoder, decoder_block = _decoder(shape.decoder, training, every.decoder, keeps_inputs)
    back = training.into_decoder or training.decoder > 0 or training.head or training.adapters > 0
    kept_connector = _connector(shape, training)
    connector_block = Terms()
    if every.connector and training.into_decoder:
        connector_block, kept_connector = kept_connector, _features(shape)
    head = Terms(supervised=3 * FULL * shape.decoder.vocabulary if back else 0.0)
    at_work = [terms.of(sums) for terms in (encoder_block, decoder_block, connector_block)]
    return ActivationBytes(
        encoder=encoder.of(sums),
        connector=kept_connector.of(sums),
        decoder=decoder.of(sums),
        head=head.of(sums),
        working=np.maximum.reduce(at_work),
    )


def _encoder(shape: EncoderShape | MeasuredTower, training: Training, every: int) -> tuple[Terms, Terms]:
    """Kept bytes, and those of one block, where it is recomputed.

    A block keeps for each token: inputs and outputs of both norms (4 c), queries, keys, values and attention's output (4 H D), the MLP's
    hidden vector before and after its activation (2 mlp; gated 4), in bf16; means and deviations of norms and one number per
    head in fp32. The patch convolution keeps its pixels when it trains.
    """
    if not training.encoder:
        return Terms(), Terms()
    if isinstance(shape, MeasuredTower):
        return Terms(patches=shape.kept), Terms()
    hidden = (4 if shape.gated else 2) * shape.mlp
    block = HALF * (4 * shape.width + 4 * shape.heads * shape.head + hidden) + FULL * (4 + shape.heads)
    first = max(0, shape.blocks - training.encoder)
    whole = {index: float(block) for index in range(first, shape.blocks)}
    kept, largest = _kept(whole, every, HALF * shape.width)
    pixels = HALF * 3 * shape.patch**2 if training.encoder >= WHOLE else 0
    return (
        Terms(patches=kept + pixels, pieces=kept * shape.prefix),
        Terms(patches=largest, pieces=largest * shape.prefix),
    )


def _connector(shape: ModelShape, training: Training) -> Terms:
    """Inputs of its linears and of its activations; in a resampler also queries, keys, values and output of attention."""
    if not training.into_decoder:
        return Terms()
    connector = shape.connector
    kept = {"patch": 0.0, "merged": 0.0, "query": 0.0}
    for linear in connector.linears:
        inputs = linear.inputs if training.connector else 0
        kept[linear.per] += HALF * (inputs + (linear.outputs if linear.activated else 0))
    kept["patch"] += HALF * 2 * connector.cross_attention
    kept["query"] += HALF * 2 * connector.cross_attention
    return Terms(
        patches=kept["patch"] + kept["merged"] / connector.merge**2,
        pieces=kept["query"] * connector.queries,
    )


def _features(shape: ModelShape) -> Terms:
    """The encoder's features, which a recomputed connector keeps; a merging linear reads merge x merge of them as one."""
    first = shape.connector.linears[0]
    return Terms(patches=HALF * first.inputs / (shape.connector.merge**2 if first.per == "merged" else 1))


def _decoder(shape: DecoderShape, training: Training, every: int, keeps_inputs: bool) -> tuple[Terms, Terms]:
    """Kept bytes, and those of the largest layer where it is recomputed; the final norm is kept in any case. A layer with adapters keeps
    what a trained one does: A needs the input of its matrix."""
    through = training.into_decoder or training.adapters > 0
    first = 0 if through else max(0, shape.layers - training.decoder)
    if first >= shape.layers:
        return Terms(), Terms()
    whole = {
        layer: layer_bytes(
            shape,
            layer,
            trains=layer >= shape.layers - training.decoder or training.adapters > 0,
            keeps_inputs=keeps_inputs,
        )
        for layer in range(first, shape.layers)
    }
    kept, largest = _kept(whole, every, HALF * shape.hidden)
    return Terms(tokens=kept + _norm_bytes(shape.hidden, trains=training.decoder > 0)), Terms(tokens=largest)


def layer_bytes(shape: DecoderShape, layer: int, *, trains: bool, keeps_inputs: bool = False) -> float:
    """Bytes that a decoder layer keeps for each token.

    Two norms; queries and output 2 H D, keys and values 2 G D in bf16, one fp32 number per head; of an MLP its gate, the gate's activation,
    the other branch and their product (4; ungated 2: before and after the activation). Frozen layers keep no input of a matrix,
    so neither the product nor the norms' bf16 outputs, unless `keeps_inputs`. An expert keeps an MLP's, its input and, to be weighted, its output.
    """
    inputs = trains or keeps_inputs
    norms = 2 * _norm_bytes(shape.hidden, trains=trains) + (0 if trains else inputs * 2 * HALF * shape.hidden)
    if shape.qk_norm:
        norms += (FULL + (HALF if trains else 0)) * (shape.heads + shape.kv_heads) * shape.head
    attention = HALF * 2 * (shape.heads + shape.kv_heads) * shape.head + FULL * shape.heads
    per_hidden = HALF * ((3 if shape.gated else 1) + inputs)
    if layer not in shape.moe_layers:
        return float(norms + attention + per_hidden * shape.intermediate)
    expert = per_hidden * shape.expert_width + HALF * shape.hidden * (1 + inputs)
    shared = per_hidden * shape.shared_width
    return float(norms + attention + shape.active * expert + shared + FULL * shape.experts)


def _norm_bytes(width: int, *, trains: bool) -> float:
    """An RMS norm as transformers writes it: its input in fp32, and where it trains the bf16 vector before and after its weight."""
    return float(width * (FULL + (2 * HALF if trains else 0)))


def _kept(whole: dict[int, float], every: int, block_input: float) -> tuple[float, float]:
    """Bytes per token of all blocks that back-propagate, recomputed ones by their input, and of the largest recomputed one."""
    again = {index: size for index, size in whole.items() if every and index % every == 0}
    kept = sum(whole.values()) - sum(again.values()) + block_input * len(again)
    return kept, max(again.values(), default=0.0)


def state_bytes(
    *,
    trained: int,
    frozen: int = 0,
    replicated: int = 0,
    zero_stage: int,
    ranks: int,
    ranks_per_node: int | None = None,
    largest_layer: int = 0,
    offload_optimizer: bool = False,
    offload_weights: bool = False,
) -> StateBytes:
    """Model states of one rank and of a node's CPU memory, AdamW, by ZeRO's stage.

    trained, frozen: parameters inside the engine; replicated: of a frozen encoder, whole on every rank. largest_layer: parameters of the
    largest module, which ZeRO-3 gathers. Per trained parameter: bf16 weight 2 and gradient 2, fp32 gradient 4, master 4 and Adam 8; ZeRO-1
    shards master and Adam, ZeRO-2 also both gradients, ZeRO-3 the weights too (and makes no whole bf16 gradient: 18 in all, as DeepSpeed
    counts). ZeRO-0 runs in fp32: 16. Equal to DeepSpeed's own estimators where all is trained (`estimate_zero2_model_states_mem_needs`,
    `estimate_zero3_model_states_mem_needs`). Raises ValueError for offloaded weights below ZeRO-3 or states at ZeRO-0.
    """
    if (offload_weights and (zero_stage < 3 or not offload_optimizer)) or (
        offload_optimizer and not zero_stage
    ):
        raise ValueError(
            "weights are offloaded at ZeRO-3 together with the optimizer, its states from ZeRO-1 on"
        )
    node = ranks if ranks_per_node is None else ranks_per_node
    nodes = max(1, ranks // node)
    if zero_stage == 0:
        return StateBytes(device=16 * trained + FULL * (frozen + replicated), host=0)
    if zero_stage == 3:
        sharded = _zero3(trained, frozen, ranks, offload_optimizer, offload_weights)
        device = HALF * replicated + 2 * HALF * largest_layer + sharded
        on_host = 2 * HALF * largest_layer * node * SPARE
        if offload_optimizer:
            weights = HALF * (trained + frozen) if offload_weights else 0
            on_host = (16 * trained + weights) / nodes * SPARE
        return StateBytes(device=device, host=int(on_host))
    fixed = HALF * (trained + frozen + replicated)
    if offload_optimizer:
        return StateBytes(device=fixed, host=int(trained * max(FULL * ranks, 16) * SPARE))
    host = int(FULL * (trained + frozen) * node * SPARE)
    if zero_stage == 1:
        return StateBytes(device=fixed + 6 * trained + int(12 * trained / ranks), host=host)
    return StateBytes(device=fixed + int(18 * trained / ranks), host=host)


def _zero3(trained: int, frozen: int, ranks: int, offload_optimizer: bool, offload_weights: bool) -> int:
    """A rank's share of what stays on the device."""
    weights = 0 if offload_weights else HALF * (trained + frozen)
    return int((weights + (0 if offload_optimizer else 16 * trained)) / ranks)
