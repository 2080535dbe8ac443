"""From files and `--set` to one plain dict that remembers where every key was written.

Rules of merging, the same for `extends` and `--set`: objects merge, lists and other values replace, null
removes (inside `mmds.stage.rates`, where null means frozen, it is a value).
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmds.errors import ConfigError
from mmds.jsonc import KeyPath, dotted, parse

Blame = Callable[[KeyPath, str], ConfigError]

# Objects that may be written as one string, which then is the value of their "name".
SHORTHANDS: frozenset[KeyPath] = frozenset(
    {("mmds", "stage"), *(("mmds", "model", part) for part in ("connector", "decoder", "resolution"))}
)
_NULL_IS_A_VALUE: KeyPath = ("mmds", "stage", "rates")
_SET_KEY = re.compile(r'"((?:[^"\\])*)"|([^."=]+)')


@dataclass(frozen=True, kw_only=True)
class Document:
    """A merged configuration: the plain dict, and `file:line` or `--set KEY` for each key path.

    `idle`: where a null was written that removed nothing, which is right for a known key and a slip of the pen otherwise.
    """

    name: str
    value: dict[str, Any]
    places: dict[KeyPath, str]
    idle: tuple[KeyPath, ...] = ()

    def get(self, path: KeyPath) -> Any:
        """The value at a key path, or None where there is none; a section written as one string has its `name`."""
        value: Any = self.value
        for depth, part in enumerate(path):
            if isinstance(value, str) and path[:depth] in SHORTHANDS:
                value = {"name": value}
            if isinstance(value, list) and isinstance(part, int) and part < len(value):
                value = value[part]
            else:
                value = value.get(part) if isinstance(value, dict) else None
        return value

    def place(self, path: KeyPath) -> str:
        """`file:line` or `--set KEY=VALUE` of the key, or of the nearest object around it."""
        around = (path[:n] for n in range(len(path), 0, -1))
        return next((self.places[outer] for outer in around if outer in self.places), self.name)

    def blame(self, path: KeyPath, problem: str) -> ConfigError:
        """The error that says where (place and key path) and what."""
        return ConfigError(f"{self.place(path)}: {dotted(path)}: {problem}")


def load_document(path: str | Path, overrides: Sequence[str] = ()) -> Document:
    """Read `path`, follow its `extends`, apply each override `a.b=JSON` in turn.

    Raises ConfigError for an unreadable file, bad JSON, a circle of `extends`, or an unreadable override.
    """
    document = _load_file(Path(path), chain=())
    for text in overrides:
        document = _merged(document, _override(document, text))
    return document


def expand(text: str, path: KeyPath, blame: Blame) -> str:
    """Expand a leading `~` and every `${VAR}` of a path-like value; an unset or empty one is an error."""

    def variable(match: re.Match[str]) -> str:
        value = os.environ.get(match[1] or "")
        if value:
            return value
        if match[1] is None:
            raise blame(path, f"{text!r} holds a bare $: write variables as ${{NAME}}")
        raise blame(
            path, f"the environment variable {match[1]!r} in {text!r} is not set: export it or write the path"
        )

    expanded = re.sub(r"\$(?:\{([^}]*)\})?", variable, text)
    if expanded.startswith("~"):
        home = os.path.expanduser(expanded)
        if home == expanded:
            raise blame(path, f"there is no home folder for {text!r}")
        return home
    return expanded


def _load_file(path: Path, chain: tuple[Path, ...]) -> Document:
    real = path.resolve()
    if real in chain:
        names = " -> ".join(str(p) for p in (*chain[chain.index(real) :], real))
        raise ConfigError(f"{path}: extends: the files extend each other in a circle: {names}")
    value, lines = parse(_read(path, chain), str(path))
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: the file must hold one JSON object {{...}}")
    document = Document(name=str(path), value=value, places={key: f"{path}:{n}" for key, n in lines.items()})
    _drop_schema(document)
    parent = value.pop("extends", None)
    empty = Document(name=str(path), value={}, places={})
    if parent is None:
        return _merged(empty, document)
    if not isinstance(parent, str) or not parent:
        raise document.blame(("extends",), "must be the path of one file, relative to this file")
    base = _load_file(path.parent / expand(parent, ("extends",), document.blame), (*chain, real))
    return _merged(base, document)


def _drop_schema(document: Document) -> None:
    """`"$schema"` tells an editor how to complete and check the file; it is no part of the run."""
    if not isinstance(document.value.pop("$schema", ""), str):
        raise document.blame(("$schema",), "must be the path or address of the schema, for editors")


def _read(path: Path, chain: tuple[Path, ...]) -> str:
    asked = f"{chain[-1]}: extends" if chain else "--config"
    try:
        return path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(f"{asked}: there is no file {path}") from None
    except OSError as error:
        raise ConfigError(f"{asked}: cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 (byte {error.start}): save the file as UTF-8") from None


def _merged(base: Document, over: Document) -> Document:
    return Document(
        name=over.name,
        value=_merge(base.value, over.value, ()),
        places={**base.places, **over.places},
        idle=(*base.idle, *over.idle, *_idle_nulls(base.value, over.value, ())),
    )


def _merge(base: Any, over: Any, path: KeyPath) -> Any:
    """`over` laid on `base`; the keys of `over` come first, so that its rate patterns win."""
    if isinstance(over, list):
        return [_merge(None, item, (*path, i)) for i, item in enumerate(over)]
    if not isinstance(over, dict):
        return over
    if isinstance(base, str) and path in SHORTHANDS:
        base = {"name": base}
    below = base if isinstance(base, dict) else {}
    merged = {}
    for key, value in over.items():
        if value is None and path != _NULL_IS_A_VALUE:
            continue
        laid = _merge(below.get(key), value, (*path, key))
        # An object of nulls alone says nothing, not even that the section is there.
        if laid != {} or value == {} or key in below:
            merged[key] = laid
    return {**merged, **{key: value for key, value in below.items() if key not in over}}


def _idle_nulls(base: Any, over: Any, path: KeyPath) -> Iterator[KeyPath]:
    """Where `over` holds a null with nothing to remove in `base`."""
    if isinstance(over, list):
        for index, item in enumerate(over):
            yield from _idle_nulls(None, item, (*path, index))
    if not isinstance(over, dict) or path == _NULL_IS_A_VALUE:
        return
    below = base if isinstance(base, dict) else {}
    for key, value in over.items():
        if value is None and key not in below:
            yield (*path, key)
        yield from _idle_nulls(below.get(key), value, (*path, key))


def _override(document: Document, text: str) -> Document:
    keys, value, lines = _read_override(text)
    if keys == ["extends"]:
        raise ConfigError(f"--set {text}: extends is read from files only: give that file to --config")
    path, laid = _overlay(document.value, keys, value, (), text)
    place = f"--set {text}"
    created = [path[:n] for n in range(1, len(path)) if not isinstance(document.get(path[:n]), (dict, list))]
    places = {key: place for key in (path, *created, *((*path, *below) for below in lines))}
    idle = (path,) if value is None and document.get(path) is None else ()
    return Document(name=document.name, value=laid, places=places, idle=idle)


def _read_override(text: str) -> tuple[list[str], Any, dict[KeyPath, int]]:
    """`a."b.c".d=JSON` -> keys, value, lines of the value. A bare word that is not JSON is a string."""
    keys: list[str] = []
    at = 0
    while match := _SET_KEY.match(text, at):
        keys.append(match[1] if match[1] is not None else match[2])
        at = match.end()
        if not text.startswith(".", at):
            break
        at += 1
    if not keys or not text.startswith("=", at):
        raise ConfigError(f"--set {text}: write KEY=VALUE, as in --set mmds.schedule.epochs=2")
    raw = text[at + 1 :].strip()
    try:
        value, lines = parse(raw, f"--set {text}")
    except ConfigError:
        if not raw or raw[0] in '{["':
            raise
        return keys, raw, {}
    return keys, value, lines


def _overlay(base: Any, keys: list[str], value: Any, path: KeyPath, text: str) -> tuple[KeyPath, Any]:
    """The key path that `keys` names in `base`, and what to merge over `base` so that it becomes `value`."""
    if not keys:
        return path, value
    head, rest = keys[0], keys[1:]
    if isinstance(base, list):
        if not head.isdecimal() or int(head) >= len(base):
            raise ConfigError(
                f"--set {text}: {dotted(path)} is a list of {len(base)}: no item {head!r} (from 0)"
            )
        index = int(head)
        full, over = _overlay(base[index], rest, value, (*path, index), text)
        return full, [*base[:index], _merge(base[index], over, (*path, index)), *base[index + 1 :]]
    below = base.get(head) if isinstance(base, dict) else None
    full, over = _overlay(below, rest, value, (*path, head), text)
    return full, {head: over}
