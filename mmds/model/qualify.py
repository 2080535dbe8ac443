"""Is this decoder family isolated in packed rows? Asked at build, of a small copy of the very config, before any weight is read.

A family may ignore the attention registry (Falcon), drop the boundaries on the way (StableLM), mix tokens outside attention (OPT's
learned positions), or need an argument that the backend does not know (Gemma 2's softcap). The small copy must give the same
logits for a packed row as stock eager attention gives for each sample alone; else the family is refused by name.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from mmds.errors import ConfigError
from mmds.model.attention import register_backends, rows_attention
from mmds.model.decoder import Decoder

_LENGTHS = (7, 19, 1, 12)  # tokens of the packed samples
_VOCABULARY = 96
_WINDOW = 6  # a sliding window shorter than the samples, so that it matters
_TOLERANCE = 1e-4
_KINDS = {"full_attention", "sliding_attention"}  # layer kinds that the packed backend computes


def qualify(config: Any, positions: str = "1d") -> None:
    """Raise ConfigError naming the family unless a 2-layer copy of `config` passes packed == stock eager alone, in fp32.

    config: a Hugging Face causal LM config; it is not changed. positions: with `mrope` the copy must also give the same for text,
    whose axes are equal, and something else for axes that differ. Takes about a second and no weights. Must run before
    a ZeRO-3 context exists.
    """
    family = getattr(config, "model_type", type(config).__name__)
    if getattr(config, "quantization_config", None):
        raise ConfigError(
            f"mmds.model.decoder: this {family} decoder is quantised (quantization_config), and QLoRA is not supported: name the model "
            "in bf16 or fp32, and train adapters beside it with mmds.stage.lora"
        )
    unknown = sorted(set(getattr(config, "layer_types", None) or ()) - _KINDS)
    if unknown:
        raise ConfigError(
            f"decoder family {family!r} has layers that cannot be held in packed rows: {', '.join(unknown)}; choose another decoder family"
        )
    with torch.random.fork_rng(devices=[]), _quiet():
        torch.manual_seed(0)
        stock = small_copy(config, family)
        _refuse_scalars(stock, family)
        rows = _embedded(stock)
        decoder = Decoder(deepcopy(stock), positions)
        with _counting() as calls:
            try:
                alone = torch.cat([_alone(stock, embeddings) for embeddings in rows])
                packed = _packed(decoder, rows)
                turned = _packed(decoder, rows, spread=True) if positions == "mrope" else None
            except (ValueError, TypeError, RuntimeError) as error:
                raise ConfigError(
                    f"decoder family {family!r} cannot be held in packed rows: {error}"
                ) from error
    layers = stock.config.num_hidden_layers * (1 if turned is None else 2)
    if len(calls) != layers:
        raise ConfigError(
            f"decoder family {family!r} ignores the attention registry ({len(calls)} of {layers} layers "
            "used the packed backend); choose another decoder family"
        )
    gap = float((packed - alone).abs().max() / alone.abs().max().clamp_min(1e-9))
    if not gap <= _TOLERANCE:
        raise ConfigError(
            f"decoder family {family!r} leaks between packed samples or drops an attention argument: packed and alone differ "
            f"by {gap:.1e} of the largest logit; choose another decoder family"
        )
    if turned is not None and torch.allclose(turned, packed):
        raise ConfigError(f'decoder family {family!r} does not look at mrope positions; use "1d"')


@contextlib.contextmanager
def _counting() -> Iterator[list[str]]:
    """The row backend, recording the class name of each module that calls it."""
    calls: list[str] = []

    def counted(module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        calls.append(type(module).__name__)
        return rows_attention(module, *args, **kwargs)

    register_backends(rows=counted)
    try:
        yield calls
    finally:
        register_backends()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' remarks about the small copy's config, which is nobody's model."""
    level = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)


def small_copy(config: Any, family: str) -> PreTrainedModel:
    """Two layers, few tokens in the vocabulary, narrow where the config stays consistent; weights large enough to tell."""
    small = deepcopy(config)
    small.num_hidden_layers = 2
    if getattr(small, "layer_types", None):
        kinds = list(dict.fromkeys(small.layer_types))
        small.layer_types = (kinds * 2)[:2]
    if getattr(small, "sliding_window", None):
        small.sliding_window = _WINDOW
    small.vocab_size = _VOCABULARY
    for key in ("pad_token_id", "bos_token_id", "eos_token_id"):
        setattr(small, key, None)
    small.tie_word_embeddings = bool(getattr(config, "tie_word_embeddings", False))
    errors = []
    for narrow in (_narrow, deepcopy):
        try:
            model = AutoModelForCausalLM.from_config(
                narrow(small), dtype=torch.float32, attn_implementation="eager"
            )
            _excite(model)
            with torch.no_grad():
                model(input_ids=torch.arange(3, 8)[None], use_cache=False)
            return model.eval()
        except (ValueError, RuntimeError, TypeError, AttributeError, KeyError, AssertionError) as error:
            errors.append(f"{type(error).__name__}: {error}")
    raise ConfigError(
        f"decoder family {family!r}: a 2-layer copy of its config cannot be built: {'; '.join(errors)}"
    )


def _narrow(config: Any) -> Any:
    """The same config with a small feed-forward, and fewer heads of the same size where it has the usual attributes."""
    narrow = deepcopy(config)
    heads, groups = getattr(config, "num_attention_heads", None), getattr(config, "num_key_value_heads", None)
    if not heads or not groups or heads % groups:
        return narrow
    head = getattr(config, "head_dim", None) or config.hidden_size // heads
    narrow.num_attention_heads = min(heads, 2 * (heads // groups))
    narrow.num_key_value_heads = max(1, narrow.num_attention_heads * groups // heads)
    narrow.hidden_size = narrow.num_attention_heads * head
    if getattr(config, "head_dim", None):
        narrow.head_dim = head
    narrow.intermediate_size = 128
    return narrow


def _excite(model: nn.Module) -> None:
    """Weights far from the tiny standard initialisation, so that masks, windows and caps show in the logits."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 2.0 / parameter.shape[-1] ** 0.5)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.2)


def _refuse_scalars(model: nn.Module, family: str) -> None:
    scalars = [name for name, parameter in model.named_parameters() if parameter.dim() == 0]
    if scalars:
        raise ConfigError(
            f"decoder family {family!r} has 0-dimensional parameters, which ZeRO cannot partition: {', '.join(scalars)}"
        )


@torch.no_grad()
def _embedded(stock: PreTrainedModel) -> list[Tensor]:
    """Embeddings [n, d] of each sample that, like visual tokens, are no rows of the table: a family may look their ids up again."""
    return [1.5 * stock.get_input_embeddings()(torch.randint(3, _VOCABULARY, (n,))) for n in _LENGTHS]


@torch.no_grad()
def _alone(stock: PreTrainedModel, embeddings: Tensor) -> Tensor:
    logits: Tensor = stock(inputs_embeds=embeddings[None], use_cache=False).logits
    return logits[0]


@torch.no_grad()
def _packed(decoder: Decoder, rows: list[Tensor], *, spread: bool = False) -> Tensor:
    """spread: with mrope, give the columns other positions than time and rows."""
    embeddings = torch.cat(rows)
    lengths = torch.tensor([0, *(len(r) for r in rows)], dtype=torch.int32)
    positions = torch.cat([torch.arange(len(r)) for r in rows])
    if decoder.rotary is not None:
        positions = torch.stack([positions, positions, 3 * positions if spread else positions])
    logits: Tensor = decoder(
        inputs_embeds=embeddings,
        position_ids=positions,
        cu_seqlens=lengths.cumsum(0, dtype=torch.int32),
        keep=torch.arange(len(embeddings)),
    )
    return logits
