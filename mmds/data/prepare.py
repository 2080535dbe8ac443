"""Raw records and pictures -> a prepared folder that appears whole or not at all (see data/README.md)."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

from tqdm import tqdm

from mmds.data.appear import alone, appearing, occupied
from mmds.data.chat_tokenizer import ChatTokenizer
from mmds.data.conversation import parse_record
from mmds.data.examine import BadSample, GoodSample, examine
from mmds.data.shard_format import FORMAT, MANIFEST, SKIPPED, TOKENS, Manifest, flush_folder, write_text
from mmds.data.shard_index import ShardIndex
from mmds.data.shard_writer import ShardWriter, TokenWriter
from mmds.data.shards import has_tokens, token_folder
from mmds.errors import DataError

OnBad = Literal["raise", "skip"]

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
    progress: bool = False,
) -> Manifest:
    """Prepare raw files into the folder `out` and return its manifest.

    images_dir: where relative image paths start; None: the folder of each raw file. on_bad: "raise" stops at
    the first bad sample, "skip" leaves bad ones out, listed in skipped.jsonl, up to max_bad_share of the
    records. shard_bytes: a shard stays below it unless one sample is larger. An `out` made from the same
    input is reused and gets the token ids that it lacks; any other content of `out` is never overwritten.
    Raises DataError.
    """
    out = Path(out)
    digest = input_digest(raw_paths, images_dir)
    if not occupied(out):
        try:
            with appearing(out) as folder:
                examined = examine(raw_paths, images_dir, tokenizer, progress=progress)
                written = _write(folder, examined, tokenizer, shard_bytes, on_bad, max_bad_share)
                raw = tuple(str(path) for path in raw_paths)
                images = None if images_dir is None else str(images_dir)
                Manifest(raw=raw, images_dir=images, digest=digest, **written).write(folder)
        except FileExistsError:
            pass  # another process was faster; what it made is judged like any other
    return _reuse(out, digest, tokenizer, on_bad=on_bad, progress=progress)


def add_tokens(path: Path | str, tokenizer: ChatTokenizer, *, progress: bool = False) -> None:
    """Tokenise a prepared folder's records for another tokenizer, without touching its pictures.

    Does nothing when the ids are there. Raises DataError when a record does not suit the tokenizer.
    """
    index = ShardIndex(Path(path))
    target = index.path / TOKENS / tokenizer.fingerprint
    if has_tokens(index.path, tokenizer.fingerprint):
        return
    try:
        with appearing(target) as folder, TokenWriter(folder) as tokens:
            for i in tqdm(range(len(index)), unit="sample", desc="tokens", disable=not progress):
                record = json.loads(index.record(i))
                encoded = tokenizer.encode(parse_record(record, where=f"{index.path}: sample {index.key(i)}"))
                tokens.add(encoded.ids, encoded.supervised)
            tokens.finish()
    except FileExistsError:
        pass  # another process was faster; same folder name, same ids


def prepared_folder(path: Path | str, images: Path | str | None = None) -> Path:
    """Where the prepared folder of a mix path is: the path itself, or for a raw file its place in a cache.

    The cache is `.cache/mmds` beside the raw file, or in the home folder where that cannot be written; the
    name holds a digest of the input, so that changed data is prepared again. Raises DataError when the path
    does not exist.
    """
    path = Path(path)
    if path.is_dir():
        return path
    digest = input_digest([path], images)
    beside = path.resolve().parent
    base = beside if os.access(beside, os.W_OK) else Path.home()
    return base / ".cache" / "mmds" / f"{path.stem}-{digest[:16]}"


def ensure_prepared(
    path: Path | str,
    tokenizer: ChatTokenizer,
    *,
    images: Path | str | None = None,
    on_bad: OnBad = "raise",
    progress: bool = False,
) -> Path:
    """The prepared folder of a mix path; a raw file is prepared once and reused afterwards.

    images, on_bad: as for `prepare`, used for a raw file. Processes that race make the same folder; one of
    them wins. A prepared folder that lacks this tokenizer's ids is an error that names the command, as its
    owner may share it.
    """
    folder = prepared_folder(path, images)
    if Path(path).is_dir():
        token_folder(folder, tokenizer.fingerprint)
    else:
        with alone(folder):  # of all ranks that start at once, one prepares and the others then find it done
            prepare([path], images, tokenizer, folder, on_bad=on_bad, progress=progress)
    return folder


def input_digest(raw_paths: Sequence[Path | str], images_dir: Path | str | None) -> str:
    """A digest of what decides a preparation: names and content of the raw files, the images folder.

    Pictures count by name only. Raises DataError for a raw file or folder that is not there.
    """
    if not raw_paths:
        raise DataError("no raw file is given")
    if images_dir is not None and not Path(images_dir).is_dir():
        raise DataError(
            f"the images folder {images_dir} does not exist; check --images (mmds.data.mix images)"
        )
    total = sha256(FORMAT.encode())
    for path in map(Path, raw_paths):
        base = path.parent if images_dir is None else Path(images_dir)
        try:
            with path.open("rb") as file:
                content = sha256()
                for block in iter(lambda: file.read(1 << 20), b""):
                    content.update(block)
        except OSError as error:
            raise DataError(f"{path}: cannot be read: {error.strerror}; check the path") from error
        total.update(f"\0{path.stem}\0{content.hexdigest()}\0{base.resolve()}".encode())
    return total.hexdigest()


def _reuse(out: Path, digest: str, tokenizer: ChatTokenizer, *, on_bad: OnBad, progress: bool) -> Manifest:
    """The manifest of what `out` holds, if it was made from this input; adds missing token ids."""
    if not (out / MANIFEST).is_file():
        raise DataError(f"{out} exists and is not a prepared folder; nothing was written. Choose another one")
    index = ShardIndex(out)
    if index.manifest.digest != digest:
        raise DataError(
            f"{out} was prepared from other input ({', '.join(index.manifest.raw)}); nothing was written. "
            "Choose another folder, or delete this one first"
        )
    if on_bad == "raise" and index.manifest.skipped:
        raise DataError(
            f"{out} leaves out {index.manifest.skipped} bad samples (listed in {out / SKIPPED}). Accept "
            'that (--on-bad skip, mmds.data.on_bad_sample "skip"), or delete the folder and mend the data'
        )
    add_tokens(out, tokenizer, progress=progress)
    token_folder(out, tokenizer.fingerprint)
    return index.manifest


def _write(
    folder: Path,
    examined: Iterator[GoodSample | BadSample],
    tokenizer: ChatTokenizer,
    shard_bytes: int,
    on_bad: OnBad,
    max_bad_share: float,
) -> dict[str, Any]:
    """Write shards, index, token ids and the list of what is left out; returns the counts of the manifest."""
    token_path = folder / TOKENS / tokenizer.fingerprint
    token_path.mkdir(parents=True)
    skipped: list[BadSample] = []
    repeated = 0
    with ShardWriter(folder, shard_bytes=shard_bytes) as shards, TokenWriter(token_path) as tokens:
        for sample in examined:
            if isinstance(sample, GoodSample):
                shards.add(key=sample.key, record=sample.record, images=sample.images)
                tokens.add(sample.ids, sample.supervised)
                repeated += sample.renamed
                continue
            if sample.ends_file:
                raise DataError(f"{sample}. List all that is wrong with --check")
            if on_bad == "raise":
                raise DataError(f"{sample}. List all with --check; leave bad samples out with --on-bad skip")
            skipped.append(sample)
            if len(skipped) % 1000 == 0:
                _refuse_too_many(skipped, len(shards), max_bad_share)
        _refuse_too_many(skipped, len(shards), max_bad_share)
        tokens.finish()
        files = shards.finish()
    flush_folder(folder / TOKENS)
    lines = (json.dumps(asdict(sample), ensure_ascii=False) + "\n" for sample in skipped)
    write_text(folder / SKIPPED, "".join(lines))
    return {
        "files": files,
        "samples": len(shards),
        "images": shards.images,
        "text_only": shards.text_only,
        "shards": tuple(shards.shards),
        "skipped": len(skipped),
        "repeated_ids": repeated,
    }


def _refuse_too_many(skipped: Sequence[BadSample], kept: int, max_bad_share: float) -> None:
    total = kept + len(skipped)
    if not kept:
        reason = f": {skipped[0]}" if skipped else ""
        raise DataError(f"no usable sample among {total} records{reason}")
    if len(skipped) > max_bad_share * total:
        raise DataError(
            f"{len(skipped)} of {total} samples are bad, more than the allowed share of {max_bad_share:.0%}; "
            f"the first: {skipped[0]}. List all with --check. A wrong --images folder is the usual cause; "
            "--max-bad-share allows more"
        )
