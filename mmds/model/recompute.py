"""Activation checkpointing of chosen blocks: their activations are computed again in the backward pass instead of being kept.

A checkpoint function is called as `checkpoint(block, function, *args, **kwargs)` and returns what `function(*args, **kwargs)` does.
The block's `forward` is wrapped, not its call, so that hooks on the block (ZeRO's among them) run once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

Checkpoint = Callable[..., Any]


def non_reentrant(block: nn.Module, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """torch's own checkpoint, which Hugging Face models use too; works with frozen inputs and frozen blocks."""
    return checkpoint(function, *args, use_reentrant=False, **kwargs)


def reentrant(run: Callable[..., Any]) -> Checkpoint:
    """A checkpoint function out of a reentrant one, `run(function, *args, **kwargs)`, such as DeepSpeed's.

    A reentrant function computes no gradient of a block's parameters when none of its inputs needs one. A block with
    trained parameters then gets its first input with a gradient, which nobody reads; a block that needs none is run plainly.
    """

    def call(block: nn.Module, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if any(isinstance(value, Tensor) and value.requires_grad for value in (*args, *kwargs.values())):
            return run(function, *args, **kwargs)
        if not any(parameter.requires_grad for parameter in block.parameters()):
            return function(*args, **kwargs)
        first, *others = args
        return run(function, first.detach().requires_grad_(), *others, **kwargs)

    return call


def recompute_blocks(blocks: Iterable[nn.Module], every: int, checkpoint: Checkpoint) -> None:
    """Recompute blocks 0, every, 2 * every, ... in each backward pass; every = 0: none."""
    for index, block in enumerate(blocks):
        if every and index % every == 0:
            block.forward = partial(_run, block, block.forward, checkpoint)


def _run(
    block: nn.Module, forward: Callable[..., Any], checkpoint: Checkpoint, *args: Any, **kwargs: Any
) -> Any:
    if torch.is_grad_enabled():
        return checkpoint(block, forward, *args, **kwargs)
    return forward(*args, **kwargs)
