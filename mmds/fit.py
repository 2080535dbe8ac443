"""What fits a card: the largest row, the pixel cap and the offloading with which a rank of a run stays below so many bytes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from mmds.config import Config, RecomputeSection
from mmds.cost import Sums
from mmds.errors import ConfigError
from mmds.run_data import RunData
from mmds.run_outline import RankBytes
from mmds.sample_sizes import SampleSizes

CONTEXT = 2.5e9
"""Bytes of a card that are taken before a tensor is there: context, communication buffers, and what the allocator cannot use."""

STEP = 256
"""Tokens by which rows grow in the search."""

MOST = 1 << 20
"""Tokens at which it ends."""

CAPS = (1280 * 28 * 28, 768 * 28 * 28, 448 * 448, 336 * 336, 224 * 224)
"""Pixel caps that are tried below the run's own."""

OFFLOAD = "offload_optimizer"

LOOKED_AT = 1_000_000
"""Samples that stand for the data."""


@dataclass(frozen=True, kw_only=True)
class Fit:
    """One way to fit. offloaded: to the CPU's memory. row_tokens: the largest row, in steps of STEP. max_pixels: the cap it holds for.
    overrides: what to add to the command line. memory: of a rank then."""

    offloaded: str
    recompute: bool
    row_tokens: int
    max_pixels: int
    overrides: tuple[str, ...]
    memory: RankBytes


def fits(data: RunData, *, room: float, world: int) -> list[Fit]:
    """Every offloading, without and with recomputation, each with the largest row that fits into `room` bytes, CONTEXT left free.

    The pixel cap is the run's own, or the next lower one at which a row of the run's own length fits, where that helps. Ways that fit no row
    are left out. Raises ConfigError where the decoder's cost is not known.
    """
    found = []
    mixtures = {cap: sizes for cap in _caps(data) if (sizes := _sizes(data, cap)) is not None}
    own = max(mixtures)
    for offloaded, config in _ways(data.config):
        by_cap = {
            cap: (row, memory)
            for cap, sizes in mixtures.items()
            if (row := _largest_row(data, config, sizes, room - CONTEXT, world)) is not None
            and (memory := _memory(data, config, sizes, row, world))
        }
        if not by_cap:
            continue
        wanted = [cap for cap, (row, _) in by_cap.items() if row >= data.plan.row_tokens]
        cap = own if own in wanted else max(wanted, default=max(by_cap))
        row, memory = by_cap[cap]
        found.append(
            Fit(
                offloaded=offloaded,
                recompute=config.recompute is not None,
                row_tokens=row,
                max_pixels=cap,
                overrides=_overrides(data.config, config, row, cap),
                memory=memory,
            )
        )
    return found


def full_row(data: RunData, sizes: SampleSizes, tokens: int) -> Sums:
    """A row of so many tokens as the planner may make it of these samples: their mean mixture, with the margin that patches have in a row, and at
    least the largest sample's."""
    total = float(sizes.tokens.sum())
    full = float(sizes.patches.sum()) * data.plan.row_tokens / total
    margin = max(1.0, (data.plan.scheme.limits.patches or 0) / max(full, 1.0))
    sums = {name: float(values.sum()) * tokens / total for name, values in vars(sizes.sums).items()}
    for name in ("pieces", "patches", "patch_squares"):
        sums[name] = max(margin * sums[name], float(getattr(sizes, name).max()))
    return Sums(**{name: np.asarray(value) for name, value in sums.items()})


def fit_table(data: RunData, *, gigabytes: float, world: int) -> str:
    """The ways as text, with lines that can be pasted."""
    found = fits(data, room=gigabytes * 1e9, world=world)
    head = f"cards of {gigabytes:g} GB, {world} ranks ({CONTEXT / 1e9:g} GB left for context and buffers):"
    if not found:
        sizes = _sizes(data, data.config.max_pixels)
        assert sizes is not None
        states = _memory(data, data.config, sizes, STEP, world).states
        return (
            f"{head}\n  nothing fits: weights, gradients and optimizer take {states / 1e9:.1f} GB a rank. ZeRO-3 on more ranks shares them, and adapters "
            "need few:\n    --set 'mmds.stage.lora={}'"
        )
    lines = [head]
    for fit in found:
        lines.append(
            f"  rows of {fit.row_tokens:>7,} tokens, images of at most {fit.max_pixels:,} pixels, offloaded: {fit.offloaded}, recomputation "
            f"{'on' if fit.recompute else 'off'}: {fit.memory.device / 1e9:.1f} GB, {fit.memory.states / 1e9:.1f} of them states; "
            f"{fit.memory.host / 1e9:.1f} GB of the node's own"
        )
        lines.append("    " + " ".join(f"--set '{override}'" for override in fit.overrides))
    return "\n".join(lines)


def _largest_row(data: RunData, config: Config, sizes: SampleSizes, room: float, world: int) -> int | None:
    """Tokens of the largest row that fits, in steps of STEP; None where not even the longest sample's row does."""

    def holds(tokens: int) -> bool:
        return _memory(data, config, sizes, tokens, world).device <= room

    low = -(-int(sizes.tokens.max()) // STEP) * STEP
    if not holds(low):
        return None
    high = 2 * low
    while holds(high):
        if high >= MOST:
            return high
        low, high = high, 2 * high
    while high - low > STEP:
        middle = (low + high) // 2 // STEP * STEP
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def _memory(data: RunData, config: Config, sizes: SampleSizes, tokens: int, world: int) -> RankBytes:
    return data.outline.rank_bytes(config, world=world, row=full_row(data, sizes, tokens))


def _caps(data: RunData) -> list[int]:
    return [data.config.max_pixels, *(cap for cap in CAPS if cap < data.config.max_pixels)]


def _sizes(data: RunData, cap: int) -> SampleSizes | None:
    """Samples under a pixel cap; None where the model knows no image that small."""
    try:
        geometry = data.geometry.capped(cap)
    except ConfigError:
        return None
    some = np.arange(0, len(data.mixture), max(1, len(data.mixture) // LOOKED_AT), dtype=np.int64)
    return data.mixture.sizes(geometry, some)


def _ways(config: Config) -> Iterator[tuple[str, Config]]:
    """The run's config without and with offloading, which ZeRO-0 has not, and recomputation of every block."""
    zero = config.deepspeed["zero_optimization"]
    kept = {key: value for key, value in zero.items() if key != OFFLOAD}
    for recompute in (None, config.recompute or RecomputeSection()):
        for name, changed in (("nothing", kept), ("optimizer", {**kept, OFFLOAD: {"device": "cpu"}})):
            if config.zero_stage or name == "nothing":
                deepspeed = {**config.deepspeed, "zero_optimization": changed}
                yield name, replace(config, deepspeed=deepspeed, recompute=recompute)


def _overrides(own: Config, config: Config, row_tokens: int, max_pixels: int) -> tuple[str, ...]:
    """The `--set` values that make one config of the other."""
    changed = [f"mmds.data.row_tokens={row_tokens}"]
    if max_pixels != own.max_pixels:
        changed.append(f"mmds.data.max_pixels={max_pixels}")
    if (own.recompute is None) != (config.recompute is None):
        changed.append("activation_checkpointing=" + ("null" if config.recompute is None else "{}"))
    zero, mine = config.deepspeed["zero_optimization"], own.deepspeed["zero_optimization"]
    if (OFFLOAD in zero) != (OFFLOAD in mine):
        changed.append(f"zero_optimization.{OFFLOAD}=" + ('{"device": "cpu"}' if OFFLOAD in zero else "null"))
    return tuple(changed)
