"""Reasons of bad samples as kinds that can be counted: what is left without names and numbers."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

LONGEST = 100  # characters of a kind

_PICTURE = re.compile(r"image \d+ \(.*?\): ", re.DOTALL)
_PLACE = re.compile(r"(turn \d+( part \d+)?|member ('.*?'|\".*?\"))(:? )", re.DOTALL)
_READ = re.compile(r"cannot read .*: ", re.DOTALL)
_QUOTED = re.compile(r"'[^']*'|\"[^\"]*\"")


def kind_of(reason: str) -> str:
    """The kind of a reason: "image 3 (a.png): cannot read /x/a.png: No such file" -> "picture: cannot read:
    No such file".
    """
    text, pictures = _PICTURE.subn("", reason, count=1)
    text = _READ.sub("cannot read: ", _PLACE.sub("", text, count=1))
    text = re.sub(r"\S*/\S*", "...", text) if pictures else text
    text = re.sub(r"-?\d+", "N", _QUOTED.sub("'...'", text)).partition(";")[0]
    return ("picture: " if pictures else "") + " ".join(text.split())[:LONGEST]


def counted(reasons: Iterable[str]) -> list[tuple[str, int]]:
    """(kind, how many reasons are of it), the most frequent first."""
    counts = Counter(map(kind_of, reasons))
    return sorted(counts.items(), key=lambda item: (-item[1], item[0]))
