"""Prepared folders in object stores, read through a cache that all processes of a node share."""

from __future__ import annotations

import functools
import hashlib
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from urllib.parse import quote

from mmds.data.node_cache import NodeCache
from mmds.data.object_store import ObjectStore, RemoteObject
from mmds.errors import ConfigError, DataError

CACHE_BYTES = 32 << 30
CHUNK_BYTES = 16 << 20

_URL = re.compile(r"(?!local-dir:)[A-Za-z][A-Za-z0-9+.-]+(://|::)")


def is_remote(path: str) -> bool:
    """Whether a path is a URL for fsspec (s3://bucket/folder), not a local path, a Windows drive or local-dir:."""
    return _URL.match(path) is not None


class RemoteFolder:
    """A prepared folder behind an fsspec URL, with a node-local cache.

    Whole files and chunks are fetched once a node, however many processes ask. An object keeps, for the
    life of this instance and its copies in other processes, the version (size and ETag) found at its first
    use. Use it from any thread, after a fork, and pickled.
    """

    def __init__(
        self,
        url: str,
        *,
        cache: Path | None = None,
        cache_bytes: int | None = None,
        chunk_bytes: int = CHUNK_BYTES,
        attempts: int = 5,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Nothing is requested yet.

        cache: default $MMDS_CACHE, else ~/.cache/mmds/remote. cache_bytes: most bytes of chunks kept there,
        default $MMDS_CACHE_BYTES, else 32 GiB; whole files do not count. chunk_bytes: of one ranged read.
        attempts: of every request. Raises ConfigError for a cache smaller than a chunk, DataError when the
        cache folder cannot be used or the package of the URL's protocol is missing.
        """
        self.url = url.rstrip("/")
        cap = _cache_bytes() if cache_bytes is None else cache_bytes
        if not 0 < chunk_bytes <= cap:
            raise ConfigError(
                f"a cache of {cap} bytes cannot hold one chunk of {chunk_bytes} bytes; raise MMDS_CACHE_BYTES"
            )
        self._chunk_bytes = chunk_bytes
        self._store = ObjectStore(self.url, attempts=attempts, sleep=sleep)
        self._objects: dict[str, RemoteObject] = {}
        self._root = _cache_folder() if cache is None else cache
        with self._usable_cache():
            self._cache = NodeCache(self._root, cap)

    def exists(self, name: str) -> bool:
        """Whether the folder holds a file `name`. Raises DataError when the store cannot tell."""
        return self._store.stat(name) is not None

    def local(self, name: str, size: int | None = None) -> Path:
        """Where a whole file of the folder lies on this node, downloaded when it is not there yet.

        Raises DataError when it is missing, is not of `size` bytes, or cannot be read.
        """
        remote = self._object(name)
        if size is not None and size != remote.size:
            kind = "is cut short" if remote.size < size else "is too long"
            raise DataError(
                f"{self.url}/{name} {kind}: {remote.size} of {size} bytes; copy the folder again or prepare it again"
            )
        key = f"{_key(self.url, remote)}/{PurePosixPath(name).name}"
        with self._usable_cache():
            path = self._cache.file(key, remote.size)
            if path is None:
                with self._cache.alone(key):
                    path = self._cache.file(key, remote.size) or self._download(remote, key)
        return path

    def read(self, name: str, offset: int, size: int) -> bytes:
        """`size` bytes from `offset` of a file of the folder, through chunks that the cache keeps.

        Raises DataError when the file is missing, ends before that, or cannot be read.
        """
        remote, end = self._object(name), offset + size
        if not 0 <= offset <= end <= remote.size:
            raise DataError(
                f"{self.url}/{name} is cut short: it has {remote.size} bytes, and bytes {offset} to {end} are needed; "
                "copy the folder again or prepare it again"
            )
        first = offset // self._chunk_bytes * self._chunk_bytes
        with self._usable_cache():
            return b"".join(
                self._from_chunk(remote, start, max(offset, start), min(end, start + self._chunk_bytes))
                for start in range(first, end, self._chunk_bytes)
            )

    def _from_chunk(self, remote: RemoteObject, start: int, offset: int, end: int) -> bytes:
        """Bytes `offset` to `end` of an object; both lie in the chunk that begins at `start`."""
        stop = min(start + self._chunk_bytes, remote.size)
        key = f"{_key(self.url, remote)}/{start}-{stop}"
        wanted = (key, stop - start, offset - start, end - offset)
        data = self._cache.chunk(*wanted)
        if data is None:
            with self._cache.alone(key):
                data = self._cache.chunk(*wanted)
                if data is None:
                    chunk = self._store.get(remote, start, stop)
                    self._cache.keep_chunk(key, chunk)
                    data = chunk[offset - start : end - start]
        return data

    def _download(self, remote: RemoteObject, key: str) -> Path:
        with self._cache.new_file(key) as file:
            for start in range(0, remote.size, self._chunk_bytes):
                file.write(self._store.get(remote, start, min(start + self._chunk_bytes, remote.size)))
        path = self._cache.file(key, remote.size)
        assert path is not None
        return path

    def _object(self, name: str) -> RemoteObject:
        if name not in self._objects:
            if ".." in name.split("/") or name.startswith("/"):
                raise DataError(f"{self.url}: {name!r} is not the name of a file in the folder")
            remote = self._store.stat(name)
            if remote is None:
                raise DataError(f"{self.url}/{name} is missing; check the URL, or copy the folder again")
            self._objects[name] = remote
        return self._objects[name]

    @contextmanager
    def _usable_cache(self) -> Iterator[None]:
        """Errors of the store are DataErrors by now; what is left is the cache's own disk."""
        try:
            yield
        except OSError as error:
            raise DataError(
                f"the cache folder {self._root} cannot be used: {error.strerror or error}; set MMDS_CACHE to a folder "
                "on a local disk with room for MMDS_CACHE_BYTES"
            ) from error


@functools.lru_cache(maxsize=4096)
def _key(url: str, remote: RemoteObject) -> str:
    """The name in the cache of one version of an object: another version never meets its chunks."""
    folder = re.sub(r"[^\w.-]", "_", url.rpartition("/")[2])[:40]
    version = _digest(f"{remote.size} {remote.version}")
    return f"{folder}-{_digest(url)}/{quote(remote.name, safe='')}/{version}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _cache_folder() -> Path:
    return Path(os.environ.get("MMDS_CACHE") or "~/.cache/mmds/remote").expanduser()


def _cache_bytes() -> int:
    text = os.environ.get("MMDS_CACHE_BYTES") or str(CACHE_BYTES)
    if not text.isascii() or not text.isdigit():
        raise ConfigError(f"MMDS_CACHE_BYTES={text!r} is not a number of bytes, such as {CACHE_BYTES}")
    return int(text)
