"""Folders that appear whole or not at all: built under a hidden name beside the target, then renamed."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mmds.data.shard_format import flush_folder


def occupied(target: Path) -> bool:
    """Whether something is there that a finished folder cannot replace (an empty folder can be replaced)."""
    return target.is_symlink() or (target.exists() and not (target.is_dir() and not any(target.iterdir())))


@contextmanager
def appearing(target: Path) -> Iterator[Path]:
    """A new hidden folder that takes the name `target` when the block ends well, and else is removed.

    Raises FileExistsError when the name was taken meanwhile.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(target)
    folder = target.parent / f"{_prefix(target)}{os.getpid()}-{secrets.token_hex(4)}"
    folder.mkdir()
    try:
        yield folder
        flush_folder(folder)
        try:
            folder.rename(target)
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise FileExistsError(f"{target} was made by another process meanwhile") from error
            raise
        flush_folder(target.parent)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _prefix(target: Path) -> str:
    return f".{target.name}.tmp-{socket.gethostname()}-"


def _remove_abandoned(target: Path) -> None:
    """Remove what killed processes of this host left behind for the same target."""
    for folder in target.parent.iterdir():
        process = folder.name.removeprefix(_prefix(target)).partition("-")[0]
        if folder.name.startswith(_prefix(target)) and process.isdigit() and not _alive(int(process)):
            shutil.rmtree(folder, ignore_errors=True)


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # someone else's, so it exists
    return True
