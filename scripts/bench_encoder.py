"""Images of mixed size in one packed encoder call against one call under a dense block-diagonal mask, side by side.

    python scripts/bench_encoder.py

The same tower with the same weights runs the same patches twice: with attention inside each image, as mmds does, and with a mask [T, T] for
scaled_dot_product_attention, as packing is done without it. The tower is that of --model (by default a small one, 384 wide) with --layers of its blocks:
a block costs what every other costs, so the ratio does not depend on their number. The ways take turns; the best of --rounds counts.
Peak memory is what the process grows by during the call (Linux).
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import numpy as np
import torch
from bench_images import machine
from torch import Tensor

from mmds.config_types import EncoderSection
from mmds.geometry import Grid
from mmds.model import packed_tower
from mmds.model.encoder import Encoder, build_encoder

SIZES = (224, 896)
"""Least and largest side of an image in pixels."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", default="ViT-S-16", help="an open_clip name of a tower without rotary positions"
    )
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--images", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args(arguments)
    torch.set_num_threads(given.threads)
    torch.manual_seed(0)
    section = EncoderSection(name=given.model, pretrained="random", layer=given.layers - 1)
    encoder = build_encoder(section)
    grids = mixed_grids(given.images, encoder.spec.patch_size)
    side = encoder.spec.patch_size
    pixels = torch.randint(0, 256, (sum(r * c for r, c in grids), 3, side, side), dtype=torch.uint8)
    print(machine())
    print(
        f"{given.model}, {given.layers} block(s), {given.threads} threads, fp32; {len(grids)} images of {SIZES[0]} to {SIZES[1]} px a "
        f"side, {len(pixels):,} patches\n"
    )
    report(encoder, pixels, grids, given.rounds)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One run of one way. seconds, peak (bytes that the process grew by): after the forward pass, and after the backward pass too."""

    features: Tensor
    seconds: tuple[float, float]
    peak: tuple[int, int]


def report(encoder: Encoder, pixels: Tensor, grids: Sequence[Grid], rounds: int) -> None:
    """Seconds, ratio and peak memory of both ways, of the forward pass and of forward and backward together."""
    ways = {"packed": packed, "dense mask": masked}
    runs: dict[str, list[Measured]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            runs[name].append(measure(way, encoder, pixels, grids))
    ours, theirs = runs.values()
    gap = float((ours[0].features - theirs[0].features).abs().max() / theirs[0].features.abs().max())
    assert gap < 1e-4, f"the ways give different features: {gap:.1e}"
    print(f"{'':<20}{'packed':>10}{'dense mask':>12}{'ratio':>8}{'peak packed':>15}{'peak dense':>14}")
    for part, title in enumerate(("forward", "forward + backward")):
        a, b = (min(run.seconds[part] for run in way) for way in (ours, theirs))
        c, d = (max(run.peak[part] for run in way) / 2**30 for way in (ours, theirs))
        print(f"{title:<20}{a:>8.2f} s{b:>10.2f} s{b / a:>7.1f}x{c:>11.2f} GiB{d:>10.2f} GiB")


def packed(encoder: Encoder, pixels: Tensor, grids: Sequence[Grid]) -> Tensor:
    """Features [P, c], attention inside each image."""
    features: Tensor = encoder(pixels, grids)
    return features


def masked(encoder: Encoder, pixels: Tensor, grids: Sequence[Grid]) -> Tensor:
    """The same call with a dense mask wherever mmds hands on segments."""
    with patch.object(packed_tower, "Segments", DenseMask):
        return packed(encoder, pixels, grids)


class DenseMask:
    """In the place of `Segments`: a mask [T, T], 0 inside each image and minus infinity elsewhere, which every tower adds to its scores."""

    def __new__(cls, *, lengths: Sequence[int], rotate: object = None) -> Tensor:  # type: ignore[misc]
        assert rotate is None, "the dense call has no rotary positions"
        numbers = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
        apart = numbers[:, None] != numbers[None]
        return torch.zeros(apart.shape).masked_fill_(apart, float("-inf"))


Way = Callable[[Encoder, Tensor, Sequence[Grid]], Tensor]


def measure(way: Way, encoder: Encoder, pixels: Tensor, grids: Sequence[Grid]) -> Measured:
    """One forward and backward pass, which gives the gradients of all weights."""
    encoder.zero_grad()
    before = reset_peak()
    started = time.perf_counter()
    features = way(encoder, pixels, grids)
    forward, forward_peak = time.perf_counter() - started, peak_bytes() - before
    features.square().mean().backward()
    whole, whole_peak = time.perf_counter() - started, peak_bytes() - before
    return Measured(features=features.detach(), seconds=(forward, whole), peak=(forward_peak, whole_peak))


def mixed_grids(images: int, side: int) -> list[Grid]:
    """Grids of patches of images whose sides are drawn evenly between SIZES."""
    rng = np.random.default_rng(0)
    sides = rng.integers(SIZES[0] // side, SIZES[1] // side, (images, 2), endpoint=True)
    return [(rows, columns) for rows, columns in sides.tolist()]


def reset_peak() -> int:
    """Forget the largest memory so far; the resident bytes now."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def peak_bytes() -> int:
    """The largest resident bytes since `reset_peak`."""
    return _status("VmHWM")


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(key))


if __name__ == "__main__":
    main()
