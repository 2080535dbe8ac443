"""One encoded picture -> the uint8 pixels that its plan asks for: a square, an overview and tiles, or patches.

Shapes: N pieces, P patches, p pixels a side of a patch.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from mmds.data.images import load_image, load_sizes
from mmds.geometry import Geometry, ImagePlan

Pixels = npt.NDArray[np.uint8]


def load_pieces(data: bytes, plan: ImagePlan, geometry: Geometry) -> Pixels:
    """uint8 of `plan.pixel_shape`: the picture resized and cut as planned. Raises DataError with the reason as `load_image` does."""
    how = geometry.interpolation
    if plan.tiles is None:
        fill = geometry.fill if geometry.pad else None
        whole = load_image(data, height=plan.height, width=plan.width, interpolation=how, square_fill=fill)
        pieces = whole[None]
    else:
        side = plan.grid[0] * plan.cell
        overview, picture = load_sizes(data, [(side, side), (plan.height, plan.width)], interpolation=how)
        pieces = np.concatenate([overview[None], tiles_of(picture, plan.tiles, side)])
    return patches_of(pieces, plan.cell) if plan.packed else pieces


def tiles_of(picture: Pixels, tiles: tuple[int, int], side: int) -> Pixels:
    """uint8 [3, h, w] -> [rows * columns, 3, side, side]: centred on black and cut into tiles in reading order."""
    rows, columns = tiles
    height, width = picture.shape[1:]
    canvas = np.zeros((3, rows * side, columns * side), dtype=np.uint8)
    top, left = (canvas.shape[1] - height) // 2, (canvas.shape[2] - width) // 2
    canvas[:, top : top + height, left : left + width] = picture
    return patches_of(canvas[None], side)


def patches_of(pieces: Pixels, side: int) -> Pixels:
    """[N, 3, H, W] -> [N * H/side * W/side, 3, side, side], piece by piece in reading order."""
    n, channels, height, width = pieces.shape
    cut = pieces.reshape(n, channels, height // side, side, width // side, side).transpose(0, 2, 4, 1, 3, 5)
    return np.ascontiguousarray(cut).reshape(-1, channels, side, side)


def pieces_of(pixels: Pixels, plan: ImagePlan) -> Pixels:
    """The inverse of the cutting into patches: uint8 of `plan.pixel_shape` -> [N, 3, H, W], the pieces as a person would look at them."""
    if not plan.packed:
        return pixels
    rows, columns, side = *plan.grid, plan.cell
    joined = pixels.reshape(plan.pieces, rows, columns, 3, side, side).transpose(0, 3, 1, 4, 2, 5)
    return np.ascontiguousarray(joined).reshape(plan.pieces, 3, rows * side, columns * side)
