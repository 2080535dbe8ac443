"""Published LLaVA models as a source of parts: a hub name or a folder becomes a model folder in a local cache, once a machine."""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
from pathlib import Path

from huggingface_hub import snapshot_download

from mmds.errors import CheckpointError
from mmds.model.folder import DESCRIPTION, find_model_folder
from mmds.model.hf_import import import_llava, is_llava

log = logging.getLogger("mmds")

HUB = "llava-hf/"
"""Whose hub names are recognised; any other repository is downloaded first and named by its folder."""

_VERSION = 1  # of the conversion; a change of it makes all anew
_SMALL = 1 << 20
_PATTERNS = ("*.json", "*.model", "*.txt", "*.jinja")


def source_folder(init_from: str) -> Path:
    """The model folder that `init_from` names: itself, that of a finished run, or one made of a published LLaVA model.

    Processes of one machine may call it at the same time: one converts, the others wait. Raises CheckpointError when it is none of these.
    """
    local = local_folder(init_from)
    return _cached(local, init_from) if is_llava(local) else find_model_folder(init_from)


def local_folder(name: str) -> Path:
    """A path as it is; for a hub name of published LLaVA models the downloaded folder. Raises CheckpointError when it cannot be fetched."""
    return _download(name) if name.startswith(HUB) and not Path(name).exists() else Path(name)


def cache_folder() -> Path:
    """Where imported models are kept: below $MMDS_CACHE, else ~/.cache/mmds."""
    return Path(os.environ.get("MMDS_CACHE") or "~/.cache/mmds").expanduser() / "imported"


def _cached(source: Path, name: str) -> Path:
    label = name.rstrip("/").rpartition("/")[2] or "llava"
    target = cache_folder() / f"{label}-{digest(source)}"
    if (target / DESCRIPTION).is_file():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.with_name(target.name + ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (target / DESCRIPTION).is_file():
            log.warning("importing %s into %s, once on this machine", name, target)
            imported = import_llava(source, target, name=name)
            log.warning("%s", "\n".join(imported.lines()[len(imported.moved) + len(imported.dropped) :]))
    return target


def digest(folder: Path) -> str:
    """16 hex digits that change with the files of a folder: by content where they are small, else by size and date or hub blob."""
    whole = hashlib.sha256(f"{_VERSION}".encode())
    for file in sorted(path for path in folder.iterdir() if path.is_file()):
        status, real = file.stat(), file.resolve()
        whole.update(f"\0{file.name}\0{status.st_size}\0".encode())
        if status.st_size <= _SMALL:
            whole.update(file.read_bytes())
        elif file.is_symlink():
            whole.update(real.name.encode())  # the hub's cache names files by their content
        else:
            whole.update(str(status.st_mtime_ns).encode())
    return whole.hexdigest()[:16]


def _download(name: str) -> Path:
    """A hub model in the hub's own cache: safetensors, or where it has none PyTorch files."""
    try:
        folder = Path(snapshot_download(name, allow_patterns=[*_PATTERNS, "*.safetensors"]))
        if not any(folder.glob("*.safetensors")):
            folder = Path(snapshot_download(name, allow_patterns=[*_PATTERNS, "pytorch_model*.bin"]))
    except Exception as error:  # the hub client raises its own and those of its transport
        raise CheckpointError(
            f"init_from: {name} cannot be fetched from the hub: {error}; download it on a machine with access and name the folder"
        ) from error
    if not is_llava(folder):
        raise CheckpointError(f"init_from: {name} is no LLaVA-1.5 or LLaVA-NeXT model of transformers")
    return folder
