"""Prepare raw conversations and pictures for training, or check them.

Write a prepared folder; list all bad samples and write nothing; add another tokenizer's ids to a folder:

    python scripts/prepare.py RAW... --images DIR --tokenizer NAME --out DIR
    python scripts/prepare.py RAW... --images DIR --tokenizer NAME --check
    python scripts/prepare.py --tokenizer NAME --out DIR
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from transformers import AutoTokenizer

from mmds.data.chat_tokenizer import ChatTokenizer
from mmds.data.check import CheckReport, check
from mmds.data.prepare import MAX_BAD_SHARE, SHARD_BYTES, add_tokens, prepare
from mmds.data.shard_format import SKIPPED
from mmds.data.shards import ShardSet
from mmds.errors import DataError, MmdsError


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line; combinations that make no sense end with a usage message."""
    parser = argparse.ArgumentParser(
        prog="scripts/prepare.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "raw", nargs="*", metavar="RAW", help="JSONL files or JSON arrays, LLaVA or chat style"
    )
    parser.add_argument(
        "--images", metavar="DIR", help="where image paths start; default: each raw file's folder"
    )
    parser.add_argument(
        "--tokenizer", required=True, metavar="NAME", help="the decoder: hub name or local folder"
    )
    parser.add_argument(
        "--out", metavar="DIR", help="the prepared folder; an existing one is never overwritten"
    )
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
    if options.check and not options.raw:
        parser.error("--check needs raw files")
    if not options.check and not options.out:
        parser.error("give --out DIR, or --check")
    return options


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


def main() -> int:
    """Exit status: 0 done, 1 something is wrong with the data."""
    options = parse_arguments()
    try:
        tokenizer = load_tokenizer(options.tokenizer)
        if options.check:
            report = check(options.raw, options.images, tokenizer, progress=True)
            print_report(report)
            return 1 if report.bad else 0
        if options.raw:
            prepare(
                options.raw,
                options.images,
                tokenizer,
                options.out,
                on_bad=options.on_bad,
                shard_bytes=options.shard_mib << 20,
                max_bad_share=options.max_bad_share,
                progress=True,
            )
        else:
            add_tokens(options.out, tokenizer, progress=True)
        print_prepared(Path(options.out), tokenizer.fingerprint)
    except (MmdsError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
