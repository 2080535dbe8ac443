"""Prepare raw conversations and pictures for training, or check them.

Write a prepared folder; list all bad samples and write nothing; add another tokenizer's ids to a folder;
write one of n parts, on as many machines, and join them:

    python scripts/prepare.py RAW... --images DIR --tokenizer NAME --out DIR
    python scripts/prepare.py RAW... --images DIR --tokenizer NAME --check
    python scripts/prepare.py --retokenize NAME --out DIR
    python scripts/prepare.py RAW... --images DIR --tokenizer NAME --out DIR --part 1/4
    python scripts/prepare.py --merge --out DIR
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from transformers import AutoTokenizer

from mmds.data.chat_tokenizer import ChatTokenizer
from mmds.data.check import CheckReport, check
from mmds.data.merge import merge
from mmds.data.parts import Part
from mmds.data.prepare import MAX_BAD_SHARE, SHARD_BYTES, add_tokens, prepare
from mmds.data.shard_format import SKIPPED
from mmds.data.shards import ShardSet
from mmds.data.sources import is_url
from mmds.errors import DataError, MmdsError


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line; combinations that make no sense end with a usage message."""
    parser = argparse.ArgumentParser(
        prog="scripts/prepare.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "raw",
        nargs="*",
        metavar="RAW",
        help="JSONL files, JSON arrays or tars, folders or globs of them, local or URLs; saved data sets; hub:NAME:SPLIT",
    )
    parser.add_argument(
        "--images",
        metavar="DIR",
        help="where image paths start, a folder or URL; default: each raw file's folder",
    )
    parser.add_argument("--tokenizer", metavar="NAME", help="the decoder: hub name or local folder")
    parser.add_argument("--retokenize", metavar="NAME", help="add the ids of another decoder to --out")
    parser.add_argument(
        "--out", metavar="DIR", help="the prepared folder or URL; an existing one is never overwritten"
    )
    parser.add_argument(
        "--workers", type=int, metavar="N", help="processes; default: one a core. The result is the same"
    )
    parser.add_argument("--part", metavar="I/N", help="only the I-th of N shares, into DIR.part-I-of-N")
    parser.add_argument("--merge", action="store_true", help="join the parts of --out; removes them then")
    parser.add_argument(
        "--on-bad", choices=("raise", "skip"), default="raise", help="bad samples: stop, or leave out"
    )
    parser.add_argument(
        "--max-bad-share",
        type=float,
        default=MAX_BAD_SHARE,
        help=f"most that may be left out ({MAX_BAD_SHARE})",
    )
    parser.add_argument(
        "--shard-mib",
        type=int,
        default=SHARD_BYTES >> 20,
        help=f"size of a shard in MiB ({SHARD_BYTES >> 20})",
    )
    parser.add_argument("--check", action="store_true", help="list every bad sample and write nothing")
    options = parser.parse_args(arguments)
    problem = _misused(options)
    if problem:
        parser.error(problem)
    return options


def _misused(options: argparse.Namespace) -> str:
    """What makes no sense about the command line; "" when all is well."""
    if options.workers is not None and options.workers < 1:
        return "--workers must be at least 1"
    if options.merge:
        alone = not (options.raw or options.tokenizer or options.retokenize or options.check or options.part)
        return "" if alone and options.out else "--merge takes --out DIR and nothing else"
    if options.retokenize:
        alone = not (options.raw or options.tokenizer or options.check or options.part)
        return "" if alone and options.out else "--retokenize NAME takes --out DIR and nothing else"
    if not options.tokenizer:
        return "give --tokenizer NAME"
    if options.check:
        return "" if options.raw and not options.part else "--check takes raw files, and no --part"
    if not options.out:
        return "give --out DIR, or --check"
    if options.part and not options.raw:
        return "--part needs raw files"
    if is_url(options.out) and options.part:
        return "--part needs a local --out: join the parts there, then prepare again with the URL"
    return ""


def load_tokenizer(name: str) -> ChatTokenizer:
    """The chat tokenizer of a decoder. Raises DataError when there is none of that name."""
    try:
        return ChatTokenizer(AutoTokenizer.from_pretrained(name))
    except (OSError, ValueError) as error:
        if isinstance(error, MmdsError):
            raise
        raise DataError(f"no tokenizer can be loaded from {name}: {error}") from error


def print_report(report: CheckReport) -> None:
    """Every bad sample on a line, then the sums."""
    for sample in report.bad:
        print(sample)
    print(
        f"{len(report.bad)} bad and {report.samples} good samples ({report.text_only} text-only, "
        f"{report.images} images, {report.tokens} stored tokens, {report.supervised} supervised)"
    )
    if report.repeated_ids:
        print(f"{report.repeated_ids} samples repeat an id and are called after their file and line")
    for kind, count in report.kinds():
        print(f"{count:8d}  {kind}")


def print_prepared(out: Path, fingerprint: str) -> None:
    """What the folder holds."""
    shards = ShardSet.open(out, fingerprint)
    manifest = shards.index.manifest
    print(
        f"{out}: {manifest.samples} samples ({manifest.text_only} text-only), {manifest.images} images, "
        f"{int(shards.text_tokens.sum())} stored tokens, {int(shards.supervised.sum())} supervised, "
        f"{len(manifest.shards)} shards"
    )
    if manifest.repeated_ids:
        print(f"{manifest.repeated_ids} samples repeat an id and are called after their file and line")
    if manifest.skipped:
        print(f"{manifest.skipped} bad samples are left out, listed in {out / SKIPPED}")


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0 done, 1 something is wrong with the data."""
    options = parse_arguments(arguments)
    try:
        return run(options)
    except (MmdsError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def run(options: argparse.Namespace) -> int:
    """Do what the command line says. Raises MmdsError, OSError."""
    if options.merge:
        manifest = merge(options.out)
        print(f"{options.out}: {manifest.samples} samples, {manifest.images} images")
        return 0
    tokenizer = load_tokenizer(options.retokenize or options.tokenizer)
    if options.check:
        report = check(options.raw, options.images, tokenizer, workers=options.workers, progress=True)
        print_report(report)
        return 1 if report.bad else 0
    out = options.out
    if options.raw:
        part = Part.parse(options.part) if options.part else None
        out = out if part is None else str(part.folder(Path(out)))
        manifest = prepare(
            options.raw,
            options.images,
            tokenizer,
            out,
            on_bad=options.on_bad,
            shard_bytes=options.shard_mib << 20,
            max_bad_share=options.max_bad_share,
            workers=options.workers,
            part=part,
            progress=True,
        )
        if is_url(out):
            print(f"{out}: {manifest.samples} samples, {manifest.images} images")
            return 0
    else:
        add_tokens(out, tokenizer, progress=True)
    print_prepared(Path(out), tokenizer.fingerprint)
    return 0


if __name__ == "__main__":
    sys.exit(main())
