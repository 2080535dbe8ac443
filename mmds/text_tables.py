"""Tables and lists of facts as plain text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns of equal width, the first one flush left."""
    lines = [head, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    shown = [
        [
            line[0].ljust(widths[0]),
            *(cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)),
        ]
        for line in lines
    ]
    return "\n".join("  ".join(cells).rstrip() for cells in shown)


def facts(values: Mapping[str, str]) -> str:
    """A line each: what, and how much."""
    return "\n".join(f"{key:<24}{value}" for key, value in values.items())
