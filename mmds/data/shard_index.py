"""Where every sample of a prepared folder lies, and its image sizes: the same for every tokenizer.

n samples, m images
"""

from __future__ import annotations

import os
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mmds.data.shard_format import COLUMNS, INDEX, Manifest, check_files
from mmds.errors import DataError

OPEN_SHARDS = 64  # file handles a process keeps open


class ShardIndex:
    """Memory-mapped columns of a prepared folder, and positioned reads of its members."""

    def __init__(self, path: Path) -> None:
        """Raises DataError naming the file that is missing, cut short or inconsistent."""
        self.path = path
        self.manifest = Manifest.read(path)
        check_files(path, self.manifest.files)
        self._columns = {name: mapped(path / INDEX / f"{name}.npy") for name in COLUMNS}
        _check_columns(path, self.manifest, self._columns)
        self._files = _OpenFiles()

    def __len__(self) -> int:
        return self.manifest.samples

    @property
    def image_start(self) -> NDArray[np.int64]:
        """int64 [n + 1]; images of sample i are image_start[i] to image_start[i + 1]."""
        return self._columns["image_start"]

    @property
    def image_sizes(self) -> NDArray[np.int32]:
        """int32 [m, 2], (width, height) of each upright image in pixels."""
        return self._columns["image_sizes"]

    def key(self, i: int) -> str:
        """The name of sample i."""
        return self._text("key", i)

    def image_paths(self, i: int) -> tuple[str, ...]:
        """Paths of the images of sample i, as the raw data wrote them."""
        return tuple(self._text("path", m) for m in self._images(i))

    def images(self, i: int) -> tuple[bytes, ...]:
        """The original files of the images of sample i. Raises DataError when the shard cannot give them."""
        return tuple(self._bytes(i, "image", m) for m in self._images(i))

    def record(self, i: int) -> bytes:
        """The raw record of sample i, JSON. Raises DataError when the shard cannot give it."""
        return self._bytes(i, "record", i)

    def _images(self, i: int) -> range:
        return range(int(self.image_start[i]), int(self.image_start[i + 1]))

    def _bytes(self, i: int, kind: str, entry: int) -> bytes:
        """Bytes of one member of sample i."""
        path = self.path / self.manifest.shards[self._columns["shard"][i]]
        offset, size = int(self._columns[f"{kind}_offset"][entry]), int(self._columns[f"{kind}_bytes"][entry])
        try:
            data = self._files.read(path, offset, size)
        except OSError as error:
            raise DataError(f"sample {self.key(i)}: cannot read {path}: {error.strerror}") from error
        if len(data) != size:
            raise DataError(
                f"{path} is cut short: sample {self.key(i)} needs bytes {offset} to {offset + size}; "
                "copy the folder again or prepare it again"
            )
        return data

    def _text(self, column: str, entry: int) -> str:
        start, end = self._columns[f"{column}_start"][entry : entry + 2]
        return bytes(self._columns[f"{column}_text"][start:end]).decode()


class _OpenFiles:
    """Positioned reads through a few open handles. A forked worker opens its own."""

    def __init__(self) -> None:
        self._process = os.getpid()
        self._open: OrderedDict[Path, int] = OrderedDict()

    def read(self, path: Path, offset: int, size: int) -> bytes:
        """Up to `size` bytes from `offset`; fewer only at the end of the file."""
        if self._process != os.getpid():
            self._process, self._open = os.getpid(), OrderedDict()
        if path not in self._open:
            self._open[path] = os.open(path, os.O_RDONLY)
            if len(self._open) > OPEN_SHARDS:
                os.close(self._open.popitem(last=False)[1])
        self._open.move_to_end(path)
        parts, left = [], size
        while left and (part := os.pread(self._open[path], left, offset + size - left)):
            parts.append(part)
            left -= len(part)
        return b"".join(parts)

    def __del__(self) -> None:
        if self._process == os.getpid():
            for descriptor in self._open.values():
                os.close(descriptor)


def mapped(path: Path) -> NDArray[Any]:
    """A .npy file, memory-mapped, as a plain array (cheap to slice). Raises DataError when it is damaged."""
    try:
        values: NDArray[Any] = np.asarray(np.load(path, mmap_mode="r", allow_pickle=False))
    except ValueError as error:
        raise DataError(f"{path} is damaged ({error}); prepare the folder again") from None
    return values


def _check_columns(path: Path, manifest: Manifest, columns: dict[str, NDArray[Any]]) -> None:
    """Counts must be the manifest's and every member must lie inside its shard."""
    n, m = manifest.samples, manifest.images
    expected = {"shard": n, "record_offset": n, "record_bytes": n, "image_start": n + 1, "key_start": n + 1}
    expected |= {"image_offset": m, "image_bytes": m, "image_sizes": m, "path_start": m + 1}
    for name, count in expected.items():
        if len(columns[name]) != count:
            raise DataError(
                f"{path / INDEX / name}.npy has {len(columns[name])} entries, not {count}; prepare it again"
            )
    sizes = np.array([manifest.files[name] for name in manifest.shards], dtype=np.int64)
    image_shard = np.repeat(columns["shard"], np.diff(columns["image_start"]))
    for kind, shard in (("record", columns["shard"]), ("image", image_shard)):
        outside = columns[f"{kind}_offset"] + columns[f"{kind}_bytes"] > sizes[shard]
        if outside.any():
            name = manifest.shards[shard[int(np.argmax(outside))]]
            raise DataError(f"{path / INDEX} points past the end of {name}; prepare the folder again")
