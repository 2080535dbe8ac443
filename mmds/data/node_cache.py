"""A folder of this node that keeps parts of remote objects, shared by all processes that name it.

files/    whole files, until their remote object changes
chunks/   parts of large objects; beyond the cap, those not used for longest go
partial/  files being written, of which nothing is ever read
locks/    who may fetch what
used      bytes in chunks/ (never fewer than there are), and the lock on adding and removing them
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

LOCKS = 1024  # names share this many lock files, so that none needs to be removed while others wait for it
LOW_WATER = 0.9  # of the cap; removing down to here spares most additions a walk through the folder


class NodeCache:
    """Files and chunks by name. Methods raise OSError when the folder cannot be used (full, not writable)."""

    def __init__(self, root: Path, cap: int) -> None:
        """root: made when missing. cap: most bytes of all chunks; whole files do not count."""
        self.root, self.cap = root, cap
        for folder in ("files", "chunks", "partial", "locks"):
            (root / folder).mkdir(parents=True, exist_ok=True)
        _remove_abandoned(root / "partial")

    @contextmanager
    def alone(self, name: str) -> Iterator[None]:
        """Hold the right to fetch `name`: other processes and threads of this node wait here meanwhile.

        Names may share a lock, so a holder must not ask for a second one.
        """
        with _locked(self.root / "locks" / f"{zlib.crc32(name.encode()) % LOCKS:03x}"):
            yield

    def file(self, name: str, size: int) -> Path | None:
        """Where the whole file `name` of `size` bytes lies, None when it is not here."""
        path = self.root / "files" / name
        try:
            return path if path.stat().st_size == size else None
        except FileNotFoundError:
            return None

    @contextmanager
    def new_file(self, name: str) -> Iterator[BinaryIO]:
        """Write the whole file `name` = OBJECT/VERSION/BASE; it appears, instead of other versions, when the block ends well."""
        target = self.root / "files" / name
        with _partial(self.root / "partial") as (part, file):
            yield file
            file.flush()
            target.parent.mkdir(parents=True, exist_ok=True)
            part.rename(target)
        for version in target.parent.parent.iterdir():
            if version != target.parent:
                shutil.rmtree(version, ignore_errors=True)  # who has mapped its file keeps it

    def chunk(self, name: str, length: int, offset: int, size: int) -> bytes | None:
        """`size` bytes from `offset` of the chunk `name`, None when no chunk of `length` bytes is here."""
        try:
            descriptor = os.open(self.root / "chunks" / name, os.O_RDONLY)
        except FileNotFoundError:
            return None
        try:  # from here on the chunk may be removed: what is open can still be read
            if os.fstat(descriptor).st_size != length:
                return None  # a power failure can leave a shorter file, as nothing is flushed to disk
            os.utime(descriptor)  # the time of last use; many disks are mounted so that reading leaves none
            return _read(descriptor, offset, size)
        finally:
            os.close(descriptor)

    def keep_chunk(self, name: str, data: bytes) -> None:
        """Keep a chunk, after removing others when the cap demands it."""
        target = self.root / "chunks" / name
        with _partial(self.root / "partial") as (part, file):
            file.write(data)
            file.flush()
            with _locked(self.root / "used") as ledger:
                used = self._make_room(ledger, len(data))
                # Counted before it is there: a kill in between must not let the folder outgrow its cap.
                os.pwrite(ledger, b"%20d" % (used + len(data)), 0)
                target.parent.mkdir(parents=True, exist_ok=True)
                part.rename(target)

    def _make_room(self, ledger: int, size: int) -> int:
        """Bytes in chunks/, after removing chunks until `size` more fit. The caller holds the ledger."""
        written = os.pread(ledger, 20, 0).strip()
        if written.isdigit() and int(written) + size <= self.cap:
            return int(written)
        chunks = sorted(_chunks(self.root / "chunks"))
        used = sum(length for _, length, _ in chunks)
        if used + size > self.cap:
            for _, length, path in chunks:
                if used + size <= LOW_WATER * self.cap:
                    break
                path.unlink(missing_ok=True)
                _remove_empty(path.parent)
                used -= length
        return used


def _chunks(folder: Path) -> Iterator[tuple[int, int, Path]]:
    """(time of last use, bytes, path) of every chunk."""
    for parent, _, names in os.walk(folder):
        for name in names:
            path = Path(parent, name)
            status = path.stat()
            yield status.st_mtime_ns, status.st_size, path


def _remove_empty(folder: Path) -> None:
    try:
        folder.rmdir()
    except OSError:
        pass  # it holds other chunks


def _read(descriptor: int, offset: int, size: int) -> bytes:
    parts, left = [], size
    while left and (part := os.pread(descriptor, left, offset + size - left)):
        parts.append(part)
        left -= len(part)
    return b"".join(parts)


@contextmanager
def _locked(path: Path) -> Iterator[int]:
    """Open a file, made when missing, and hold its lock. A process that dies lets go of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield descriptor
    finally:
        fcntl.flock(
            descriptor, fcntl.LOCK_UN
        )  # closing is not enough: a process forked meanwhile has it open too
        os.close(descriptor)


@contextmanager
def _partial(folder: Path) -> Iterator[tuple[Path, BinaryIO]]:
    """A new file under a name of its own, removed in the end unless it was renamed. Locked while it is written."""
    while True:
        path = folder / secrets.token_hex(8)
        file = path.open("xb")
        fcntl.flock(file, fcntl.LOCK_EX)
        if os.fstat(file.fileno()).st_nlink:
            break
        file.close()  # taken for abandoned before it was locked
    try:
        yield path, file
    finally:
        path.unlink(missing_ok=True)
        file.close()


def _remove_abandoned(folder: Path) -> None:
    """Remove the partial files whose writers are dead: nobody holds their locks."""
    for path in folder.iterdir():
        try:
            with path.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink(missing_ok=True)
        except (FileNotFoundError, BlockingIOError):
            pass  # finished meanwhile, or being written
