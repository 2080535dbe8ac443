"""DeepSpeed's own pydantic models, read: which fields they have, of what type, with which default and meaning."""

from __future__ import annotations

import ast
import enum
import importlib
import inspect
import re
import textwrap
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmds.ds_rules import Model

_KINDS = {bool: "boolean", int: "integer", float: "number", str: "string", Path: "string", list: "list"}


@dataclass(frozen=True, kw_only=True)
class ModelField:
    """One field of a model.

    `names`: as it may be written, the documented one first. `kind`: "boolean", "integer", "number", "string", "list" or
    "object", the last with its `model`. `doc`: the first sentence that DeepSpeed's source says about it.
    """

    names: tuple[str, ...]
    kind: str
    default: Any
    doc: str
    least: float | None
    above: float | None
    most: float | None
    choices: tuple[str, ...]
    model: Any


def load_model(rule: Model) -> Any:
    """The pydantic class that a rule names; imports deepspeed (seconds)."""
    module, name = rule.target.split(":")
    return getattr(importlib.import_module(module), name)


def written_names(model: Any) -> Mapping[str, str]:
    """Every name under which a field may be written -> the field's own name."""
    fields = model.model_fields.items()
    return {**{spec.alias or name: name for name, spec in fields}, **{name: name for name, _ in fields}}


def read_fields(model: Any) -> Iterator[ModelField]:
    """The fields of a pydantic class, in its order."""
    docs = _meanings(model)
    for name, spec in model.model_fields.items():
        hint = _plain(spec.annotation)
        yield ModelField(
            names=tuple(dict.fromkeys((spec.alias or name, name))),
            kind=_kind(hint),
            default=_default(spec),
            doc=docs.get(name, ""),
            least=_bound(spec, "ge"),
            above=_bound(spec, "gt"),
            most=_bound(spec, "le"),
            choices=tuple(item.value for item in hint) if _is(hint, str) and _is(hint, enum.Enum) else (),
            model=hint if _kind(hint) == "object" else None,
        )


def _bound(spec: Any, name: str) -> float | None:
    return next((getattr(item, name) for item in spec.metadata if hasattr(item, name)), None)


def _plain(hint: Any) -> Any:
    """The type without "or None"."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return next(arg for arg in typing.get_args(hint) if arg is not type(None))
    return hint


def _is(hint: Any, kind: type) -> bool:
    return isinstance(hint, type) and issubclass(hint, kind)


def _kind(hint: Any) -> str:
    if hasattr(hint, "model_fields"):
        return "object"
    hint = typing.get_origin(hint) or hint
    return next(kind for known, kind in _KINDS.items() if _is(hint, known))


def _default(spec: Any) -> Any:
    """The default as JSON holds it; None for an object, whose fields have their own."""
    value = spec.get_default(call_default_factory=True)
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, int) and not isinstance(value, bool):
        return int(value)
    return value if isinstance(value, (bool, float, str, list)) else None


def _meanings(model: Any) -> Mapping[str, str]:
    """Field -> the first sentence of the string that stands under it in the class body."""
    (body,) = ast.parse(textwrap.dedent(inspect.getsource(model))).body
    assert isinstance(body, ast.ClassDef)
    found = {}
    for field, below in zip(body.body, body.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and _is_text(below):
            text = " ".join(below.value.value.replace("``", "`").replace("’", "'").split())
            found[field.target.id] = re.split(r"(?<=\.) (?=[A-Z])", text)[0].removesuffix(".")
    return found


def _is_text(node: Any) -> typing.TypeGuard[Any]:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )
