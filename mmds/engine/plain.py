"""What DeepSpeed leaves out without ZeRO: the gradient norm, clipping by it, and skipping a non-finite gradient."""

from __future__ import annotations

from functools import wraps
from typing import Any

import torch
from torch.optim import Optimizer


def measure_and_clip(optimizer: Optimizer, clipping: float) -> None:
    """Make `optimizer.step()` measure the global gradient norm, clip it to `clipping` (0 = no clipping), and update unless it
    is not finite.

    The gradients are already averaged over the ranks, so every rank comes to the same norm. DeepSpeed's engine reads the two
    attributes that its own optimizers have: `_global_grad_norm` (before clipping) and `overflow` (the step was skipped).
    """
    plain_step = optimizer.step
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    reported: Any = optimizer
    reported.overflow = False

    @wraps(plain_step)
    def step(*args: Any, **kwargs: Any) -> Any:
        norm = torch.nn.utils.clip_grad_norm_(parameters, clipping if clipping > 0 else float("inf"))
        reported._global_grad_norm = float(norm)
        reported.overflow = not bool(norm.isfinite())
        return None if reported.overflow else plain_step(*args, **kwargs)

    reported.step = step
