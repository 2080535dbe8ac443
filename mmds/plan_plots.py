"""The pictures of a plan's report, as PNG files in memory. Needs matplotlib (`pip install 'mmds[planning]'`)."""

from __future__ import annotations

import io
from typing import Any

import numpy as np

from mmds.errors import ConfigError
from mmds.plan_report import SIDES, PlanReport

BLUE, ORANGE, GREY, GREEN = "#2f6db5", "#d9822b", "#8a93a3", "#3a8f5c"
COLOURS = {"cost": BLUE, "token_budget": ORANGE, "resolution_bucket": GREY}


def plots(report: PlanReport) -> dict[str, bytes]:
    """Name -> PNG. Raises ConfigError when matplotlib is not installed."""
    return {
        "sizes": _png(_sizes(report)),
        "data": _png(_data(report)),
        "balance": _png(_balance(report)),
        "memory": _png(_memory(report)),
    }


def _figure(columns: int) -> tuple[Any, Any]:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            "the report draws with matplotlib, which is not installed: pip install 'mmds[planning]'"
        ) from error
    figure = Figure(figsize=(10, 3.8), layout="constrained")
    axes = figure.subplots(1, columns, squeeze=False)[0]
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(color="#e6e9ee", linewidth=0.8)
        axis.set_axisbelow(True)
    return figure, axes


def _sizes(report: PlanReport) -> Any:
    """Patches and visual tokens of one image by the length of its longer side."""
    figure, axes = _figure(2)
    for (name, (patches, tokens)), colour in zip(report.curves.items(), (BLUE, ORANGE, GREY), strict=True):
        axes[0].plot(SIDES, patches, color=colour, label=name)
        axes[1].plot(SIDES, tokens, color=colour, label=name)
    for axis, what in zip(axes, ("patches (encoder)", "visual tokens (decoder)"), strict=True):
        axis.set(
            xlabel="longer side of the image, px", ylabel=what, title=f"{what} of one image", ylim=(0, None)
        )
    axes[0].legend(title="aspect", frameon=False)
    return figure


def _data(report: PlanReport) -> Any:
    """Patches, tokens and work of the samples."""
    figure, axes = _figure(3)
    sizes = report.sizes
    for axis, values, what, colour in (
        (axes[0], sizes.patches[sizes.images > 0], "patches", BLUE),
        (axes[1], sizes.tokens, "tokens, slots included", ORANGE),
        (axes[2], report.flops, "FLOPs, forward and backward", GREEN),
    ):
        if len(values):
            low, high = max(1.0, float(values.min())), float(values.max())
            bins = np.geomspace(low, max(high, 1.01 * low), 41)
            axis.hist(np.maximum(values, low), bins=bins, color=colour)
            axis.set_xscale("log")
            axis.xaxis.set_minor_formatter("")  # between powers of ten they would overlap
        axis.set(
            xlabel=f"{what} of a sample",
            ylabel="samples",
            title=what.split(",")[0][0].upper() + what.split(",")[0][1:],
        )
    return figure


def _balance(report: PlanReport) -> Any:
    """Idle share by scheme and number of ranks, and the least that any plan could reach."""
    figure, (axis,) = _figure(1)
    ranks = sorted({b.ranks for b in report.balances})
    schemes = list(dict.fromkeys(b.scheme for b in report.balances))
    width = 0.8 / max(len(schemes), 1)
    for at, scheme in enumerate(schemes):
        idle = {b.ranks: 100 * b.idle for b in report.balances if b.scheme == scheme}
        places = [ranks.index(r) + (at - (len(schemes) - 1) / 2) * width for r in idle]
        bars = axis.bar(places, list(idle.values()), width=0.92 * width, color=COLOURS[scheme], label=scheme)
        axis.bar_label(bars, fmt="%.2f", fontsize=8, padding=2)
    least = {b.ranks: 100 * (1 - 1 / b.bound) for b in report.balances if b.scheme == "cost"}
    for r, value in least.items():
        middle = ranks.index(r)
        axis.plot([middle - 0.4, middle + 0.4], [value, value], color="#1d2330", linewidth=1.6)
    axis.plot([], [], color="#1d2330", label="no plan can be below")
    axis.set_xticks(range(len(ranks)), [f"{r} ranks" for r in ranks])
    axis.set(ylabel="% of all ranks' time", title="What ranks wait for one another, predicted")
    axis.margins(y=0.15)
    axis.legend(frameon=False)
    return figure


def _memory(report: PlanReport) -> Any:
    """States and activations of a rank by number of ranks, and what a card has."""
    figure, (axis,) = _figure(1)
    names = [f"{ranks} ranks" for ranks in report.memory]
    states = np.array([memory.states / 1e9 for memory in report.memory.values()])
    kept = np.array([memory.activations / 1e9 for memory in report.memory.values()])
    axis.bar(names, states, width=0.55, color=BLUE, label="weights, gradients, optimizer")
    bars = axis.bar(
        names, kept, width=0.55, bottom=states, color=ORANGE, label="activations of the largest row"
    )
    axis.bar_label(bars, labels=[f"{total:.1f}" for total in states + kept], padding=2, fontsize=9)
    card = report.cards.memory
    if (states + kept).max() > card / 4:
        axis.axhline(card, color="#1d2330", linewidth=1.4)
        axis.annotate(
            f"a card: {card:g} GB", (0.01, card), xycoords=("axes fraction", "data"), va="bottom", fontsize=9
        )
    axis.set(ylabel="GB of a rank", title="Memory, without context and buffers")
    axis.margins(y=0.15)
    axis.legend(frameon=False)
    return figure


def _png(figure: Any) -> bytes:
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=110)
    return file.getvalue()
