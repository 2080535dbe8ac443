"""Parts of a preparation -> the one prepared folder, without writing a shard again.

The result holds the same samples in the same order, under the same names, with the same token ids, sizes and
paths as a preparation in one go, and counts as prepared from the same input. Only where shards are cut
differs: every part begins a new one.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mmds.data.appear import appearing, occupied
from mmds.data.parts import Part, part_folders
from mmds.data.shard_format import COLUMNS, INDEX, SKIPPED, TOKEN_META, TOKENS, Manifest, flush_folder
from mmds.data.shard_index import ShardIndex
from mmds.data.shard_writer import shard_name, write_token_meta
from mmds.data.shards import token_folder
from mmds.errors import DataError

_BLOCK = 1 << 20  # entries of a column that are copied at a time


def merge(out: Path | str) -> Manifest:
    """Join the parts `OUT.part-1-of-n`, ... into the prepared folder `out` and return its manifest.

    The parts are removed once `out` is whole; their shards are linked into it, so that no disk is used and a
    killed merge leaves the parts as they were. Raises DataError for parts that are missing, damaged or not of
    one input, and for an `out` that is there.
    """
    out = Path(out)
    if occupied(out):
        raise DataError(f"{out} exists; nothing was written. Choose another name, or delete it first")
    parts = part_folders(out)
    indexes = [ShardIndex(path) for _, path in parts]
    fingerprints = _fingerprints([path for _, path in parts])
    digest = _digest([part for part, _ in parts], [index.manifest for index in indexes])
    with appearing(out) as folder:
        shards = _link_shards(folder, indexes)
        _join_index(folder / INDEX, indexes)
        for fingerprint in fingerprints:
            _join_tokens(
                folder / TOKENS / fingerprint, [token_folder(Path(i.path), fingerprint) for i in indexes]
            )
        flush_folder(folder / TOKENS)
        _concatenate(folder / SKIPPED, [Path(index.path) / SKIPPED for index in indexes])
        manifest = _joined_manifest(folder, [index.manifest for index in indexes], shards, digest)
        manifest.write(folder)
    for _, path in parts:
        shutil.rmtree(path)
    return manifest


def _digest(parts: Sequence[Part], manifests: Sequence[Manifest]) -> str:
    """The digest of the whole input. Raises DataError when the parts are not of one input."""
    whole = manifests[0].whole_digest
    for part, manifest in zip(parts, manifests, strict=True):
        if manifest.part != (part.index, part.count) or manifest.whole_digest != whole:
            raise DataError(
                f"part {part.index}/{part.count} was prepared from other input ({', '.join(manifest.raw)}) or "
                "as another part; nothing was written. Make it again"
            )
    if not any(manifest.samples for manifest in manifests):
        raise DataError("no part holds a usable sample; nothing was written")
    assert whole is not None
    return whole


def _fingerprints(paths: Sequence[Path]) -> list[str]:
    """Tokenizers whose ids every part holds. Raises DataError when there is none."""
    held = [{meta.parent.name for meta in (path / TOKENS).glob(f"[!.]*/{TOKEN_META}")} for path in paths]
    common = sorted(set.intersection(*held))
    if not common:
        raise DataError("the parts hold ids of different tokenizers; make them with the same --tokenizer")
    return common


def _link_shards(folder: Path, indexes: Sequence[ShardIndex]) -> tuple[str, ...]:
    """Every shard under its number in the whole: a second name of the same file, where disks allow it."""
    shards: list[str] = []
    for index in indexes:
        for name in index.manifest.shards:
            shards.append(shard_name(len(shards)))
            try:
                os.link(Path(index.path) / name, folder / shards[-1])
            except OSError:
                shutil.copy2(Path(index.path) / name, folder / shards[-1])
    return tuple(shards)


def _join_index(target: Path, indexes: Sequence[ShardIndex]) -> None:
    """Columns end to end; those that count starts go on from where the part before ended."""
    target.mkdir()
    for name in COLUMNS:
        columns = [index.column(name) for index in indexes]
        join = _join_starts if name.endswith("_start") else _join_values
        join(target / f"{name}.npy", columns)
    flush_folder(target)


def _join_tokens(target: Path, folders: Sequence[Path]) -> None:
    """Ids and flags end to end."""
    target.mkdir(parents=True)
    for name in ("ids.bin", "supervised.bin"):
        _concatenate(target / name, [folder / name for folder in folders])
    for name, join in (("starts.npy", _join_starts), ("supervised.npy", _join_values)):
        join(target / name, [np.load(folder / name, mmap_mode="r") for folder in folders])
    write_token_meta(target)


def _join_values(path: Path, columns: Sequence[NDArray[Any]]) -> None:
    shape = (sum(len(column) for column in columns), *columns[0].shape[1:])
    _write_pieces(path, [(column, 0) for column in columns], shape)


def _join_starts(path: Path, columns: Sequence[NDArray[Any]]) -> None:
    """Columns [n + 1] of starts: the first entry of a later one is the last of the one before."""
    ends = [0, *accumulate(int(column[-1]) for column in columns)]
    pieces = [(columns[0][:1], 0), *((column[1:], end) for column, end in zip(columns, ends, strict=False))]
    _write_pieces(path, pieces, (sum(len(values) for values, _ in pieces),))


def _write_pieces(path: Path, pieces: Sequence[tuple[NDArray[Any], int]], shape: tuple[int, ...]) -> None:
    """A .npy file of (values, what to add to them), written block by block."""
    header = {"descr": pieces[0][0].dtype.str, "fortran_order": False, "shape": shape}
    with path.open("wb") as file:
        np.lib.format.write_array_header_1_0(file, header)
        for values, shift in pieces:
            for start in range(0, len(values), _BLOCK):
                file.write((values[start : start + _BLOCK] + values.dtype.type(shift)).tobytes())
        file.flush()
        os.fsync(file.fileno())


def _concatenate(target: Path, files: Sequence[Path]) -> None:
    with target.open("wb") as whole:
        for path in files:
            with path.open("rb") as file:
                shutil.copyfileobj(file, whole, 1 << 20)
        whole.flush()
        os.fsync(whole.fileno())


def _joined_manifest(
    folder: Path, manifests: Sequence[Manifest], shards: tuple[str, ...], digest: str
) -> Manifest:
    names = [*shards, *(f"{INDEX}/{name}.npy" for name in COLUMNS)]
    return replace(
        manifests[0],
        samples=sum(manifest.samples for manifest in manifests),
        images=sum(manifest.images for manifest in manifests),
        text_only=sum(manifest.text_only for manifest in manifests),
        skipped=sum(manifest.skipped for manifest in manifests),
        repeated_ids=sum(manifest.repeated_ids for manifest in manifests),
        shards=shards,
        files={name: (folder / name).stat().st_size for name in names},
        digest=digest,
        part=None,
        whole_digest=None,
    )
