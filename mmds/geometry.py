"""Image size -> resized size -> patches -> visual tokens, as integer functions.

The single source of these numbers: preparation, planner, collator, encoder and evaluation all call it, so a planned patch
is an encoded patch. Three modes:

fixed   every image becomes one square (LLaVA-1.5).
anyres  a square overview, then the best grid of square tiles, unpadded, a separator after each row (LLaVA-NeXT).
native  sides rounded to the patch grid with the aspect kept, between a least and a largest number of pixels (Qwen2-VL).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from mmds.errors import ConfigError, DataError

Grid = tuple[int, int]
"""Rows and columns."""

MAX_RATIO = 200
"""Longest side over shortest side in `native` mode; a longer image is squeezed to it."""

NATIVE_PIXELS = 1280 * 28 * 28
"""Most pixels of one image in `native` mode when nothing else says so."""


@dataclass(frozen=True, kw_only=True)
class ImagePlan:
    """What one image becomes.

    height, width: pixels that the picture is resized to (in `anyres` on the tiles; the overview is a square of the input size).
    patches: of all its pieces. visual_tokens: what the decoder receives, separators included. grid: patches of one piece, rows x columns.
    pieces: encoder inputs of this grid. tiles: grid of tiles in `anyres`, else None. kept: token rows and columns of the joined
    tiles that show picture (top, left, rows, columns). tokens: visual tokens of one piece as rows x columns; None when they have no
    such order. cell: pixels a side of a patch. packed: pixels are handed over as patches, not as whole pieces.
    """

    height: int
    width: int
    patches: int
    visual_tokens: int
    grid: Grid = (1, 1)
    pieces: int = 1
    tiles: Grid | None = None
    kept: tuple[int, int, int, int] | None = None
    tokens: Grid | None = None
    cell: int = 1
    packed: bool = False

    @property
    def pixel_shape(self) -> tuple[int, int, int, int]:
        """Shape of its uint8 pixels: [patches, 3, p, p] where packed, else [pieces, 3, H, W]."""
        if self.packed:
            return (self.patches, 3, self.cell, self.cell)
        return (self.pieces, 3, self.grid[0] * self.cell, self.grid[1] * self.cell)


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """How a model turns an image of any size into patches, visual tokens and positions.

    mode: `fixed`, `anyres` or `native`. image_size: pixels a side of a square encoder input (unused in `native`). patch_size: pixels a
    side of one patch. merge: neighbouring patches that the connector joins per side (1 = none, 2 = 2x2). queries: visual tokens that
    the connector makes of every encoder input, whatever its size (0 = as many as merged patches). pad: in `fixed`, pad to a square
    instead of distorting. grids: in `anyres`, tile grids to choose from, in the order in which equal ones are preferred.
    min_pixels, max_pixels: in `native`, of one resized image. packed: pixels travel as patches (the encoder runs all images
    in one packed call). positions: `1d`, or `mrope` (time, row, column). interpolation: of every resize. fill: RGB of padding.
    """

    mode: str
    image_size: int
    patch_size: int
    merge: int = 1
    queries: int = 0
    pad: bool = False
    grids: tuple[Grid, ...] = ()
    min_pixels: int = 0
    max_pixels: int = NATIVE_PIXELS
    packed: bool = False
    positions: str = "1d"
    interpolation: str = "bicubic"
    fill: tuple[int, int, int] = (0, 0, 0)

    def __post_init__(self) -> None:
        if self.mode not in ("fixed", "anyres", "native"):
            raise ConfigError(f"mmds.model.resolution: {self.mode!r} is none of fixed, anyres, native")
        if self.positions == "mrope" and (self.mode == "anyres" or self.queries):
            raise ConfigError(
                "mmds.model.positions: mrope gives every visual token a row and a column of its image, which tiles and the resampler "
                'do not keep; use "1d", or resolution fixed or native with another connector'
            )
        if self.mode == "native":
            self._check_native()
            return
        if self.image_size % self.patch_size:
            raise ConfigError(
                f"the encoder's image size {self.image_size} is not a multiple of its patch size {self.patch_size}: "
                "pixels at the border would be lost; choose a size on the patch grid"
            )
        if self.side % self.merge:
            raise ConfigError(
                f"mmds.model.connector: merging {self.merge}x{self.merge} patches needs a grid side that is a multiple of "
                f"{self.merge}, but {self.image_size} px / {self.patch_size} px = {self.side}; use 'mlp2x' or another image size"
            )
        if self.mode == "anyres":
            self._check_tiles()

    @property
    def side(self) -> int:
        """Patches a side of a square encoder input."""
        return self.image_size // self.patch_size

    @property
    def factor(self) -> int:
        """Pixels a side of what becomes one visual token; sides are multiples of it in `native`."""
        return self.patch_size * self.merge

    def plan(self, width: int, height: int) -> ImagePlan:
        """What an upright image of `width` x `height` pixels becomes. Raises DataError for an empty size."""
        if width < 1 or height < 1:
            raise DataError(f"an image of {width} x {height} pixels has no content")
        return _plan(self, width, height)

    @property
    def dummy(self) -> ImagePlan:
        """The smallest encoder input, for a rank that has no image in a micro-step."""
        if self.mode == "native":
            return self._piece(self.factor, self.factor)
        return self._piece(self.image_size, self.image_size)

    def _piece(self, height: int, width: int) -> ImagePlan:
        """One encoder input of `height` x `width` pixels, without separators."""
        rows, columns = height // self.patch_size, width // self.patch_size
        tokens = None if self.queries else (rows // self.merge, columns // self.merge)
        return ImagePlan(
            height=height,
            width=width,
            patches=rows * columns,
            visual_tokens=self.queries if tokens is None else tokens[0] * tokens[1],
            grid=(rows, columns),
            tokens=tokens,
            cell=self.patch_size,
            packed=self.packed,
        )

    def _tiled(self, height: int, width: int) -> ImagePlan:
        tiles = best_grid(height, width, self.grids, self.image_size)
        canvas = (tiles[0] * self.image_size, tiles[1] * self.image_size)
        piece = self._piece(self.image_size, self.image_size)
        assert piece.tokens is not None
        kept = unpadded(height, width, tiles[0] * piece.tokens[0], tiles[1] * piece.tokens[1])
        inside = fit_inside(height, width, *canvas)
        pieces = 1 + tiles[0] * tiles[1]
        return ImagePlan(
            height=inside[0],
            width=inside[1],
            patches=pieces * piece.patches,
            visual_tokens=piece.visual_tokens + kept[2] * (kept[3] + 1),
            grid=piece.grid,
            pieces=pieces,
            tiles=tiles,
            kept=kept,
            tokens=piece.tokens,
            cell=self.patch_size,
            packed=self.packed,
        )

    def capped(self, max_pixels: int | None) -> Geometry:
        """The same geometry held to at most `max_pixels` pixels that the encoder receives for one image, tiles included.

        None: no cap (in `native` the one it has). Raises ConfigError where even the smallest image is above it.
        """
        if max_pixels is None:
            return self
        if self.mode == "native":
            return Geometry(**{**vars(self), "max_pixels": max_pixels})
        square = self.image_size**2
        if self.mode == "fixed" and square > max_pixels:
            raise ConfigError(
                f"mmds.data.max_pixels is {max_pixels}, but the encoder's fixed input of {self.image_size} x "
                f"{self.image_size} = {square} pixels is above it; raise max_pixels or choose another encoder"
            )
        if self.mode == "anyres":
            left = tuple(grid for grid in self.grids if (1 + grid[0] * grid[1]) * square <= max_pixels)
            if not left:
                fewest = min(1 + rows * columns for rows, columns in self.grids)
                raise ConfigError(
                    f"mmds.data.max_pixels is {max_pixels}, but the overview and the fewest tiles are {fewest} x {square} = "
                    f"{fewest * square} pixels; raise it, or use resolution fixed"
                )
            return Geometry(**{**vars(self), "grids": left})
        return self

    def to_json(self) -> dict[str, Any]:
        """All that decides what an image becomes, as plain types."""
        return {**vars(self), "grids": [list(grid) for grid in self.grids], "fill": list(self.fill)}

    def _check_native(self) -> None:
        if not self.packed:
            raise ConfigError("native resolution runs as one packed call")
        if self.max_pixels < self.factor**2:
            raise ConfigError(
                f"mmds.data.max_pixels is {self.max_pixels}, but one visual token takes {self.factor} x {self.factor} = "
                f"{self.factor**2} pixels; raise it"
            )
        if self.min_pixels > self.max_pixels:
            raise ConfigError(
                f"mmds.model.resolution.min_pixels is {self.min_pixels}, above the most pixels of one image, {self.max_pixels} "
                "(mmds.data.max_pixels, or the stage's); lower it"
            )

    def _check_tiles(self) -> None:
        if self.queries:
            raise ConfigError(
                "mmds.model.connector: the resampler's tokens have no rows and columns to lay tiles side by side; use 'mlp2x', or "
                "resolution fixed or native"
            )
        if not self.grids:
            raise ConfigError("mmds.model.resolution: anyres needs at least one grid of tiles")


@lru_cache(maxsize=65536)
def _plan(geometry: Geometry, width: int, height: int) -> ImagePlan:
    if geometry.mode == "anyres":
        return geometry._tiled(height, width)
    if geometry.mode == "native":
        size = native_size(
            height,
            width,
            factor=geometry.factor,
            min_pixels=geometry.min_pixels,
            max_pixels=geometry.max_pixels,
        )
        return geometry._piece(*size)
    return geometry._piece(geometry.image_size, geometry.image_size)


def native_size(height: int, width: int, *, factor: int, min_pixels: int, max_pixels: int) -> Grid:
    """Height and width in multiples of `factor`, near the image's own, with min_pixels <= height x width <= max_pixels.

    Qwen2-VL's rule (arXiv 2409.12191, its released image processor), and what it leaves open: an image longer than MAX_RATIO to 1 is
    squeezed to that ratio first; where a side cannot get below `factor`, or rounding up to min_pixels passes max_pixels, the longer
    side gives way until max_pixels holds. max_pixels must be at least factor x factor.
    """
    height, width = min(height, MAX_RATIO * width), min(width, MAX_RATIO * height)
    rows, columns = round(height / factor), round(width / factor)
    if rows * columns * factor**2 > max_pixels:
        beta = math.sqrt((height * width) / max_pixels)
        rows = max(1, math.floor(height / beta / factor))
        columns = max(1, math.floor(width / beta / factor))
    elif rows * columns * factor**2 < min_pixels:
        beta = math.sqrt(min_pixels / (height * width))
        rows, columns = math.ceil(height * beta / factor), math.ceil(width * beta / factor)
    rows, columns = max(1, rows), max(1, columns)
    while rows * columns * factor**2 > max_pixels:
        taller = (rows, width) > (columns, height)  # where equal, the image's own longer side stays
        rows, columns = (rows - 1, columns) if taller else (rows, columns - 1)
    return rows * factor, columns * factor


def best_grid(height: int, width: int, grids: Sequence[Grid], side: int) -> Grid:
    """The grid of tiles that keeps most of the image's pixels, then wastes fewest (LLaVA-NeXT's rule); the first of equals.

    height, width: the image's. side: pixels a side of a tile.
    """
    best, most, least_waste = grids[0], -1, 0
    for rows, columns in grids:
        target_height, target_width = rows * side, columns * side
        scale = min(target_width / width, target_height / height)
        kept = min(int(width * scale) * int(height * scale), width * height)
        waste = target_width * target_height - kept
        if kept > most or (kept == most and waste < least_waste):
            best, most, least_waste = (rows, columns), kept, waste
    return best


def fit_inside(height: int, width: int, target_height: int, target_width: int) -> Grid:
    """The largest size of the image's aspect inside the target, the free side rounded up (LLaVA-NeXT's rule)."""
    scale_width, scale_height = target_width / width, target_height / height
    if scale_width < scale_height:
        return min(math.ceil(height * scale_width), target_height), target_width
    return target_height, min(math.ceil(width * scale_height), target_width)


def unpadded(height: int, width: int, rows: int, columns: int) -> tuple[int, int, int, int]:
    """(top, left, rows, columns) of the part of `rows` x `columns` tokens that shows an image centred on them, not padding.

    LLaVA-NeXT's rule; but at least one row and one column stay, however thin the image is.
    """
    if width / height > columns / rows:
        shown = int(round(height * (columns / width), 7))
        top = min((rows - shown) // 2, (rows - 1) // 2)
        return top, 0, rows - 2 * top, columns
    shown = int(round(width * (rows / height), 7))
    left = min((columns - shown) // 2, (columns - 1) // 2)
    return 0, left, rows, columns - 2 * left


def tile_grids(max_tiles: int) -> tuple[Grid, ...]:
    """Every grid of 2 to max_tiles tiles, by number of tiles, then by rows. Raises ConfigError for fewer than 2."""
    if max_tiles < 2:
        raise ConfigError(
            f"mmds.model.resolution.max_tiles is {max_tiles}: a grid has at least 2 tiles; for none use resolution fixed"
        )
    grids = [
        (rows, total // rows)
        for total in range(2, max_tiles + 1)
        for rows in range(1, total + 1)
        if total % rows == 0
    ]
    return tuple(grids)


@lru_cache(maxsize=4096)
def arrangement(plan: ImagePlan) -> npt.NDArray[np.int64]:
    """int64 [visual tokens]: which token of its pieces stands where; -1 = the separator.

    Tokens of the pieces are numbered piece by piece in reading order. Tiles: the overview first, then the joined tiles row by row,
    without their padding, a separator after each row.
    """
    if plan.tiles is None:
        return np.arange(plan.visual_tokens, dtype=np.int64)
    assert plan.tokens is not None and plan.kept is not None
    (tile_rows, tile_columns), (rows, columns) = plan.tiles, plan.tokens
    piece = rows * columns
    numbers = piece + np.arange(tile_rows * tile_columns * piece, dtype=np.int64)
    apart = numbers.reshape(tile_rows, tile_columns, rows, columns).transpose(0, 2, 1, 3)
    joined = apart.reshape(tile_rows * rows, tile_columns * columns)
    top, left, height, width = plan.kept
    shown = joined[top : top + height, left : left + width]
    separators = np.full((height, 1), -1, dtype=np.int64)
    return np.concatenate([np.arange(piece), np.hstack([shown, separators]).ravel()])
