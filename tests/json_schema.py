"""What a JSON Schema finds wrong with a value: the keywords that ours uses, and no others."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

Schema = dict[str, Any]

_SILENT = {"$schema", "title", "description", "default", "doNotSuggest", "then"}  # "then" belongs to "if"


def faults(value: Any, schema: Schema, path: str = "") -> Iterator[str]:
    """`path: keyword` of every fault. KeyError for a keyword that is not known here."""
    for word in schema.keys() - _SILENT:
        yield from _KEYWORDS[word](value, schema[word], schema, path)


def _is(value: Any, kind: str) -> bool:
    if kind == "null":
        return value is None
    if kind == "integer":
        return _is(value, "number") and value == int(value)
    if kind in ("number", "boolean"):
        return isinstance(value, (int, float)) and isinstance(value, bool) == (kind == "boolean")
    return isinstance(value, {"object": dict, "array": list, "string": str}[kind])


def _equal(one: Any, other: Any) -> bool:
    return one == other and isinstance(one, bool) == isinstance(other, bool)


def _when(kind: str, right: Callable[[Any, Any], bool], word: str) -> Callable[..., Iterator[str]]:
    """A keyword that says something about values of one kind only."""

    def check(value: Any, rule: Any, schema: Schema, path: str) -> Iterator[str]:
        if _is(value, kind) and not right(value, rule):
            yield f"{path}: {word}"

    return check


def _type(value: Any, rule: Any, schema: Schema, path: str) -> Iterator[str]:
    if not any(_is(value, kind) for kind in ([rule] if isinstance(rule, str) else rule)):
        yield f"{path}: type"


def _enum(value: Any, rule: Any, schema: Schema, path: str) -> Iterator[str]:
    if not any(_equal(value, one) for one in rule):
        yield f"{path}: enum"


def _const(value: Any, rule: Any, schema: Schema, path: str) -> Iterator[str]:
    if not _equal(value, rule):
        yield f"{path}: const"


def _not(value: Any, rule: Schema, schema: Schema, path: str) -> Iterator[str]:
    if not list(faults(value, rule)):
        yield f"{path}: not"


def _any_of(value: Any, rule: list[Schema], schema: Schema, path: str) -> Iterator[str]:
    if all(list(faults(value, one)) for one in rule):
        yield f"{path}: anyOf"


def _all_of(value: Any, rule: list[Schema], schema: Schema, path: str) -> Iterator[str]:
    for one in rule:
        yield from faults(value, one, path)


def _if(value: Any, rule: Schema, schema: Schema, path: str) -> Iterator[str]:
    if not list(faults(value, rule)):
        yield from faults(value, schema["then"], path)


def _items(value: Any, rule: Schema, schema: Schema, path: str) -> Iterator[str]:
    for index, item in enumerate(value if _is(value, "array") else ()):
        yield from faults(item, rule, f"{path}[{index}]")


def _required(value: Any, rule: list[str], schema: Schema, path: str) -> Iterator[str]:
    if _is(value, "object"):
        yield from (f"{path}: required {name}" for name in rule if name not in value)


def _properties(value: Any, rule: Schema, schema: Schema, path: str) -> Iterator[str]:
    for name, item in value.items() if _is(value, "object") else ():
        if name in rule:
            yield from faults(item, rule[name], f"{path}.{name}")


def _pattern_properties(value: Any, rule: Schema, schema: Schema, path: str) -> Iterator[str]:
    for name, item in value.items() if _is(value, "object") else ():
        for pattern, inner in rule.items():
            if re.search(pattern, name):
                yield from faults(item, inner, f"{path}.{name}")


def _no_others(value: Any, rule: bool, schema: Schema, path: str) -> Iterator[str]:
    assert rule is False
    known, patterns = schema.get("properties", {}), schema.get("patternProperties", {})
    for name in value if _is(value, "object") else ():
        if name not in known and not any(re.search(pattern, name) for pattern in patterns):
            yield f"{path}.{name}: additionalProperties"


_KEYWORDS: dict[str, Callable[..., Iterator[str]]] = {
    "type": _type,
    "enum": _enum,
    "const": _const,
    "not": _not,
    "anyOf": _any_of,
    "allOf": _all_of,
    "if": _if,
    "items": _items,
    "required": _required,
    "properties": _properties,
    "patternProperties": _pattern_properties,
    "additionalProperties": _no_others,
    "minimum": _when("number", lambda value, bound: value >= bound, "minimum"),
    "maximum": _when("number", lambda value, bound: value <= bound, "maximum"),
    "exclusiveMinimum": _when("number", lambda value, bound: value > bound, "exclusiveMinimum"),
    "exclusiveMaximum": _when("number", lambda value, bound: value < bound, "exclusiveMaximum"),
    "minLength": _when("string", lambda value, bound: len(value) >= bound, "minLength"),
    "pattern": _when("string", lambda value, rule: bool(re.search(rule, value)), "pattern"),
    "minItems": _when("array", lambda value, bound: len(value) >= bound, "minItems"),
    "maxItems": _when("array", lambda value, bound: len(value) <= bound, "maxItems"),
}
