"""Before the first step: the row that needs most memory, once, so that a lack of it shows at once and not hours later."""

from __future__ import annotations

from mmds.data.loader import StepLoader
from mmds.engine import Engine
from mmds.monitor import RunFolder
from mmds.run_data import RunData
from mmds.run_forecast import forecast


def rehearse(engine: Engine, steps: StepLoader, data: RunData, run: RunFolder) -> None:
    """Run forward and backward of the row with the largest predicted memory among the next steps on every rank at once; nothing comes of it.

    Raises ConfigError when it does not fit. Nothing to do where `mmds.planner.rehearse` is false, no step is left, or the cost of the decoder's
    family is not known.
    """
    if not data.config.planner.rehearse or not len(steps) or data.outline.shape is None:
        return
    known = forecast(data, first=engine.step_index)
    with engine.ranks.together("reading the row that needs most memory"):
        row = steps.row_of(known.heaviest)
    engine.rehearse(row)
    run.event(
        "rehearsed",
        tokens=row.real_tokens,
        patches=sum(plan.patches for plan in row.plans),
        images=len(row.plans),
        predicted_gb=round(known.memory.device / 1e9, 2),
        of_steps=known.steps,
    )
