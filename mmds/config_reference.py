"""docs/config.md: the hand-written template, filled with tables made from the keys themselves."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterable, Iterator
from pathlib import Path

from mmds.config_explain import explain
from mmds.config_keys import Key, deepspeed_keys, own_tree, walk
from mmds.config_load import load_document
from mmds.config_text import default_text, show, type_text

NOTE = "<!-- Made by scripts/config_reference.py from docs/config.template.md and the keys themselves: change those. -->\n\n"


def reference_page(template: str, example: Path) -> str:
    """The page: `template` with `{{mmds}}`, `{{deepspeed}}`, `{{version}}` and `{{explain}}` (of `example`) filled in."""
    parts = {
        "mmds": own_tables(),
        "deepspeed": deepspeed_tables(),
        "version": importlib.metadata.version("deepspeed"),
        "explain": _indented(explain("row_tokens", load_document(example))),
    }
    for name, text in parts.items():
        template = template.replace(f"{{{{{name}}}}}", text)
    return NOTE + template


def own_tables() -> str:
    """A table for each section of "mmds", and the names that come later."""
    sections = [key for key in walk(own_tree()) if key.keys]
    tables = [
        f"### `{_title(section)}`\n\n{_first(section)}\n\n{_accepted(_leaves(section))}"
        for section in sections
    ]
    return "\n\n".join([*tables, _later()])


def deepspeed_tables() -> str:
    """What is accepted, what with one value, and what is refused."""
    keys = [key for top in deepspeed_keys(deep=True) for key in walk(top)]
    free = [key for key in keys if not key.refused and not key.only]
    plain = [key for key in free if "." not in key.path and not key.keys]
    sections = [key for key in free if key.keys and _leaves(key)]
    return "\n\n".join(
        [
            f"### Accepted: top level\n\n{_accepted(plain)}",
            *(
                f"### Accepted: `{key.path}`\n\n{_first(key)}\n\n{_accepted(_leaves(key))}"
                for key in sections
            ),
            f"### Accepted with one value, which is also that of a run without the key\n\n{_fixed(keys)}",
            f"### Refused\n\n{_refused(keys)}",
        ]
    )


def _leaves(section: Key) -> list[Key]:
    """The keys of a section that hold values and may be set."""
    return [key for key in section.keys if not key.keys and not key.refused and not key.only]


def _title(section: Key) -> str:
    return f"{section.path}[]" if section.kind == "list" else section.path


def _first(section: Key) -> str:
    """The meaning of a section as a sentence."""
    return section.doc[:1].upper() + section.doc[1:] + "."


def _accepted(keys: Iterable[Key]) -> str:
    rows = ([f"`{key.path}`", type_text(key), _default(key), _meaning(key)] for key in keys)
    return _table(["key", "type", "default", "meaning"], rows)


def _default(key: Key) -> str:
    text = default_text(key)
    return text if text == "required" else f"`{text}`"


def _meaning(key: Key) -> str:
    return f"{key.doc}; may be written `{key.also}`" if key.also else key.doc


def _fixed(keys: Iterable[Key]) -> str:
    rows = ([f"`{key.path}`", f"`{show(key.only[0])}`", key.why] for key in keys if key.only)
    return _table(["key", "value", "why no other"], rows)


def _refused(keys: Iterable[Key]) -> str:
    """One row for each reason, with all its keys."""
    reasons: dict[str, list[str]] = {}
    for key in keys:
        if key.refused:
            reasons.setdefault(key.refused, []).append(f"`{key.path}`")
    return _table(["keys", "answer"], ([", ".join(paths), why] for why, paths in reasons.items()))


def _later() -> str:
    keys = list(walk(own_tree()))
    names = [f"- `{key.path}`: {key.doc}" for key in keys if key.refused]
    return "\n".join(["### Not yet supported, and refused with these words", "", *names])


def _table(head: list[str], rows: Iterable[list[str]]) -> str:
    def lines() -> Iterator[str]:
        for cells in (head, ["---"] * len(head), *rows):
            yield f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |"

    return "\n".join(lines())


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines())
