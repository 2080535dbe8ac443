"""Where every sample of a prepared folder lies, and its image sizes: the same for every tokenizer.

n samples, m images
"""

from __future__ import annotations

import mmap
from bisect import bisect_right
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mmds.data.local_folder import LocalFolder
from mmds.data.remote import CHUNK_BYTES, RemoteFolder, is_remote
from mmds.data.shard_format import BLOCK, COLUMNS, INDEX, MANIFEST, Manifest, check_files, read_json
from mmds.errors import DataError

RANDOM_BYTES = 1 << 30  # columns above this size are read here and there, never as a whole
CHECKED = 50_000_000  # samples and images up to which every entry is checked at the start


class ShardIndex:
    """Memory-mapped columns of a prepared folder, and positioned reads of its members."""

    def __init__(self, path: Path | str) -> None:
        """path: a local folder, or its URL in an object store.

        Raises DataError naming the file that is missing, cut short or inconsistent.
        """
        self.path = path
        self.folder = open_folder(path)
        self.manifest = _manifest(self.folder, path)
        if isinstance(self.folder, LocalFolder):
            check_files(self.folder.path, self.manifest.files)
        names = {column: f"{INDEX}/{column}.npy" for column in COLUMNS}
        files = {column: self.folder.local(name, self.manifest.files[name]) for column, name in names.items()}
        self._columns = {column: mapped(file) for column, file in files.items()}
        _check_columns(path, self.manifest, self._columns)
        self._shard_starts = self._columns["shard_start"].tolist()

    def __len__(self) -> int:
        return self.manifest.samples

    @property
    def image_start(self) -> NDArray[np.int64]:
        """int64 [n + 1]; images of sample i are image_start[i] to image_start[i + 1]."""
        return self._columns["image_start"]

    @property
    def image_sizes(self) -> NDArray[np.uint16]:
        """uint16 [m, 2], (width, height) of each upright image in pixels."""
        return self._columns["image_sizes"]

    @property
    def image_digests(self) -> NDArray[np.uint64]:
        """uint64 [m], digest and number of each image's original bytes: equal for the same picture under any name."""
        digests, sizes = self._columns["image_digest"], self._columns["image_bytes"]
        return digests.astype(np.uint64) << np.uint64(32) | sizes.astype(np.uint64)

    def column(self, name: str) -> NDArray[Any]:
        """A column of the index by its name in COLUMNS."""
        return self._columns[name]

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
        start, end = self.image_start[i : i + 2].tolist()
        return range(start, end)

    def _bytes(self, i: int, kind: str, entry: int) -> bytes:
        """Bytes of one member of sample i."""
        name = self.manifest.shards[bisect_right(self._shard_starts, i) - 1]
        offset = int(self._columns[f"{kind}_block"][entry]) * BLOCK
        size = int(self._columns[f"{kind}_bytes"][entry])
        try:
            data = self.folder.read(name, offset, size)
        except OSError as error:
            raise DataError(
                f"sample {self.key(i)}: cannot read {self.path}/{name}: {error.strerror}"
            ) from error
        if len(data) != size:
            raise DataError(
                f"{self.path}/{name} is cut short: sample {self.key(i)} needs bytes {offset} to {offset + size}; "
                "copy the folder again or prepare it again"
            )
        return data

    def _text(self, column: str, entry: int) -> str:
        start, end = self._columns[f"{column}_start"][entry : entry + 2].tolist()
        return self._columns[f"{column}_text"][start:end].tobytes().decode()


def mapped(path: Path) -> NDArray[Any]:
    """A .npy file, memory-mapped, as a plain array (cheap to slice). Raises DataError when it is damaged."""
    try:
        file: Any = np.load(path, mmap_mode="r", allow_pickle=False)
        if file.nbytes > RANDOM_BYTES:
            file._mmap.madvise(
                mmap.MADV_RANDOM
            )  # else each sample asked for would read its neighbours' pages too
        values: NDArray[Any] = np.asarray(file)
    except ValueError as error:
        raise DataError(f"{path} is damaged ({error}); prepare the folder again") from None
    return values


def open_folder(path: Path | str) -> LocalFolder | RemoteFolder:
    """The files of a prepared folder, wherever it is."""
    return (
        RemoteFolder(str(path), chunk_bytes=CHUNK_BYTES) if is_remote(str(path)) else LocalFolder(Path(path))
    )


def _manifest(folder: LocalFolder | RemoteFolder, path: Path | str) -> Manifest:
    if isinstance(folder, LocalFolder):
        return Manifest.read(folder.path)
    return Manifest.of(read_json(folder.local(MANIFEST)), f"{path}/{MANIFEST}")


def _check_columns(path: Path | str, manifest: Manifest, columns: dict[str, NDArray[Any]]) -> None:
    """Counts must be the manifest's and every member must lie inside its shard."""
    n, m = manifest.samples, manifest.images
    expected = {"shard_start": len(manifest.shards) + 1, "record_block": n, "record_bytes": n}
    expected |= {"image_start": n + 1, "key_start": n + 1, "path_start": m + 1}
    expected |= {"image_block": m, "image_bytes": m, "image_sizes": m, "image_digest": m}
    for name, count in expected.items():
        if len(columns[name]) != count:
            raise DataError(
                f"{path}/{INDEX}/{name}.npy has {len(columns[name])} entries, not {count}; prepare it again"
            )
    if n + m > CHECKED:
        return  # reading every entry would take minutes; what a sample's own entries say is checked when it is read
    shard_start, image_start = columns["shard_start"], columns["image_start"]
    for name, starts, end in (("shard_start", shard_start, n), ("image_start", image_start, m)):
        if starts[0] != 0 or starts[-1] != end or (np.diff(starts) < 0).any():
            raise DataError(f"{path}/{INDEX}/{name}.npy is damaged; prepare the folder again")
    for shard, name in enumerate(manifest.shards):
        samples = shard_start[shard : shard + 2]
        for kind, (first, last) in (("record", samples), ("image", image_start[samples])):
            ends = columns[f"{kind}_block"][first:last].astype(np.int64) * BLOCK
            ends += columns[f"{kind}_bytes"][first:last]
            if (ends > manifest.files[name]).any():
                raise DataError(f"{path}/{INDEX} points past the end of {name}; prepare the folder again")
