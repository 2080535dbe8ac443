"""One step of a live engine, and the gradients that its optimizer was about to use."""

from __future__ import annotations

from collections.abc import Sequence
from functools import wraps
from typing import Any

from deepspeed.utils import safe_get_full_grad
from torch import Tensor

from mmds.data.rows import Row
from mmds.engine import Engine


def measured_step(engine: Engine, rows: Sequence[Row], *, measure_wait: bool = False) -> dict[str, Any]:
    """The step's report, and the gradients that the optimizer is about to use, before clipping."""
    grads: dict[str, Tensor] = {}
    optimizer = engine.ds.optimizer
    update = optimizer.step

    @wraps(update)
    def spying_update(*args: Any, **kwargs: Any) -> Any:
        for name, parameter in engine.model.named_parameters():
            full = safe_get_full_grad(parameter) if parameter.requires_grad else None
            if full is not None:
                grads[name] = full.detach().clone()
        return update(*args, **kwargs)

    optimizer.step = spying_update
    report = engine.step(rows, measure_wait=measure_wait)
    optimizer.step = update
    return {"report": report.__dict__, "grads": grads}
