"""A prepared folder on a disk of this machine (or one that is mounted): the local counterpart of `RemoteFolder`."""

from __future__ import annotations

import os
from collections import OrderedDict
from pathlib import Path

from mmds.data.shard_format import check_files

OPEN_SHARDS = 64  # file handles a process keeps open


class LocalFolder:
    """Files of a folder by name, and positioned reads of its shards."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._files = _OpenFiles(path)

    def exists(self, name: str) -> bool:
        """Whether the folder holds a file `name`."""
        return (self.path / name).is_file()

    def local(self, name: str, size: int | None = None) -> Path:
        """Where a file lies. Raises DataError when it is not of `size` bytes."""
        if size is not None:
            check_files(self.path, {name: size})
        return self.path / name

    def read(self, name: str, offset: int, size: int) -> bytes:
        """Up to `size` bytes from `offset` of a file; fewer only at its end. Raises OSError."""
        return self._files.read(name, offset, size)


class _OpenFiles:
    """Positioned reads through a few open handles. A forked worker opens its own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process = os.getpid()
        self._open: OrderedDict[str, int] = OrderedDict()

    def read(self, name: str, offset: int, size: int) -> bytes:
        """Up to `size` bytes from `offset`; fewer only at the end of the file."""
        if self._process != os.getpid():
            self._process, self._open = os.getpid(), OrderedDict()
        if name not in self._open:
            self._open[name] = os.open(self._folder / name, os.O_RDONLY)
            if len(self._open) > OPEN_SHARDS:
                os.close(self._open.popitem(last=False)[1])
        self._open.move_to_end(name)
        file = self._open[name]
        data = os.pread(file, size, offset)
        while len(data) < size and (more := os.pread(file, size - len(data), offset + len(data))):
            data += more
        return data

    def __del__(self) -> None:
        if self._process == os.getpid():
            for descriptor in self._open.values():
                os.close(descriptor)
