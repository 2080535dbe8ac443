"""Every key that a config may hold, as one tree.

`--explain`, docs/config.md and ds_configs/schema.json are three views of it, and an unknown key is answered from it. The keys of
"mmds" come from the dataclasses of `config_types`, DeepSpeed's from the tables of `ds_keys` and, below the sections that
DeepSpeed checks by itself, from its pydantic models (`deep`, which imports deepspeed).
"""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mmds.config_types import MmdsSection, about
from mmds.ds_keys import PATHS, TOP_LEVEL
from mmds.ds_models import ModelField, load_model, read_fields
from mmds.ds_rules import Model, Only, Pair, Refused, Rule, Section, Value
from mmds.jsonc import KeyPath, dotted

# Documented keys of "mmds" that this version does not have, with what they will say.
NOT_YET: Mapping[str, str] = {
    "mmds.eval": "evaluations on the way",
}
LATER = "not yet supported: take the key out"
_KINDS = {int: "integer", float: "number", bool: "boolean", str: "string"}


@dataclass(frozen=True, kw_only=True)
class Key:
    """One key of a config.

    `path`: dotted, "[]" for the items of a list. `kind`: "boolean", "integer", "number", "string", "object", "list" (of numbers
    or strings where `keys` is empty, else of objects with these keys), or "rates" (pattern -> number or null). `default`: what a run
    has without the key, None = nothing, or decided elsewhere. `only`: the one value that may be written; `refused`: why none
    may. `also`: another name of the same setting.
    """

    path: str
    kind: str
    doc: str
    required: bool = False
    default: Any = None
    least: float | None = None
    above: float | None = None
    most: float | None = None
    below: float | None = None
    choices: tuple[str, ...] = ()
    any_case: bool = False
    items: str = ""
    size: int | None = None
    expands: bool = False
    shorthand: bool = False
    only: tuple[Any, ...] = ()
    why: str = ""
    refused: str = ""
    also: str = ""
    keys: tuple[Key, ...] = ()

    @property
    def name(self) -> str:
        """The last part of the path, as it is written in the file."""
        return self.path.removesuffix("[]").rpartition(".")[2]


@functools.cache
def own_tree() -> Key:
    """The key "mmds" and all below it."""
    spec = dataclasses.field(metadata=about("the run: what trains, on what, from where, for how long"))
    return _own_key(MmdsSection, spec, "mmds")


@functools.cache
def deepspeed_keys(*, deep: bool) -> tuple[Key, ...]:
    """DeepSpeed's keys at the top level and all below; without `deep` models show only the keys with a rule of ours."""
    return tuple(_rule_key(rule, name, deep) for name, rule in TOP_LEVEL.items())


@functools.cache
def whole_tree(*, deep: bool) -> Key:
    """The whole file as one object."""
    files = (
        Key(path="$schema", kind="string", doc="schema that an editor completes and checks the file with"),
        Key(path="extends", kind="string", doc="file that this one starts from", expands=True),
    )
    return Key(path="", kind="object", doc="a run", keys=(*files, *deepspeed_keys(deep=deep), own_tree()))


def walk(key: Key) -> Iterator[Key]:
    """The key and all below it, in order."""
    yield key
    for below in key.keys:
        yield from walk(below)


def pattern(path: KeyPath) -> str:
    """`("mmds", "data", "mix", 0, "path")` -> `mmds.data.mix[].path`."""
    return dotted(tuple("[]" if isinstance(part, int) else part for part in path)).replace(".[]", "[]")


def find(path: KeyPath) -> Key | None:
    """The key at a place in the file, or None. A pattern of `rates` is found as `rates`, an item of a list as the list."""
    key = whole_tree(deep=_meets_model(path))
    for part in path:
        if key.kind == "rates" or (isinstance(part, int) and key.kind == "list"):
            continue
        below = [below for below in key.keys if part in (below.name, below.also)]
        if not below:
            return None
        key = below[0]
    return key


def named(name: str, *, deep: bool) -> tuple[Key, ...]:
    """The keys whose last part is `name`, in any section."""
    return tuple(key for key in walk(whole_tree(deep=deep)) if name and name in (key.name, key.also))


def _meets_model(path: KeyPath) -> bool:
    """Whether DeepSpeed's own model decides about the key or one around it."""
    keys: Mapping[str, Rule] = TOP_LEVEL
    for part in path:
        rule = keys.get(str(part))
        if isinstance(rule, Model):
            return True
        keys = rule.keys if isinstance(rule, Section) else {}
    return False


def _own_key(hint: Any, spec: dataclasses.Field[Any], path: str) -> Key:
    held = spec.metadata
    given: dict[str, Any] = {
        "path": path,
        "required": spec.default is dataclasses.MISSING and spec.default_factory is dataclasses.MISSING,
        "default": _default(spec),
        "expands": held["path"],
        **{name: held[name] for name in ("doc", "least", "above", "most", "size", "shorthand")},
    }
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        hint = typing.get_args(hint)[0]
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if dataclasses.is_dataclass(hint):
        return Key(kind="object", keys=_own_keys(hint, path), **given)
    if origin is tuple and dataclasses.is_dataclass(args[0]):
        return Key(kind="list", keys=_own_keys(args[0], f"{path}[]"), **given)
    if origin is tuple:
        return Key(kind="list", items=_KINDS[args[0]], **given)
    if origin is dict:
        return Key(kind="rates", **given)
    if origin is typing.Literal:
        return Key(kind="string", choices=args, **given)
    return Key(kind=_KINDS[hint], **given)


def _default(spec: dataclasses.Field[Any]) -> Any:
    """The default as it may be written in the file; a section that has one may be written as its name."""
    default: Any = spec.default
    if default is dataclasses.MISSING:
        return None
    return getattr(default, "name", None) if dataclasses.is_dataclass(default) else default


def _own_keys(cls: Any, path: str) -> tuple[Key, ...]:
    hints = typing.get_type_hints(cls)
    there = tuple(_own_key(hints[spec.name], spec, f"{path}.{spec.name}") for spec in dataclasses.fields(cls))
    later = {name: doc for name, doc in NOT_YET.items() if name.rpartition(".")[0] == path}
    return there + tuple(Key(path=name, kind="", doc=doc, refused=LATER) for name, doc in later.items())


def _rule_key(rule: Rule, path: str, deep: bool) -> Key:
    if isinstance(rule, Refused):
        return Key(path=path, kind="", doc="", refused=rule.why)
    if isinstance(rule, Only):
        kind = _KINDS[type(rule.value)]
        return Key(path=path, kind=kind, doc="", default=rule.value, only=(rule.value,), why=rule.why)
    if isinstance(rule, Pair):
        numbers: dict[str, Any] = {"kind": "list", "items": "number", "size": 2, "least": 0, "below": 1}
        return Key(path=path, doc=rule.doc, default=list(rule.default), **numbers)
    if isinstance(rule, Value):
        return Key(path=path, expands=tuple(path.split(".")) in PATHS, **vars(rule))
    ruled = {name: _rule_key(below, f"{path}.{name}", deep) for name, below in rule.keys.items()}
    if isinstance(rule, Section):
        return Key(path=path, kind="object", doc=rule.doc, keys=tuple(ruled.values()))
    keys = _model_keys(load_model(rule), path, ruled, rule.docs) if deep else tuple(ruled.values())
    return Key(path=path, kind="object", doc=rule.doc, required=rule.required, keys=keys)


def _model_keys(model: Any, path: str, ruled: Mapping[str, Key], docs: Mapping[str, str]) -> tuple[Key, ...]:
    """The fields of a model, each with our rule where there is one, and the names that only we have a rule for."""
    keys: list[Key] = []
    known: set[str] = set()
    for field in read_fields(model):
        rule = next((ruled[name] for name in field.names if name in ruled), None)
        keys.append(_field_key(field, path, docs, rule))
        known.update(field.names)
    return (*keys, *(key for name, key in ruled.items() if name not in known))


def _field_key(field: ModelField, path: str, docs: Mapping[str, str], rule: Key | None) -> Key:
    name, also = field.names[0], "".join(field.names[1:])
    doc = docs.get(field.names[-1], field.doc)
    if rule is not None:
        return dataclasses.replace(rule, path=f"{path}.{name}", also=also, doc=rule.doc or doc)
    return Key(
        path=f"{path}.{name}",
        also=also,
        kind=field.kind,
        items="string" if field.kind == "list" else "",
        doc=doc,
        default=field.default,
        least=field.least,
        above=field.above,
        most=field.most,
        choices=field.choices,
        expands=(*path.split("."), name) in PATHS,
        keys=_model_keys(field.model, f"{path}.{name}", {}, {}) if field.model else (),
    )
