"""A planned run in numbers, for people to decide by: sizes, work, balance by scheme and ranks, memory, time and money. Prints and draws nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from mmds.balance import Limits, Sizes, bound
from mmds.config import rows_per_step
from mmds.data.mixture import usual_patches
from mmds.errors import ConfigError
from mmds.geometry import Geometry
from mmds.planner import RunPlan
from mmds.run_data import RunData
from mmds.run_forecast import Forecast, forecast, sums_of
from mmds.run_outline import RankBytes
from mmds.sample_sizes import SampleSizes
from mmds.schemes import SCHEMES
from mmds.stages import least_text_share

Floats = npt.NDArray[np.float64]

STEPS = 12
"""Steps of each scheme and rank count that are looked at."""

MOST_ROWS = 4096
"""Rows of each that are planned at most: at many ranks fewer steps are looked at."""

SIDES = tuple(range(64, 4097, 32))
"""Pixels of the longer side of images whose patches are shown."""

RATIOS = {"1 : 1": 1.0, "4 : 3": 0.75, "3 : 1": 1 / 3}
"""Aspects of them: longer side over the other."""

LOOKED_AT = 200_000
"""Samples that stand for the data set, evenly spaced, where it has more."""

TELLING = 1.01
"""Bound of a step above which a single sample is what makes ranks wait."""


@dataclass(frozen=True, kw_only=True)
class Balanced:
    """One scheme on some ranks: rows of a step, steps looked at, cost over that of equal ranks, the least that any plan could reach, and how full rows are."""

    scheme: str
    ranks: int
    rows: int
    steps: int
    ratio: float
    bound: float
    fill: float

    @property
    def idle(self) -> float:
        """Share of all ranks' time spent waiting."""
        return 1 - 1 / self.ratio


@dataclass(frozen=True, kw_only=True)
class Cards:
    """What the run is to run on. tflops: dense bf16 of one, in 1e12. mfu: share that training reaches. price: of one for an hour. memory: GB of one."""

    count: int = 8
    tflops: float = 989.0
    mfu: float = 0.4
    price: float = 2.5
    memory: float = 80.0

    def hours(self, flops: float, imbalance: float) -> float:
        """Of a run of so many FLOPs whose steps take `imbalance` times what equal ranks would."""
        return flops * imbalance / (self.count * self.tflops * 1e12 * self.mfu) / 3600


@dataclass(frozen=True, kw_only=True)
class PlanReport:
    """Everything that `scripts/plan.py` shows.

    sizes, flops: of samples that stand for the data, flops float64 [n]. curves: aspect -> (patches, visual tokens) at SIDES. memory: ranks -> bytes
    of a rank with the row of largest predicted memory. caps: ranks -> largest pixel cap at which no single sample bounds the step, where one does now.
    """

    data: RunData
    sizes: SampleSizes
    flops: Floats
    vision_share: float
    curves: dict[str, tuple[list[int], list[int]]]
    forecast: Forecast
    balances: tuple[Balanced, ...]
    memory: dict[int, RankBytes]
    caps: dict[int, int | None]
    cards: Cards
    warnings: tuple[str, ...]

    @property
    def run_flops(self) -> float:
        """Of the whole run."""
        return self.forecast.flops * self.data.plan.total_steps

    @property
    def hours(self) -> float:
        """Of the run on `cards`, balanced as the run's scheme does on the nearest rank count that was looked at."""
        mine = [b for b in self.balances if b.scheme == self.data.config.planner.scheme]
        nearest = min(mine, key=lambda b: abs(b.ranks - self.cards.count), default=None)
        return self.cards.hours(self.run_flops, nearest.ratio if nearest else self.forecast.imbalance)


def plan_report(data: RunData, ranks: Sequence[int], cards: Cards) -> PlanReport:
    """Look at everything. Raises ConfigError where the decoder's cost is not known."""
    some = np.arange(0, len(data.mixture), max(1, len(data.mixture) // LOOKED_AT), dtype=np.int64)
    sizes = data.mixture.sizes(data.geometry, some)
    flops = data.outline.flops(data.config).flops(sizes.sums)
    known = forecast(data)
    row = sums_of(data, [known.heaviest])[0]
    balances = tuple(
        found for name in SCHEMES for count in ranks if (found := balanced(data, name, count)) is not None
    )
    caps = {
        b.ranks: cap_without_bound(data, b.ranks)
        for b in balances
        if b.scheme == "cost" and b.bound > TELLING
    }
    memory = {
        count: data.outline.rank_bytes(data.config, world=count, row=row)
        for count in sorted({*ranks, cards.count})
    }
    report = PlanReport(
        data=data,
        sizes=sizes,
        flops=np.asarray(flops.total),
        vision_share=float(flops.vision.sum() / flops.total.sum()),
        curves={name: curve(data.geometry, ratio) for name, ratio in RATIOS.items()},
        forecast=known,
        balances=balances,
        memory=memory,
        caps=caps,
        cards=cards,
        warnings=(),
    )
    return PlanReport(**{**vars(report), "warnings": tuple(_warnings(report))})


def curve(geometry: Geometry, ratio: float) -> tuple[list[int], list[int]]:
    """Patches and visual tokens of images with the longer sides SIDES; ratio: shorter over longer side."""
    plans = [geometry.plan(side, max(1, round(side * ratio))) for side in SIDES]
    return [plan.patches for plan in plans], [plan.visual_tokens for plan in plans]


def rows_on(data: RunData, ranks: int) -> int:
    """Rows of a step on so many ranks: the config's where they can share them out, else one a rank."""
    try:
        return rows_per_step(data.config, ranks)[0]
    except ConfigError:
        return ranks


def balanced(data: RunData, name: str, ranks: int) -> Balanced | None:
    """How equal the rows of a scheme are on so many ranks; None where the data has too few samples for a step of them."""
    rows = rows_on(data, ranks)
    plan = plan_of(data, name, rows)
    if plan is None:
        return None
    steps = plan.total_steps
    objective = data.config.objective
    found = [plan.balance_of(step, world=ranks, objective=objective) for step in range(steps)]
    known = [each for each in found if each is not None]
    mean = sum(each.mean for each in known)
    tokens = sum(
        int(plan.scheme.sizes([i for row in plan.step_rows(step, world=ranks) for i in row]).tokens.sum())
        for step in range(steps)
    )
    return Balanced(
        scheme=name,
        ranks=ranks,
        rows=rows,
        steps=steps,
        ratio=sum(each.cost for each in known) / mean,
        bound=sum(each.bound * each.mean for each in known) / mean,
        fill=tokens / (steps * rows * data.plan.row_tokens),
    )


def plan_of(data: RunData, name: str, rows: int) -> RunPlan | None:
    """The first steps of the data under a scheme with so many rows a step; None where an epoch has fewer samples."""
    own = data.plan.scheme
    limits, options = Limits(tokens=own.limits.tokens), dict[str, Any](rows=rows, cost=own.cost)
    if name == "cost":
        held_out = [source.held_out for source in data.plan.stream.sources]
        patches = own.limits.patches or usual_patches(data.config, data.mixture, data.geometry, held_out)
        limits = Limits(tokens=own.limits.tokens, patches=patches, images=own.limits.images)
        options["objective"] = data.config.objective
    scheme = SCHEMES[name](data.plan.stream, partial(data.mixture.sizes, data.geometry), limits, **options)
    plan = RunPlan(scheme, steps=max(1, min(STEPS, MOST_ROWS // rows)))
    samples = data.plan.stream.epoch_samples
    if samples is not None and samples < rows:
        return None
    try:
        plan.step_rows(0)
    except ConfigError:  # with those left out that are larger than a row
        return None
    return plan


def worst_step(plan: RunPlan, ranks: int, objective: str) -> npt.NDArray[np.int64]:
    """Samples of the step, of all in the plan, in which one sample stands out most."""
    found = [plan.balance_of(step, world=ranks, objective=objective) for step in range(plan.total_steps)]
    worst = int(np.argmax([each.bound if each is not None else 0.0 for each in found]))
    return np.array([i for row in plan.step_rows(worst, world=ranks) for i in row], dtype=np.int64)


def cap_without_bound(data: RunData, ranks: int) -> int | None:
    """The largest pixel cap at which no sample of the most uneven step costs more than a rank's share; None where no cap does it.

    Looked for among the caps that change something: multiples of the pixels of a visual token.
    """
    plan = plan_of(data, "cost", rows_on(data, ranks))
    if plan is None or data.geometry.mode == "fixed":
        return None
    samples = worst_step(plan, ranks, data.config.objective)
    unit = data.geometry.factor**2 if data.geometry.mode == "native" else data.geometry.image_size**2

    def free(cap: int) -> bool:
        try:
            geometry = data.geometry.capped(cap * unit)
        except ConfigError:
            return False
        costs = _costs(data, data.mixture.sizes(geometry, samples))
        return bound(costs, world=ranks, objective=data.config.objective).ratio <= 1.0

    low, high = 0, data.config.max_pixels // unit
    if free(high):
        return high * unit
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if free(middle) else (low, middle)
    return low * unit if low and free(low) else None


def _costs(data: RunData, sizes: SampleSizes) -> Sizes:
    assert data.plan.scheme.cost is not None
    costs = data.plan.scheme.cost.flops(sizes.sums)
    return Sizes(
        tokens=sizes.tokens,
        patches=sizes.patches,
        images=sizes.images,
        encoder=np.asarray(costs.vision),
        decoder=np.asarray(costs.decoder),
    )


def _warnings(report: PlanReport) -> list[str]:
    """What people would want to change before they pay for it."""
    data, config = report.data, report.data.config
    found = []
    if report.vision_share > 0.5:
        found.append(
            f"images before the decoder are {report.vision_share:.0%} of the work: a lower mmds.data.max_pixels, or a frozen encoder, saves most"
        )
    for ranks, cap in report.caps.items():
        helps = (
            f"--set mmds.data.max_pixels={cap} removes it"
            if cap
            else "no pixel cap removes it: fewer ranks or more rows a step do"
        )
        found.append(f"on {ranks} ranks one sample costs more than a rank's share of a step: {helps}")
    if data.geometry.mode == "native" and len(report.sizes):
        most = (
            int(report.sizes.patches[report.sizes.images == 1].max(initial=0)) * data.geometry.patch_size**2
        )
        if 0 < most < 0.5 * config.max_pixels:
            found.append(
                f"the largest image has {most:,} pixels, far below the cap of {config.max_pixels:,}: the cap changes nothing"
            )
    least = max(least_text_share(config.stage), 0.0)
    if data.text_share <= least or not data.text_share:
        found.append(
            f"{data.text_share:.1%} of the samples are text-only (the stage wants {least:.1%}): language ability may suffer, which scores on images do not show"
        )
    planned = {b.ranks for b in report.balances} | {report.cards.count}
    if missing := sorted(set(report.memory) - planned):
        found.append(f"fewer samples than a step has rows on {', '.join(map(str, missing))} ranks")
    over = int((report.sizes.tokens > data.plan.row_tokens).sum())
    if over > 0.01 * len(report.sizes):
        found.append(
            f"{over / len(report.sizes):.1%} of the samples are longer than a row of {data.plan.row_tokens:,} tokens and are left out"
        )
    low = [b for b in report.balances if b.scheme == config.planner.scheme and b.fill < 0.9]
    if low:
        found.append(
            f"rows are only {min(b.fill for b in low):.0%} full: samples are long beside mmds.data.row_tokens"
        )
    for ranks, memory in report.memory.items():
        if memory.device > report.cards.memory * 1e9:
            found.append(
                f"a rank of {ranks} needs {memory.device / 1e9:.1f} GB, a card has {report.cards.memory:g}: see --fit {report.cards.memory:g}"
            )
    return found
