"""Files that only grow, so that a preparation which is killed can go on from where they were last known."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import BinaryIO


class GrowingFiles:
    """Append-only files below one folder, all cut back at the start to lengths that are known to be good."""

    def __init__(self, root: Path, lengths: Mapping[str, int] | None = None) -> None:
        """lengths: bytes of each file to keep, by its name below `root`; a file not named starts empty."""
        self.root = root
        self._keep = dict(lengths or {})
        self._files: dict[str, BinaryIO] = {}

    def open(self, names: Iterable[str]) -> None:
        """Make the files, or cut back what is there."""
        for name in names:
            path = self.root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            self._files[name] = path.open("r+b" if name in self._keep else "wb")
            self._files[name].truncate(self._keep.get(name, 0))
            self._files[name].seek(0, os.SEEK_END)

    def append(self, name: str, data: bytes) -> None:
        """Write at the end of a file that was opened."""
        self._files[name].write(data)

    def length(self, name: str) -> int:
        """Bytes of a file so far."""
        return self._files[name].tell()

    def lengths(self) -> dict[str, int]:
        """Bytes of every file, all of them on disk."""
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())
        return {name: file.tell() for name, file in self._files.items()}

    def remove(self, folder: str) -> None:
        """Remove a folder of files that have served."""
        shutil.rmtree(self.root / folder)

    def close(self) -> None:
        """Close all files."""
        for file in self._files.values():
            file.close()

    def __enter__(self) -> GrowingFiles:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
