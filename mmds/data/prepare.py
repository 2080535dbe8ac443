"""Raw records and pictures -> a prepared folder that appears whole or not at all (see data/README.md)."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from tqdm import tqdm

from mmds.data import sources
from mmds.data.appear import appearing, occupied
from mmds.data.chat_tokenizer import ChatTokenizer
from mmds.data.conversation import parse_record
from mmds.data.growing import GrowingFiles
from mmds.data.inputs import Inputs
from mmds.data.parts import Part
from mmds.data.remote import RemoteFolder
from mmds.data.shard_format import FORMAT, MANIFEST, SKIPPED, TOKENS, Manifest
from mmds.data.shard_index import ShardIndex
from mmds.data.shard_writer import COLUMN_FOLDER, TokenWriter
from mmds.data.shards import ShardSet, has_tokens, token_folder
from mmds.data.upload import has_uploaded_tokens, upload, uploaded
from mmds.data.work import tidy, working
from mmds.data.write import OnBad, Rules, write_prepared
from mmds.errors import DataError

SHARD_BYTES = 512 * 2**20
MAX_BAD_SHARE = 0.1  # of the records; more than that is a wrong folder or format, not a few bad samples


def prepare(
    raw_paths: Sequence[Path | str],
    images_dir: Path | str | None,
    tokenizer: ChatTokenizer,
    out: Path | str,
    *,
    on_bad: OnBad = "raise",
    shard_bytes: int = SHARD_BYTES,
    max_bad_share: float = MAX_BAD_SHARE,
    workers: int | None = None,
    part: Part | None = None,
    progress: bool = False,
) -> Manifest:
    """Prepare raw data into the folder `out` and return its manifest.

    raw_paths: files, folders, globs, tars or data sets, local or URLs. images_dir: where relative picture
    paths start, a folder or URL; None: the folder of each raw file. on_bad: "raise" stops at the first bad
    sample, "skip" leaves bad ones out, listed in skipped.jsonl, up to max_bad_share of the records.
    shard_bytes: a shard stays below it unless one sample is larger. workers: processes, None: one a core; the
    result is the same for every number. part: only this share of the records, to be joined by `merge`.

    What a killed run had finished is not made again. An `out` made from the same input is reused and gets the
    token ids that it lacks; any other content of `out` is never overwritten. An `out` that is a URL is made in
    the cache of the home folder first, then copied there, the manifest last. Raises DataError.
    """
    inputs = Inputs.of(raw_paths, images_dir)
    whole = inputs.digest()
    job = _Job(
        inputs=inputs,
        source={
            "raw": tuple(map(str, raw_paths)),
            "images_dir": None if images_dir is None else str(images_dir),
            "digest": whole if part is None else part.digest(whole),
            "part": None if part is None else (part.index, part.count),
            "whole_digest": None if part is None else whole,
        },
        tokenizer=tokenizer,
        rules=Rules(
            on_bad=on_bad, max_bad_share=max_bad_share, shard_bytes=shard_bytes, part=part, workers=workers
        ),
        progress=progress,
    )
    return _make_in_store(str(out), job) if sources.is_url(out) else _make(Path(out), job)


@dataclass(frozen=True, kw_only=True)
class _Job:
    """One preparation, wherever it goes. source: what the manifest says of its input."""

    inputs: Inputs
    source: dict[str, Any]
    tokenizer: ChatTokenizer
    rules: Rules
    progress: bool


def _make(out: Path, job: _Job) -> Manifest:
    """Make a local folder, or use what is there."""
    if not occupied(out):
        try:
            with working(out) as work:
                if not occupied(out):  # else another process made it while this one waited
                    work.begin(
                        {
                            "format": FORMAT,
                            "digest": job.source["digest"],
                            "tokenizer": job.tokenizer.fingerprint,
                            "shard_bytes": job.rules.shard_bytes,
                        }
                    )
                    written = write_prepared(
                        work, job.inputs, job.tokenizer, job.rules, progress=job.progress
                    )
                    Manifest(**job.source, **written).write(work.folder)
                    work.publish()
        except FileExistsError:
            pass  # another process was faster; what it made is judged like any other
    if not (out / MANIFEST).is_file():
        raise DataError(f"{out} exists and is not a prepared folder; nothing was written. Choose another one")
    tidy(out)
    manifest = ShardIndex(out).manifest
    _check_usable(str(out), manifest, job)
    add_tokens(out, job.tokenizer, progress=job.progress)
    token_folder(out, job.tokenizer.fingerprint)
    return manifest


def _make_in_store(url: str, job: _Job) -> Manifest:
    """Make a folder in the cache of the home folder and move it to a URL, or use what is there."""
    there = uploaded(url)
    if there is not None:
        _check_usable(url, there, job)
        if has_uploaded_tokens(url, job.tokenizer.fingerprint):
            return there
    name = sha256(f"{url}\0{job.source['digest']}\0{job.tokenizer.fingerprint}".encode()).hexdigest()
    local = Path.home() / ".cache" / "mmds" / f"upload-{name[:16]}"
    manifest = _make(local, job)
    upload(local, url, progress=job.progress)
    shutil.rmtree(local)
    return manifest


def _check_usable(out: str, manifest: Manifest, job: _Job) -> None:
    """Raise DataError unless a prepared folder is of the job's input and leaves out no more than it may."""
    if manifest.digest != job.source["digest"]:
        raise DataError(
            f"{out} was prepared from other input ({', '.join(manifest.raw)}); nothing was written. "
            "Choose another folder, or delete this one first"
        )
    if job.rules.on_bad == "raise" and manifest.skipped:
        raise DataError(
            f"{out} leaves out {manifest.skipped} bad samples (listed in {out}/{SKIPPED}). Accept "
            'that (--on-bad skip, mmds.data.on_bad_sample "skip"), or delete the folder and mend the data'
        )


def add_tokens(path: Path | str, tokenizer: ChatTokenizer, *, progress: bool = False) -> None:
    """Tokenise a prepared folder's records for another tokenizer, without touching its pictures.

    Does nothing when the ids are there. Raises DataError when a record does not suit the tokenizer.
    """
    path = Path(path)
    index = ShardIndex(path)
    target = path / TOKENS / tokenizer.fingerprint
    if has_tokens(path, tokenizer.fingerprint):
        return
    try:
        with appearing(target) as folder:
            with GrowingFiles(folder) as files:
                tokens = TokenWriter(folder, files)
                for i in tqdm(range(len(index)), unit="sample", desc="tokens", disable=not progress):
                    record = json.loads(index.record(i))
                    encoded = tokenizer.encode(parse_record(record, where=f"{path}: sample {index.key(i)}"))
                    tokens.add(encoded.ids, encoded.supervised)
                tokens.finish()
            files.remove(COLUMN_FOLDER)
    except FileExistsError:
        pass  # another process was faster; same folder name, same ids


def prepared_folder(path: Path | str, images: Path | str | None = None) -> Path | str:
    """Where the prepared folder of a mix path is: the path itself, or for raw data its place in a cache.

    A folder counts as prepared, and a URL below which there is a manifest; raw data is a file, a glob or another URL. The cache is `.cache/mmds` beside the
    (first) raw file, or in the home folder when that is a URL or cannot be written; the name holds a digest
    of the input, so that changed data is prepared again. Raises DataError when the path does not exist.
    """
    if _is_prepared(path):
        return path if sources.is_url(path) else Path(path)
    inputs = Inputs.of([path], images)
    first = inputs.files[0]
    base = Path.home()
    if first.kind != "set" and not sources.is_url(first.path):
        beside = Path(first.path).resolve().parent
        base = beside if os.access(beside, os.W_OK) else base
    return base / ".cache" / "mmds" / f"{first.name}-{inputs.digest()[:16]}"


def ensure_prepared(
    path: Path | str,
    tokenizer: ChatTokenizer,
    *,
    images: Path | str | None = None,
    on_bad: OnBad = "raise",
    progress: bool = False,
) -> Path | str:
    """The prepared folder of a mix path; raw data is prepared once and reused afterwards.

    images, on_bad: as for `prepare`, used for raw data. Of processes that start at once, one prepares and the
    others wait for it. A prepared folder that lacks this tokenizer's ids is an error that names the command,
    as its owner may share it.
    """
    folder = prepared_folder(path, images)
    if _is_prepared(path):
        ShardSet.open(folder, tokenizer.fingerprint)
    else:
        prepare([path], images, tokenizer, folder, on_bad=on_bad, progress=progress)
    return folder


def _is_prepared(path: Path | str) -> bool:
    """Whether a mix path is a folder that is, or is meant to be, a prepared one."""
    if sources.is_url(path):
        return RemoteFolder(str(path)).exists(MANIFEST)
    return Path(path).is_dir()
