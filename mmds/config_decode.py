"""From a plain dict to the typed sections, strictly: no unknown key, no wrong type, no value out of range."""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

from mmds.config_load import Blame, expand
from mmds.config_names import unknown_key
from mmds.config_text import AUTO, bounds_text, show
from mmds.jsonc import KeyPath

Section = TypeVar("Section")


def decode(cls: type[Section], value: Any, path: KeyPath, blame: Blame) -> Section:
    """Build the dataclass `cls` from a JSON object.

    Raises the ConfigError that `blame(key path, problem)` makes: an unknown or missing key, a bad value.
    """
    if not isinstance(value, dict):
        raise blame(path, f"expected an object {{...}}, got {show(value)}")
    fields = {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    for key in value:
        if key not in fields:
            raise blame((*path, key), unknown_key((*path, key), fields))
    hints = typing.get_type_hints(cls)
    found = {}
    for name, spec in fields.items():
        if name in value:
            found[name] = _value(hints[name], spec.metadata, value[name], (*path, name), blame)
        elif spec.default is dataclasses.MISSING and spec.default_factory is dataclasses.MISSING:
            raise blame((*path, name), f"missing: {spec.metadata['doc']}")
    return cls(**found)


def plain(value: Any) -> Any:
    """A decoded section as JSON types again (the inverse of `decode`), with every default written out."""
    if dataclasses.is_dataclass(value):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return [plain(item) for item in value]
    return value


def _value(hint: Any, about: Mapping[str, Any], value: Any, path: KeyPath, blame: Blame) -> Any:
    """One value of the type `hint`; nested sections, lists and pattern tables recurse."""
    if value == "auto":
        raise blame(path, f"{AUTO}, or take the key out ({about['doc']})")
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return None if value is None else _value(args[0], about, value, path, blame)
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        short = about.get("shorthand") and isinstance(value, str)
        return decode(hint, {"name": value} if short else value, path, blame)
    if origin is tuple:
        _check_list(value, about["size"], path, blame)
        return tuple(_value(args[0], about, item, (*path, i), blame) for i, item in enumerate(value))
    if origin is dict:
        if not isinstance(value, dict):
            raise blame(path, f"expected an object {{...}}, got {show(value)}")
        return {key: _value(args[1], about, item, (*path, key), blame) for key, item in value.items()}
    if origin is typing.Literal:
        return _choice(args, value, path, blame)
    if hint in (int, float):
        return _number(hint, about, value, path, blame)
    if hint is bool:
        if not isinstance(value, bool):
            raise blame(path, f"expected true or false, got {show(value)}")
        return value
    if not isinstance(value, str) or not value.strip():
        raise blame(path, f"expected a non-empty string, got {show(value)}")
    return _expanded(value, path, blame) if about["path"] else value


def _check_list(value: Any, size: int | None, path: KeyPath, blame: Blame) -> None:
    if not isinstance(value, list) or not value:
        raise blame(path, f"expected a list with at least one item, got {show(value)}")
    if size is not None and len(value) != size:
        raise blame(path, f"expected a list of {size} numbers, got {show(value)}")


def _choice(args: tuple[Any, ...], value: Any, path: KeyPath, blame: Blame) -> Any:
    known = ", ".join(f'"{arg}"' for arg in args)
    if not isinstance(value, str) or value not in args:
        raise blame(path, f"expected one of {known}, got {show(value)}")
    return value


def _number(hint: type, about: Mapping[str, Any], value: Any, path: KeyPath, blame: Blame) -> int | float:
    meant = f" ({about['doc']})" + (f": {about['hint']}" if about["hint"] else "")
    if isinstance(value, bool) or not isinstance(value, int if hint is int else (int, float)):
        kind = "an integer" if hint is int else "a number"
        string = ", a string" if isinstance(value, str) else ""
        raise blame(path, f"expected {kind}, got {show(value)}{string}{meant}")
    least, above, most = about["least"], about["above"], about["most"]
    inside = (
        (least is None or value >= least)
        and (above is None or value > above)
        and (most is None or value <= most)
    )
    if not inside or not math.isfinite(value):
        raise blame(path, f"expected {bounds_text(least, above, most)}, got {show(value)}{meant}")
    return value if hint is int else float(value)


def _expanded(value: str, path: KeyPath, blame: Blame) -> str:
    prefix = "local-dir:" if value.startswith("local-dir:") else ""
    return prefix + expand(value.removeprefix(prefix), path, blame)
