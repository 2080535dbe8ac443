"""See what the model sees: `python scripts/inspect_batch.py --config my.json -o page.html`.

Writes one packed row as an HTML page that needs no other file: samples in bands, pictures at the encoder's size, supervised
tokens marked, below each token what it must predict, and what the row costs beside its step. Needs no weights and no GPU.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mmds.errors import ConfigError, MmdsError
from mmds.inspect_page import render
from mmds.run_data import open_run_data
from mmds.run_forecast import cost_facts


def main() -> None:
    """One row, one page."""
    parser = argparse.ArgumentParser(description="Write a packed row of a run as an HTML page.")
    parser.add_argument("--config", required=True, help="JSON file of the run")
    parser.add_argument(
        "--set", action="append", default=[], metavar="a.b=JSON", help="override a key; repeatable"
    )
    parser.add_argument("-o", "--out", required=True, type=Path, help="the page")
    parser.add_argument("--step", type=int, default=0, help="optimizer step, from 0")
    parser.add_argument("--micro", type=int, default=0, help="micro-step of the step, from 0")
    parser.add_argument("--rank", type=int, default=0, help="rank, from 0")
    parser.add_argument("--world", type=int, default=1, help="ranks of the run (1)")
    args = parser.parse_args()
    data = open_run_data(args.config, args.set, world=args.world)
    for flag, value, count in (
        ("--step", args.step, data.plan.total_steps),
        ("--micro", args.micro, data.accumulation),
        ("--rank", args.rank, args.world),
    ):
        if not 0 <= value < count:
            raise ConfigError(f"{flag} is {value}, but on {args.world} ranks this run has 0 to {count - 1}")
    row = data.loader(rank=args.rank).row(args.step, args.micro)
    place = f"step {args.step}, micro-step {args.micro}, rank {args.rank} of {args.world}"
    cost = cost_facts(data, args.step, args.micro, args.rank)
    page = render(
        row,
        data.tokenizer,
        title=f"Row of {args.config}",
        place=place,
        row_tokens=data.config.data.row_tokens,
        cost=cost,
    )
    args.out.write_text(page, encoding="utf-8")
    print(
        f"{args.out}: {place}: {row.real_tokens} tokens, {row.supervised} targets, {len(row.image_names)} images, "
        f"{len(row.bad)} bad samples"
    )
    for name, value in cost.items():
        print(f"  {name:<10}{value}")


if __name__ == "__main__":
    try:
        main()
    except (MmdsError, OSError) as error:
        sys.exit(f"{type(error).__name__}: {error}")
