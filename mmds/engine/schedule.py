"""The rate schedule: one factor for all groups, so that a group's rate is always table rate x factor."""

from __future__ import annotations

import math

from mmds.config_types import ScheduleSection


def rate_factor(step: int, *, total: int, warmup: int, decay: str) -> float:
    """Factor in (0, 1] for the optimizer step with index `step` (from 0).

    Linear warm-up over `warmup` steps that never starts at 0 (a step at rate 0 is a wasted step), then `constant`, `linear` or
    `cosine` decay towards 0 at step `total`.
    """
    if step < warmup:
        return (step + 1) / warmup
    if decay == "constant":
        return 1.0
    progress = min(1.0, (step - warmup) / max(1, total - warmup))
    if decay == "linear":
        return 1.0 - progress
    return 0.5 * (1.0 + math.cos(math.pi * progress))


def warmup_steps(section: ScheduleSection, total: int) -> int:
    """Warm-up length in steps: given, or a share of the whole run."""
    if section.warmup_steps is not None:
        return section.warmup_steps
    return math.ceil((section.warmup_ratio or 0.0) * total)
