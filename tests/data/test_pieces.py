"""The pixels of each resolution mode, against transformers' LLaVA-NeXT processor and Pillow on pictures with structure."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
import torch
from PIL import ExifTags, Image
from transformers.models.llava_next.image_processing_llava_next import LlavaNextImageProcessor

from mmds.data import images as images_module
from mmds.data.images import load_image, load_sizes, probe
from mmds.data.pieces import load_pieces, patches_of, pieces_of, tiles_of
from mmds.errors import DataError
from mmds.geometry import Geometry

GRIDS = ((1, 2), (2, 1), (2, 2), (3, 1), (1, 3))
ANYRES = Geometry(mode="anyres", image_size=56, patch_size=14, grids=GRIDS)
NATIVE = Geometry(
    mode="native", image_size=0, patch_size=14, merge=2, min_pixels=784, max_pixels=150_000, packed=True
)


def photo(width: int, height: int, seed: int = 0) -> Image.Image:
    """A smooth picture with edges, all channels different; nothing in it is symmetric."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[0:height, 0:width]
    waves = [np.sin(x / a + y / b + c) for a, b, c in rng.uniform(7, 40, (3, 3))]
    pixels = 127 + 90 * np.stack(waves, axis=-1)
    pixels[: height // 3, : width // 4] = (250, 30, 60)
    pixels[height // 2 :, width // 2 :, 1] = 20
    return Image.fromarray(pixels.clip(1, 255).astype(np.uint8))  # no black, which is the colour of padding


def png(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def jpeg(image: Image.Image, orientation: int = 1) -> bytes:
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=95, exif=exif, subsampling=0)
    return buffer.getvalue()


def loaded(data: bytes, geometry: Geometry) -> np.ndarray:
    plan = geometry.plan(*probe(data))
    pixels = load_pieces(data, plan, geometry)
    assert pixels.dtype == np.uint8 and pixels.shape == plan.pixel_shape and pixels.flags.c_contiguous
    return pixels


def apart(ours: np.ndarray, theirs: Any) -> int:
    """Largest difference in grey levels."""
    theirs = np.asarray(theirs)
    assert ours.shape == theirs.shape
    return int(np.abs(ours.astype(int) - theirs.astype(int)).max())


SIZES = [
    (300, 200),
    (200, 300),
    (640, 480),
    (57, 56),
    (500, 90),
    (90, 500),
    (56, 112),
    (13, 29),
    (700, 61),
    (3, 200),
]


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_overview_and_tiles_are_those_of_llava_nexts_processor(width: int, height: int) -> None:
    picture = photo(width, height)
    side = ANYRES.image_size
    processor = LlavaNextImageProcessor(
        size={"shortest_edge": side},
        crop_size={"height": side, "width": side},
        image_grid_pinpoints=[[rows * side, columns * side] for rows, columns in GRIDS],
        do_rescale=False,
        do_normalize=False,
    )
    given = torch.from_numpy(np.asarray(picture).transpose(2, 0, 1).copy())
    theirs = processor(given, return_tensors="pt")["pixel_values"][0].numpy()
    ours = loaded(png(picture), ANYRES)
    assert apart(ours, theirs) <= 2
    assert np.array_equal(ours.max(1) == 0, theirs.max(1) == 0)  # padding, to the pixel


def test_tiles_are_in_reading_order_and_centred_on_black() -> None:
    numbers = np.arange(1, 7).reshape(2, 3)
    picture = np.broadcast_to(numbers.repeat(4, 0).repeat(4, 1), (3, 8, 12)).astype(np.uint8)
    assert tiles_of(picture, (2, 3), 4)[:, 0].min((1, 2)).tolist() == [1, 2, 3, 4, 5, 6]
    centred = tiles_of(
        np.full((3, 8, 5), 9, np.uint8), (1, 2), 8
    )  # 11 columns are left over: 5 before, 6 after
    assert centred[0, 0, 0].tolist() == [0] * 5 + [9] * 3
    assert centred[1, 2, 7].tolist() == [9] * 2 + [0] * 6


def expand2square(image: Image.Image, colour: tuple[int, int, int]) -> Image.Image:
    """LLaVA-1.5's padding (llava/mm_utils.py)."""
    width, height = image.size
    side = max(width, height)
    square = Image.new("RGB", (side, side), colour)
    square.paste(image, ((side - width) // 2, (side - height) // 2))
    return square


@pytest.mark.parametrize(("width", "height"), [*SIZES, (101, 100), (100, 101), (64, 64)])
def test_padding_to_a_square_is_that_of_llava_1_5(width: int, height: int) -> None:
    colour = (122, 116, 104)
    geometry = Geometry(mode="fixed", image_size=56, patch_size=14, pad=True, fill=colour)
    picture = photo(width, height)
    expected = expand2square(picture, colour).resize((56, 56), Image.Resampling.BICUBIC)
    assert apart(loaded(png(picture), geometry)[0], np.asarray(expected).transpose(2, 0, 1)) <= 2


@pytest.mark.parametrize(("width", "height"), [(211, 100), (100, 211), (90, 90), (1500, 1111), (667, 1001)])
def test_padding_is_that_of_the_upright_picture_also_of_a_jpeg_on_its_side(width: int, height: int) -> None:
    colour = (122, 116, 104)
    geometry = Geometry(mode="fixed", image_size=56, patch_size=14, pad=True, fill=colour)
    for orientation in range(1, 9):
        data = jpeg(photo(width, height), orientation)
        upright = upright_by_pillow(data)
        expected = expand2square(upright, colour).resize((56, 56), Image.Resampling.BICUBIC)
        assert apart(loaded(data, geometry)[0], np.asarray(expected).transpose(2, 0, 1)) <= 3


def upright_by_pillow(data: bytes) -> Image.Image:
    from PIL import ImageOps

    return ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB")


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_native_pixels_are_pillows_bicubic_at_the_planned_size_cut_into_patches(
    width: int, height: int
) -> None:
    picture = photo(width, height)
    plan = NATIVE.plan(width, height)
    pixels = loaded(png(picture), NATIVE)
    resized = np.asarray(picture.resize((plan.width, plan.height), Image.Resampling.BICUBIC))
    number = 0
    for top in range(0, plan.height, 14):
        for left in range(0, plan.width, 14):
            expected = resized[top : top + 14, left : left + 14].transpose(2, 0, 1)
            assert apart(pixels[number], expected) <= 2, (top, left)
            number += 1
    assert number == plan.patches == len(pixels)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("geometry", [ANYRES, NATIVE], ids=["anyres", "native"])
def test_width_and_height_are_never_swapped(geometry: Geometry, orientation: int) -> None:
    """TRAPS B10, B12: a JPEG that EXIF turns is planned, resized and cut as the upright picture would be."""
    data = jpeg(photo(260, 140), orientation)
    upright = upright_by_pillow(data)
    assert upright.size == ((140, 260) if orientation >= 5 else (260, 140)) == probe(data)
    expected = loaded(png(upright), geometry)
    pixels = loaded(data, geometry)
    # Decoders differ by a rounding or two; a picture on its side differs by its contrast.
    assert apart(pixels, expected) <= 6
    assert np.abs(pixels.astype(int) - expected).mean() < 1
    wide = geometry.plan(260, 140), geometry.plan(140, 260)
    assert wide[0].tiles == (wide[1].tiles[::-1] if wide[1].tiles else None)
    assert (wide[0].height, wide[0].width) == (wide[1].width, wide[1].height)


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (2, 3), (5, 2), (1, 7)])
def test_patches_are_cut_in_reading_order_and_joined_again(rows: int, columns: int) -> None:
    plan = NATIVE.plan(28 * columns, 28 * rows)
    assert plan.grid == (2 * rows, 2 * columns)
    pieces = np.random.default_rng(rows).integers(0, 256, (1, 3, 28 * rows, 28 * columns)).astype(np.uint8)
    patches = patches_of(pieces, 14)
    assert patches.shape == plan.pixel_shape
    assert np.array_equal(patches[2 * columns], pieces[0, :, 14:28, :14])  # the first of the second row
    assert np.array_equal(pieces_of(patches, plan), pieces)


def test_pieces_of_tiles_are_joined_one_by_one() -> None:
    packed = Geometry(mode="anyres", image_size=56, patch_size=14, grids=GRIDS, packed=True)
    data = png(photo(300, 140))
    plan, plain = packed.plan(300, 140), ANYRES.plan(300, 140)
    whole = load_pieces(data, plain, ANYRES)
    cut = load_pieces(data, plan, packed)
    assert cut.shape == (plan.patches, 3, 14, 14) == (16 * len(whole), 3, 14, 14)
    assert np.array_equal(pieces_of(cut, plan), whole)
    assert pieces_of(whole, plain) is whole


def test_one_decoding_serves_the_overview_and_the_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, int]] = []
    decode = images_module._decode

    def counted(image: Any, data: bytes, *, height: int, width: int) -> Any:
        calls.append((height, width))
        return decode(image, data, height=height, width=width)

    monkeypatch.setattr(images_module, "_decode", counted)
    data = jpeg(photo(900, 400))
    pixels = loaded(data, ANYRES)
    plan = ANYRES.plan(900, 400)
    assert plan.pieces > 1
    assert calls == [(max(plan.height, 56), max(plan.width, 56))]
    both = load_sizes(data, [(56, 56), (plan.height, plan.width)])
    assert np.array_equal(both[0], pixels[0])
    assert np.array_equal(tiles_of(both[1], plan.tiles or (0, 0), 56), pixels[1:])
    assert (
        apart(both[0], load_image(data, height=56, width=56)) <= 6
    )  # that one may decode at a smaller scale


def test_broken_bytes_are_a_data_error_in_every_mode() -> None:
    data = jpeg(photo(300, 200))
    for geometry in (ANYRES, NATIVE, Geometry(mode="fixed", image_size=56, patch_size=14, pad=True)):
        with pytest.raises(DataError, match="cannot be decoded|content"):
            load_pieces(data[: len(data) // 2], geometry.plan(300, 200), geometry)


@pytest.mark.parametrize("size", [(1, 1), (1, 1000), (1000, 1), (3, 5)])
@pytest.mark.parametrize("geometry", [ANYRES, NATIVE], ids=["anyres", "native"])
def test_the_smallest_and_thinnest_pictures_have_the_planned_shape(
    geometry: Geometry, size: tuple[int, int]
) -> None:
    """TRAPS B11: one colour stays that colour wherever there is no padding."""
    pixels = loaded(png(Image.new("RGB", size, (9, 120, 251))), geometry)
    colours = {tuple(colour) for colour in pixels.transpose(0, 2, 3, 1).reshape(-1, 3).tolist()}
    assert colours in ({(9, 120, 251)}, {(9, 120, 251), (0, 0, 0)})
