"""What a run will cost before it runs: `python scripts/plan.py --config my.json --ranks 8,64,512 -o report.html`.

Images, samples, work, balance by scheme and ranks, memory, time and money, from the config and the sizes of the data: no GPU, no weights. With -o
also as one HTML page and PNG files beside it. `--fit 24` tells what fits cards of 24 GB, `--example` why equal tokens are not equal work.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mmds.errors import MmdsError
from mmds.fit import fit_table
from mmds.plan_page import page, sections, text
from mmds.plan_plots import plots
from mmds.plan_report import Cards, plan_report
from mmds.run_data import open_run_data
from mmds.worked_example import worked_example


def counts(text: str) -> list[int]:
    """Numbers of ranks: "8,64,512"."""
    found = [int(part) for part in text.split(",")]
    if min(found) < 1:
        raise ValueError
    return found


def main() -> None:
    """Print the report; write it where -o says."""
    parser = argparse.ArgumentParser(description="Say what a run will cost before it runs.")
    parser.add_argument("--config", help="JSON file of the run")
    parser.add_argument(
        "--set", action="append", default=[], metavar="a.b=JSON", help="override a key; repeatable"
    )
    parser.add_argument(
        "--ranks", type=counts, default=[8, 64, 512], metavar="8,64,512", help="ranks to look at"
    )
    parser.add_argument(
        "-o", "--out", type=Path, help="HTML page; its pictures also go beside it as PNG files"
    )
    parser.add_argument("--fit", type=float, metavar="GB", help="only say what fits cards of so many GB")
    parser.add_argument(
        "--example", action="store_true", help="only print the worked example; needs no config"
    )
    for flag, kind, default, what in (
        ("--gpus", int, Cards.count, "GPUs of the run"),
        ("--tflops", float, Cards.tflops, "dense bf16 TFLOP/s of one"),
        ("--mfu", float, Cards.mfu, "share of them that training reaches"),
        ("--price", float, Cards.price, "of one for an hour"),
        ("--memory", float, Cards.memory, "GB of one"),
    ):
        parser.add_argument(flag, type=kind, default=default, help=f"{what} ({default})")
    args = parser.parse_args()
    if args.example:
        print(worked_example())
        return
    if args.config is None:
        parser.error("give --config, or --example")
    if min(args.gpus, args.tflops, args.mfu, args.memory) <= 0 or args.price < 0 or (args.fit or 1) <= 0:
        parser.error("--gpus, --tflops, --mfu, --memory and --fit must be above 0, --price not below")
    data = open_run_data(args.config, args.set)
    if args.fit is not None:
        for ranks in args.ranks:
            print(fit_table(data, gigabytes=args.fit, world=ranks))
        return
    cards = Cards(count=args.gpus, tflops=args.tflops, mfu=args.mfu, price=args.price, memory=args.memory)
    report = plan_report(data, args.ranks, cards)
    parts = sections(report)
    parts["Afterwards"] = data.outline.exports
    print(text(parts))
    if args.out is not None:
        pictures = plots(report)
        args.out.write_text(page(f"Plan of {args.config}", parts, pictures), encoding="utf-8")
        for name, picture in pictures.items():
            args.out.with_name(f"{args.out.stem}-{name}.png").write_bytes(picture)
        print(f"\n{args.out}, and {len(pictures)} PNG files beside it")


if __name__ == "__main__":
    try:
        main()
    except (MmdsError, OSError) as error:
        sys.exit(f"{type(error).__name__}: {error}")
