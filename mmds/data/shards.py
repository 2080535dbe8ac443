"""Prepared samples with the token ids of one tokenizer: sizes without opening a picture, samples by index.

n samples, m images, t stored tokens of a sample (one marker per image)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mmds.data.shard_format import TOKEN_META, TOKENS, check_files, read_json
from mmds.data.shard_index import ShardIndex, mapped
from mmds.errors import DataError
from mmds.geometry import Geometry


@dataclass(frozen=True, kw_only=True)
class StoredSample:
    """One sample as stored: nothing decoded, nothing expanded.

    ids: int32 [t], one IMAGE_MARKER per image. supervised: bool [t]. image_bytes: the original files.
    image_sizes: (width, height), upright, in pixels. image_paths: as the raw data wrote them.
    """

    key: str
    ids: NDArray[np.int32]
    supervised: NDArray[np.bool_]
    image_bytes: tuple[bytes, ...]
    image_sizes: tuple[tuple[int, int], ...]
    image_paths: tuple[str, ...]


class ShardSet:
    """A prepared folder with the token ids of one tokenizer: columns memory-mapped, shards read by offset."""

    def __init__(self, path: Path, fingerprint: str) -> None:
        """The same as `open`."""
        self.path, self.fingerprint = path, fingerprint
        self.index = ShardIndex(path)
        tokens = token_folder(path, fingerprint)
        self._starts: NDArray[np.int64] = mapped(tokens / "starts.npy")
        self.supervised: NDArray[np.int32] = mapped(tokens / "supervised.npy")
        if not len(self) == len(self._starts) - 1 == len(self.supervised):
            raise DataError(
                f"{tokens} is of another preparation: {len(self.supervised)} of {len(self)} samples"
            )
        self._ids = np.asarray(np.memmap(tokens / "ids.bin", dtype="<i4", mode="r"))
        self._mask = np.asarray(np.memmap(tokens / "supervised.bin", dtype=np.uint8, mode="r"))

    @classmethod
    def open(cls, path: Path | str, fingerprint: str) -> ShardSet:
        """Open the prepared folder `path` with the ids of the tokenizer `fingerprint`.

        Raises DataError naming the file that is missing, cut short or damaged, or the command that adds the
        ids.
        """
        return cls(Path(path), fingerprint)

    def __reduce__(self) -> tuple[Callable[..., ShardSet], tuple[Path, str]]:
        return type(self).open, (self.path, self.fingerprint)  # a spawned worker maps the files itself

    def __len__(self) -> int:
        return len(self.index)

    @property
    def text_tokens(self) -> NDArray[np.int32]:
        """int32 [n], stored tokens of each sample; a marker counts as one."""
        return np.diff(self._starts).astype(np.int32)

    @property
    def image_start(self) -> NDArray[np.int64]:
        """int64 [n + 1]; images of sample i are image_start[i] to image_start[i + 1]."""
        return self.index.image_start

    @property
    def image_sizes(self) -> NDArray[np.int32]:
        """int32 [m, 2], (width, height) of each upright image in pixels."""
        return self.index.image_sizes

    def row_lengths(self, geometry: Geometry) -> NDArray[np.int64]:
        """int64 [n], tokens of each sample once its markers are the slots that `geometry` plans."""
        sizes = np.asarray(self.image_sizes, dtype=np.int64)
        distinct, which = np.unique(sizes[:, 0] << 32 | sizes[:, 1], return_inverse=True)
        plans = [geometry.plan(int(size >> 32), int(size & 0xFFFFFFFF)) for size in distinct]
        slots = np.array([plan.visual_tokens for plan in plans], dtype=np.int64)
        more = np.concatenate([[0], np.cumsum(slots[which] - 1)])  # the marker itself is counted already
        return np.diff(self._starts) + np.diff(more[self.image_start])

    def key(self, i: int) -> str:
        """The name of sample i."""
        return self.index.key(i)

    def read(self, i: int) -> StoredSample:
        """Sample i, 0 <= i < n. Raises DataError when the shard no longer holds what the index says."""
        if not 0 <= i < len(self):
            raise IndexError(f"sample {i} of {len(self)} in {self.path}")
        start, end = int(self._starts[i]), int(self._starts[i + 1])
        sizes = self.image_sizes[self.image_start[i] : self.image_start[i + 1]]
        return StoredSample(
            key=self.key(i),
            ids=np.array(self._ids[start:end], dtype=np.int32),
            supervised=np.array(self._mask[start:end], dtype=np.bool_),
            image_bytes=self.index.images(i),
            image_sizes=tuple((int(width), int(height)) for width, height in sizes),
            image_paths=self.index.image_paths(i),
        )


def has_tokens(path: Path, fingerprint: str) -> bool:
    """Whether the prepared folder holds the ids of a tokenizer."""
    return (path / TOKENS / fingerprint / TOKEN_META).is_file()


def token_folder(path: Path, fingerprint: str) -> Path:
    """The folder of a tokenizer's ids, files checked. Raises DataError naming the command that makes it."""
    if not has_tokens(path, fingerprint):
        present = sorted(p.parent.name for p in (path / TOKENS).glob(f"[!.]*/{TOKEN_META}"))
        raise DataError(
            f"{path} holds no token ids of this tokenizer and chat template (fingerprint {fingerprint}; it "
            f"holds {', '.join(present) or 'none'}). Add them, without touching the pictures, with: "
            f"python scripts/prepare.py --tokenizer NAME --out {path}"
        )
    folder = path / TOKENS / fingerprint
    check_files(folder, read_json(folder / TOKEN_META).get("files", {}))
    return folder
