"""Rotary positions of three axes in a decoder (M-RoPE: time, row, column; Qwen2-VL, arXiv 2409.12191, section 2.1).

A decoder's rotary module turns positions into cosines and sines once a forward pass. Here it does so for each axis, and each
frequency takes those of the axis whose section it lies in. Shapes: T tokens, D rotary size (the head's, or a part of it).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from mmds.errors import ConfigError

AXES = 3


class MultiAxisRotary:
    """Stands between a decoder and its rotary module. `positions`: int64 [3, T] of the next forward pass; without them it refuses."""

    def __init__(self, llm: PreTrainedModel) -> None:
        """Raises ConfigError naming the family when its rotary module is not one that three axes can be given to."""
        rotary = rotary_module(llm)
        self.positions: Tensor | None = None
        self.sections = sections_of(llm.config, _rotary_size(rotary))
        rotary.forward = partial(self._forward, rotary.forward)

    def _forward(self, own: Any, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        if self.positions is None or self.positions.shape != (AXES, x.shape[1]):
            raise ValueError(
                f"decoder: mrope needs positions [3, {x.shape[1]}], got {None if self.positions is None else tuple(self.positions.shape)}"
            )
        by_axis = [own(x, axis[None]) for axis in self.positions]
        return tuple(self._choose(torch.stack(kind)) for kind in zip(*by_axis, strict=True))  # type: ignore[return-value]

    def _choose(self, values: Tensor) -> Tensor:
        """[3, 1, T, D] -> [1, T, D]: each section of each half from its own axis."""
        parts = values.split(self.sections * 2, dim=-1)
        return torch.cat([part[index % AXES] for index, part in enumerate(parts)], dim=-1)


def rotary_module(llm: PreTrainedModel) -> nn.Module:
    """The one rotary module of a decoder. Raises ConfigError naming the family when there is none, or one for each kind of layer."""
    found = [module for name, module in llm.named_modules() if name.rpartition(".")[2] == "rotary_emb"]
    buffers = {name for module in found for name, _ in module.named_buffers() if name.endswith("inv_freq")}
    if len(found) != 1 or buffers - {"original_inv_freq"} != {"inv_freq"} or not _in_halves(found[0]):
        family = getattr(llm.config, "model_type", type(llm).__name__)
        raise ConfigError(
            f'mmds.model.positions: decoder family {family!r} has no rotary module that mrope can be given to; use "1d", or a Llama, '
            "Qwen2, Qwen3 or Mistral"
        )
    return found[0]


def _in_halves(rotary: nn.Module) -> bool:
    """Whether every frequency stands once in each half, as `_choose` takes them, and not twice side by side (Cohere)."""
    frequencies = rotary.inv_freq
    assert isinstance(frequencies, Tensor)
    cos, _ = rotary(
        frequencies.new_zeros(1, 1, 1), torch.ones(1, 1, dtype=torch.int64, device=frequencies.device)
    )
    first, second = cos.chunk(2, dim=-1)
    return torch.equal(first, second)


def sections_of(config: Any, size: int) -> list[int]:
    """Frequencies of time, row and column, D/2 in all: the config's own `mrope_section`, else 1/4, 3/8, 3/8 as in Qwen2-VL."""
    given = (getattr(config, "rope_parameters", None) or {}).get("mrope_section")
    if given:
        if len(given) != AXES or sum(given) != size // 2:
            raise ConfigError(
                f"decoder config: mrope_section {given} must be {AXES} numbers that add up to {size // 2}"
            )
        return [int(n) for n in given]
    time = size // 8
    row = (size // 2 - time + 1) // 2
    return [time, row, size // 2 - time - row]


def _rotary_size(rotary: nn.Module) -> int:
    frequencies = rotary.inv_freq
    assert isinstance(frequencies, Tensor)
    return 2 * frequencies.numel()
