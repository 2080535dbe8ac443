"""Values, bounds, types and defaults in the words of messages, of --explain and of the reference page."""

from __future__ import annotations

import json
from typing import Any

from mmds.config_keys import Key

AUTO = '"auto" has no meaning here: write the value'


def show(value: Any) -> str:
    """A JSON value as it stands in a message, at most 60 characters."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."


def bounds_text(
    least: float | None, above: float | None, most: float | None, below: float | None = None
) -> str:
    """The bounds of a number in words, as in "at least 0 and at most 1"; empty without bounds."""
    named = {"at least": least, "above": above, "at most": most, "below": below}
    return " and ".join(f"{word} {bound}" for word, bound in named.items() if bound is not None)


def type_text(key: Key) -> str:
    """The type of a key with its bounds or choices, as in "integer, at least 1"."""
    bounds = bounds_text(key.least, key.above, key.most, key.below)
    if key.least is not None and key.most is not None:
        bounds = f"{key.least} to {key.most}"
    if key.kind == "rates":
        return "object: pattern -> number above 0 and at most 1, or null"
    if key.choices:
        kind = f"{' or '.join(key.choices)}" if len(key.choices) < 3 else f"one of {', '.join(key.choices)}"
    elif key.kind == "list":
        kind = f"list of {key.size or ''} {key.items}s".replace("  ", " ") if key.items else "list of objects"
    else:
        kind = "path" if key.expands else key.kind
    return ", ".join(filter(None, (kind, bounds)))


def default_text(key: Key) -> str:
    """What a run has when the key is absent, as JSON; "required" when it may not be absent."""
    if key.required:
        return "required"
    return "{}" if key.kind == "rates" else "null" if key.default in (None, "") else json.dumps(key.default)
