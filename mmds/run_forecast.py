"""What a planned run will cost, in numbers: the first steps' work, balance and memory, and how long all of it takes."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mmds.cost import Floats, Sums
from mmds.data.bench import pace_of_run
from mmds.packing import Samples
from mmds.run_data import RunData
from mmds.run_outline import RankBytes

CARDS = {"A100": 312e12, "H100": 989e12}
"""Dense bf16 FLOP/s by their makers' data sheets, for runs that nothing has measured yet."""

MFU = 0.4
"""Share of a card's FLOP/s that training is taken to reach there."""

LOOKED_AT = 2048
"""Rows of the first steps that stand for all."""


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """The first steps of a run.

    steps: how many. flops: of a step, mean. encoder_share: of them, connector included. imbalance: cost over what it would be with equal ranks, and
    the least that any plan of these steps could reach. heaviest: samples of the row with the largest predicted memory. memory: of its rank.
    """

    steps: int
    flops: float
    encoder_share: float
    imbalance: float
    bound: float
    heaviest: Samples
    memory: RankBytes


def forecast(data: RunData, *, first: int = 0) -> Forecast:
    """Of the steps from `first` on that have LOOKED_AT rows. Raises ConfigError where the decoder's cost is not known."""
    steps = range(first, min(data.plan.total_steps, first + max(1, LOOKED_AT // data.plan.rows_per_step)))
    rows = [row for step in steps for row in data.plan.step_rows(step, world=data.world)]
    sums = sums_of(data, rows)
    flops = data.outline.flops(data.config).flops(sums)
    balances = [balance for step in steps if (balance := data.balance(step)) is not None]
    cost, mean = sum(b.cost for b in balances), sum(b.mean for b in balances)
    heaviest = int(np.argmax(data.outline.activations(data.config, sums)))
    return Forecast(
        steps=len(steps),
        flops=float(flops.total.sum()) / len(steps),
        encoder_share=float(flops.vision.sum() / flops.total.sum()),
        imbalance=cost / mean if mean else 1.0,
        bound=sum(b.bound * b.mean for b in balances) / mean if mean else 1.0,
        heaviest=rows[heaviest],
        memory=data.outline.rank_bytes(data.config, world=data.world, row=sums[heaviest]),
    )


def sums_of(data: RunData, rows: Iterable[Samples]) -> Sums:
    """What the cost of each row is computed from, float64 [rows]; a row without images runs the smallest encoder input."""
    rows = list(rows)
    sizes = data.plan.scheme.sizes([i for row in rows for i in row])
    owner = np.repeat(np.arange(len(rows)), [len(row) for row in rows])
    totals: dict[str, Floats] = {}
    for name, values in vars(sizes.sums).items():
        totals[name] = np.zeros(len(rows))
        np.add.at(totals[name], owner, values)
    without, dummy = totals["pieces"] == 0, data.geometry.dummy.patches
    totals["pieces"][without], totals["patches"][without], totals["patch_squares"][without] = (
        1,
        dummy,
        dummy**2,
    )
    return Sums(**totals)


def cost_facts(data: RunData, step: int, micro: int, rank: int) -> dict[str, str]:
    """What one row costs beside the mean of its step, and how long others wait for it or it for others, by predicted costs."""
    if data.outline.shape is None:
        return {"cost": f"not known: {data.outline.unknown}"}
    rows = data.plan.step_rows(step, world=data.world)
    sums = sums_of(data, rows)
    flops, at = data.outline.flops(data.config).flops(sums), micro * data.world + rank
    facts = {
        part: f"{float(each[at]):.3g} FLOPs, {float(each[at] / each.mean() if each.mean() else 1):.2f} x the step's mean row"
        for part, each in {"images": flops.vision, "decoder": flops.decoder, "row": flops.total}.items()
    }
    cap = data.plan.scheme.limits.patches
    facts["patches"] = f"{int(sums.patches[at]):,}" + (f" of at most {cap:,}" if cap is not None else "")
    memory = data.outline.rank_bytes(data.config, world=data.world, row=sums[at])
    facts["memory"] = f"{_gb(memory.activations)} of activations"
    balance = data.balance(step)
    assert balance is not None
    facts["step"] = f"{balance.ratio:.4f} of equal ranks' time"
    return facts


def plan_facts(data: RunData) -> dict[str, str]:
    """Lines of the dry run: work, balance, memory and time."""
    if data.outline.shape is None:
        return {"cost": f"not known: {data.outline.unknown}"}
    known, config = forecast(data), data.config
    memory = known.memory
    total = known.flops * data.plan.total_steps
    return {
        "work a step": f"{known.flops:.3g} FLOPs, {known.encoder_share:.0%} of them of images before the decoder; {total:.3g} in all",
        "balance": f"{config.planner.scheme}: predicted {known.imbalance:.4f} of equal ranks' time, no plan below {known.bound:.4f}"
        f" (first {known.steps:,} steps)",
        "memory a rank": f"{_gb(memory.device)} = {_gb(memory.states)} states + {_gb(memory.activations)} activations of the largest row, "
        f"without context and buffers; {_gb(memory.host)} of a node's own",
        "time": "; ".join(_times(data, known)),
    }


def _times(data: RunData, known: Forecast) -> list[str]:
    """How long the run takes, by what is known best: its own pace, a calibration, or the cards' data sheets."""
    steps = data.plan.total_steps
    pace = pace_of_run(Path(data.config.output_dir))
    if pace:
        return [f"{duration(statistics.median(pace) * steps)} at the pace of the run so far"]
    balance = data.balance(0)
    if data.config.planner.calibration is not None and balance is not None:
        return [
            f"{duration(balance.cost * steps)} by {data.config.planner.calibration}, communication not counted"
        ]
    return [
        f"{duration(known.flops * known.imbalance * steps / (data.world * speed * MFU))} on {data.world} {name} at {MFU:.0%} of {speed / 1e12:g} TFLOP/s"
        for name, speed in CARDS.items()
    ]


def duration(seconds: float) -> str:
    """Seconds as people say them."""
    for unit, size in (("days", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s"


def _gb(size: float) -> str:
    return f"{size / 1e9:.1f} GB"
