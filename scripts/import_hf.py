"""Make a model folder out of a LLaVA folder of transformers, with a report of every tensor: `python scripts/import_hf.py SRC OUT`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from mmds.errors import MmdsError
from mmds.model.hf_import import import_llava
from mmds.model.published import local_folder


def main() -> None:
    """Read the arguments, convert, say where everything went."""
    parser = argparse.ArgumentParser(
        description="Import a LLaVA-1.5 or LLaVA-NeXT model of transformers; no GPU needed."
    )
    parser.add_argument(
        "source", help="llava-hf/ hub name, or folder with config, weights, tokenizer, processor"
    )
    parser.add_argument("out", type=Path, help="model folder to write")
    args = parser.parse_args()
    print("\n".join(import_llava(local_folder(args.source), args.out, name=args.source).lines()))
    print(f"{args.source} -> {args.out}")


if __name__ == "__main__":
    try:
        main()
    except MmdsError as error:
        sys.exit(f"{type(error).__name__}: {error}")
