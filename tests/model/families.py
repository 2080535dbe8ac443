"""Tiny random decoders of several families, and each sample alone through stock transformers with eager attention."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import deepspeed
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from mmds.model.recompute import reentrant

BY_DEEPSPEED = reentrant(deepspeed.checkpointing.checkpoint)
"""DeepSpeed's checkpoint function as the engine hands it to the parts."""

VOCABULARY = 80
WINDOW = 5  # shorter than the samples, so that it matters
_BASE: dict[str, Any] = dict(
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=VOCABULARY,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)


def _family(name: str, **extra: Any) -> Callable[[], Any]:
    return lambda: getattr(transformers, f"{name}Config")(**{**_BASE, **extra})


FAMILIES: dict[str, Callable[[], Any]] = {
    "llama": _family("Llama", tie_word_embeddings=False),
    "llama_tied": _family("Llama", tie_word_embeddings=True),
    "qwen2_tied": _family("Qwen2", tie_word_embeddings=True),
    "qwen3": _family("Qwen3", head_dim=16, tie_word_embeddings=False),
    "mistral_window": _family("Mistral", sliding_window=WINDOW),
    "gemma": _family("Gemma", head_dim=16, num_key_value_heads=1),
    "phi3": _family("Phi3", tie_word_embeddings=False),
    "granite": _family("Granite", logits_scaling=4.0, attention_multiplier=0.4, residual_multiplier=0.7),
}


def stock_model(name: str, *, seed: int = 0) -> Any:
    """A decoder of the family with weights large enough that a leak, a window or a scale shows."""
    torch.manual_seed(seed)
    config = FAMILIES[name]()
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    excite(model)
    return model


@torch.no_grad()
def excite(model: nn.Module) -> None:
    """Random weights of about unit gain; norms away from their initial ones."""
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.normal_(0.0, 1.5 / parameter.shape[-1] ** 0.5)
        else:
            parameter.add_(torch.randn_like(parameter) * 0.2)


def random_samples(lengths: Sequence[int], *, seed: int = 3) -> list[Tensor]:
    """Token ids int64 [n] of each sample."""
    dice = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCABULARY, (n,), generator=dice) for n in lengths]


def alone_logits(model: Any, samples: Sequence[Tensor]) -> Tensor:
    """Logits [T, V] of all samples, each in a forward pass of its own."""
    return torch.cat([model(input_ids=ids[None], use_cache=False).logits[0] for ids in samples])


def alone_nll(model: Any, samples: Sequence[Tensor]) -> Tensor:
    """Sum of next-token NLL over all samples, each alone, every token but the first of each being a target."""
    terms = [
        F.cross_entropy(alone_logits(model, [ids])[:-1], ids[1:], reduction="sum")
        for ids in samples
        if len(ids) > 1
    ]
    return torch.stack(terms).sum()


def packed_inputs(samples: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """ids int64 [T], positions int64 [T] restarting at each sample, boundaries int32 [S + 1]."""
    bounds = [0]
    for ids in samples:
        bounds.append(bounds[-1] + len(ids))
    positions = torch.cat([torch.arange(len(ids)) for ids in samples])
    return torch.cat(list(samples)), positions, torch.tensor(bounds, dtype=torch.int32)


def gradients(module: nn.Module) -> dict[str, Tensor]:
    """Gradient of each parameter, zeros where there is none."""
    return {
        name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
        for name, p in module.named_parameters()
    }


def worst(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> list[str]:
    """Names outside the tolerance: 1e-5 of the largest of all, and 1e-3 of their own unless below 1e-6 of the largest."""
    assert set(ours) == set(theirs)
    largest = max(float(t.abs().max()) for t in theirs.values())
    wrong = []
    for name, b in theirs.items():
        gap, size = float((ours[name] - b).abs().max()), float(b.abs().max())
        if not gap <= 1e-5 * largest or (size > 1e-6 * largest and gap > 1e-3 * size):
            wrong.append(f"{name}: gap {gap:.1e}, size {size:.1e}, largest {largest:.1e}")
    return wrong


def gap(ours: Tensor, theirs: Tensor) -> float:
    """Largest difference over largest value."""
    assert ours.shape == theirs.shape
    a, b = ours.detach().double(), theirs.detach().double()
    return float((a - b).abs().max() / b.abs().max())
