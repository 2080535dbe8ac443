"""Objects behind a URL of fsspec: their size and version, and ranges of their bytes, again when the network fails."""

from __future__ import annotations

import errno
import os
import random
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import fsspec

from mmds.errors import DataError, StoreError

T = TypeVar("T")

FIRST_DELAY, LONGEST_DELAY = 1.0, 60.0  # seconds between attempts; doubles in between
VERSION_KEYS = ("ETag", "etag", "generation", "mtime", "LastModified", "last_modified", "updated", "created")
PASSING_STATUS = (408, 425, 429)  # the HTTP statuses below 500 that another attempt may mend
LASTING_ERRNO = (errno.EINVAL, errno.ENAMETOOLONG, errno.ENOSYS)

_jitter = random.SystemRandom()  # draws from no random stream of the run, and differs in every forked process


@dataclass(frozen=True, kw_only=True)
class RemoteObject:
    """One version of an object. size: bytes. version: its ETag, or the time of its last change where the store has none."""

    name: str
    size: int
    version: str


class ObjectStore:
    """The objects below a URL. May be used after a fork and be pickled: every process opens a connection of its own."""

    def __init__(self, url: str, *, attempts: int = 5, sleep: Callable[[float], None] = time.sleep) -> None:
        """attempts: of every request, with growing pauses. Raises DataError when the URL's package is missing."""
        self.url, self._attempts, self._sleep = url.rstrip("/"), attempts, sleep
        self._process = os.getpid()
        self._opened: tuple[Any, str] | None = None
        self._inherited: tuple[Any, str] | None = None
        protocol = re.split("::|://", url)[0]
        try:
            fsspec.get_filesystem_class(protocol)
        except (ImportError, ValueError) as error:
            raise DataError(f"{url} cannot be opened: {error}") from error

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": None, "_inherited": None}

    def stat(self, name: str) -> RemoteObject | None:
        """Size and version of an object as it is now, None when there is none. Raises DataError after the last attempt."""

        def look() -> RemoteObject | None:
            try:
                return self._look(name)
            except FileNotFoundError:
                return None

        return self._attempt(f"{self.url}/{name}", look)

    def get(self, remote: RemoteObject, start: int, stop: int) -> bytes:
        """Bytes `start` to `stop` (exclusive) of exactly this version of an object, by one ranged read.

        Raises DataError when the object is another one by now, and after the last attempt.
        """
        where = f"{self.url}/{remote.name} bytes {start} to {stop}"
        data = self._attempt(where, lambda: self._range(remote, start, stop))
        # The range itself does not tell of which version it is.
        self._attempt(where, lambda: self._check_unchanged(remote))
        return data

    def _range(self, remote: RemoteObject, start: int, stop: int) -> bytes:
        filesystem, root = self._filesystem()
        try:
            data: bytes = filesystem.cat_file(f"{root}/{remote.name}", start=start, end=stop)
        except OSError as error:
            if error.errno == errno.EINVAL:
                self._check_unchanged(remote)  # S3 answers so to a range past the end of what became shorter
            raise
        if len(data) != stop - start:
            self._check_unchanged(remote)
            raise OSError(f"{len(data)} instead of {stop - start} bytes arrived")
        return data

    def _check_unchanged(self, remote: RemoteObject) -> None:
        now = self._look(remote.name)
        if now != remote:
            raise StoreError(
                f"{self.url}/{remote.name} was replaced while it was being read (version {remote.version}, "
                f"{remote.size} bytes, is now {now.version}, {now.size} bytes); start again to read the new one"
            )

    def _look(self, name: str) -> RemoteObject:
        filesystem, root = self._filesystem()
        info = filesystem.info(f"{root}/{name}")
        if info["type"] != "file":
            raise FileNotFoundError(f"{self.url}/{name} is a folder")
        version = next((info[key] for key in VERSION_KEYS if info.get(key)), "unknown")
        return RemoteObject(name=name, size=int(info["size"]), version=str(version).strip('"'))

    def _attempt(self, what: str, request: Callable[[], T]) -> T:
        for attempt in range(1, self._attempts + 1):
            try:
                return request()
            except DataError:
                raise
            except Exception as error:  # every store's package has error classes of its own
                reason = f"{type(error).__name__}: {error}"
                if _lasts(error):
                    raise StoreError(f"cannot read {what}: {reason}") from error
                if attempt == self._attempts:
                    raise StoreError(
                        f"cannot read {what}: {attempt} attempts failed, the last with {reason}"
                    ) from error
            delay = min(LONGEST_DELAY, FIRST_DELAY * 2 ** (attempt - 1))
            self._sleep(delay * _jitter.uniform(0.5, 1.0))
        raise AssertionError("at least one attempt")

    def _filesystem(self) -> tuple[Any, str]:
        """This process's own connection, and the path of the URL in it."""
        if self._process != os.getpid():
            # Kept, not dropped: ending a connection of the parent would wait for the parent's threads.
            self._inherited, self._opened = self._opened, None
            self._process = os.getpid()
        if self._opened is None:
            filesystem, root = fsspec.url_to_fs(self.url, skip_instance_cache=True)
            if "s3" in filesystem.protocol:
                _one_attempt_each(filesystem)
            self._opened = (filesystem, root.rstrip("/"))
        return self._opened


def _one_attempt_each(filesystem: Any) -> None:
    """Leave trying again to us: s3fs and botocore would multiply our attempts by five each."""
    filesystem.retries = 1
    filesystem.config_kwargs = {"retries": {"total_max_attempts": 1}, **filesystem.config_kwargs}


def _lasts(error: Exception) -> bool:
    """Whether another attempt would fail in the same way."""
    status = next(
        (s for key in ("status", "status_code", "code") if isinstance(s := getattr(error, key, None), int)), 0
    )
    return (
        isinstance(error, FileNotFoundError | PermissionError | NotImplementedError)
        or (isinstance(error, OSError) and error.errno in LASTING_ERRNO)
        or (400 <= status < 500 and status not in PASSING_STATUS)
    )
