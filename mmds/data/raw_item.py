"""One record as its source gives it, whatever the source is: a line, an element, a row, members of a tar."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Slice:
    """Bytes of a picture inside a larger file. name: as a member is called. offset, size: bytes."""

    name: str
    path: str
    offset: int
    size: int


@dataclass(frozen=True, kw_only=True)
class Inline:
    """A picture that came with its record. name: what it is called there. data: the file's bytes."""

    name: str
    data: bytes


@dataclass(frozen=True, kw_only=True)
class RawItem:
    """A record, or what stands in its place.

    where: "file:line" (or member or row). record: None when it cannot be read, and then `problem` says why.
    ends_file: nothing after it can be read. size: bytes of the source that it takes, for progress.
    base: where relative picture paths start. pictures: those that came with the record, in order; None when
    the record names files.
    """

    where: str
    record: dict[str, Any] | None
    base: str
    key: str = ""
    problem: str = ""
    ends_file: bool = False
    size: int = 0
    pictures: tuple[Slice | Inline, ...] | None = None
