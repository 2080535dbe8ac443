"""A plan's report as text, and as one HTML page that needs no other file."""

from __future__ import annotations

import base64
import html
from collections.abc import Mapping

import numpy as np

from mmds.plan_report import STEPS, PlanReport
from mmds.run_forecast import duration
from mmds.text_tables import facts, table

_STYLE = """
body { margin: 0; background: #f6f7f9; color: #1d2330; font: 15px/1.5 system-ui, "Segoe UI", sans-serif }
main { max-width: 1060px; margin: 0 auto; padding: 24px }
h1 { font-size: 22px } h2 { font-size: 17px; margin: 28px 0 6px }
pre { background: #fff; border: 1px solid #dfe3ea; border-radius: 6px; padding: 12px 14px; overflow-x: auto; font: 13px/1.5 ui-monospace, monospace }
img { max-width: 100%; background: #fff; border: 1px solid #dfe3ea; border-radius: 6px }
"""

_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"

PICTURES = {"Images": "sizes", "Samples": "data", "Balance": "balance", "Memory": "memory"}
"""Which picture belongs to which part of the text."""


def sections(report: PlanReport) -> dict[str, str]:
    """The report as text: title -> lines."""
    data, known = report.data, report.forecast
    found = {
        "Images": _images(report),
        "Samples": _samples(report),
        "Work": facts(
            {
                "a sample": f"{report.flops.mean():.3g} FLOPs mean, {np.median(report.flops):.3g} median, {np.quantile(report.flops, 0.99):.3g} of one in a hundred",
                "a step": f"{known.flops:.3g} FLOPs, {known.encoder_share:.1%} of them of images before the decoder",
                "the run": f"{report.run_flops:.3g} FLOPs in {data.plan.total_steps:,} steps of {data.plan.rows_per_step} rows",
            }
        ),
        "Balance": _balance(report),
        "Memory": _memory(report),
        "Time and money": _time(report),
    }
    if report.warnings:
        found["To look at"] = "\n".join(f"- {warning}" for warning in report.warnings)
    return found


def text(parts: Mapping[str, str]) -> str:
    """All of it for a terminal."""
    return "\n\n".join(f"{title}\n{'-' * len(title)}\n{lines}" for title, lines in parts.items())


def page(title: str, parts: Mapping[str, str], pictures: Mapping[str, bytes]) -> str:
    """All of it as HTML. pictures: name -> PNG."""
    body = []
    for name, lines in parts.items():
        body.append(f"<h2>{html.escape(name)}</h2>")
        if PICTURES.get(name) in pictures:
            data = base64.b64encode(pictures[PICTURES[name]]).decode()
            body.append(f'<img alt="{html.escape(name)}" src="data:image/png;base64,{data}">')
        body.append(f"<pre>{html.escape(lines)}</pre>")
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style></head><body><main><h1>{html.escape(title)}</h1>"
        + "".join(body)
        + "</main></body></html>\n"
    )


def _images(report: PlanReport) -> str:
    geometry = report.data.geometry
    rows = []
    for width, height in ((224, 224), (336, 336), (640, 480), (1344, 896), (1700, 2200), (4000, 3000)):
        plan = geometry.plan(width, height)
        rows.append((f"{width} x {height}", f"{plan.patches:,}", f"{plan.visual_tokens:,}"))
    return f"resolution {geometry.mode}, at most {report.data.config.max_pixels:,} pixels an image\n" + table(
        ("image", "patches", "visual tokens"), rows
    )


def _samples(report: PlanReport) -> str:
    data, sizes, first = report.data, report.sizes, report.data.plan.preview()
    rows = [
        (
            name,
            f"{values.mean():,.0f}",
            f"{np.median(values):,.0f}",
            f"{np.quantile(values, 0.99):,.0f}",
            f"{values.max():,}",
        )
        for name, values in (
            ("tokens", sizes.tokens),
            ("trained on", sizes.supervised),
            ("images", sizes.images),
            ("patches", sizes.patches),
        )
    ]
    real = first.tokens / (first.rows * data.plan.row_tokens)
    return (
        f"{len(data.mixture):,} samples, {data.text_share:.1%} of those seen are text-only; {first.samples / first.rows:.1f} samples a row, "
        f"rows {real:.1%} full, {first.dropped:,} samples of the first {first.steps} steps left out as too large\n"
        + table(("of a sample", "mean", "median", "1 in 100", "most"), rows)
    )


def _balance(report: PlanReport) -> str:
    rows = [
        (
            b.scheme,
            f"{b.ranks:,}",
            f"{b.rows:,}",
            f"{b.ratio:.4f}",
            f"{b.bound:.4f}",
            f"{b.idle:.2%}",
            f"{b.fill:.1%}",
            str(b.steps),
        )
        for b in report.balances
    ]
    lines = [
        table(("scheme", "ranks", "rows a step", "cost / mean", "least", "idle", "full", "steps"), rows),
        f"cost / mean: what a step takes over what it would be were all ranks equally busy (objective {report.data.config.objective}; at most the "
        f"first {STEPS} steps).",
    ]
    for ranks, cap in report.caps.items():
        lines.append(
            f"{ranks} ranks: one sample alone costs more than a rank's share; "
            + (f"none would with --set mmds.data.max_pixels={cap}" if cap else "no pixel cap changes that")
        )
    return "\n".join(lines)


def _memory(report: PlanReport) -> str:
    card = report.cards.memory * 1e9
    rows = [
        (
            f"{ranks:,}",
            f"{memory.states / 1e9:.1f} GB",
            f"{memory.activations / 1e9:.1f} GB",
            f"{memory.device / 1e9:.1f} GB",
            f"{memory.host / 1e9:.1f} GB",
            "fits" if memory.device <= card else "DOES NOT FIT",
        )
        for ranks, memory in report.memory.items()
    ]
    return (
        table(
            ("ranks", "states", "activations", "in all", "of the node's", f"{report.cards.memory:g} GB"), rows
        )
        + "\nwithout context, communication buffers and what the allocator cannot use: 2 to 3 GB. Activations are those of the row of the first "
        f"{report.forecast.steps} steps that needs most."
    )


def _time(report: PlanReport) -> str:
    cards, hours, plan = report.cards, report.hours, report.data.plan
    first = plan.preview()
    tokens = first.tokens / first.steps * plan.total_steps
    return facts(
        {
            "tokens": f"{tokens:,.0f} in {plan.total_steps:,} steps",
            "time": f"{duration(3600 * hours)} on {cards.count} GPUs of {cards.tflops:g} TFLOP/s at {cards.mfu:.0%}: FLOPs x imbalance / (GPUs x TFLOP/s x MFU)",
            "a step": duration(3600 * hours / plan.total_steps),
            "money": f"{cards.count * hours * cards.price:,.0f} at {cards.price:g} for a GPU and hour",
        }
    )
