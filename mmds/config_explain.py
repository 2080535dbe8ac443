"""`train.py --explain KEY`: what a key means, what it may hold, who owns it, and what a given config says about it."""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections.abc import Iterator, Sequence

from mmds.config_keys import Key, find, named, pattern, walk, whole_tree
from mmds.config_load import Document, load_document
from mmds.config_names import FOREIGN, LATER_NAMES, NEEDLESS, UNSUPPORTED
from mmds.config_text import default_text, show, type_text
from mmds.ds_keys import TOP_LEVEL
from mmds.errors import ConfigError
from mmds.jsonc import KeyPath

_PART = re.compile(r'"([^"]*)"|\[(\d*)\]|([^.\[\]"]+)')


def explain_command(arguments: Sequence[str]) -> int:
    """Answer `--explain KEY [--config FILE] [--set a.b=JSON]` on stdout, or say on stderr why not; the exit status."""
    parser = argparse.ArgumentParser(prog="train.py", allow_abbrev=False)
    parser.add_argument("--explain", required=True, metavar="KEY")
    parser.add_argument("--config", metavar="FILE")
    parser.add_argument("--set", action="append", default=[], metavar="a.b=JSON")
    asked, _ = parser.parse_known_args(arguments)
    try:
        document = load_document(asked.config, asked.set) if asked.config else None
        print(explain(asked.explain, document))
    except ConfigError as error:
        print(f"ConfigError: {error}", file=sys.stderr)
        return 1
    return 0


def explain(name: str, document: Document | None = None) -> str:
    """The page about the key `name`: a full path, or any end of one that is unique; names of other trainers lead to ours.

    `document`: a config whose value, and the place where it was written, are shown too. Raises ConfigError for a name that is
    unknown (with the nearest), or that several keys have (with their paths).
    """
    path = read_path(name)
    if path and (key := find(path)):
        return _page(key, path, document)
    if inside := _refused_around(path):
        return f"{pattern(path)}\n  refused   as all of {inside.path}: {inside.refused}"
    ends = list(_ending(path, deep=False))
    if not ends and (page := _foreign(path, document)):
        return page
    # No name of "mmds" is one in DeepSpeed's models too; any other is looked for there as well.
    if len(ends) != 1 or not ends[0].path.startswith("mmds."):
        ends = list(_ending(path, deep=True))
    if len(ends) == 1:
        return _page(ends[0], read_path(ends[0].path), document)
    if ends:
        paths = ", ".join(key.path for key in ends)
        raise ConfigError(f"--explain {name}: {len(ends)} keys have this name: {paths}")
    raise ConfigError(f"--explain {name}: unknown key: {_nearest(path)}")


def read_path(name: str) -> KeyPath:
    """`mmds.data.mix[].path`, `mmds.data.mix.0.path` or `a."b.c"` -> a key path; items of a list are all alike."""
    parts: list[str | int] = []
    for quoted, index, plain in _PART.findall(name):
        item = not quoted and (plain.isdecimal() or not plain)
        parts.append(int(index or plain or 0) if item else quoted or plain)
    return tuple(parts)


def _page(key: Key, path: KeyPath, document: Document | None) -> str:
    facts = {
        "meaning": key.doc,
        "type": "" if key.refused else type_text(key),
        "default": "" if key.refused or (key.keys and key.default is None) else default_text(key),
        "only": f"{show(key.only[0])} may be written: {key.why}" if key.only else "",
        "refused": key.refused,
        "owner": "" if key.refused else _owner(key),
        "also": f"may be written {key.also}" if key.also else "",
    }
    lines = [key.path, *(f"  {name:<9} {text}" for name, text in facts.items() if text)]
    if document is not None and not (key.refused and document.get(path) is None):
        lines += [f"  {'here':<9} {line}" for line in _values(key, path, document)]
    return "\n".join([*lines, *_table(key)])


def _owner(key: Key) -> str:
    if key.path.startswith("mmds.stage."):
        return "the stage table of mmds, from which a run departs here (docs/stages.md)"
    return "DeepSpeed" if key.path.split(".")[0] in TOP_LEVEL and not key.only else "mmds"


def _table(key: Key) -> Iterator[str]:
    """The keys of an object."""
    width = max((len(below.name) for below in key.keys), default=0)
    for below in key.keys:
        rule = f"refused: {below.refused}" if below.refused else f"only {show(below.default)}: {below.why}"
        yield f"    {below.name:<{width}}  {rule if below.refused or below.only else below.doc}"


def _values(key: Key, path: KeyPath, document: Document) -> Iterator[str]:
    """The value in a config and where it was written; one line for each item of a list."""
    if 0 in path and not key.path.endswith("[]"):
        at = path.index(0)
        items = document.get(path[:at])
        for index in range(len(items) if isinstance(items, list) else 0):
            yield f"[{index}] {_value(key, (*path[:at], index, *path[at + 1 :]), document)}"
    else:
        yield _value(key, path, document)


def _value(key: Key, path: KeyPath, document: Document) -> str:
    value = document.get(path)
    if value is not None:
        return f"{show(value)}  ({document.place(path)})"
    removed = f"null  ({document.places[path]})" if path in document.places else "absent"
    if key.required:
        return f"{removed}: it is missing"
    return f"{removed}: the default" if key.default not in (None, "") else removed


def _refused_around(path: KeyPath) -> Key | None:
    """The refused key that holds the unknown one."""
    around = (find(path[:n]) for n in range(len(path) - 1, 0, -1))
    return next((key for key in around if key is not None and key.refused), None)


def _ending(path: KeyPath, *, deep: bool) -> Iterator[Key]:
    """The keys whose path ends in `path`."""
    if not path:
        return
    for key in named(str(path[-1]), deep=deep):
        own = read_path(key.path)
        if own[-len(path) : -1] == path[:-1]:
            yield key


def _foreign(path: KeyPath, document: Document | None) -> str:
    """The answer to a name from another trainer, with the page of ours; empty for any other name."""
    name = str(path[-1]) if path else ""
    if name in LATER_NAMES:
        return f"{name}\n  refused   not yet supported"
    if name in UNSUPPORTED:
        return f"{name}\n  refused   {UNSUPPORTED[name]}"
    if name in NEEDLESS:
        return f"{name}\n  no key    none is needed: {NEEDLESS[name]}"
    if name not in FOREIGN:
        return ""
    words = re.findall(r"[\w.\[\]]+", FOREIGN[name])
    ours = next((word for word in words if find(read_path(word))), "")
    page = f"\n\n{explain(ours, document)}" if ours else ""
    return f"{name}\n  elsewhere here it is {FOREIGN[name]}{page}"


def _nearest(path: KeyPath) -> str:
    """What was perhaps meant: names that hold the word, else the key with the nearest path or name."""
    word = str(path[-1]) if path else ""
    keys = {key.path: key.name for key in walk(whole_tree(deep=True)) if key.path}
    holding = [full for full, name in keys.items() if len(word) > 2 and word in name]
    if 0 < len(holding) < 5:
        return f"did you mean {' or '.join(holding)}?"
    names = {name: full for full, name in reversed(keys.items())}
    near = difflib.get_close_matches(pattern(path), keys, n=1, cutoff=0.6)
    near = near or [names[name] for name in difflib.get_close_matches(word, names, n=1, cutoff=0.6)]
    return f"did you mean {near[0]}?" if near and path else 'the keys of "mmds" are listed by --explain mmds'
