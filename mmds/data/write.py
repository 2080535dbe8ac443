"""Fills a work folder with a prepared set, from where a killed preparation left off."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from mmds.data.chat_tokenizer import ChatTokenizer
from mmds.data.examine import BadSample, examine
from mmds.data.growing import GrowingFiles
from mmds.data.inputs import Inputs
from mmds.data.parts import Part
from mmds.data.shard_format import INDEX, SKIPPED, TOKENS, flush_folder
from mmds.data.shard_writer import ShardWriter, TokenWriter
from mmds.data.work import Checkpoint, Work
from mmds.errors import DataError

OnBad = Literal["raise", "skip"]

_SKIPPED = f"folder/{SKIPPED}"


@dataclass(frozen=True, kw_only=True)
class Rules:
    """How to prepare. on_bad: stop at a bad sample, or leave it out, up to max_bad_share of the records.

    shard_bytes: a shard stays below it unless one sample is larger. part: only this share of the records.
    workers: processes, None: one a core.
    """

    on_bad: OnBad
    max_bad_share: float
    shard_bytes: int
    part: Part | None = None
    workers: int | None = None


def write_prepared(
    work: Work, inputs: Inputs, tokenizer: ChatTokenizer, rules: Rules, *, progress: bool
) -> dict[str, Any]:
    """Write shards, index, token ids and the list of what is left out; returns the counts of the manifest.

    Every finished shard is noted in the work folder's journal and is not made again. Raises DataError for a
    bad sample that must not be left out, and for too many of them.
    """
    start = work.checkpoint()
    if start is None or (rules.on_bad == "raise" and start.skipped):
        work.forget()
        start = Checkpoint(records=0, shards=0, repeated=0, skipped=0, lengths={})
    shutil.rmtree(work.folder / INDEX, ignore_errors=True)
    first, last = rules.part.span(sum(1 for _ in inputs.items())) if rules.part else (0, None)
    token_path = work.folder / TOKENS / tokenizer.fingerprint
    token_path.mkdir(parents=True, exist_ok=True)
    repeated, bad = start.repeated, _Bad(start.skipped, rules)
    with (
        GrowingFiles(work.path, start.lengths) as files,
        ShardWriter(work.folder, files, shard_bytes=rules.shard_bytes, shards=start.shards) as shards,
    ):
        tokens = TokenWriter(token_path, files)
        files.open([_SKIPPED])
        examined = examine(
            inputs,
            tokenizer,
            first=max(first, start.records),
            last=last,
            workers=rules.workers,
            progress=progress,
        )
        for sample in examined:
            if isinstance(sample, BadSample):
                bad.add(sample, kept=len(shards))
                files.append(_SKIPPED, _line(sample))
                continue
            if shards.is_full(record=sample.record, images=sample.images):
                shards.finish_shard()
                done = Checkpoint(
                    records=sample.number,
                    shards=len(shards.shards),
                    repeated=repeated,
                    skipped=bad.count,
                    lengths=files.lengths(),
                )
                work.note(done)
            shards.add(key=sample.key, record=sample.record, images=sample.images)
            tokens.add(sample.ids, sample.supervised)
            repeated += sample.renamed
        bad.check(kept=len(shards))
        written, count, images = shards.finish(), len(shards), shards.images
        tokens.finish()
    flush_folder(work.folder / TOKENS)
    starts = np.load(work.folder / INDEX / "image_start.npy", mmap_mode="r")
    return {
        "files": written,
        "samples": count,
        "images": images,
        "text_only": int((np.diff(starts) == 0).sum()),
        "shards": tuple(shards.shards),
        "skipped": bad.count,
        "repeated_ids": repeated,
    }


class _Bad:
    """Counts bad samples and says when it is enough."""

    def __init__(self, count: int, rules: Rules) -> None:
        """count: those found before the preparation was killed."""
        self.count, self._rules = count, rules
        self._first: BadSample | None = None

    def add(self, sample: BadSample, *, kept: int) -> None:
        """Count one. Raises DataError when it must not be left out, or they are far too many."""
        if sample.ends_file:
            raise DataError(f"{sample}. List all that is wrong with --check")
        if self._rules.on_bad == "raise":
            raise DataError(f"{sample}. List all with --check; leave bad samples out with --on-bad skip")
        self._first = self._first or sample
        self.count += 1
        if self.count % 1000 == 0:
            self.check(kept=kept)

    def check(self, *, kept: int) -> None:
        """Raise DataError when too many are bad, or nothing is good (of a part, nothing may be)."""
        total = kept + self.count
        first = f": {self._first}" if self._first else ""
        if not kept and not self._rules.part:
            raise DataError(f"no usable sample among {total} records{first}")
        if self.count > self._rules.max_bad_share * total:
            raise DataError(
                f"{self.count} of {total} samples are bad, more than the allowed share of "
                f"{self._rules.max_bad_share:.0%}; the first{first}. List all with --check. A wrong --images "
                "folder is the usual cause; --max-bad-share allows more"
            )


def _line(sample: BadSample) -> bytes:
    entry = {name: value for name, value in asdict(sample).items() if name in ("where", "key", "reason")}
    return (json.dumps(entry, ensure_ascii=False) + "\n").encode()
