"""JPEG: decoded no finer than the planned size needs, and by the shorter way where both give the same pixels."""

from __future__ import annotations

import math
import warnings

import numpy as np
import numpy.typing as npt
import torch
from PIL.JpegImagePlugin import JpegImageFile

try:
    from torchvision.io import ImageReadMode, decode_jpeg
except ImportError:  # announced by torchvision 0.29 for a later release; Pillow then decodes the same pixels
    decode_jpeg = None

# It announces that at every call, which nobody who trains can act on.
warnings.filterwarnings(
    "ignore", category=DeprecationWarning, message="The image decoding and encoding capabilities"
)

SPARE = 1.5
"""How many times larger than planned, in both directions, a picture decoded at a fraction of its size still is.

A JPEG decodes at 1/2, 1/4 or 1/8 of its size for less work (its discrete cosine transform is inverted with
fewer coefficients), but sharper than antialiasing would make it; the resize that follows must have enough left
to do.
"""


def scale_to(image: JpegImageFile, height: int, width: int) -> int:
    """Have an opened JPEG decode at the smallest DCT scale that leaves SPARE times the planned size.

    height, width: planned size in pixels, as the file stores it, not upright. Returns what the sides are
    divided by (1, 2, 4 or 8) and then rounded up.
    """
    whole = image.size[0]
    drafted = image.draft(None, (math.ceil(SPARE * width), math.ceil(SPARE * height)))
    return 1 if drafted is None else round(whole / drafted[1][2])


def decode_whole(image: JpegImageFile, data: bytes) -> npt.NDArray[np.uint8] | None:
    """uint8 [H, W, 3] at full size: Pillow's pixels without its detour over four bytes a pixel and back.

    image: `data`, opened. None where Pillow has to decode: other colours than RGB or grey, and broken files,
    so that Pillow alone decides which those are.
    """
    if decode_jpeg is None or image.mode not in ("L", "RGB"):
        return None
    try:
        decoded = decode_jpeg(torch.frombuffer(bytearray(data), dtype=torch.uint8), mode=ImageReadMode.RGB)
    except RuntimeError:
        return None
    pixels: npt.NDArray[np.uint8] = decoded.permute(1, 2, 0).numpy()
    return pixels if pixels.shape[1::-1] == image.size else None
