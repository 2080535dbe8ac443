"""What a prepared folder holds: names, columns and the manifest that vouches for them (see data/README.md).

n samples, m images, t stored tokens (one marker per image)
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from mmds.errors import DataError

FORMAT = "mmds-shards-2"
MANIFEST = "manifest.json"
SKIPPED = "skipped.jsonl"
INDEX = "index"
TOKENS = "tokens"
TOKEN_META = "meta.json"
TOKEN_FILES = ("ids.bin", "supervised.bin", "starts.npy", "supervised.npy")

BLOCK = 512
"""Bytes; every member of a tar begins at a multiple of it, so 32 bits reach 2 TiB into a shard."""

COLUMNS: dict[str, type[np.generic]] = {
    "shard_start": np.int64,  # [shards + 1] samples of shard s are shard_start[s] to shard_start[s + 1]
    "record_block": np.uint32,  # [n] where the raw record begins in its shard, in blocks
    "record_bytes": np.uint32,  # [n]
    "image_start": np.int64,  # [n + 1] images of sample i are image_start[i] to image_start[i + 1]
    "image_block": np.uint32,  # [m] where the image begins in the sample's shard, in blocks
    "image_bytes": np.uint32,  # [m]
    "image_sizes": np.uint16,  # [m, 2] width, height of the upright image in pixels
    "image_digest": np.uint32,  # [m] of the original bytes: with their number, equal for the same picture under any name
    "key_start": np.int64,  # [n + 1] into key_text
    "key_text": np.uint8,  # UTF-8
    "path_start": np.int64,  # [m + 1] into path_text
    "path_text": np.uint8,  # UTF-8, image paths as the raw data wrote them
}


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Counts of a prepared folder, the size of every file, and what it was made from.

    files: bytes of each shard and index file by its name in the folder. raw, images_dir: the arguments of the
    preparation. digest: of those and of the raw files' content. part: (i, n) when only the i-th of n parts is
    here, and then whole_digest is that of all. skipped: bad samples left out (listed in skipped.jsonl). repeated_ids: records whose id was taken
    and who are called after file and line.
    """

    samples: int
    images: int
    text_only: int
    shards: tuple[str, ...]
    files: dict[str, int] = field(repr=False)
    raw: tuple[str, ...]
    images_dir: str | None
    digest: str
    part: tuple[int, int] | None = None
    whole_digest: str | None = None
    skipped: int = 0
    repeated_ids: int = 0

    def write(self, folder: Path) -> None:
        """Write manifest.json, the last file of a preparation."""
        write_json(folder / MANIFEST, {"format": FORMAT, **asdict(self)})

    @staticmethod
    def read(folder: Path) -> Manifest:
        """Read manifest.json. Raises DataError when the folder is not a prepared one."""
        path = folder / MANIFEST
        if not path.is_file():
            raise DataError(
                f"{folder} is not a prepared folder (no {MANIFEST}); make one with: "
                "python scripts/prepare.py RAW.jsonl --images DIR --tokenizer NAME --out FOLDER"
            )
        return Manifest.of(read_json(path), str(path))

    @staticmethod
    def of(content: dict[str, Any], path: str) -> Manifest:
        """The manifest of a parsed file. path: for messages. Raises DataError when it is none."""
        if content.pop("format", None) != FORMAT:
            raise DataError(f"{path} is not of format {FORMAT}; prepare the folder again with this mmds")
        try:
            part = None if content.get("part") is None else tuple(content["part"])
            lists = {"shards": tuple(content["shards"]), "raw": tuple(content["raw"]), "part": part}
            return Manifest(**{**content, **lists})
        except (KeyError, TypeError) as error:
            raise DataError(f"{path} is damaged ({error}); prepare the folder again") from None


def check_files(folder: Path, files: Mapping[str, int]) -> None:
    """Compare the size of every file with the recorded one. Raises DataError naming the first to differ."""
    for name, expected in files.items():
        path = folder / name
        try:
            found = path.stat().st_size
        except FileNotFoundError:
            raise DataError(f"{path} is missing; copy the folder again or prepare it again") from None
        if found != expected:
            kind = "is cut short" if found < expected else "is too long"
            raise DataError(
                f"{path} {kind}: {found} of {expected} bytes; copy the folder again or prepare it again"
            )


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write an object and flush it to disk."""
    write_text(path, json.dumps(content, indent=1, ensure_ascii=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write UTF-8 text and flush it to disk."""
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def read_json(path: Path) -> dict[str, Any]:
    """Read an object. Raises DataError when the file is not whole."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"{path} is damaged ({error}); prepare the folder again") from None
    if not isinstance(content, dict):
        raise DataError(f"{path} is damaged (not an object); prepare the folder again")
    return content


def flush_folder(folder: Path) -> None:
    """fsync a folder's own entries, so that a rename never shows files that are not there yet."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
