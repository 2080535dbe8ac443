"""A prepared folder -> a store: every file, the manifest last, so that nobody takes half of it for the whole."""

from __future__ import annotations

import json
from pathlib import Path

from tqdm import tqdm

from mmds.data.shard_format import MANIFEST, TOKEN_META, TOKENS, Manifest
from mmds.data.sources import file_system, told
from mmds.errors import DataError

UPLOADING = ".uploading.json"
"""Marks a folder in a store as ours while files arrive; it holds the digest of what they are of."""


def uploaded(url: str) -> Manifest | None:
    """The manifest of the prepared folder at a URL; None when nothing is there, or an upload that did not end.

    Raises DataError when something else is there.
    """
    system, root = file_system(url)
    path = f"{root}/{MANIFEST}"
    try:
        if system.exists(path):
            return Manifest.of(json.loads(system.cat_file(path)), f"{url}/{MANIFEST}")
        if system.exists(f"{root}/{UPLOADING}") or not system.find(root):
            return None
    except DataError:
        raise
    except Exception as error:  # noqa: BLE001  each store raises its own
        raise DataError(f"{url}: cannot be read: {told(error)}") from error
    raise DataError(f"{url} holds something that is no prepared folder; nothing was written. Choose another")


def has_uploaded_tokens(url: str, fingerprint: str) -> bool:
    """Whether the prepared folder at a URL holds the ids of a tokenizer."""
    system, root = file_system(url)
    return bool(system.exists(f"{root}/{TOKENS}/{fingerprint}/{TOKEN_META}"))


def upload(folder: Path, url: str, *, progress: bool = False) -> None:
    """Copy a prepared folder to a URL, files that are there from an upload that did not end included.

    Raises DataError when the URL holds something else, or another prepared folder.
    """
    digest = Manifest.read(folder).digest
    there = uploaded(url)
    if there is not None and there.digest != digest:
        raise DataError(f"{url} was prepared from other input; nothing was written. Choose another place")
    system, root = file_system(url)
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST)
    total = sum(path.stat().st_size for path in files)
    try:
        if there is None:
            system.makedirs(root, exist_ok=True)
            system.pipe_file(f"{root}/{UPLOADING}", json.dumps({"digest": digest}).encode())
        with tqdm(total=total, unit="B", unit_scale=True, desc="upload", disable=not progress) as bar:
            for path in files:
                target = f"{root}/{path.relative_to(folder).as_posix()}"
                system.makedirs(target.rpartition("/")[0], exist_ok=True)
                system.put_file(str(path), target)
                bar.update(path.stat().st_size)
        system.put_file(str(folder / MANIFEST), f"{root}/{MANIFEST}")
        if system.exists(f"{root}/{UPLOADING}"):
            system.rm_file(f"{root}/{UPLOADING}")
    except Exception as error:  # noqa: BLE001  each store raises its own
        raise DataError(f"{url}: cannot be written: {told(error)}; the same command goes on") from error
