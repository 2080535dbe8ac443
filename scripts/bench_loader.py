"""Measure the loader alone: `python scripts/bench_loader.py --config my.json --workers 1,2,4,8`.

Prints rows, images and tokens a second for each count of workers, what each stage takes, and which count suffices for the pace of
training: `--need`; or that of GPUs with `--tflops` at `--mfu`, by the FLOPs of the run's rows; or that of the run in output_dir. Needs no
weights and no GPU. One rank is measured: the ranks of a machine share its cores.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mmds.data.bench import MARGIN, advice, measure, need_of_gpu, need_of_run, table
from mmds.errors import MmdsError
from mmds.run_data import open_run_data
from mmds.run_forecast import forecast


def counts(text: str) -> list[int]:
    """Numbers of workers: "0,1,2"."""
    found = [int(part) for part in text.split(",")]
    if min(found) < 0:
        raise ValueError
    return found


def main() -> None:
    """Measure, print, advise."""
    parser = argparse.ArgumentParser(description="Measure how fast rows are loaded.")
    parser.add_argument("--config", required=True, help="JSON file of the run")
    parser.add_argument(
        "--set", action="append", default=[], metavar="a.b=JSON", help="override a key; repeatable"
    )
    parser.add_argument(
        "--workers", type=counts, default=[0, 1, 2, 4], metavar="0,1,2,4", help="counts to measure"
    )
    parser.add_argument("--rows", type=int, default=64, help="rows to measure for each count (64)")
    parser.add_argument("--need", type=float, help="rows a second that one rank takes in training")
    parser.add_argument("--gpus", type=int, default=1, help="GPUs of the run, one rank each (1)")
    parser.add_argument("--tflops", type=float, help="dense bf16 TFLOP/s of a GPU, such as 989 (H100)")
    parser.add_argument("--mfu", type=float, default=0.4, help="share of them that training reaches (0.4)")
    args = parser.parse_args()
    if args.rows < 1 or min(args.need or 1, args.tflops or 1, args.gpus, args.mfu) <= 0:
        parser.error("--rows, --need, --gpus, --tflops and --mfu must be above 0")
    data = open_run_data(args.config, args.set)
    speeds = []
    steps = math.ceil((args.rows + max(args.workers)) / data.accumulation)
    for turn, workers in enumerate(args.workers):
        # Other rows each time, while there are any: those read before come from the machine's memory.
        start = turn * steps % max(data.plan.total_steps - steps + 1, 1)
        loader = data.loader(workers=workers, start_step=start)
        speeds.append(measure(loader, workers=workers, rows=args.rows))
    print(table(speeds))
    need = args.need
    if need is None and args.tflops is not None:
        flops = forecast(data).flops / data.plan.rows_per_step
        need = need_of_gpu(flops, tflops=args.tflops, mfu=args.mfu)
        print(
            f"need: {args.gpus * need:.2f} rows/s on {args.gpus} GPUs, {need:.2f} a rank: {flops:.3g} FLOPs a row at {args.mfu:.0%} of "
            f"{args.tflops:g} TFLOP/s"
        )
    if need is None and (found := need_of_run(Path(data.config.output_dir))) is not None:
        need, known = found
        print(f"need: {need:.2f} rows/s a rank, median of the last {known} steps in {data.config.output_dir}")
    cores = len(os.sched_getaffinity(0))
    print(
        f"no need is known: give --tflops of a GPU, or --need ROWS_PER_S of one rank; {MARGIN:g} x that should be loaded"
        if need is None
        else advice(speeds, need, cores=cores)
    )


if __name__ == "__main__":
    try:
        main()
    except MmdsError as error:
        sys.exit(f"{type(error).__name__}: {error}")
