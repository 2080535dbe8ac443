"""Make a model folder out of a ZeRO checkpoint: `python scripts/consolidate.py RUN [--tag step-00000500] OUT`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from mmds import checkpoint, export
from mmds.errors import MmdsError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def main() -> None:
    """Read the arguments, consolidate, say what was written."""
    parser = argparse.ArgumentParser(
        description="Make a model folder out of a ZeRO checkpoint; no GPU needed."
    )
    parser.add_argument("run", type=Path, help="run folder of a training")
    parser.add_argument("out", type=Path, help="model folder to write")
    parser.add_argument("--tag", help="checkpoint, such as step-00000500 (default: the newest complete one)")
    parser.add_argument("--dtype", choices=DTYPES, help="of all weights (default: the run's compute dtype)")
    args = parser.parse_args()
    folder = args.run / "checkpoints"
    found = checkpoint.find(folder, str(folder / args.tag) if args.tag else "auto")
    if found is None:
        raise MmdsError(f"{folder} has no checkpoint; the run must save one (mmds.checkpoint.every)")
    export.consolidate(args.run, found.name, args.out, dtype=DTYPES.get(args.dtype))
    print(f"{found} -> {args.out}")


if __name__ == "__main__":
    try:
        main()
    except MmdsError as error:
        sys.exit(f"{type(error).__name__}: {error}")
