"""Pictures: encoded bytes -> upright RGB pixels of the planned size.

What every picture becomes: the first frame, turned as its EXIF orientation says, in RGB, transparent parts on
white, 16-bit greyscale scaled to 8 bits, resized with antialiasing. The type is read from the bytes, never
from a name. Colour profiles are ignored (sRGB assumed). Every failure is a DataError with a reason; nothing is
replaced, nothing is guessed.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt
from PIL import ExifTags, Image, ImageFile, UnidentifiedImageError
from PIL.JpegImagePlugin import JpegImageFile

from mmds.data.jpeg import decode_whole, scale_to
from mmds.data.resize import INTERPOLATION, resize
from mmds.errors import DataError

T = TypeVar("T")

MAX_SOURCE_PIXELS = 64_000_000
"""Most pixels of a source image (8000 x 8000); larger ones are refused from the header, before any pixel is
decoded.
"""

MAX_SIDE = 65_535
"""Longest side of a source image in pixels: the longest that a JPEG can have, and what the index has room for."""

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "JPEG2000", "AVIF")
"""What is read, by content. Formats that start other programs or that hold no fixed pixels (EPS, WMF) are
left out.
"""

_UPRIGHT = {
    1: (False, False, False),
    2: (False, False, True),
    3: (False, True, True),
    4: (False, True, False),
    5: (True, False, False),
    6: (True, False, True),
    7: (True, True, True),
    8: (True, True, False),
}
"""How each EXIF orientation is turned upright: rows and columns exchanged, then rows, columns reversed."""

_LATE_METADATA = (b"eXIf", b"iTXt", b"tEXt", b"zTXt")


def probe(data: bytes, *, max_pixels: int = MAX_SOURCE_PIXELS) -> tuple[int, int]:
    """(width, height) in pixels of an encoded image once upright, from its header.

    max_pixels: own limit on width x height. Raises DataError with the reason when the bytes are no readable
    image.
    """

    def read(image: ImageFile.ImageFile) -> tuple[int, int]:
        if _metadata_follows_pixels(image, data):
            image.load()
        width, height = image.size
        return (height, width) if _swaps_sides(image) else (width, height)

    return _with_image(data, max_pixels, read)


def load_image(
    data: bytes,
    *,
    height: int,
    width: int,
    interpolation: str = "bicubic",
    max_pixels: int = MAX_SOURCE_PIXELS,
    square_fill: tuple[int, int, int] | None = None,
) -> npt.NDArray[np.uint8]:
    """uint8 [3, height, width]: an encoded image upright, in RGB on white, resized with antialiasing; see `load_sizes`."""
    sizes = [(height, width)]
    return load_sizes(
        data, sizes, interpolation=interpolation, max_pixels=max_pixels, square_fill=square_fill
    )[0]


def load_sizes(
    data: bytes,
    sizes: Sequence[tuple[int, int]],
    *,
    interpolation: str = "bicubic",
    max_pixels: int = MAX_SOURCE_PIXELS,
    square_fill: tuple[int, int, int] | None = None,
) -> list[npt.NDArray[np.uint8]]:
    """One uint8 [3, height, width] for each (height, width) of `sizes`, all from one decoding of the image.

    Upright, in RGB on white, resized with antialiasing. interpolation: `bilinear`, `bicubic` or `lanczos`. max_pixels: own limit on the
    source. square_fill: RGB that the image is first padded with to a square, centred (None: the aspect is not kept). Raises
    DataError with the reason when the bytes are no whole, readable image or its range of values is unknown.
    """
    if interpolation not in INTERPOLATION:
        raise DataError(f"unknown interpolation {interpolation!r}; known are {', '.join(INTERPOLATION)}")
    height, width = (max(sides) for sides in zip(*sizes, strict=True))

    def read(image: ImageFile.ImageFile) -> list[npt.NDArray[np.uint8]]:
        # Padding needs whole pixels at the border, which a JPEG decoded at a fraction of its size may not have.
        finest = max(image.size) if square_fill is not None else 0
        pixels, extent = _decode(image, data, height=max(height, finest), width=max(width, finest))
        orientation = _orientation(image)
        if square_fill is not None:
            pixels = _squared(pixels, square_fill, orientation)
            extent = (float(pixels.shape[0]), float(pixels.shape[1]))
        return [_upright(pixels, extent, orientation, size, interpolation) for size in sizes]

    return _with_image(data, max_pixels, read)


def _upright(
    pixels: npt.NDArray[np.uint8],
    extent: tuple[float, float],
    orientation: int,
    size: tuple[int, int],
    interpolation: str,
) -> npt.NDArray[np.uint8]:
    """uint8 [3, *size] of decoded pixels [H, W, 3] as stored. extent: see `_decode`."""
    transposed, *flips = _UPRIGHT[orientation]
    stored = size[::-1] if transposed else size
    resized = resize(pixels, *stored, interpolation, extent=extent)
    turned = resized.swapaxes(0, 1) if transposed else resized
    upright = turned[tuple(slice(None, None, -1 if flip else 1) for flip in flips)]
    planes = np.empty((3, *size), dtype=np.uint8)
    for channel in range(3):  # in this order half the time of one strided copy
        planes[channel] = upright[:, :, channel]
    return planes


def _squared(
    pixels: npt.NDArray[np.uint8], fill: tuple[int, int, int], orientation: int
) -> npt.NDArray[np.uint8]:
    """uint8 [H, W, 3] as stored -> [S, S, 3], S = max(H, W), centred on the colour `fill`.

    Of an odd number of rows or columns the one to spare is below or to the right, once upright.
    """
    height, width = pixels.shape[:2]
    side = max(height, width)
    if height == width:
        return pixels
    square = np.empty((side, side, 3), dtype=np.uint8)
    square[:] = fill
    transposed, *flips = _UPRIGHT[orientation]
    flipped_rows, flipped_columns = reversed(flips) if transposed else flips
    top, left = (side - height + flipped_rows) // 2, (side - width + flipped_columns) // 2
    square[top : top + height, left : left + width] = pixels
    return square


def _decode(
    image: ImageFile.ImageFile, data: bytes, *, height: int, width: int
) -> tuple[npt.NDArray[np.uint8], tuple[float, float]]:
    """An opened image in RGB on white, as stored; a JPEG not much larger than planned.

    Returns uint8 [H, W, 3] and the height and width in these pixels that the image covers; a JPEG's last
    row and column may be covered in part.
    """
    extent = (float(image.size[1]), float(image.size[0]))
    if isinstance(image, JpegImageFile):
        stored = (width, height) if _swaps_sides(image) else (height, width)
        scale = scale_to(image, *stored)
        if scale == 1 and (pixels := decode_whole(image, data)) is not None:
            return pixels, extent
        extent = (extent[0] / scale, extent[1] / scale)
    size = image.size
    image.load()
    if image.size != size:
        raise DataError(
            f"the header says {size[0]} x {size[1]} pixels, the content {image.size[0]} x {image.size[1]}"
        )
    return np.asarray(_to_rgb(image, data), dtype=np.uint8), extent


def _with_image(data: bytes, max_pixels: int, read: Callable[[ImageFile.ImageFile], T]) -> T:
    """Open the bytes and apply `read`; too many pixels and whatever Pillow raises become a DataError."""
    if ImageFile.LOAD_TRUNCATED_IMAGES:
        raise DataError(
            "PIL.ImageFile.LOAD_TRUNCATED_IMAGES is on: broken images would pass as grey; switch it off"
        )
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            width, height = image.size
            if max(width, height) > MAX_SIDE:
                raise DataError(f"a side of {max(width, height)} pixels is above {MAX_SIDE}; make it smaller")
            if width * height > max_pixels:
                raise DataError(
                    f"{width} x {height} pixels are more than the limit of {max_pixels}; make it smaller"
                )
            return read(image)
    except (DataError, MemoryError):
        raise
    except Image.DecompressionBombError as error:  # Pillow's own limit is above ours, and comes first
        raise DataError(f"more than the limit of {max_pixels} pixels ({error}); make it smaller") from error
    except UnidentifiedImageError as error:
        raise DataError(
            f"not an image of a known type ({', '.join(FORMATS)}), or its header is broken"
        ) from error
    except Exception as error:  # decoders raise almost anything on broken bytes
        raise DataError(f"cannot be decoded: {type(error).__name__}: {error}") from error


def _orientation(image: Image.Image) -> int:
    """The EXIF orientation, 1 (upright) when there is none or it cannot be read."""
    try:
        # The base method: PNG's own one decodes all pixels in search of metadata.
        value = Image.Image.getexif(image).get(ExifTags.Base.Orientation, 1)
    except Exception:  # noqa: BLE001  broken EXIF is common and harmless, and its parser raises almost anything
        return 1
    return value if isinstance(value, int) and value in _UPRIGHT else 1


def _swaps_sides(image: ImageFile.ImageFile) -> bool:
    """Whether turning the image upright swaps the width and height that the opened file reports."""
    return (
        image.format != "TIFF" and _orientation(image) >= 5
    )  # Pillow reports TIFF sizes upright, and turns them itself


def _metadata_follows_pixels(image: ImageFile.ImageFile, data: bytes) -> bool:
    """Whether a PNG may hold an orientation after its pixels, which only a full decode reads."""
    if image.format != "PNG":
        return False
    names = list(_png_chunks(data))
    pixels = names.index(b"IDAT") if b"IDAT" in names else len(names)
    return any(name in _LATE_METADATA for name in names[pixels:])


def _png_chunks(data: bytes) -> Iterator[bytes]:
    """Names of the chunks of a PNG file, in order."""
    position = 8
    while position + 8 <= len(data):
        yield data[position + 4 : position + 8]
        position += 12 + int.from_bytes(data[position : position + 4], "big")


def _to_rgb(image: ImageFile.ImageFile, data: bytes) -> Image.Image:
    """A decoded image in RGB, transparent parts composited on white."""
    if image.mode.startswith("I;16") or image.mode == "I":
        return _grey16_to_rgb(image)
    if image.mode == "F":
        raise DataError("floating-point pixels have no defined range; save it with 8 or 16 bits")
    _scale_png_key(image, data)
    if image.mode in ("LA", "PA", "RGBA", "La", "RGBa", "P") or "transparency" in image.info:
        rgba = image.convert("RGBA")
        white = Image.new("RGBA", rgba.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, rgba).convert("RGB")
    return image.convert("RGB")


def _grey16_to_rgb(image: ImageFile.ImageFile) -> Image.Image:
    """Greyscale of 16 bits: 0 .. 65535 onto 0 .. 255, rounded; the transparent value becomes white."""
    if image.mode == "I" and image.format != "PPM":  # Pillow opens 16-bit PPM as "I"
        raise DataError("32-bit integer pixels have no defined range; save it with 8 or 16 bits")
    values = np.asarray(image).astype(np.int64)
    tags = getattr(image, "tag_v2", {})
    top = (1 << int(np.ravel(tags.get(258, 16))[0])) - 1  # 258: BitsPerSample
    grey = (values * 255 + top // 2) // top
    if tags.get(262) == 0:  # PhotometricInterpretation: white is zero; Pillow inverts 8 bits, but not 16
        grey = 255 - grey
    if "transparency" in image.info:
        grey = np.where(values == image.info["transparency"], 255, grey)
    return Image.fromarray(grey.astype(np.uint8)).convert("RGB")


def _scale_png_key(image: ImageFile.ImageFile, data: bytes) -> None:
    """Bring a PNG's transparent colour onto 8 bits, as Pillow does with the pixels only."""
    if image.format != "PNG" or image.mode not in ("L", "RGB") or "transparency" not in image.info:
        return
    bits = data[24]  # in the IHDR chunk, which is always first
    if image.mode == "L" and bits < 8:
        image.info["transparency"] = image.info["transparency"] * 255 // ((1 << bits) - 1)
    elif bits == 16:
        raise DataError(
            "16-bit colour with a transparent colour is not supported; save it with 8 bits or with alpha"
        )
