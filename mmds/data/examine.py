"""Turns raw records into samples ready to store, or says what is wrong with them.

A record passes when it parses, tokenises, and every picture decodes whole, so that nothing is left to fail
in training.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from tqdm import tqdm

from mmds.data import sources
from mmds.data.chat_tokenizer import ChatTokenizer
from mmds.data.conversation import Conversation, parse_record
from mmds.data.images import FORMATS, load_image, probe
from mmds.data.inputs import Inputs
from mmds.data.raw_item import Inline, RawItem, Slice
from mmds.data.shard_writer import StoredImage
from mmds.data.workers import in_order
from mmds.errors import DataError

TRIAL_SIDE = 64  # pixels; a decode to this size reads the whole file and costs little
CHUNK = 16  # records that a process takes at a time
EXTENSIONS = {"JPEG": "jpg", "MPO": "jpg", "JPEG2000": "jp2", "TIFF": "tif"}  # others: the type's own name


@dataclass(frozen=True, kw_only=True)
class GoodSample:
    """A sample ready to store.

    number: of its record in the input, from 0. record: JSON bytes. ids: int32 [t], one marker per image.
    supervised: bool [t]. renamed: its id was taken, so it is called after its file and line.
    """

    number: int
    where: str
    key: str
    record: bytes
    ids: NDArray[np.int32]
    supervised: NDArray[np.bool_]
    images: tuple[StoredImage, ...]
    renamed: bool


@dataclass(frozen=True, kw_only=True)
class BadSample:
    """A record that cannot be used. where: "file:line"; key: what it would be called; reason: one sentence.

    number: of its record in the input, from 0. ends_file: the file itself is broken there, nothing after it
    was read. All can be printed, whatever the record held.
    """

    number: int
    where: str
    key: str
    reason: str
    ends_file: bool = False

    def __post_init__(self) -> None:
        for name in ("where", "key", "reason"):
            printable = getattr(self, name).encode("utf-8", "backslashreplace").decode()
            object.__setattr__(self, name, printable)

    def __str__(self) -> str:
        return f"{self.where}: {f'sample {self.key}: ' if self.key else ''}{self.reason}"


class Names:
    """Gives every record a name of its own: its id, or file and line when it has none or the id is taken."""

    def __init__(self) -> None:
        self._taken: set[str] = set()

    def name(self, record: dict[str, Any], where: str) -> tuple[str, bool]:
        """(key, whether an id was given but taken)."""
        given = record.get("id")
        wanted = str(given) if isinstance(given, str | int) and given != "" else None
        if wanted is not None and wanted not in self._taken:
            self._taken.add(wanted)
            return wanted, False
        file, _, line = where.rpartition(":")
        fallback = key = f"{Path(file).stem}-{line}"
        number = 2
        while key in self._taken:
            key, number = f"{fallback}-{number}", number + 1
        self._taken.add(key)
        return key, wanted is not None


@dataclass(frozen=True, kw_only=True)
class _Named:
    """A record with its number and name, as it goes to a process."""

    number: int
    key: str
    renamed: bool
    item: RawItem


def examine(
    inputs: Inputs,
    tokenizer: ChatTokenizer,
    *,
    first: int = 0,
    last: int | None = None,
    workers: int | None = None,
    progress: bool = False,
) -> Iterator[GoodSample | BadSample]:
    """Examine records number `first` to `last` (not included; None: all), in order.

    workers: processes that tokenise and decode, None: one a core; results do not depend on it. progress:
    show a bar over the bytes of the input.
    """
    total = inputs.size() if progress else 0
    with tqdm(total=total or None, unit="B", unit_scale=True, desc="prepare", disable=not progress) as bar:

        def chunks() -> Iterator[list[_Named]]:
            chunk: list[_Named] = []
            for named in _named(inputs, last):
                if named.number < first:
                    bar.update(named.item.size)
                    continue
                chunk.append(named)
                if len(chunk) == CHUNK:
                    yield chunk
                    chunk = []
            if chunk:
                yield chunk

        good = bad = 0
        for sizes, samples in in_order(_examine_chunk, chunks(), tokenizer, workers):
            for size, sample in zip(sizes, samples, strict=True):
                good, bad = good + isinstance(sample, GoodSample), bad + isinstance(sample, BadSample)
                bar.set_postfix(samples=good, bad=bad, refresh=False)
                bar.update(size)
                yield sample


def _named(inputs: Inputs, last: int | None) -> Iterator[_Named]:
    """Records up to `last` with their numbers and names, which depend on all records before."""
    names = Names()
    for number, item in enumerate(inputs.items()):
        if last is not None and number >= last:
            return
        key, renamed = (item.key, False) if item.record is None else names.name(item.record, item.where)
        yield _Named(number=number, key=key, renamed=renamed, item=item)


def _examine_chunk(
    chunk: Sequence[_Named], tokenizer: ChatTokenizer
) -> tuple[list[int], list[GoodSample | BadSample]]:
    """(bytes of the input, samples) of some records. Their pictures are fetched together."""
    texts = [_text(named, tokenizer) for named in chunk]
    files = sources.read_pictures(
        picture
        for text in texts
        if isinstance(text, _Text)
        for picture in text.pictures
        if isinstance(picture, str)
    )
    samples = [text if isinstance(text, BadSample) else _with_images(text, files) for text in texts]
    return [named.item.size for named in chunk], samples


@dataclass(frozen=True, kw_only=True)
class _Text:
    """A sample before its pictures are read. pictures: a path each, or where else the bytes are."""

    named: _Named
    record: bytes
    ids: NDArray[np.int32]
    supervised: NDArray[np.bool_]
    written: tuple[str, ...]
    pictures: tuple[str | Slice | Inline, ...]


def _text(named: _Named, tokenizer: ChatTokenizer) -> _Text | BadSample:
    """Parse and tokenise a record."""
    item, key = named.item, named.key
    if item.record is None:
        return BadSample(
            number=named.number, where=item.where, key=key, reason=item.problem, ends_file=item.ends_file
        )
    try:
        conversation = replace(parse_record(item.record, where=item.where), key=key)
        pictures = _pictures(item, conversation)
        encoded = tokenizer.encode(conversation)
        record = json.dumps(item.record, ensure_ascii=False, allow_nan=False).encode()
    except DataError as error:
        return _bad(named, _reason(error, item.where, key))
    except UnicodeEncodeError:
        return _bad(named, "holds a lone surrogate, which is not text")
    except (TypeError, ValueError) as error:  # a row of a data set may hold anything
        return _bad(named, f"cannot be written as JSON: {error}")
    return _Text(
        named=named,
        record=record,
        ids=encoded.ids,
        supervised=encoded.supervised,
        written=conversation.images,
        pictures=pictures,
    )


def _pictures(item: RawItem, conversation: Conversation) -> tuple[str | Slice | Inline, ...]:
    """Where the pictures of a conversation are. Raises DataError when others came with the record."""
    if item.pictures is None:
        return tuple(sources.joined(item.base, path) for path in conversation.images)
    if len(item.pictures) != len(conversation.images):
        came = ", ".join(picture.name for picture in item.pictures) or "none"
        raise DataError(
            f"{len(conversation.images)} pictures are named in the record, but {len(item.pictures)} come "
            f"with it ({came})"
        )
    return item.pictures


def _with_images(text: _Text, files: Mapping[str, bytes | DataError]) -> GoodSample | BadSample:
    """Read and decode the pictures of a sample."""
    named, images = text.named, []
    for number, (written, picture) in enumerate(zip(text.written, text.pictures, strict=True)):
        try:
            images.append(stored_image(_data(picture, files), written=written))
        except DataError as error:
            return _bad(named, f"image {number} ({written}): {error}")
    return GoodSample(
        number=named.number,
        where=named.item.where,
        key=named.key,
        renamed=named.renamed,
        record=text.record,
        ids=text.ids,
        supervised=text.supervised,
        images=tuple(images),
    )


def _data(picture: str | Slice | Inline, files: Mapping[str, bytes | DataError]) -> bytes:
    """The bytes of a picture's file. Raises DataError with the reason."""
    if isinstance(picture, Inline):
        return picture.data
    if isinstance(picture, Slice):
        return sources.read_range(picture.path, picture.offset, picture.size)
    found = files[picture]
    if isinstance(found, DataError):
        raise found
    return found


def stored_image(data: bytes, *, written: str) -> StoredImage:
    """A picture's file, decoded on trial. written: its path in the record. Raises DataError with a reason."""
    width, height = probe(data)
    load_image(data, height=TRIAL_SIDE, width=TRIAL_SIDE)
    with Image.open(io.BytesIO(data), formats=FORMATS) as image:
        kind = str(image.format)
    extension = EXTENSIONS.get(kind, kind.lower())
    return StoredImage(data=data, path=written, extension=extension, width=width, height=height)


def _bad(named: _Named, reason: str) -> BadSample:
    return BadSample(number=named.number, where=named.item.where, key=named.key, reason=reason)


def _reason(error: DataError, where: str, key: str) -> str:
    """An error's text without the place that it begins with."""
    text = str(error).removeprefix(f"{where} (sample {key})").removeprefix(where)
    return text.removeprefix(f"sample {key}").removeprefix(": ")
