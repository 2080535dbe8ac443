"""Prepared samples with the token ids of one tokenizer: sizes without opening a picture, samples by index.

n samples, m images, t stored tokens of a sample (one marker per image)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mmds.data.remote import CHUNK_BYTES, is_remote
from mmds.data.shard_format import TOKEN_FILES, TOKEN_META, TOKENS, check_files, read_json
from mmds.data.shard_index import ShardIndex, mapped
from mmds.errors import DataError
from mmds.geometry import Geometry
from mmds.sample_sizes import SampleSizes


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

    def __init__(self, path: Path | str, fingerprint: str) -> None:
        """The same as `open`."""
        self.path, self.fingerprint = path, fingerprint
        self.index = ShardIndex(path)
        tokens = _token_files(self.index, fingerprint)
        self._starts: NDArray[np.int64] = mapped(tokens["starts.npy"])
        self.supervised: NDArray[np.int32] = mapped(tokens["supervised.npy"])
        if not len(self) == len(self._starts) - 1 == len(self.supervised):
            raise DataError(
                f"{path}/{TOKENS}/{fingerprint} is of another preparation: {len(self.supervised)} of {len(self)} samples"
            )
        self._ids = _mapped_values(tokens["ids.bin"], "<i4")
        self._mask = _mapped_values(tokens["supervised.bin"], "u1")

    @classmethod
    def open(cls, path: Path | str, fingerprint: str) -> ShardSet:
        """Open the prepared folder `path`, local or a URL, with the ids of the tokenizer `fingerprint`.

        Raises DataError naming the file that is missing, cut short or damaged, or the command that adds the
        ids.
        """
        return cls(path if is_remote(str(path)) else Path(path), fingerprint)

    def __reduce__(self) -> tuple[Callable[..., ShardSet], tuple[Path | str, str]]:
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
    def image_sizes(self) -> NDArray[np.uint16]:
        """uint16 [m, 2], (width, height) of each upright image in pixels."""
        return self.index.image_sizes

    @property
    def identity(self) -> tuple[str, str]:
        """What decides the samples and their ids: digests of the preparation's input and of the tokenizer."""
        return self.index.manifest.digest, self.fingerprint

    @property
    def block(self) -> int:
        """Samples that are read together and so should stay near each other in the order; 0 = any order will do."""
        if not is_remote(str(self.path)):
            return 0
        total = sum(self.index.manifest.files[name] for name in self.index.manifest.shards)
        return max(1, CHUNK_BYTES * len(self) // max(total, 1))

    def sizes(self, geometry: Geometry, samples: NDArray[np.int64] | None = None) -> SampleSizes:
        """Sizes of these samples (None: of all, in order) once their markers are the slots that `geometry` plans. Opens no picture."""
        if samples is None:
            samples = np.arange(len(self), dtype=np.int64)
        first, end = self.image_start[samples], self.image_start[samples + 1]
        counts = (end - first).astype(np.int64)
        owner = np.repeat(np.arange(len(samples)), counts)
        within = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
        shapes = np.asarray(self.image_sizes[first[owner] + within], dtype=np.int64)
        distinct, which = np.unique(shapes[:, 0] << 32 | shapes[:, 1], return_inverse=True)
        plans = [geometry.plan(int(size >> 32), int(size & 0xFFFFFFFF)) for size in distinct]
        facts = np.array(
            [(p.visual_tokens, p.pieces, p.patches, p.patches**2 // p.pieces) for p in plans], dtype=np.int64
        ).reshape(-1, 4)
        totals = np.zeros((len(samples), 4), dtype=np.int64)
        np.add.at(totals, owner, facts[which])
        stored = (self._starts[samples + 1] - self._starts[samples]).astype(np.int64)
        return SampleSizes(
            tokens=stored - counts + totals[:, 0],  # an image's marker is one of the stored tokens
            supervised=self.supervised[samples].astype(np.int64),
            images=counts,
            pieces=totals[:, 1],
            patches=totals[:, 2],
            patch_squares=totals[:, 3],
        )

    def key(self, i: int) -> str:
        """The name of sample i."""
        return self.index.key(i)

    def read(self, i: int) -> StoredSample:
        """Sample i, 0 <= i < n. Raises DataError when the shard no longer holds what the index says."""
        if not 0 <= i < len(self):
            raise IndexError(f"sample {i} of {len(self)} in {self.path}")
        start, end = self._starts[i : i + 2].tolist()
        first, last = self.image_start[i : i + 2].tolist()
        return StoredSample(
            key=self.key(i),
            ids=np.array(self._ids[start:end], dtype=np.int32),
            supervised=np.array(self._mask[start:end], dtype=np.bool_),
            image_bytes=self.index.images(i),
            image_sizes=tuple((width, height) for width, height in self.image_sizes[first:last].tolist()),
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
            f"python scripts/prepare.py --retokenize NAME --out {path}"
        )
    folder = path / TOKENS / fingerprint
    check_files(folder, read_json(folder / TOKEN_META).get("files", {}))
    return folder


def _token_files(index: ShardIndex, fingerprint: str) -> dict[str, Path]:
    """Where the files of a tokenizer's ids lie, by name, with their sizes checked."""
    inside = f"{TOKENS}/{fingerprint}"
    if not is_remote(str(index.path)):
        folder = token_folder(Path(index.path), fingerprint)
        return {name: folder / name for name in TOKEN_FILES}
    if not index.folder.exists(f"{inside}/{TOKEN_META}"):
        raise DataError(
            f"{index.path} holds no token ids of this tokenizer and chat template (fingerprint {fingerprint}); prepare "
            f"it with this tokenizer: python scripts/prepare.py RAW... --tokenizer NAME --out {index.path}"
        )
    files = read_json(index.folder.local(f"{inside}/{TOKEN_META}")).get("files", {})
    return {name: index.folder.local(f"{inside}/{name}", files.get(name)) for name in TOKEN_FILES}


def _mapped_values(path: Path, kind: str) -> NDArray[Any]:
    """A file of plain values, memory-mapped; an empty one (of a part without samples) cannot be."""
    if path.stat().st_size == 0:
        return np.zeros(0, dtype=kind)
    return np.asarray(np.memmap(path, dtype=kind, mode="r"))
