"""Weights of a connector from a file: original LLaVA's projector (`mm_projector.bin`), or the connector of a model folder."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from mmds.errors import CheckpointError
from mmds.model.connector import Connector
from mmds.model.folder import part_files, read_tensors
from mmds.model.llava_names import original_projector

KEY = "mmds.model.connector_weights"


def load_connector(connector: Connector, path: str) -> None:
    """Fill a connector from `path`: a .bin or .safetensors file of original LLaVA, or a folder, `connector/` of a model folder.

    The separator of tiles may be missing or too many: with LLaVA-NeXT it begins. Raises CheckpointError naming what else is missing, has
    no place, or has another shape. A .bin is read without running what it holds.
    """
    stored = _stored(Path(path), connector)
    own = connector.state_dict()
    if "separator" in stored and "separator" not in own:
        del stored["separator"]  # of a model with tiles, for one without
    if "separator" in own:
        stored.setdefault("separator", own["separator"])  # of a model without tiles, for one with
    try:
        connector.load_state_dict(stored, strict=True)
    except RuntimeError as error:
        raise CheckpointError(
            f"{KEY}: {path} does not fit the connector {connector.section.name!r}: {error}; for a fresh one\n    --set {KEY}=null"
        ) from error


def _stored(given: Path, connector: Connector) -> dict[str, Tensor]:
    """The tensors of `given` under the connector's names."""
    if given.is_dir():
        folder = given / "connector" if (given / "connector").is_dir() else given
        return {name: read() for name, read in read_tensors(part_files(folder))}
    if not given.is_file():
        raise CheckpointError(f"{KEY}: {given} does not exist; name a projector file or a connector/ folder")
    stored = read_file(given)
    if not any("mm_projector." in name for name in stored):
        return stored
    try:
        renamed = original_projector(list(stored), connector.section.name)
    except CheckpointError as error:
        raise CheckpointError(f"{KEY}: {given}: {error}") from error
    return {ours: stored[name] for name, ours in renamed.items()}


def read_file(file: Path) -> dict[str, Tensor]:
    """All tensors of a .safetensors file or of a PyTorch file, which is read without running what it holds."""
    if file.suffix == ".safetensors":
        return {name: read() for name, read in read_tensors([file])}
    try:
        stored = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # noqa: BLE001  the unpickler raises almost anything
        raise CheckpointError(f"{file}: not a file of plain tensors: {error}") from error
    if not isinstance(stored, dict) or not all(isinstance(value, Tensor) for value in stored.values()):
        raise CheckpointError(f"{file}: not a dict of names and tensors")
    return stored
