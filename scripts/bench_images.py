"""How fast pictures decode, and how near to a full decode they stay: a Markdown table, as in docs/data-speed.md.

Each row compares mmds.data.images.load_image with Pillow's full decode and bicubic resize of the same bytes to
the same size. Both take turns in one process, one thread each; the CPU time of the best round counts.
"""

from __future__ import annotations

import argparse
import io
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import PIL
import torch
import torchvision
from PIL import Image, ImageDraw, ImageFilter, ImageFont, features

from mmds.data.images import load_image, probe


@dataclass(frozen=True, kw_only=True)
class Case:
    """An encoded picture. target: the least ratio wanted, where one is set."""

    name: str
    data: bytes
    target: float | None = None


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the arguments, measure, print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", type=Path, nargs="*", help="pictures of your own (default: drawn ones)")
    parser.add_argument("--side", type=int, default=672, help="planned height and width in pixels")
    parser.add_argument(
        "--rounds", type=int, default=30, help="times that every picture is decoded either way"
    )
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    print(machine(), end="\n\n")
    print("| picture | file | bits a pixel | Pillow, ms | mmds, ms | ratio | target | PSNR, dB |")
    print("|---|--:|--:|--:|--:|--:|--:|--:|")
    own = [Case(name=path.name, data=path.read_bytes()) for path in given.files]
    for case in own or drawn():
        print(row(case, given.side, given.rounds), flush=True)


def machine() -> str:
    """The processor, its cores and the versions that decide the figures."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    model = next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown"
    )
    cores = sum(line.startswith("processor") for line in lines)
    return (
        f"{model}, {cores} cores, {torch.backends.cpu.get_cpu_capability()}; Python {platform.python_version()}, "
        f"Pillow {PIL.__version__} (libjpeg-turbo {features.version('libjpeg_turbo')}), "
        f"torch {torch.__version__}, torchvision {torchvision.__version__}, numpy {np.__version__}"
    )


def drawn() -> Iterator[Case]:
    """Photographs at the sizes that targets are set for, then what is hard to scale.

    Much of a decode goes into undoing the entropy coding, which no way around can spare: the more bits a
    picture has, the smaller the ratio. Hence three qualities: strongly compressed, usual, and a camera's.
    """
    for width, height, target in ((4000, 3000, 3.2), (1920, 1080, 2.3), (640, 480, 2.5)):
        picture = photograph(width, height)
        for quality in (50, 75, 90):
            name = f"photograph, {width} x {height}, quality {quality}"
            yield Case(name=name, data=encoded(picture, quality=quality), target=target)
    yield Case(name="photograph, 640 x 480, PNG", data=encoded(picture, kind="PNG"))
    for width, height in ((4000, 3000), (1920, 1080)):
        yield Case(name=f"gradient, {width} x {height}, quality 90", data=encoded(gradient(width, height)))
        yield Case(name=f"page of text, {width} x {height}, quality 90", data=encoded(text(width, height)))


def encoded(picture: Image.Image, kind: str = "JPEG", quality: int = 90) -> bytes:
    """The bytes of a file of that picture."""
    buffer = io.BytesIO()
    picture.save(buffer, kind, quality=quality)
    return buffer.getvalue()


def row(case: Case, side: int, rounds: int) -> str:
    """One line of the table."""
    data = case.data

    def pillow() -> Image.Image:
        with Image.open(io.BytesIO(data)) as image:
            return image.convert("RGB").resize((side, side), Image.Resampling.BICUBIC)

    def ours() -> np.ndarray:
        return load_image(data, height=side, width=side)

    slow, fast = best_of_both(pillow, ours, rounds)
    width, height = probe(data)
    quality = psnr(ours().transpose(1, 2, 0), np.asarray(pillow()))
    return (
        f"| {case.name} | {len(data) / 1024:.0f} KiB | {len(data) * 8 / (width * height):.2f} | {slow:.1f} "
        f"| {fast:.1f} | {slow / fast:.2f} | {case.target or ''} | {quality:.1f} |"
    )


def best_of_both(
    first: Callable[[], object], second: Callable[[], object], rounds: int
) -> tuple[float, float]:
    """The least CPU time of each in milliseconds, both having taken turns."""
    best = [float("inf"), float("inf")]
    for _ in range(rounds):
        for i, function in enumerate((first, second)):
            started = time.process_time()
            function()
            best[i] = min(best[i], 1000 * (time.process_time() - started))
    return best[0], best[1]


def psnr(got: np.ndarray, wanted: np.ndarray) -> float:
    """Peak signal-to-noise ratio of 8-bit pixels in dB, infinite when they are equal."""
    error = float(np.square(got.astype(np.float64) - wanted).mean())
    return float(10 * np.log10(255**2 / error)) if error else float("inf")


def photograph(width: int, height: int, seed: int = 0) -> Image.Image:
    """Something with the statistics of a photograph: leaves of all sizes over one another, shaded, grained.

    Occluding discs whose radii follow r^-3 give natural images' edges and spectrum (Lee, Mumford and Huang,
    "Occlusion models for natural images", 2001).
    """
    random = np.random.default_rng(seed)
    largest = min(width, height) / 3
    image = Image.new("RGB", (width, height))
    draw = ImageDraw.Draw(image)
    for u in random.random(12_000):
        # Radii of density r^-3 from 3 pixels up, by inversion.
        radius = (3.0**-2 - u * (3.0**-2 - largest**-2)) ** -0.5
        x, y = random.uniform(0, width), random.uniform(0, height)
        colour = np.clip(random.normal(120, 45) + random.normal(0, 18, 3), 0, 255).astype(int)
        draw.ellipse(
            (x - radius, y - radius * 0.7, x + radius, y + radius * 0.7), fill=tuple(colour.tolist())
        )
    # No camera is sharp to the pixel: its lens and the interpolation of its colours spread an edge over a few.
    pixels = np.asarray(image.filter(ImageFilter.GaussianBlur(0.8)), dtype=np.float32)
    coarse = Image.fromarray(random.normal(0, 14, (height // 12, width // 12)).astype(np.float32))
    shade = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC))[:, :, None]
    grain = random.normal(0, 2.5, (height, width, 1)).astype(np.float32)
    return Image.fromarray(np.clip(pixels + shade + grain, 0, 255).astype(np.uint8))


def gradient(width: int, height: int) -> Image.Image:
    """Smooth colours without any noise, one direction a channel."""
    x, y = np.meshgrid(np.linspace(0, 255, width), np.linspace(0, 255, height))
    return Image.fromarray(np.stack([x, y, (x + y) / 2], axis=-1).astype(np.uint8))


def text(width: int, height: int, seed: int = 0) -> Image.Image:
    """Black letters on white in sizes from 14 to 40 pixels: nothing but edges."""
    random = np.random.default_rng(seed)
    image = Image.new("RGB", (width, height), "white")
    draw = ImageDraw.Draw(image)
    y = 0
    while y < height:
        size = int(random.integers(14, 40))
        letters = "".join(map(chr, random.integers(33, 127, 2 * width // size)))
        draw.text((4, y), letters, fill="black", font=ImageFont.load_default(size))
        y += size + 6
    return image


if __name__ == "__main__":
    main()
