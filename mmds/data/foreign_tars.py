"""Tars of samples that others wrote (webdataset, img2dataset): members to records, nothing ever extracted.

A sample is KEY.json or KEY.txt with the pictures KEY.jpg or KEY.0.jpg, KEY.1.png, ... (any known picture
extension, upper or lower case), in any order. KEY is all of the member's name before the extension, so it may
hold dots and folders. KEY.json with `conversations` or `messages` is a record; otherwise KEY.txt is a caption
of one picture. Members that are no plain file, that leave the archive, come twice or belong to no sample are
bad samples, named "file:member".
"""

from __future__ import annotations

import re
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import IO, Any

from mmds.data.raw import parse_json
from mmds.data.raw_item import RawItem, Slice
from mmds.data.sources import MAX_FILE_BYTES, open_file, read_range, told
from mmds.errors import DataError

TEXTS = ("json", "txt")
PICTURES = frozenset("jpg jpeg jpe jfif mpo png webp gif bmp tif tiff ppm pgm pbm pnm jp2 j2k avif".split())
BLOCK = 512  # bytes; a tar ends with blocks of zeros

_NUMBERED = re.compile(r"(.+)\.(\d+)", re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class _Member:
    name: str
    stem: str
    extension: str
    offset: int
    size: int
    problem: str = ""


@dataclass(kw_only=True)
class _Group:
    """Members of one sample, by what they are."""

    texts: dict[str, _Member] = field(default_factory=dict)
    pictures: dict[int, _Member] = field(default_factory=dict)  # -1: the one without a number
    problem: str = ""


def scan_tar(path: str) -> Iterator[RawItem]:
    """Every sample of a tar, local or a URL, in the order of the first member of each; then what is wrong
    with the file itself.

    Only headers are read here, and texts; pictures are Slices. Raises DataError for a file that cannot be
    opened or is no plain tar.
    """
    members, end = _members(path)
    order = _grouped(members)
    for key, group in order.items():
        yield _item(path, key, group)
    if end:
        yield RawItem(where=path, record=None, base="", problem=end, ends_file=True)


def _members(path: str) -> tuple[list[_Member], str]:
    """All members but folders, and what is wrong with the end of the file ("" when it is whole)."""
    found: list[_Member] = []
    with open_file(path) as file:
        if file.read(2) == b"\x1f\x8b":
            raise DataError(f"{path}: is compressed; unpack it first: gunzip {path}")
        file.seek(0)
        try:
            with tarfile.open(fileobj=file, mode="r:") as tar:
                for info in tar:
                    tar.members = []  # type: ignore[attr-defined]  # it would keep them all; millions are common
                    if not info.isdir():
                        found.append(_member(info))
                return found, _end(file, tar.offset)
        except (tarfile.TarError, EOFError, OSError) as error:
            if not found:
                raise DataError(f"{path}: is not a tar that can be read: {told(error)}") from error
            return found, f"the tar is cut short or damaged after {found[-1].name!r}: {told(error)}"


def _end(file: IO[bytes], offset: int) -> str:
    """What is wrong with the end of a tar: it must be zeros from where the last member ends."""
    file.seek(offset)
    block = file.read(BLOCK)
    if len(block) < BLOCK:
        return "the tar is cut short: the blocks that end it are missing"
    while block:
        if block.strip(b"\0"):
            return "the tar is damaged, or another follows in the same file: something stands after its end"
        block = file.read(1 << 20)
    return ""


def _member(info: tarfile.TarInfo) -> _Member:
    """A header as a member, with the reason when it is refused."""
    path = PurePosixPath(info.name)
    stem, _, extension = info.name.rpartition(".")
    problem = ""
    if path.is_absolute() or ".." in path.parts:
        problem = "its name leaves the archive"
    elif info.issym() or info.islnk():
        problem = f"is a link (to {info.linkname!r})"
    elif not info.isreg() or info.issparse():
        problem = "is no plain file"
    elif info.size > MAX_FILE_BYTES:
        problem = f"has {info.size} bytes, more than the limit of {MAX_FILE_BYTES}"
    elif not stem or (extension.lower() not in TEXTS and extension.lower() not in PICTURES):
        problem = "has no extension of a text (json, txt) or of a picture"
    return _Member(
        name=info.name,
        stem=stem,
        extension=extension.lower(),
        offset=info.offset_data,
        size=info.size,
        problem=problem,
    )


def _grouped(members: list[_Member]) -> dict[str, _Group]:
    """Members by sample, in the order in which the samples begin."""
    keys = {member.stem for member in members if member.extension in TEXTS}
    groups: dict[str, _Group] = {}
    for member in members:
        if member.problem:
            group = groups.setdefault(member.name, _Group())
            group.problem = group.problem or f"member {member.name!r} {member.problem}"
            continue
        key, number = _place(member, keys)
        group = groups.setdefault(key, _Group())
        slot: dict[Any, _Member] = group.texts if member.extension in TEXTS else group.pictures
        name = member.extension if member.extension in TEXTS else number
        if name in slot:
            again = "comes twice" if slot[name].name == member.name else f"and {slot[name].name!r} are one"
            group.problem = f"member {member.name!r} {again}"
        slot[name] = member
    return groups


def _place(member: _Member, keys: set[str]) -> tuple[str, int]:
    """(key of the sample, number of the picture in it; -1 for the one that has none)."""
    if member.stem in keys or member.extension in TEXTS:
        return member.stem, -1
    numbered = _NUMBERED.fullmatch(member.stem)
    if numbered and numbered[1] in keys:
        return numbered[1], int(numbered[2])
    return member.stem, -1


def _item(path: str, key: str, group: _Group) -> RawItem:
    """The record of a sample, or what is wrong with it."""
    members = [*group.texts.values(), *group.pictures.values()]
    name = members[0].name if members else key
    size = sum(member.size for member in members) + BLOCK * len(members)
    pictures = tuple(
        Slice(name=member.name, path=path, offset=member.offset, size=member.size)
        for _, member in sorted(group.pictures.items())
    )
    record, problem = None, group.problem
    if not problem:
        try:
            record = _record(path, key, group, [picture.name for picture in pictures])
        except DataError as error:
            problem = str(error)
    return RawItem(
        where=f"{path}:{name}",
        record=record,
        base="",
        key="" if record else key,
        problem=problem,
        size=size,
        pictures=pictures,
    )


def _record(path: str, key: str, group: _Group, pictures: list[str]) -> dict[str, Any]:
    """A conversation as KEY.json holds it, or one made of a caption. Raises DataError with the reason."""
    if not group.texts:
        raise DataError(f"a picture without a text: there is no {key}.json or {key}.txt")
    if "json" in group.texts:
        record = _conversation(path, group.texts["json"])
        if record is not None:
            record.setdefault("id", key)
            if pictures and not _names_pictures(record):
                record["images"] = pictures
            return record
    if "txt" not in group.texts:
        raise DataError(f"{key}.json holds neither 'conversations' nor 'messages', and there is no {key}.txt")
    if len(pictures) != 1:
        raise DataError(f"a caption needs one picture, but {key}.txt comes with {len(pictures)}")
    caption = _text(path, group.texts["txt"]).strip()
    user = {"role": "user", "content": [{"type": "image", "image": pictures[0]}]}
    answer = {"role": "assistant", "content": [{"type": "text", "text": caption}]}
    return {"id": key, "messages": [user, answer]}


def _conversation(path: str, member: _Member) -> dict[str, Any] | None:
    """The record of a .json member; None when it is something else, such as a picture's description."""
    try:
        record = parse_json(_text(path, member))
    except ValueError as error:
        raise DataError(f"member {member.name!r}: {error}") from error
    if not isinstance(record, dict):
        raise DataError(f"member {member.name!r}: must be a JSON object, not {type(record).__name__}")
    return record if record.get("conversations") or record.get("messages") else None


def _names_pictures(record: dict[str, Any]) -> bool:
    """Whether the record names its pictures itself: in a list, or in parts of its messages."""
    if record.get("image") is not None or record.get("images") is not None:
        return True
    turns = record.get("messages")
    parts = [
        part
        for turn in (turns if isinstance(turns, list) else [])
        if isinstance(turn, dict) and isinstance(turn.get("content"), list)
        for part in turn["content"]
    ]
    return any(isinstance(part, dict) and isinstance(part.get("image"), str) for part in parts)


def _text(path: str, member: _Member) -> str:
    try:
        return read_range(path, member.offset, member.size).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(
            f"member {member.name!r}: not UTF-8 (byte {error.object[error.start]:#04x})"
        ) from error
