"""Writes what shards.py reads: tar shards with index columns, and token ids beside them."""

from __future__ import annotations

import os
import shutil
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b, sha256
from pathlib import Path
from typing import BinaryIO
from urllib.parse import quote

import numpy as np
from numpy.typing import NDArray

from mmds.data.growing import GrowingFiles
from mmds.data.shard_format import BLOCK, COLUMNS, INDEX, TOKEN_FILES, TOKEN_META, flush_folder, write_json

COLUMN_FOLDER = "columns"  # of the files that the index is made from, below the root of all that grows
MAX_STEM = 120  # bytes of a member's name before the extension; file systems stop at 255

_STARTS, _COUNTS = _TOKEN_COLUMNS = (f"{COLUMN_FOLDER}/token_start", f"{COLUMN_FOLDER}/supervised")


@dataclass(frozen=True, kw_only=True)
class StoredImage:
    """One picture as it goes into a shard. data: the original bytes; path: as the raw data wrote it.

    extension: from the real type, such as "jpg"; width, height: pixels of the upright image.
    """

    data: bytes
    path: str
    extension: str
    width: int
    height: int


def member_stem(key: str) -> str:
    """A tar member name for any key. Readers cut it at the first dot: dots and odd letters are %-escaped."""
    stem = quote(key, safe="").replace(".", "%2E").replace("~", "%7E")
    if len(stem) <= MAX_STEM:
        return stem
    return f"{stem[: MAX_STEM - 17]}~{sha256(key.encode()).hexdigest()[:16]}"


def image_digest(data: bytes) -> int:
    """32 bits that are equal for equal bytes, and for others only by a rare chance."""
    return int.from_bytes(blake2b(data, digest_size=4).digest(), "little")


class ShardWriter:
    """Appends samples to `shard-00000.tar`, `shard-00001.tar`, ... and remembers where everything lies."""

    def __init__(self, folder: Path, files: GrowingFiles, *, shard_bytes: int, shards: int = 0) -> None:
        """folder: of the shards. files: holds the columns. shard_bytes: a sample that would take a shard
        beyond it is for the next. shards: finished ones to go on after; the columns end with them.
        """
        self._folder, self._files, self._shard_bytes = folder, files, shard_bytes
        self._file: BinaryIO | None = None
        self.shards = [shard_name(number) for number in range(shards)]
        files.open(map(_column, COLUMNS))
        for start in ("shard_start", "image_start", "key_start", "path_start"):
            if files.length(_column(start)) == 0:
                self._put(start, 0)

    def __len__(self) -> int:
        return self._files.length(_column("record_bytes")) // 4

    @property
    def images(self) -> int:
        """Images written so far."""
        return self._files.length(_column("image_bytes")) // 4

    def is_full(self, *, record: bytes, images: Sequence[StoredImage]) -> bool:
        """Whether the open shard holds something and a sample would take it beyond its size."""
        more = len(record) + sum(len(image.data) for image in images) + 2 * BLOCK * (1 + len(images))
        return self._file is not None and self._file.tell() + more > self._shard_bytes

    def add(self, *, key: str, record: bytes, images: Sequence[StoredImage]) -> None:
        """Append one sample: its raw record as JSON bytes and its pictures."""
        if self._file is None:
            self.shards.append(shard_name(len(self.shards)))
            self._file = (self._folder / self.shards[-1]).open("wb")
        stem = member_stem(key)
        self._put("record_block", self._member(f"{stem}.json", record))
        self._put("record_bytes", len(record))
        for number, image in enumerate(images):
            self._put("image_block", self._member(f"{stem}.{number}.{image.extension}", image.data))
            self._put("image_bytes", len(image.data))
            self._put("image_sizes", image.width, image.height)
            self._put("image_digest", image_digest(image.data))
            self._text("path", image.path)
        self._put("image_start", self.images)
        self._text("key", key)

    def finish_shard(self) -> None:
        """Finish the open shard, on disk; nothing happens when none is open."""
        if self._file is not None:
            self._file.write(b"\0" * 2 * BLOCK)
            _flush_and_close(self._file)
            self._file = None
            self._put("shard_start", len(self))

    def finish(self) -> dict[str, int]:
        """Finish the last shard, write the index, return the size of every file by its name in the folder."""
        self.finish_shard()
        lengths = self._files.lengths()
        index = self._folder / INDEX
        index.mkdir(exist_ok=True)
        for name, kind in COLUMNS.items():
            count = lengths[_column(name)] // np.dtype(kind).itemsize
            shape = (count // 2, 2) if name == "image_sizes" else (count,)
            save_column(self._files.root / _column(name), index / f"{name}.npy", kind, shape)
        flush_folder(index)
        names = [*self.shards, *(f"{INDEX}/{name}.npy" for name in COLUMNS)]
        return {name: (self._folder / name).stat().st_size for name in names}

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def _member(self, name: str, data: bytes) -> int:
        """Write one member; returns the block it begins at. No clock, no user: same input, same bytes."""
        assert self._file is not None
        header = tarfile.TarInfo(name)
        header.size = len(data)
        self._file.write(header.tobuf(tarfile.PAX_FORMAT, "utf-8", "strict"))
        offset = self._file.tell()
        self._file.write(data)
        self._file.write(b"\0" * (-len(data) % BLOCK))
        return offset // BLOCK

    def _put(self, column: str, *values: int) -> None:
        self._files.append(_column(column), np.array(values, dtype=COLUMNS[column]).tobytes())

    def _text(self, column: str, text: str) -> None:
        self._files.append(_column(f"{column}_text"), text.encode())
        self._put(f"{column}_start", self._files.length(_column(f"{column}_text")))


class TokenWriter:
    """Appends token ids and what is supervised; `folder` becomes tokens/<fingerprint>."""

    def __init__(self, folder: Path, files: GrowingFiles) -> None:
        """folder: exists, below the root of `files`, which holds everything that grows."""
        self._folder, self._files = folder, files
        inside = folder.relative_to(files.root)
        self._ids, self._mask = str(inside / "ids.bin"), str(inside / "supervised.bin")
        files.open((self._ids, self._mask, *_TOKEN_COLUMNS))
        if files.length(_STARTS) == 0:
            files.append(_STARTS, np.int64(0).tobytes())

    def add(self, ids: NDArray[np.int32], supervised: NDArray[np.bool_]) -> None:
        """Append one sample: int32 [t] with one marker per image, bool [t]."""
        assert ids.shape == supervised.shape and len(ids) > 0
        self._files.append(self._ids, np.ascontiguousarray(ids, dtype="<i4").tobytes())
        self._files.append(self._mask, np.ascontiguousarray(supervised, dtype=np.uint8).tobytes())
        self._files.append(_STARTS, np.int64(self._files.length(self._mask)).tobytes())
        self._files.append(_COUNTS, np.int32(supervised.sum()).tobytes())

    def finish(self) -> None:
        """Write offsets, counts and the sizes of all files."""
        samples = self._files.lengths()[_COUNTS] // 4
        root = self._files.root
        save_column(root / _STARTS, self._folder / "starts.npy", np.int64, (samples + 1,))
        save_column(root / _COUNTS, self._folder / "supervised.npy", np.int32, (samples,))
        write_token_meta(self._folder)


def write_token_meta(folder: Path) -> None:
    """Write meta.json of a token folder that is otherwise complete: counts, and the size of every file."""
    supervised = np.load(folder / "supervised.npy", mmap_mode="r")
    meta = {
        "samples": len(supervised),
        "tokens": int(np.load(folder / "starts.npy", mmap_mode="r")[-1]),
        "supervised": int(supervised.sum()),
        "files": {name: (folder / name).stat().st_size for name in TOKEN_FILES},
    }
    write_json(folder / TOKEN_META, meta)
    flush_folder(folder)


def shard_name(number: int) -> str:
    """What a shard is called."""
    return f"shard-{number:05d}.tar"


def save_column(
    source: Path, target: Path, kind: type[np.generic], shape: tuple[int] | tuple[int, int]
) -> None:
    """Make a .npy file of a file of plain values, without reading it into memory."""
    header = {"descr": np.dtype(kind).str, "fortran_order": False, "shape": shape}
    with source.open("rb") as values, target.open("wb") as file:
        np.lib.format.write_array_header_1_0(file, header)
        shutil.copyfileobj(values, file, 1 << 20)
        file.flush()
        os.fsync(file.fileno())


def _column(name: str) -> str:
    return f"{COLUMN_FOLDER}/{name}"


def _flush_and_close(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())
    file.close()
