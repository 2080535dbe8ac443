"""Architecture numbers read off the real modules, for `mmds.cost` and `mmds.memory`; weights are not needed (meta device).

Numbers come from the modules and their configs, and are then held against the modules' own weights: if the matrices that a block has are
not those that the cost formula counts, the tower or the family is refused by name instead of being counted wrongly. Towers that cannot
run packed (ResNet, ConvNeXt and other makes) take squares of one size, so one run of FlopCounterMode tells all.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import PreTrainedModel

from mmds.architecture import (
    ConnectorShape,
    DecoderShape,
    EncoderShape,
    Linear,
    MeasuredTower,
    ModelShape,
)
from mmds.cost import WHOLE, Training, decoder_matrices, encoder_matrices
from mmds.errors import ConfigError
from mmds.model.connector import Connector, kind_of, queries_of
from mmds.model.encoder import Encoder, tower_blocks
from mmds.model.resampler import Resampler

_PER: dict[str, tuple[str, ...]] = {
    "linear": ("patch",),
    "mlp2x": ("patch", "patch"),
    "merge_mlp": ("merged", "merged"),
    "pixel_shuffle": ("merged", "merged"),
}
"""What each linear of a connector is applied to, in order."""

_BEHIND_THE_MLP = ("ls2", "ls_2", "post_feedforward_layernorm")
"""Modules of a block that change its MLP's output, other than an nn.Identity."""


def model_shape(encoder: Encoder, connector: Connector, llm: PreTrainedModel) -> ModelShape:
    """All three parts. Raises ConfigError naming a part whose FLOPs would be counted wrongly."""
    return ModelShape(
        encoder=encoder_shape(encoder), connector=connector_shape(connector), decoder=decoder_shape(llm)
    )


def encoder_shape(encoder: Encoder) -> EncoderShape | MeasuredTower:
    """Of an open_clip ViT, or a timm ViT, SigLIP or EVA; any other tower is measured at its own size.

    Raises ConfigError for a transformer whose blocks have other matrices than the formula counts.
    """
    if encoder.unpackable:
        return measure_tower(encoder)
    visual: Any = encoder.visual
    trunk = getattr(visual, "trunk", None)
    blocks = tower_blocks(encoder.visual)
    block: Any = blocks[0]
    hidden, gated = _mlp(block.mlp)
    shape = EncoderShape(
        blocks=len(blocks),
        width=int(visual.conv1.out_channels if trunk is None else trunk.embed_dim),
        mlp=hidden,
        gated=gated,
        heads=int(block.attn.num_heads),
        head=int(block.attn.head_dim),
        prefix=1 if trunk is None else int(trunk.num_prefix_tokens),
        patch=encoder.spec.patch_size,
        last_is_product=_ends_with_product(block),
    )
    for number, each in enumerate(blocks):
        if (held := _matrices(each)) != encoder_matrices(shape):
            raise ConfigError(
                f"mmds.model.encoder.name: block {number} of {encoder.spec.name} has matrices of {held:,} weights, the cost model counts "
                f"{encoder_matrices(shape):,}; its cost would be wrong, so choose another encoder"
            )
    return shape


def measure_tower(encoder: Encoder) -> MeasuredTower:
    """FLOPs of one square through a tower of any make, on the meta device, by torch's own counter; and what its backward pass keeps."""
    size, cell = encoder.spec.image_size, encoder.spec.patch_size
    state: dict[str, Tensor] = {}
    for name, tensor in (*encoder.named_parameters(), *encoder.named_buffers()):
        there = torch.empty_like(
            tensor, device="meta", dtype=torch.bfloat16 if tensor.is_floating_point() else None
        )
        state[name] = there.requires_grad_(isinstance(tensor, nn.Parameter))
    weights = {tensor.untyped_storage()._cdata for tensor in state.values()}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in weights:
            kept[storage._cdata] = storage.nbytes()
        return tensor

    pixels = torch.zeros(1, 3, size, size, dtype=torch.uint8, device="meta")
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            features = functional_call(encoder, state, (pixels,))
        forward = counter.get_total_flops()
        features.backward(torch.zeros_like(features))
    cells = (size // cell) ** 2
    return MeasuredTower(
        forward=forward / cells,
        backward=(counter.get_total_flops() - forward) / cells,
        kept=sum(kept.values()) / cells,
    )


def connector_shape(connector: Connector) -> ConnectorShape:
    """Of any of CONNECTORS. Raises ConfigError for another one, whose linears nobody has described."""
    name, net = connector.section.name, connector.net
    if isinstance(net, Resampler):
        return _resampler(net)
    if name not in _PER:
        raise ConfigError(
            f"mmds.model.connector: the cost model does not know {name!r}: describe its linears in mmds/model/shapes.py"
        )
    linears = [module for module in net.modules() if isinstance(module, nn.Linear)]
    normed = any(isinstance(module, nn.LayerNorm) for module in net.modules())
    described = tuple(
        _linear(module, per=per, first=index == 0 and not normed, activated=index == 0 and len(linears) > 1)
        for index, (module, per) in enumerate(zip(linears, _PER[name], strict=True))
    )
    return ConnectorShape(
        linears=described, merge=kind_of(connector.section).merge, queries=queries_of(connector.section)
    )


def _resampler(net: Resampler) -> ConnectorShape:
    """Keys and values are made of every patch in each layer; all else is applied to queries."""
    linears = [_linear(net.project, per="patch", first=True)]
    for layer in net.layers:
        each: Any = layer
        linears += [_linear(module, per="patch") for module in (each.k, each.v)]
        linears += [_linear(module, per="query") for module in (each.q, each.proj, each.down)]
        linears.append(_linear(each.up, per="query", activated=True))
    linears.append(_linear(net.out, per="query"))
    queries, width = net.queries.shape
    return ConnectorShape(
        linears=tuple(linears), queries=int(queries), cross_attention=int(width) * len(net.layers)
    )


def _linear(module: nn.Linear, *, per: str, first: bool = False, activated: bool = False) -> Linear:
    return Linear(
        per=per, inputs=module.in_features, outputs=module.out_features, first=first, activated=activated
    )


def decoder_shape(llm: PreTrainedModel) -> DecoderShape:
    """Of a Hugging Face causal LM with grouped or full heads, tied or not, dense or with experts.

    Raises ConfigError naming a family whose layers have other matrices than the formula counts.
    """
    config: Any = llm.config.get_text_config()
    layers = decoder_layers(llm)
    heads = int(config.num_attention_heads)
    moe = tuple(index for index, layer in enumerate(layers) if _experts(layer) is not None)
    dense = [layer for index, layer in enumerate(layers) if index not in moe]
    output: Any = llm.get_output_embeddings()
    embedding: Any = llm.get_input_embeddings()
    facts = _expert_facts(config, layers[moe[0]]) if moe else {}
    hidden, gated = _mlp(_mlp_of(dense[0])) if dense else (0, True)
    shape = DecoderShape(
        layers=len(layers),
        hidden=int(config.hidden_size),
        heads=heads,
        kv_heads=int(getattr(config, "num_key_value_heads", None) or heads),
        head=int(getattr(config, "head_dim", None) or config.hidden_size // heads),
        intermediate=hidden,
        gated=gated,
        vocabulary=int(output.weight.shape[0]),
        tied=output.weight is embedding.weight or bool(config.tie_word_embeddings),
        moe_layers=moe,
        qk_norm=any(name.endswith("q_norm") for name, _ in layers[0].named_modules()),
        last_is_product=bool(dense) and _ends_with_product(dense[0]),
        **facts,
    )
    _check_layers(llm, shape, layers)
    return shape


def decoder_layers(llm: PreTrainedModel) -> list[nn.Module]:
    """The layers of a decoder in order. Raises ConfigError naming a family that has no one stack of them."""
    wanted = int(llm.config.get_text_config().num_hidden_layers)
    for module in llm.modules():
        if isinstance(module, nn.ModuleList) and len(module) == wanted:
            return list(module)
    raise _refused(llm, f"it has no stack of {wanted} layers")


def _expert_facts(config: Any, layer: nn.Module) -> dict[str, Any]:
    """The numbers of a layer of experts; experts are one tensor [experts, 2 x width, d] and one [experts, d, width]."""
    down = _experts(layer)
    assert down is not None
    shared, gate = 0, False
    for name, module in layer.named_modules():
        last = name.rpartition(".")[2]
        if last in ("shared_expert", "shared_experts", "shared_mlp"):
            shared = _mlp(module)[0]
        gate = gate or last == "shared_expert_gate"
    return {
        "experts": int(down.shape[0]),
        "active": int(config.num_experts_per_tok),
        "expert_width": int(down.shape[2]),
        "shared_width": shared,
        "shared_gate": gate,
    }


def _experts(layer: nn.Module) -> Tensor | None:
    """The tensor of all experts' last matrices, or None in a dense layer."""
    named = (p for name, p in layer.named_parameters() if name.endswith("experts.down_proj") and p.dim() == 3)
    return next(named, None)


def _mlp_of(layer: Any) -> nn.Module:
    """The MLP of a dense layer: a module of that name, or the layer itself where its matrices are its own (OPT)."""
    mlp: nn.Module = getattr(layer, "mlp", None) or getattr(layer, "feed_forward", None) or layer
    return mlp


def _mlp(mlp: nn.Module) -> tuple[int, bool]:
    """Hidden width, and whether it is gated: its last matrix reads the hidden width, and the others make it once or twice."""
    matrices = [p for _, p in mlp.named_parameters() if p.dim() == 2]
    weights = sum(p.numel() for p in matrices)
    linears = [module for module in mlp.modules() if isinstance(module, nn.Linear)]
    hidden, width = (linears[-1].in_features, linears[-1].out_features) if linears else _widths(matrices)
    return hidden, weights == 3 * hidden * width


def _widths(matrices: Sequence[Tensor]) -> tuple[int, int]:
    """Hidden and outer width of an MLP of bare matrices [in, out] (GPT-2's Conv1D)."""
    rows, columns = matrices[-1].shape
    return int(rows), int(columns)


def _check_layers(llm: PreTrainedModel, shape: DecoderShape, layers: Iterable[nn.Module]) -> None:
    idle = (shape.experts - shape.active) * shape.expert_width * shape.hidden * (3 if shape.gated else 2)
    for number, layer in enumerate(layers):
        counted = decoder_matrices(shape, number) + (idle if number in shape.moe_layers else 0)
        if (held := _matrices(layer)) != counted:
            raise _refused(
                llm,
                f"layer {number} has matrices of {held:,} weights, the formula counts {counted:,}",
            )


def _refused(llm: PreTrainedModel, reason: str) -> ConfigError:
    family = getattr(llm.config, "model_type", type(llm).__name__)
    return ConfigError(
        f"mmds.model.decoder: the cost of decoder family {family!r} is not known: {reason}; choose another decoder family"
    )


def _matrices(block: nn.Module) -> int:
    """Weights of a block's matrices, of all experts where it has some."""
    return sum(parameter.numel() for parameter in block.parameters() if parameter.dim() > 1)


def _ends_with_product(block: Any) -> bool:
    """Whether the MLP's last product goes into the residual sum as it is, so that recomputation can stop before it."""
    behind = (getattr(block, name, None) for name in _BEHIND_THE_MLP)
    scaled = getattr(block, "gamma_2", None) is not None or "PostNorm" in type(block).__name__
    return not scaled and all(module is None or isinstance(module, nn.Identity) for module in behind)


def training_of(
    encoder: Encoder, connector: Connector, llm: PreTrainedModel, rates: Mapping[str, float | None]
) -> Training:
    """What a run trains, from the rate of every parameter by its name in the stage table (None = frozen).

    A block counts as trained when one of its matrices has a rate; below the first trained block of the encoder only the forward pass runs.
    Where trained and frozen blocks alternate, all from the first trained one on count as trained (a little too high).
    """
    trained = {name for name, rate in rates.items() if rate is not None}

    def matrices(part: str, module: nn.Module) -> dict[int, bool]:
        """Whether each of its matrices trains, by the identity of the parameter."""
        trains: dict[int, bool] = {}
        for name, p in module.named_parameters(
            remove_duplicate=False
        ):  # a tied matrix has two names, one of them in `rates`
            if p.dim() > 1:
                trains[id(p)] = trains.get(id(p), False) or f"{part}.{name}" in trained
        return trains

    vision, language = matrices("encoder", encoder), matrices("decoder.llm", llm)
    blocks = tower_blocks(encoder.visual)
    output: Any = llm.get_output_embeddings()
    head = language.get(id(output.weight), False)
    return Training(
        encoder=_trained_blocks(vision, blocks),
        connector=any(matrices("connector", connector).values()),
        decoder=_trained_blocks(language, decoder_layers(llm), apart={id(output.weight)}),
        head=head,
    )


def _trained_blocks(
    trains: Mapping[int, bool], blocks: Sequence[nn.Module], apart: Iterable[int] = ()
) -> int:
    """Blocks from the last to the first trained one; WHOLE when a matrix outside of the blocks, and not `apart`, trains."""
    inside: set[int] = set()
    first = len(blocks)
    for index, block in enumerate(blocks):
        own = {id(parameter) for parameter in block.parameters()}
        inside |= own
        if any(trains.get(key, False) for key in own):
            first = min(first, index)
    outside = any(on for key, on in trains.items() if key not in inside and key not in set(apart))
    return WHOLE if outside else len(blocks) - first
