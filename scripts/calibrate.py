"""Measure seconds per FLOP of each part of a run on this machine, for the planner.

    python scripts/calibrate.py --config my.json -o calibration.json
    python scripts/calibrate.py --example       a small model, on a CPU about three minutes

Random weights and random rows of the run's sizes; reads no data set and no weights. A quarter of the rows is held out of the fit and tells
how well times are predicted, beside a model of tokens alone and one rate for all FLOPs. On a GPU that does not hold the whole
model: --blocks 4.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch

from mmds.calibration import COLUMNS, RATES, Calibration, Floats, choose_columns, fit, fit_columns, mape
from mmds.config import load_config
from mmds.errors import ConfigError, MmdsError
from mmds.measure_rows import Bench, Timed, build_bench, random_rows, time_rows
from mmds.model.build import find_source

EXAMPLE_DECODER = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 4096,
    "tie_word_embeddings": True,
}
EXAMPLE_ENCODER = {
    "model_cfg": {
        "embed_dim": 64,
        "vision_cfg": {"image_size": 224, "layers": 3, "width": 256, "head_width": 64, "patch_size": 14},
        "text_cfg": {},
    },
    "preprocess_cfg": {"mean": [0.5] * 3, "std": [0.5] * 3, "interpolation": "bicubic"},
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Build, time, fit, report, write."""
    parser = argparse.ArgumentParser(description="Measure seconds per FLOP of a run's parts on this machine.")
    chosen = parser.add_mutually_exclusive_group(required=True)
    chosen.add_argument("--config", help="JSON file of the run")
    chosen.add_argument("--example", action="store_true", help="a small encoder and decoder made here")
    parser.add_argument(
        "--set", action="append", default=[], metavar="a.b=JSON", help="override a key; repeatable"
    )
    parser.add_argument("-o", "--out", type=Path, default=Path("calibration.json"), help="the file to write")
    parser.add_argument("--rows", type=int, default=48, help="random rows (48)")
    parser.add_argument("--repeats", type=int, default=3, help="times each row runs; the least counts (3)")
    parser.add_argument("--blocks", type=int, help="of encoder and decoder, at most; default all")
    parser.add_argument("--held-out", type=float, default=0.25, help="share of rows not fitted (0.25)")
    parser.add_argument("--seed", type=int, default=0, help="of the random rows (0)")
    args = parser.parse_args(arguments)
    held = round(args.rows * args.held_out)
    if held < 1 or args.rows - held < 2 * len(COLUMNS):
        raise ConfigError(
            f"--rows {args.rows} with --held-out {args.held_out} holds {held} rows out and fits {args.rows - held}; "
            f"hold out at least 1 and fit at least {2 * len(COLUMNS)}"
        )
    if args.repeats < 1 or (args.blocks is not None and args.blocks < 1):
        raise ConfigError("--repeats and --blocks are at least 1")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu":
        torch.set_num_threads(1)  # CPU seconds are then seconds of computing
    with tempfile.TemporaryDirectory() as folder:
        config = load_config(_example(Path(folder)) if args.example else args.config, args.set)
        bench = build_bench(config, find_source(config.init_from, config.model), device, blocks=args.blocks)
    rows = random_rows(bench, args.rows, row_tokens=config.data.row_tokens, seed=args.seed)
    timed = time_rows(bench, rows, repeats=args.repeats, seed=args.seed)
    calibration = report(bench, timed, held)
    calibration.save(args.out)
    print(f"wrote {args.out}")


def report(bench: Bench, timed: Timed, held: int) -> Calibration:
    """Fit all rows but the last `held`, print errors on these, and the rates."""
    fitted = len(timed.seconds) - held
    features, seconds = timed.features[:fitted], timed.seconds[:fitted]
    columns = choose_columns(features, seconds)
    found = fit_columns(
        np.concatenate([features, timed.alone_features]),
        np.concatenate([seconds, timed.alone_seconds]),
        columns,
    )
    calibration = Calibration(
        **dict(zip(COLUMNS, found.tolist(), strict=True)),
        device=_device_name(bench.device),
        dtype=str(bench.dtype).removeprefix("torch."),
        torch=torch.__version__,
        rows=fitted,
        error=mape(timed.features[fitted:] @ found, timed.seconds[fitted:]),
    )
    print(
        f"\n{calibration.device}, {calibration.dtype}, torch {calibration.torch}: {fitted} rows fitted, {held} held out"
    )
    print(f"rows take {timed.seconds.min():.4f} to {timed.seconds.max():.4f} s\n")
    total = timed.features[:fitted].sum(axis=0) * found
    print(f"{'part':<20}{'ps / FLOP':>12}{'GFLOP/s':>12}{'share of time':>16}")
    for index, name in enumerate(RATES):
        speed = f"{1e-9 / found[index]:12.1f}" if found[index] else f"{'-':>12}"
        print(f"{name:<20}{found[index] * 1e12:12.3f}{speed}{total[index] / seconds.sum():16.1%}")
    for index in range(len(RATES), len(COLUMNS)):
        print(f"{COLUMNS[index]:<20}{found[index] * 1e6:9.0f} us{'':>12}{total[index] / seconds.sum():16.1%}")
    flops = timed.features[:, : len(RATES)].sum(axis=1)
    tokens_only = _line_error(timed.sums.tokens, timed.seconds, fitted)
    one_rate = _line_error(flops, timed.seconds, fitted)
    print(f"\n{'predicts held-out rows by':<34}{'mean relative error':>20}")
    for name, error in (
        ("this calibration", calibration.error),
        ("one rate for all FLOPs", one_rate),
        ("tokens alone", tokens_only),
    ):
        print(f"{name:<34}{error:20.2%}")
    print(f"the calibration's error is {calibration.error / tokens_only:.3f} of that of tokens alone")
    return calibration


def _line_error(x: Floats, seconds: Floats, fitted: int) -> float:
    """Held-out error of seconds = a x + b, fitted as the calibration is."""
    features = np.stack([x, np.ones_like(x)], axis=1)
    return mape(features[fitted:] @ fit(features[:fitted], seconds[:fitted]), seconds[fitted:])


def _device_name(device: torch.device) -> str:
    """Of the GPU, or of the CPU as the system calls it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cpus = Path("/proc/cpuinfo")
    lines = cpus.read_text(encoding="utf-8").splitlines() if cpus.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()}, 1 thread"


def _example(folder: Path) -> Path:
    """A run of a small random encoder and decoder that both train, with images of their own size."""
    for name, content in (
        ("decoder/config.json", EXAMPLE_DECODER),
        ("tower/open_clip_config.json", EXAMPLE_ENCODER),
    ):
        (folder / name).parent.mkdir()
        (folder / name).write_text(json.dumps(content), encoding="utf-8")
    run = {
        "train_batch_size": 1,
        "zero_optimization": {"stage": 0},
        "mmds": {
            "stage": "pretrain",
            "output_dir": str(folder / "run"),
            "model": {
                "encoder": {"name": f"local-dir:{folder / 'tower'}", "pretrained": "random"},
                "connector": "merge_mlp",
                "decoder": {"name": str(folder / "decoder"), "random": True},
                "resolution": "native",
            },
            "data": {
                "mix": [{"name": "none", "path": str(folder)}],
                "row_tokens": 768,
                "max_pixels": 448 * 336,
            },
            "schedule": {"epochs": 1, "warmup_ratio": 0.03},
        },
    }
    path = folder / "run.json"
    path.write_text(json.dumps(run), encoding="utf-8")
    return path


if __name__ == "__main__":
    try:
        main()
    except (MmdsError, OSError) as error:
        sys.exit(f"{type(error).__name__}: {error}")
