"""The JSON Schema (draft 07, which editors know best) of a config: keys, types, bounds and meanings, for completion and checks.

It knows single keys. What keys say to each other (epochs or steps, recompute with activation_checkpointing) is for `load_config`.
"""

from __future__ import annotations

from typing import Any

from mmds.config_keys import Key, whole_tree
from mmds.config_text import type_text

Schema = dict[str, Any]


def config_schema() -> Schema:
    """The schema of a whole config file. Imports deepspeed, whose models declare most of its keys."""
    tree = whole_tree(deep=True)
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "mmds run",
        "description": "DeepSpeed's keys at the top level and the section mmds. The reference: docs/config.md",
        **_object(tree),
        # A file that extends another one may leave out anything, at every depth.
        "if": {"not": {"required": ["extends"]}},
        "then": _required(tree),
    }


def _node(key: Key) -> Schema:
    """The schema of one key. Null is allowed everywhere: it takes a key back to its default."""
    if key.refused:
        return {"type": "null", "description": f"Refused: {key.refused}", "doNotSuggest": True}
    if key.only:
        return {"enum": [*key.only, None], "description": f"Only {key.only[0]}: {key.why}"}
    node: Schema = {"description": key.doc if key.keys else f"{key.doc} ({type_text(key)})"}
    if key.default not in (None, ""):
        node["default"] = key.default
    if key.shorthand:
        name = next(below for below in key.keys if below.name == "name")
        return {**node, "anyOf": [_scalar(name), {"type": "object", **_object(key)}]}
    return {**node, **_value(key)}


def _value(key: Key) -> Schema:
    if key.kind == "object":
        return {"type": ["object", "null"], **_object(key)}
    if key.kind == "rates":
        rate = {"type": ["number", "null"], "exclusiveMinimum": 0, "maximum": 1}
        parts = {r"^([*?\[]|encoder|connector|decoder)": rate}
        return {"type": ["object", "null"], "patternProperties": parts, "additionalProperties": False}
    if key.kind == "list":
        entry = {"type": "object", **_object(key), "allOf": [_required(key)]}
        item = entry if key.keys else {"type": key.items, **_bounds(key)}
        least = {"minItems": 1} if key.path.startswith("mmds") else {}
        size = {"minItems": key.size, "maxItems": key.size} if key.size else {}
        return {"type": ["array", "null"], "items": item, **least, **size}
    return _scalar(key)


def _object(key: Key) -> Schema:
    """Exactly these keys."""
    properties = {below.name: _node(below) for below in key.keys}
    properties |= {below.also: _node(below) for below in key.keys if below.also}
    return {"properties": properties, "additionalProperties": False}


def _required(key: Key) -> Schema:
    """The keys that must be there and hold more than null, at this depth and below."""
    names = [below.name for below in key.keys if below.required]
    inside = {below.name: _required(below) for below in key.keys if below.kind == "object" and below.keys}
    node: Schema = {name: schema for name, schema in inside.items() if schema}
    for name in names:
        node[name] = {"not": {"type": "null"}, **node.get(name, {})}
    return {**({"required": names} if names else {}), **({"properties": node} if node else {})}


def _scalar(key: Key) -> Schema:
    if key.choices and key.any_case:
        words = "|".join("".join(f"[{c.lower()}{c.upper()}]" for c in word) for word in key.choices)
        return {"anyOf": [{"enum": [*key.choices, None]}, {"type": "string", "pattern": f"^({words})$"}]}
    if key.choices:
        return {"enum": [*key.choices, None]}
    text = {"minLength": 1, "not": {"const": "auto"}} if key.kind == "string" else {}
    return {"type": [key.kind, "null"], **_bounds(key), **text}


def _bounds(key: Key) -> Schema:
    given = {
        "minimum": key.least,
        "exclusiveMinimum": key.above,
        "maximum": key.most,
        "exclusiveMaximum": key.below,
    }
    return {name: bound for name, bound in given.items() if bound is not None}
