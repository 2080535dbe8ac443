"""Every decoder family that the README names, tied and untied, on a tiny random config."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM

from mmds.errors import ConfigError
from mmds.model.decoder import Decoder
from mmds.model.qualify import qualify
from mmds.model.recompute import non_reentrant
from tests.model.families import (
    VOCABULARY,
    alone_logits,
    alone_nll,
    excite,
    gap,
    gradients,
    packed_inputs,
    random_samples,
    worst,
)

SIZES: dict[str, Any] = dict(
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=VOCABULARY,
    max_position_embeddings=128,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
MOE: dict[str, Any] = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, head_dim=16)

FAMILIES: dict[str, Callable[..., Any]] = {
    "Llama": lambda **tie: transformers.LlamaConfig(**SIZES, **tie),
    "Llama 3.1, scaled positions": lambda **tie: transformers.LlamaConfig(
        **SIZES,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        **tie,
    ),
    "SmolLM2": lambda **tie: transformers.LlamaConfig(
        **{**SIZES, "num_key_value_heads": 4}, rms_norm_eps=1e-5, rope_theta=100000, **tie
    ),
    "SmolLM3": lambda **tie: transformers.SmolLM3Config(
        **{**SIZES, "num_hidden_layers": 4}, no_rope_layers=[1, 0, 1, 0], **tie
    ),
    "Qwen2 and Qwen2.5": lambda **tie: transformers.Qwen2Config(**SIZES, **tie),
    "Qwen3": lambda **tie: transformers.Qwen3Config(**SIZES, head_dim=16, **tie),
    "Qwen3-MoE": lambda **tie: transformers.Qwen3MoeConfig(**SIZES, **MOE, **tie),
    "Mistral": lambda **tie: transformers.MistralConfig(**SIZES, sliding_window=None, **tie),
    "Mistral, window": lambda **tie: transformers.MistralConfig(**SIZES, sliding_window=5, **tie),
    "Gemma": lambda **tie: transformers.GemmaConfig(
        **{**SIZES, "num_key_value_heads": 1}, head_dim=16, **tie
    ),
    "Phi": lambda **tie: transformers.PhiConfig(**SIZES, partial_rotary_factor=0.5, **tie),
    "Phi-3": lambda **tie: transformers.Phi3Config(**SIZES, **tie),
}
LENGTHS = (7, 1, 12, 4, 9)


def stock(family: str, tied: bool) -> Any:
    """transformers' own model with eager attention and weights large enough that a leak or a window shows."""
    torch.manual_seed(0)
    config = FAMILIES[family](tie_word_embeddings=tied)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    excite(model)
    return model


def packed_logits(decoder: Decoder, samples: list[Tensor], keep: Tensor | None = None) -> Tensor:
    ids, positions, bounds = packed_inputs(samples)
    keep = torch.arange(len(ids)) if keep is None else keep
    return decoder(inputs_embeds=decoder.embed(ids), position_ids=positions, cu_seqlens=bounds, keep=keep)


def predicting(samples: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Row positions that predict a token of their own sample, and these tokens."""
    starts = torch.tensor([0, *(len(ids) for ids in samples)]).cumsum(0)
    places = [torch.arange(start, start + len(ids) - 1) for start, ids in zip(starts, samples, strict=False)]
    return torch.cat(places), torch.cat([ids[1:] for ids in samples])


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_equals_stock_eager_alone_and_the_head_on_some_positions_the_full_head(
    family: str, tied: bool
) -> None:
    """Logits and all gradients, of a row through the head at the predicting positions alone, with recomputation."""
    theirs = stock(family, tied).train()
    samples = random_samples(LENGTHS)
    decoder = Decoder(deepcopy(theirs)).train()
    llm: Any = decoder.llm
    assert (llm.get_output_embeddings().weight is llm.get_input_embeddings().weight) == tied
    with torch.no_grad():
        full = packed_logits(decoder, samples)
    assert gap(full, alone_logits(theirs, samples)) < 1e-5
    decoder.set_recompute(1, non_reentrant)
    keep, target = predicting(samples)
    some = packed_logits(decoder, samples, keep)
    assert gap(some, full[keep]) < 1e-6
    F.cross_entropy(some, target, reduction="sum").backward()
    alone_nll(theirs, samples).backward()
    assert worst(gradients(decoder.llm), gradients(theirs)) == []


@pytest.mark.parametrize("family", FAMILIES)
def test_the_family_is_held_at_build(family: str) -> None:
    qualify(FAMILIES[family](tie_word_embeddings=True))


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "Gemma 2": (lambda: transformers.Gemma2Config(**SIZES, head_dim=16), "gemma2"),
    "StableLM": (lambda: transformers.StableLmConfig(**SIZES), "stablelm"),
    "Falcon": (
        lambda: transformers.FalconConfig(
            hidden_size=32, num_hidden_layers=2, num_attention_heads=4, vocab_size=VOCABULARY
        ),
        "falcon",
    ),
    "Qwen3-Next": (
        lambda: transformers.Qwen3NextConfig(**SIZES, head_dim=16, num_experts=2, num_experts_per_tok=1),
        "qwen3_next",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_family_that_cannot_be_held_is_refused_by_name(case: str) -> None:
    build, name = REFUSED[case]
    with pytest.raises(ConfigError, match=f"decoder family '{name}'"):
        qualify(build())
