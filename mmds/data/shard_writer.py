"""Writes what shards.py reads: tar shards with index columns, and token ids beside them."""

from __future__ import annotations

import os
import tarfile
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import BinaryIO
from urllib.parse import quote

import numpy as np
from numpy.typing import NDArray

from mmds.data.shard_format import COLUMNS, INDEX, TOKEN_META, flush_folder, write_json

BLOCK = 512  # bytes; tar pads every member to it
MAX_STEM = 120  # bytes of a member's name before the extension; file systems stop at 255


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


class ShardWriter:
    """Appends samples to `shard-00000.tar`, `shard-00001.tar`, ... and remembers where everything lies."""

    def __init__(self, folder: Path, *, shard_bytes: int) -> None:
        """folder: exists, empty. shard_bytes: a sample that would take a shard beyond it opens the next."""
        self._folder, self._shard_bytes = folder, shard_bytes
        self._file: BinaryIO | None = None
        self.shards: list[str] = []
        self.text_only = 0
        self._columns = {
            name: array("i" if kind is np.int32 else "q")
            for name, kind in COLUMNS.items()
            if kind is not np.uint8
        }
        self._texts = {name: bytearray() for name, kind in COLUMNS.items() if kind is np.uint8}
        for start in ("image_start", "key_start", "path_start"):
            self._columns[start].append(0)

    def __len__(self) -> int:
        return len(self._columns["shard"])

    @property
    def images(self) -> int:
        """Images written so far."""
        return len(self._columns["image_bytes"])

    def add(self, *, key: str, record: bytes, images: Sequence[StoredImage]) -> None:
        """Append one sample: its raw record as JSON bytes and its pictures."""
        stem, columns = member_stem(key), self._columns
        self._roll(len(record) + sum(len(image.data) for image in images) + 2 * BLOCK * (1 + len(images)))
        columns["shard"].append(len(self.shards) - 1)
        columns["record_offset"].append(self._member(f"{stem}.json", record))
        columns["record_bytes"].append(len(record))
        for number, image in enumerate(images):
            columns["image_offset"].append(self._member(f"{stem}.{number}.{image.extension}", image.data))
            columns["image_bytes"].append(len(image.data))
            columns["image_sizes"].extend((image.width, image.height))
            self._text("path", image.path)
        columns["image_start"].append(len(columns["image_bytes"]))
        self._text("key", key)
        self.text_only += not images

    def finish(self) -> dict[str, int]:
        """Finish the last shard, write the index, return the size of every file by its name in the folder."""
        self._finish_shard()
        index = self._folder / INDEX
        index.mkdir()
        for name, kind in COLUMNS.items():
            values = np.frombuffer(
                self._texts[name] if name in self._texts else self._columns[name], dtype=kind
            )
            _save(index / f"{name}.npy", values.reshape(-1, 2) if name == "image_sizes" else values)
        flush_folder(index)
        names = [*self.shards, *(f"{INDEX}/{name}.npy" for name in COLUMNS)]
        return {name: (self._folder / name).stat().st_size for name in names}

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def _roll(self, more: int) -> None:
        """Open the next shard when there is none or the sample would overfill it."""
        if self._file is not None and self._file.tell() + more > self._shard_bytes:
            self._finish_shard()
        if self._file is None:
            self.shards.append(f"shard-{len(self.shards):05d}.tar")
            self._file = (self._folder / self.shards[-1]).open("wb")

    def _member(self, name: str, data: bytes) -> int:
        """Write one member; returns its first byte's offset. No clock, no user: same input, same bytes."""
        assert self._file is not None
        header = tarfile.TarInfo(name)
        header.size = len(data)
        self._file.write(header.tobuf(tarfile.PAX_FORMAT, "utf-8", "strict"))
        offset = self._file.tell()
        self._file.write(data)
        self._file.write(b"\0" * (-len(data) % BLOCK))
        return offset

    def _text(self, column: str, text: str) -> None:
        self._texts[f"{column}_text"] += text.encode()
        self._columns[f"{column}_start"].append(len(self._texts[f"{column}_text"]))

    def _finish_shard(self) -> None:
        if self._file is not None:
            self._file.write(b"\0" * 2 * BLOCK)
            _flush_and_close(self._file)
            self._file = None


class TokenWriter:
    """Appends token ids and what is supervised; `folder` becomes tokens/<fingerprint>."""

    def __init__(self, folder: Path) -> None:
        """folder: exists and is empty."""
        self._folder = folder
        self._ids, self._mask = (folder / "ids.bin").open("wb"), (folder / "supervised.bin").open("wb")
        self._starts, self._supervised = array("q", [0]), array("i")

    def add(self, ids: NDArray[np.int32], supervised: NDArray[np.bool_]) -> None:
        """Append one sample: int32 [t] with one marker per image, bool [t]."""
        assert ids.shape == supervised.shape and len(ids) > 0
        self._ids.write(np.ascontiguousarray(ids, dtype="<i4").tobytes())
        self._mask.write(np.ascontiguousarray(supervised, dtype=np.uint8).tobytes())
        self._starts.append(self._starts[-1] + len(ids))
        self._supervised.append(int(supervised.sum()))

    def finish(self) -> None:
        """Write offsets, counts and the sizes of all files."""
        _flush_and_close(self._ids)
        _flush_and_close(self._mask)
        _save(self._folder / "starts.npy", np.frombuffer(self._starts, dtype=np.int64))
        _save(self._folder / "supervised.npy", np.frombuffer(self._supervised, dtype=np.int32))
        names = ("ids.bin", "supervised.bin", "starts.npy", "supervised.npy")
        meta = {
            "samples": len(self._supervised),
            "tokens": self._starts[-1],
            "supervised": sum(self._supervised),
            "files": {name: (self._folder / name).stat().st_size for name in names},
        }
        write_json(self._folder / TOKEN_META, meta)
        flush_folder(self._folder)

    def __enter__(self) -> TokenWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._ids.close()
        self._mask.close()


def _save(path: Path, values: NDArray[np.generic]) -> None:
    with path.open("wb") as file:
        np.save(file, values)
        file.flush()
        os.fsync(file.fileno())


def _flush_and_close(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())
    file.close()
