"""The hidden folder in which a preparation is made, so that one that was killed can be gone on with.

.NAME.work/lock           held by the process at work; others wait
           settings.json  what the preparation is of; another one's work is thrown away
           journal.jsonl  one line for each shard that is finished and on disk
           folder/        becomes NAME when all is done
           columns/       what the index is made from
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

from mmds.data.shard_format import flush_folder, write_json


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """How far a preparation had come. records: of the raw data, good or bad, that are dealt with.

    shards: finished ones. lengths: bytes of every growing file. repeated: samples whose id was taken.
    skipped: bad samples.
    """

    records: int
    shards: int
    repeated: int
    skipped: int
    lengths: dict[str, int]


class Work:
    """A work folder in hand."""

    def __init__(self, path: Path, target: Path) -> None:
        """path: exists and is locked by this process."""
        self.path, self.target = path, target
        self.folder = path / "folder"
        self._journal = path / "journal.jsonl"

    def begin(self, settings: Mapping[str, object]) -> None:
        """Keep what is there if it is of the same settings, else start with nothing."""
        mark, wanted = self.path / "settings.json", json.dumps(dict(settings), sort_keys=True)
        try:
            same = json.dumps(json.loads(mark.read_text(encoding="utf-8")), sort_keys=True) == wanted
        except (OSError, ValueError):
            same = False
        if not same:
            self.clear()
            write_json(mark, settings)
        self.folder.mkdir(exist_ok=True)

    def clear(self) -> None:
        """Remove everything but the lock."""
        for entry in self.path.iterdir():
            if entry.is_dir():
                shutil.rmtree(entry)
            elif entry.name != "lock":
                entry.unlink()

    def checkpoint(self) -> Checkpoint | None:
        """The last one of the journal that was written whole; None when no shard is finished."""
        try:
            lines = self._journal.read_text(encoding="utf-8").split("\n")[:-1]
            return Checkpoint(**json.loads(lines[-1])) if lines else None
        except (OSError, ValueError, TypeError):
            return None

    def note(self, checkpoint: Checkpoint) -> None:
        """Add a checkpoint; what it names must be on disk."""
        flush_folder(self.folder)
        with self._journal.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(checkpoint)) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def forget(self) -> None:
        """Start over: no checkpoint counts any more."""
        self._journal.unlink(missing_ok=True)
        shutil.rmtree(self.folder)
        self.folder.mkdir()

    def publish(self) -> None:
        """Give the finished folder its name. Raises FileExistsError when the name was taken meanwhile."""
        flush_folder(self.folder)
        try:
            self.folder.rename(self.target)
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise FileExistsError(f"{self.target} was made by another process meanwhile") from error
            raise
        flush_folder(self.target.parent)


@contextmanager
def working(target: Path) -> Iterator[Work]:
    """The work folder of `target`, alone: other processes of this machine (or of a shared disk with locks)
    wait here meanwhile. It is removed at the end, unless it failed with finished shards to go on from.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    path = target.parent / f".{target.name}.work"
    with _locked(path):
        work = Work(path, target)
        try:
            yield work
        except BaseException:
            if work.checkpoint() is None:
                shutil.rmtree(path, ignore_errors=True)
            raise
        shutil.rmtree(path, ignore_errors=True)


def tidy(target: Path) -> None:
    """Remove what a run has left that was killed just after its folder got its name."""
    if (target.parent / f".{target.name}.work").exists():
        with working(target):
            pass


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock of a work folder. Whoever held it before may have removed the folder: then once more."""
    while True:
        lock = _open_lock(path)
        if lock is None:
            continue
        with lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            try:
                current = os.path.samestat(os.fstat(lock.fileno()), os.stat(path / "lock"))
            except FileNotFoundError:
                current = False
            if current:
                yield
                return


def _open_lock(path: Path) -> IO[str] | None:
    """The open lock file; None when the folder went away meanwhile."""
    path.mkdir(exist_ok=True)
    try:
        return (path / "lock").open("w")
    except FileNotFoundError:
        return None
