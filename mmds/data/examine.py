"""Turns raw records into samples ready to store, or says what is wrong with them.

A record passes when it parses, tokenises, and every picture decodes whole, so that nothing is left to fail
in training.
"""

from __future__ import annotations

import io
import json
import os
import re
import stat
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from tqdm import tqdm

from mmds.data.chat_tokenizer import ChatTokenizer, Encoded
from mmds.data.conversation import parse_record
from mmds.data.images import FORMATS, load_image, probe
from mmds.data.raw import read_records
from mmds.data.shard_writer import StoredImage
from mmds.errors import DataError

TRIAL_SIDE = 64  # pixels; a decode to this size reads the whole file and costs little
AHEAD = 8  # records examined ahead, per thread
EXTENSIONS = {"JPEG": "jpg", "MPO": "jpg", "JPEG2000": "jp2", "TIFF": "tif"}  # others: the type's own name


@dataclass(frozen=True, kw_only=True)
class GoodSample:
    """A sample ready to store.

    record: JSON bytes. ids: int32 [t], one marker per image. supervised: bool [t]. renamed: its id was
    taken, so it is called after its file and line.
    """

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

    ends_file: the file itself is broken there, nothing after it was read. All can be printed, whatever the
    record held.
    """

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


def examine(
    raw_paths: Sequence[Path | str],
    images_dir: Path | str | None,
    tokenizer: ChatTokenizer,
    *,
    threads: int | None = None,
    progress: bool = False,
) -> Iterator[GoodSample | BadSample]:
    """Examine every record, in file order. Pictures are read in threads, which changes nothing else.

    images_dir: where relative image paths start; None: the folder of each raw file.
    threads: None means one a core, at most 8. progress: show a bar.
    """
    paths = [Path(path) for path in raw_paths]
    samples = _examine(paths, images_dir, tokenizer, threads or min(8, len(os.sched_getaffinity(0))))
    total = sum(map(_count_lines, paths)) if progress else 0
    yield from tqdm(samples, total=total or None, unit="sample", desc="samples", disable=not progress)


def _examine(
    paths: Sequence[Path], images_dir: Path | str | None, tokenizer: ChatTokenizer, threads: int
) -> Iterator[GoodSample | BadSample]:
    """`examine` without its bar: reads the pictures of a few samples ahead."""
    pending: deque[Callable[[], GoodSample | BadSample]] = deque()
    with ThreadPoolExecutor(threads) as pool:
        for text in _texts(paths, tokenizer):
            if isinstance(text, BadSample):
                pending.append(partial(_same, text))
            else:
                base = text.raw_path.parent if images_dir is None else Path(images_dir)
                pending.append(pool.submit(_with_images, text, base).result)
            if len(pending) > AHEAD * threads:
                yield pending.popleft()()
        while pending:
            yield pending.popleft()()


@dataclass(frozen=True, kw_only=True)
class _Text:
    """What is known of a sample before its pictures are read."""

    raw_path: Path
    where: str
    key: str
    renamed: bool
    record: bytes
    encoded: Encoded
    image_paths: tuple[str, ...]


def _texts(raw_paths: Sequence[Path], tokenizer: ChatTokenizer) -> Iterator[_Text | BadSample]:
    """Parse, name and tokenise every record."""
    names = Names()
    for path in raw_paths:
        try:
            for where, record in read_records(path):
                key, renamed = names.name(record, where)
                try:
                    conversation = replace(parse_record(record, where=where), key=key)
                    yield _Text(
                        raw_path=path,
                        where=where,
                        key=key,
                        renamed=renamed,
                        record=json.dumps(record, ensure_ascii=False).encode(),
                        encoded=tokenizer.encode(conversation),
                        image_paths=conversation.images,
                    )
                except UnicodeEncodeError:
                    yield BadSample(where=where, key=key, reason="holds a lone surrogate, which is not text")
                except DataError as error:
                    yield BadSample(where=where, key=key, reason=_reason(error, where, key))
        except DataError as error:
            place = re.match(rf"{re.escape(str(path))}(:\d+)?", str(error))
            where = place.group() if place else str(path)
            rest = "; nothing after it was read" if where != str(path) else ""
            yield BadSample(where=where, key="", reason=_reason(error, where, "") + rest, ends_file=True)


def _with_images(text: _Text, base: Path) -> GoodSample | BadSample:
    """Read and decode the pictures of a sample."""
    images = []
    for number, path in enumerate(text.image_paths):
        try:
            images.append(read_image(base / path, written=path))
        except DataError as error:
            reason = f"image {number} ({path}): {error}"
            return BadSample(where=text.where, key=text.key, reason=reason)
    return GoodSample(
        where=text.where,
        key=text.key,
        renamed=text.renamed,
        record=text.record,
        ids=text.encoded.ids,
        supervised=text.encoded.supervised,
        images=tuple(images),
    )


def read_image(path: Path, *, written: str) -> StoredImage:
    """A picture's file, decoded on trial. written: its path in the record. Raises DataError with a reason."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise DataError(f"{path} is not a file")
        data = path.read_bytes()
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error
    width, height = probe(data)
    load_image(data, height=TRIAL_SIDE, width=TRIAL_SIDE)
    with Image.open(io.BytesIO(data), formats=FORMATS) as image:
        kind = str(image.format)
    extension = EXTENSIONS.get(kind, kind.lower())
    return StoredImage(data=data, path=written, extension=extension, width=width, height=height)


def _count_lines(path: Path) -> int:
    """Records of a JSONL file, roughly (blank lines count); for the progress bar only."""
    with path.open("rb") as file:
        return sum(block.count(b"\n") for block in iter(lambda: file.read(1 << 20), b""))


def _same(sample: BadSample) -> BadSample:
    return sample


def _reason(error: DataError, where: str, key: str) -> str:
    """An error's text without the place that it begins with."""
    text = str(error).removeprefix(f"{where} (sample {key})").removeprefix(where)
    return text.removeprefix(f"sample {key}").removeprefix(": ")
