"""Resizing of 8-bit pixels: antialiased, one thread, and within a rounding of Pillow's in either direction."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

INTERPOLATION = ("bilinear", "bicubic", "lanczos")


def resize(
    pixels: npt.NDArray[np.uint8],
    height: int,
    width: int,
    interpolation: str,
    *,
    extent: tuple[float, float] | None = None,
) -> npt.NDArray[np.uint8]:
    """uint8 [height, width, 3] of uint8 [H, W, 3], antialiased.

    interpolation: one of INTERPOLATION. extent: height and width of the part of `pixels`, from the top left,
    that is to fill the result; less than a pixel short of [H, W] (default: all).
    """
    # DLPack takes read-only memory without a copy. The batch is added by torch, whose strides say "channels
    # last" (NumPy's do not), since that layout has a kernel of its own, which is twice as fast.
    batch = torch.from_dlpack(pixels)[None].permute(0, 3, 1, 2)
    shape = pixels.shape[:2]
    if extent is None or extent == shape:
        how: dict[str, Any] = {"size": (height, width)}
    else:
        factors = (_factor(shape[0], extent[0], height), _factor(shape[1], extent[1], width))
        how = {"scale_factor": factors, "recompute_scale_factor": False}
    resized = torch.nn.functional.interpolate(batch, mode=interpolation, antialias=True, **how)
    result: npt.NDArray[np.uint8] = resized[0].permute(1, 2, 0).numpy()
    return result


def _factor(side: int, extent: float, wanted: int) -> float:
    """wanted / extent, and so that torch, which rounds side x factor down, makes it `wanted` pixels."""
    factor = wanted / extent
    return factor if math.floor(side * factor) >= wanted else math.nextafter(factor, math.inf)
