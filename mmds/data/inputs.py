"""What a preparation reads: files, folders, globs, URLs, tars and data sets, expanded and in one order."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Literal

from mmds.data import sources
from mmds.data.foreign_tars import scan_tar
from mmds.data.hub_sets import HUB, is_saved_set, open_set, scan_set
from mmds.data.raw import scan
from mmds.data.raw_item import RawItem
from mmds.data.shard_format import FORMAT, MANIFEST
from mmds.errors import DataError

JSON_NAMES = (".jsonl", ".json")
TAR_NAMES = (".tar", ".tar.gz", ".tgz")


@dataclass(frozen=True, kw_only=True)
class RawFile:
    """One source of records. base: where its relative picture paths start."""

    path: str
    kind: Literal["json", "tar", "set"]
    base: str

    @property
    def name(self) -> str:
        """What samples without an id are called after."""
        return Path(self.path.removeprefix(HUB)).stem

    def items(self) -> Iterator[RawItem]:
        """Every record, in order; what is broken stands in its place. Raises nothing for bad data."""
        try:
            if self.kind == "tar":
                yield from scan_tar(self.path)
            elif self.kind == "set":
                yield from scan_set(self.path, self.base)
            else:
                yield from self._scanned()
        except DataError as error:
            problem = str(error).removeprefix(f"{self.path}: ")
            yield RawItem(where=self.path, record=None, base=self.base, problem=problem, ends_file=True)

    def _scanned(self) -> Iterator[RawItem]:
        for found in scan(self.path):
            rest = "; nothing after it was read" if found.ends_file else ""
            yield RawItem(
                where=f"{self.path}:{found.line}",
                record=found.value,
                base=self.base,
                problem=found.problem + rest,
                ends_file=found.ends_file,
                size=found.size,
            )

    def size(self) -> int:
        """Bytes, for progress. Raises DataError for a file that is not there."""
        if self.kind == "set":
            return int(open_set(self.path).data.nbytes)
        return sources.size_and_version(self.path)[0]

    def digest(self) -> str:
        """A digest of what it holds: the content of JSON; size and time of a tar; the set's own mark."""
        if self.kind == "set":
            return str(open_set(self.path)._fingerprint)
        if self.kind == "tar":
            return "{}-{}".format(*sources.size_and_version(self.path))
        content = sha256()
        with sources.open_file(self.path) as file:
            try:
                for block in iter(lambda: file.read(1 << 20), b""):
                    content.update(block)
            except OSError as error:
                raise DataError(f"{self.path}: cannot be read: {sources.told(error)}") from error
        return content.hexdigest()


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """Everything that one preparation reads, in order."""

    files: tuple[RawFile, ...]

    @classmethod
    def of(cls, raw_paths: Sequence[Path | str], images_dir: Path | str | None) -> Inputs:
        """Expand raw paths: a file, a folder, a glob, a URL of these, a tar, a saved data set or hub:NAME.

        images_dir: where relative picture paths start, a folder or a URL; None: each file's own folder.
        Raises DataError for a path that is not there, or that gives nothing.
        """
        if not raw_paths:
            raise DataError("no raw file is given")
        if images_dir is not None and not sources.is_folder(str(images_dir)):
            raise DataError(
                f"the images folder {images_dir} does not exist; check --images (mmds.data.mix images)"
            )
        base = None if images_dir is None else str(images_dir)
        return cls(files=tuple(file for path in raw_paths for file in _expand(str(path), base)))

    def items(self) -> Iterator[RawItem]:
        """Every record of every file, in order."""
        for file in self.files:
            yield from file.items()

    def size(self) -> int:
        """Bytes of all files, for progress. Raises DataError for one that is not there."""
        return sum(file.size() for file in self.files)

    def digest(self) -> str:
        """A digest of what decides a preparation: names and content of the files, where pictures start.

        Pictures count by name only. Raises DataError for a file that cannot be read.
        """
        total = sha256(FORMAT.encode())
        for file in self.files:
            base = file.base if sources.is_url(file.base) else Path(file.base).resolve()
            total.update(f"\0{file.name}\0{file.digest()}\0{base}".encode())
        return total.hexdigest()


def _expand(path: str, images: str | None) -> Iterator[RawFile]:
    """The files that one argument stands for."""
    if path.startswith(HUB):
        yield RawFile(path=path, kind="set", base=images or ".")
    elif sources.is_folder(path):
        yield from _folder(path, images)
    elif re.search(r"[*?\[]", path) and not (not sources.is_url(path) and Path(path).exists()):
        found = sources.glob(path)
        if not found:
            raise DataError(f"{path}: no file matches the pattern; check the path")
        yield from (_file(name, images) for name in found)
    else:
        yield _file(path, images)


def _folder(path: str, images: str | None) -> Iterator[RawFile]:
    """A saved data set, or the JSON files in a folder, or when there are none, its tars."""
    if not sources.is_url(path) and is_saved_set(path):
        yield RawFile(path=path, kind="set", base=images or path)
        return
    names = sources.names_in(path)
    if MANIFEST in names:
        raise DataError(f"{path}: cannot be read as raw data: it is a prepared folder already")
    chosen = [name for name in names if name.endswith(JSON_NAMES)]
    chosen = chosen or [name for name in names if name.endswith(TAR_NAMES)]
    if not chosen:
        raise DataError(f"{path}: cannot be read: the folder holds no *.jsonl, *.json or *.tar")
    yield from (_file(sources.joined(path, name), images) for name in chosen)


def _file(path: str, images: str | None) -> RawFile:
    base = sources.parent(path) if images is None else images
    return RawFile(path=path, kind="tar" if path.endswith(TAR_NAMES) else "json", base=base)
