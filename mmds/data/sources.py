"""Files by path or by URL: everything that preparation reads goes through here.

A path is local; anything with "://" is a URL that fsspec opens (s3://, gs://, memory://, ...). End points and
credentials come from fsspec's own configuration (`FSSPEC_S3_ENDPOINT_URL`, ~/.config/fsspec) or from the
store's (`AWS_ENDPOINT_URL`, `AWS_ACCESS_KEY_ID`), never from mmds.
"""

from __future__ import annotations

import io
import os
import re
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, Any

from fsspec import AbstractFileSystem
from fsspec.core import url_to_fs

from mmds.errors import DataError

MAX_FILE_BYTES = 1 << 30
"""Most bytes of one picture file; no picture below the pixel limit is larger."""

BUFFER = 1 << 20  # bytes read ahead of a remote file

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")


def is_url(path: str | os.PathLike[str]) -> bool:
    """Whether fsspec is to open it; everything else is a local path."""
    return _URL.match(str(path)) is not None


def file_system(url: str) -> tuple[AbstractFileSystem, str]:
    """(file system, path in it) of a URL. Raises DataError when the package of its protocol is missing."""
    try:
        system, path = url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise DataError(
            f"{url}: cannot be opened: {error} (s3:// needs: pip install mmds[remote])"
        ) from error
    return system, str(path)


def is_folder(path: str) -> bool:
    """Whether a folder of that name is there. Raises DataError when a store cannot be asked."""
    if not is_url(path):
        return Path(path).is_dir()
    system, inner = file_system(path)
    try:
        return bool(system.isdir(inner))
    except Exception as error:  # noqa: BLE001  each store raises its own
        raise DataError(f"{path}: cannot be read: {told(error)}") from error


def names_in(folder: str) -> list[str]:
    """Names of the files of a folder, sorted; not those of its subfolders."""
    if not is_url(folder):
        return sorted(entry.name for entry in Path(folder).iterdir() if entry.is_file())
    system, inner = file_system(folder)
    entries = system.ls(inner, detail=True)
    return sorted(entry["name"].rpartition("/")[2] for entry in entries if entry["type"] == "file")


def glob(pattern: str) -> list[str]:
    """Files that match a pattern, sorted. Raises DataError when a store cannot be asked."""
    if not is_url(pattern):
        base = Path(pattern).anchor or "."
        relative = str(Path(pattern).relative_to(base)) if Path(pattern).anchor else pattern
        found = (path for path in Path(base).glob(relative) if path.is_file())
        return sorted(str(path) for path in found)
    system, inner = file_system(pattern)
    try:
        return sorted(system.unstrip_protocol(path) for path in system.glob(inner) if system.isfile(path))
    except Exception as error:  # noqa: BLE001  each store raises its own
        raise DataError(f"{pattern}: cannot be read: {told(error)}") from error


def parent(path: str) -> str:
    """The folder that a file lies in."""
    return path.rpartition("/")[0] if is_url(path) else str(Path(path).parent)


def joined(base: str, path: str) -> str:
    """A picture's path from `base`; an absolute path or a URL stays what it is."""
    if is_url(path) or (os.path.isabs(path) and not is_url(base)):
        return path
    if is_url(base):
        return path if os.path.isabs(path) else f"{base.rstrip('/')}/{path}"
    return str(Path(base) / path)


def open_file(path: str) -> IO[bytes]:
    """A file for reading, seekable. Raises DataError naming it."""
    try:
        if not is_url(path):
            return Path(path).open("rb")
        system, inner = file_system(path)
        return io.BufferedReader(system.open(inner, "rb"), BUFFER)
    except DataError:
        raise
    except Exception as error:  # noqa: BLE001  each store raises its own
        raise DataError(f"{path}: cannot be read: {told(error)}; check the path") from error


def size_and_version(path: str) -> tuple[int, str]:
    """(bytes, what changes when the file does: its modification time, or the store's own mark)."""
    try:
        if not is_url(path):
            status = Path(path).stat()
            return status.st_size, str(status.st_mtime_ns)
        system, inner = file_system(path)
        return int(system.info(inner)["size"]), str(system.ukey(inner))
    except DataError:
        raise
    except Exception as error:  # noqa: BLE001  each store raises its own
        raise DataError(f"{path}: cannot be read: {told(error)}; check the path") from error


def read_pictures(paths: Iterable[str]) -> Mapping[str, bytes | DataError]:
    """The content of files, or why there is none. Those of one store are fetched at the same time."""
    found: dict[str, bytes | DataError] = {}
    remote: list[str] = []
    for path in dict.fromkeys(paths):
        if is_url(path):
            remote.append(path)
            continue
        try:
            found[path] = _read_local(path)
        except DataError as error:
            found[path] = error
    for protocol in dict.fromkeys(path.partition("://")[0] for path in remote):
        found |= _read_remote([path for path in remote if path.startswith(f"{protocol}://")])
    return found


def read_range(path: str, offset: int, size: int) -> bytes:
    """`size` bytes of a file from `offset`. Raises DataError when they are not there."""
    try:
        if is_url(path):
            system, inner = file_system(path)
            data = bytes(system.cat_file(inner, start=offset, end=offset + size))
        else:
            with Path(path).open("rb") as file:
                file.seek(offset)
                data = file.read(size)
    except DataError:
        raise
    except Exception as error:  # noqa: BLE001  each store raises its own
        raise DataError(f"cannot read {path}: {told(error)}") from error
    if len(data) != size:
        raise DataError(f"{path} is cut short: bytes {offset} to {offset + size} are not there")
    return data


def told(error: BaseException) -> str:
    """One sentence for an error of the operating system or of a store."""
    if isinstance(error, FileNotFoundError):
        return "No such file or directory"
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def _read_local(path: str) -> bytes:
    try:
        status = Path(path).stat()
        if not stat.S_ISREG(status.st_mode):
            raise DataError(f"{path} is not a file")
        _refuse_large(path, status.st_size)
        return Path(path).read_bytes()
    except (OSError, ValueError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"cannot read {path}: {told(error)}") from error


def _read_remote(paths: list[str]) -> dict[str, bytes | DataError]:
    """Files of one store. One that is missing does not keep the others from coming."""
    system, _ = file_system(paths[0])
    inner = {path: str(system._strip_protocol(path)) for path in paths}
    try:
        got: Mapping[str, Any] = system.cat(list(dict.fromkeys(inner.values())), on_error="return")
    except Exception as error:  # noqa: BLE001  each store raises its own
        return {path: DataError(f"cannot read {path}: {told(error)}") for path in paths}
    found: dict[str, bytes | DataError] = {}
    for path, name in inner.items():
        content = got.get(name, FileNotFoundError())
        if isinstance(content, BaseException):
            found[path] = DataError(f"cannot read {path}: {told(content)}")
        else:
            found[path] = bytes(content)
    return found


def _refuse_large(path: str, size: int) -> None:
    if size > MAX_FILE_BYTES:
        raise DataError(f"{path} has {size} bytes, more than the limit of {MAX_FILE_BYTES}; make it smaller")
