"""Write a model folder for transformers and vLLM: `python scripts/export_hf.py MODEL OUT`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from mmds.errors import MmdsError
from mmds.hf_export import export_hf
from mmds.model.folder import find_model_folder


def main() -> None:
    """Read the arguments, convert, say what was written."""
    parser = argparse.ArgumentParser(
        description="Export a model as LLaVA of transformers, with its processor; no GPU needed."
    )
    parser.add_argument("model", help="model folder, or a run folder with a finished model")
    parser.add_argument("out", type=Path, help="folder to write")
    args = parser.parse_args()
    done = export_hf(find_model_folder(args.model), args.out)
    before, after = done.rows
    grown = f", {after - before} rows added to {before}" if after > before else ""
    print(f"{args.model} -> {args.out}: {done.name}, <image> is token {done.image_token}{grown}")
    for note in done.notes:
        print(f"note: {note}")


if __name__ == "__main__":
    try:
        main()
    except MmdsError as error:
        sys.exit(f"{type(error).__name__}: {error}")
