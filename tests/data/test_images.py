from __future__ import annotations

import io
import itertools
import struct
import warnings
import zlib
from typing import Any

import numpy as np
import pytest
from PIL import ExifTags, Image, ImageFile, features

from mmds.data.images import MAX_SOURCE_PIXELS, load_image, probe
from mmds.errors import DataError

LOSSLESS = ("PNG", "TIFF", "WEBP", "BMP", "PPM", "GIF")


def _bytes(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def _pixels(data: bytes) -> np.ndarray:
    """[H, W, 3] at the source's own upright size: resizing to the same size changes nothing."""
    width, height = probe(data)
    pixels = load_image(data, height=height, width=width)
    assert pixels.dtype == np.uint8
    assert pixels.shape == (3, height, width)
    assert pixels.flags.c_contiguous
    return pixels.transpose(1, 2, 0)


def _chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def _png(
    width: int, height: int, depth: int, colour: int, rows: bytes, extra: bytes = b"", late: bytes = b""
) -> bytes:
    """A PNG by hand. rows: raw scan lines with their filter bytes; extra / late: chunks before / after the
    pixels.
    """
    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    pixels = _chunk(b"IDAT", zlib.compress(rows))
    return b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", header) + extra + pixels + late + _chunk(b"IEND", b"")


# Modes: each case is bytes and the RGB triples expected of its one row of pixels.


def _one(mode: str, *values: Any) -> Image.Image:
    image = Image.new(mode, (len(values), 1))
    for x, value in enumerate(values):
        image.putpixel((x, 0), value)
    return image


def _palette(*indices: int, alpha: bytes | int | None = None, kind: str = "PNG") -> bytes:
    image = Image.new("P", (len(indices), 1))
    image.putpalette([255, 0, 0, 0, 255, 0, 0, 0, 255, 10, 20, 30])
    for x, index in enumerate(indices):
        image.putpixel((x, 0), index)
    return _bytes(image, kind, **({} if alpha is None else {"transparency": alpha}))


WHITE = (255, 255, 255)
GREY_16 = np.array([[0, 257, 128 * 257, 65535, 300, 400]], dtype=np.uint16)
GREY_16_RGB = [(v, v, v) for v in (0, 1, 128, 255, 1, 2)]  # round(v / 257)

MODES: dict[str, tuple[bytes, list[tuple[int, int, int]]]] = {
    "1": (_bytes(_one("1", 0, 1)), [(0, 0, 0), WHITE]),
    "L": (_bytes(_one("L", 0, 7, 255)), [(0, 0, 0), (7, 7, 7), WHITE]),
    "LA": (_bytes(_one("LA", (100, 255), (100, 0), (0, 51))), [(100,) * 3, WHITE, (204,) * 3]),
    "P": (_palette(0, 1, 2, 3), [(255, 0, 0), (0, 255, 0), (0, 0, 255), (10, 20, 30)]),
    "P, one index transparent": (_palette(0, 1, 2, alpha=1), [(255, 0, 0), WHITE, (0, 0, 255)]),
    "P, alpha per index": (_palette(0, 1, 2, alpha=b"\xff\x00\x33"), [(255, 0, 0), WHITE, (204, 204, 255)]),
    "P in GIF, transparent": (_palette(0, 1, 2, alpha=0, kind="GIF"), [WHITE, (0, 255, 0), (0, 0, 255)]),
    "RGB": (_bytes(_one("RGB", (1, 2, 3), (250, 128, 0))), [(1, 2, 3), (250, 128, 0)]),
    "RGBA": (
        _bytes(_one("RGBA", (9, 8, 7, 255), (200, 0, 0, 0), (0, 100, 255, 51))),
        [(9, 8, 7), WHITE, (204, 224, 255)],
    ),
    "RGB, one colour transparent": (
        _bytes(_one("RGB", (1, 2, 3), (250, 128, 0)), transparency=(1, 2, 3)),
        [WHITE, (250, 128, 0)],
    ),
    "L, one grey transparent": (_bytes(_one("L", 5, 6), transparency=6), [(5, 5, 5), WHITE]),
    "1, white black transparent": (_bytes(_one("1", 0, 1), transparency=0), [WHITE, WHITE]),
    "L of 4 bits, transparent": (
        _png(2, 1, 4, 0, b"\0\x0f", _chunk(b"tRNS", struct.pack(">H", 0))),
        [WHITE, WHITE],
    ),
    "L of 2 bits, transparent": (
        _png(4, 1, 2, 0, b"\0\x1b", _chunk(b"tRNS", struct.pack(">H", 2))),
        [(0, 0, 0), (85, 85, 85), WHITE, WHITE],
    ),
    "CMYK": (
        _bytes(_one("CMYK", (0, 0, 0, 0), (255, 0, 0, 0), (0, 0, 0, 255)), "TIFF"),
        [WHITE, (0, 255, 255), (0, 0, 0)],
    ),
    "I;16 in PNG": (_bytes(Image.fromarray(GREY_16)), GREY_16_RGB),
    "I;16 in TIFF": (_bytes(Image.fromarray(GREY_16), "TIFF"), GREY_16_RGB),
    "I;16 in PPM": (_bytes(Image.fromarray(GREY_16), "PPM"), GREY_16_RGB),
    "I;16 big-endian TIFF": (_bytes(Image.fromarray(GREY_16.astype(">u2")), "TIFF"), GREY_16_RGB),
    "I;16, one grey transparent": (
        _png(2, 1, 16, 0, b"\0" + struct.pack(">HH", 257, 514), _chunk(b"tRNS", struct.pack(">H", 514))),
        [(1, 1, 1), WHITE],
    ),
    "RGB of 16 bits": (
        _png(2, 1, 16, 2, b"\0" + struct.pack(">6H", 257, 514, 65535, 0, 32896, 771)),
        [(1, 2, 255), (0, 128, 3)],
    ),
    "LA of 16 bits": (_png(1, 1, 16, 4, b"\0" + struct.pack(">2H", 65535, 0)), [WHITE]),
}


@pytest.mark.parametrize("case", MODES)
def test_every_mode_becomes_the_right_rgb_on_white(case: str) -> None:
    data, expected = MODES[case]
    assert [tuple(pixel) for pixel in _pixels(data)[0].tolist()] == expected


def test_the_table_of_modes_really_opens_in_those_modes() -> None:
    """Guards the table above: a writer that converts would make its cases empty."""
    for case, (data, _) in MODES.items():
        mode = case.split()[0].rstrip(",")
        opened = Image.open(io.BytesIO(data)).mode
        if mode == "I;16":
            assert opened in ("I;16", "I;16B", "I")
        elif case == "LA of 16 bits":
            assert opened == "RGBA"
        else:
            assert opened == mode, case


@pytest.mark.parametrize("kind", LOSSLESS)
def test_lossless_formats_give_their_pixels(kind: str) -> None:
    image = Image.fromarray(np.arange(4 * 5 * 3, dtype=np.uint8).reshape(4, 5, 3) * 4)
    options = {"lossless": True} if kind == "WEBP" else {}
    assert np.array_equal(_pixels(_bytes(image, kind, **options)), np.asarray(image))


def test_a_cmyk_jpeg_and_a_ycbcr_jpeg_have_the_right_colours() -> None:
    for mode, colour, expected in (
        ("CMYK", (0, 255, 255, 0), (255, 0, 0)),
        ("RGB", (0, 0, 255), (0, 0, 255)),
        ("YCbCr", (76, 85, 255), (255, 0, 0)),
        ("L", 77, (77, 77, 77)),
    ):
        data = _bytes(Image.new(mode, (16, 16), colour), "JPEG", quality=95)
        assert np.abs(_pixels(data).astype(int) - np.array(expected)).max() <= 3


def test_ycbcr_stored_as_such_is_converted() -> None:
    data = _bytes(Image.new("YCbCr", (4, 4), (150, 44, 21)), "TIFF")
    assert Image.open(io.BytesIO(data)).mode == "YCbCr"
    assert np.abs(_pixels(data)[0, 0].astype(int) - np.array((0, 255, 1))).max() <= 3


def test_a_palette_with_an_alpha_band_is_put_on_white() -> None:
    image = Image.new("PA", (2, 1))
    image.putpalette([255, 0, 0, 0, 0, 255])
    image.putpixel((0, 0), (1, 255))
    image.putpixel((1, 0), (0, 0))
    data = _bytes(image, "TIFF")
    assert Image.open(io.BytesIO(data)).mode == "PA"
    assert _pixels(data)[0].tolist() == [[0, 0, 255], [255, 255, 255]]


@pytest.mark.parametrize(
    "image",
    [
        Image.fromarray(np.array([[0, 1000, 70000]], dtype=np.int32)),
        Image.fromarray(np.array([[0.0, 0.5, 1.0]], dtype=np.float32)),
    ],
)
def test_values_without_a_defined_range_are_refused(image: Image.Image) -> None:
    data = _bytes(image, "TIFF")
    assert Image.open(io.BytesIO(data)).mode in ("I", "F")
    assert probe(data) == (3, 1)
    with pytest.raises(DataError, match="no defined range"):
        load_image(data, height=1, width=3)


def test_16_bit_colour_with_a_transparent_colour_is_refused_not_guessed() -> None:
    key = _chunk(b"tRNS", struct.pack(">3H", 257, 514, 771))
    data = _png(1, 1, 16, 2, b"\0" + struct.pack(">3H", 257, 514, 771), key)
    with pytest.raises(DataError, match="16-bit colour"):
        load_image(data, height=1, width=1)


def test_a_16_bit_tiff_where_zero_is_white_is_inverted() -> None:
    data = bytearray(_bytes(Image.fromarray(np.array([[0, 65535]], np.uint16)), "TIFF"))
    entry = data.index(struct.pack("<HHI", 262, 3, 1))
    data[entry + 8 : entry + 10] = struct.pack("<H", 0)
    assert _pixels(bytes(data))[0].tolist() == [[255] * 3, [0] * 3]


def test_a_noise_image_is_not_washed_out_by_16_bits() -> None:
    values = np.random.default_rng(0).integers(0, 65536, size=(8, 8), dtype=np.uint16)
    expected = np.rint(values / 257).astype(np.uint8)
    assert np.array_equal(_pixels(_bytes(Image.fromarray(values)))[:, :, 1], expected)


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG", "TIFF"])
def test_of_several_frames_the_first_is_taken(kind: str) -> None:
    frames = [Image.new("RGB", (6, 4), colour) for colour in ((255, 0, 0), (0, 255, 0), (0, 0, 255))]
    options = {"lossless": True} if kind == "WEBP" else {}
    data = _bytes(frames[0], kind, save_all=True, append_images=frames[1:], **options)
    assert getattr(Image.open(io.BytesIO(data)), "n_frames", 1) == 3
    assert np.unique(_pixels(data).reshape(-1, 3), axis=0).tolist() == [[255, 0, 0]]


# Orientation


def _upright(pixels: np.ndarray, orientation: int) -> np.ndarray:
    """EXIF 2.3, tag 274, written out: what each stored [H, W, 3] shows when upright."""
    turned = {
        1: pixels,
        2: pixels[:, ::-1],
        3: pixels[::-1, ::-1],
        4: pixels[::-1],
        5: pixels.transpose(1, 0, 2),
        6: pixels.transpose(1, 0, 2)[:, ::-1],
        7: pixels.transpose(1, 0, 2)[::-1, ::-1],
        8: pixels.transpose(1, 0, 2)[::-1],
    }
    return turned[orientation]


def _exif(orientation: int) -> Image.Exif:
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    return exif


NEARLY_EXACT: dict[str, dict[str, Any]] = {
    "JPEG": {"quality": 100, "subsampling": 0},
    "WEBP": {"lossless": True},
}

STORED = np.zeros((16, 32, 3), dtype=np.uint8)
STORED[:8, :8] = (255, 0, 0)
STORED[:8, 8:] = (0, 255, 0)
STORED[8:, 24:] = (0, 0, 255)


@pytest.mark.parametrize(
    ("kind", "orientation"), list(itertools.product(["JPEG", "PNG", "WEBP", "TIFF"], range(1, 9)))
)
def test_every_orientation_is_turned_upright_in_pixels_and_in_the_probed_size(
    kind: str, orientation: int
) -> None:
    options = NEARLY_EXACT.get(kind, {})
    data = _bytes(Image.fromarray(STORED), kind, exif=_exif(orientation), **options)
    expected = _upright(STORED, orientation)
    assert probe(data) == (expected.shape[1], expected.shape[0])
    assert np.abs(_pixels(data).astype(int) - expected.astype(int)).max() <= (3 if kind == "JPEG" else 0)


@pytest.mark.skipif(not features.check("avif"), reason="this Pillow has no AVIF")
def test_orientation_in_avif() -> None:
    data = _bytes(Image.fromarray(STORED), "AVIF", exif=_exif(6), quality=100, subsampling="4:4:4")
    assert probe(data) == (16, 32)
    assert np.abs(_pixels(data).astype(int) - _upright(STORED, 6).astype(int)).mean() <= 3


def test_orientation_written_after_the_pixels_of_a_png_counts_in_both() -> None:
    rows = b"".join(b"\0" + STORED[y].tobytes() for y in range(16))
    exif = _chunk(b"eXIf", _exif(6).tobytes().removeprefix(b"Exif\0\0"))
    for data in (_png(32, 16, 8, 2, rows, extra=exif), _png(32, 16, 8, 2, rows, late=exif)):
        assert probe(data) == (16, 32)
        assert np.array_equal(_pixels(data), _upright(STORED, 6))


@pytest.mark.parametrize("orientation", [0, 9, 65535])
def test_orientations_that_do_not_exist_are_ignored(orientation: int) -> None:
    data = _bytes(Image.fromarray(STORED), exif=_exif(orientation))
    assert np.array_equal(_pixels(data), STORED)


@pytest.mark.filterwarnings("ignore:Corrupt EXIF data")
def test_broken_exif_is_ignored() -> None:
    data = _bytes(Image.fromarray(STORED), "JPEG", exif=b"Exif\0\0II*\0\x08\0\0\0\xff\xff junk", quality=100)
    assert probe(data) == (32, 16)
    assert _pixels(data).shape == (16, 32, 3)


# Broken and hostile files


def _photo(size: int = 64) -> Image.Image:
    noise = np.random.default_rng(1).integers(0, 256, size=(size, size, 3), dtype=np.uint8)
    return Image.fromarray(noise)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("JPEG", {}),
        ("JPEG", {"progressive": True}),
        ("PNG", {}),
        ("WEBP", {}),
        ("GIF", {}),
        ("TIFF", {}),
        ("TIFF", {"compression": "tiff_lzw"}),
        ("BMP", {}),
        ("PPM", {}),
    ],
)
@pytest.mark.parametrize("kept", [0.5, 0.9])
@pytest.mark.filterwarnings("ignore:Corrupt EXIF data")
def test_a_file_cut_short_is_refused(kind: str, options: dict[str, Any], kept: float) -> None:
    data = _bytes(_photo(), kind, **options)
    assert load_image(data, height=8, width=8).shape == (3, 8, 8)
    with pytest.raises(DataError):
        load_image(data[: int(len(data) * kept)], height=8, width=8)


def test_a_truncated_jpeg_still_probes_from_its_header() -> None:
    data = _bytes(_photo(), "JPEG")
    assert probe(data[: len(data) // 2]) == (64, 64)


def test_the_switch_that_hides_truncation_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    data = _bytes(_photo(), "JPEG")
    assert ImageFile.LOAD_TRUNCATED_IMAGES is False
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    with pytest.raises(DataError, match="LOAD_TRUNCATED_IMAGES"):
        load_image(data[: len(data) // 2], height=8, width=8)


@pytest.mark.parametrize(
    "data", [b"", b"\xff\xd8\xff", b"<html>not found</html>", b"\x89PNG\r\n\x1a\n", b"\0" * 100]
)
def test_what_is_no_image_is_refused(data: bytes) -> None:
    for read in (lambda: probe(data), lambda: load_image(data, height=4, width=4)):
        with pytest.raises(DataError):
            read()


def test_formats_that_start_other_programs_are_not_opened() -> None:
    data = _bytes(_photo(8), "EPS")
    with pytest.raises(DataError, match="known type"):
        load_image(data, height=4, width=4)


def _refuse(*_: object) -> None:
    raise AssertionError("decoded")


def _bomb(width: int, height: int) -> bytes:
    """A PNG of black pixels that is small as a file; compressed piecewise to keep the test small."""
    packer = zlib.compressobj(9)
    line = b"\0" + b"\0" * ((width + 7) // 8)
    packed = b"".join(packer.compress(line) for _ in range(height)) + packer.flush()
    header = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", header) + _chunk(b"IDAT", packed) + _chunk(b"IEND", b"")


@pytest.mark.parametrize(("width", "height"), [(10_000, 10_000), (20_000, 20_000)])
@pytest.mark.parametrize("filters", ["default", "error"])
@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_decompression_bombs_are_refused_from_the_header(
    width: int, height: int, filters: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = _bomb(width, height)
    assert len(data) < 50_000
    monkeypatch.setattr(ImageFile.ImageFile, "load", _refuse)
    before = Image.MAX_IMAGE_PIXELS
    with warnings.catch_warnings():
        if filters == "error":
            warnings.simplefilter("error")
        for read in (lambda: probe(data), lambda: load_image(data, height=4, width=4)):
            with pytest.raises(DataError, match=r"more than the limit|DecompressionBomb"):
                read()
    assert before == Image.MAX_IMAGE_PIXELS


def test_the_limit_is_on_pixels_and_can_be_set() -> None:
    data = _bytes(Image.new("L", (300, 10)))
    assert probe(data, max_pixels=3000) == (300, 10)
    with pytest.raises(DataError, match="300 x 10 pixels are more than the limit of 2999"):
        probe(data, max_pixels=2999)
    with pytest.raises(DataError, match="limit"):
        load_image(data, height=4, width=4, max_pixels=2999)
    assert MAX_SOURCE_PIXELS == 64_000_000


# Sizes


@pytest.mark.parametrize(("width", "height"), [(1, 1), (1, 1000), (1000, 1), (3, 5), (4, 3), (2, 10_000)])
@pytest.mark.parametrize("mode", ["L", "RGB", "RGBA"])
def test_odd_sizes_get_the_planned_shape(width: int, height: int, mode: str) -> None:
    data = _bytes(Image.new(mode, (width, height), 200 if mode == "L" else (200,) * len(mode)))
    assert probe(data) == (width, height)
    pixels = load_image(data, height=28, width=14)
    assert pixels.shape == (3, 28, 14)
    assert pixels.min() >= 200


@pytest.mark.parametrize(
    ("width", "height"), [(1, 1), (3, 1), (1, 3), (3, 3), (4, 3), (3, 4), (3, 5), (1, 1000)]
)
def test_sides_as_short_as_the_channels_are_no_channels(width: int, height: int) -> None:
    values = np.arange(height * width * 3).reshape(height, width, 3) % 251
    assert np.array_equal(_pixels(_bytes(Image.fromarray(values.astype(np.uint8)))), values)


def test_height_and_width_are_not_swapped() -> None:
    left_red = np.zeros((20, 40, 3), np.uint8)
    left_red[:, :20, 0] = 255
    pixels = load_image(_bytes(Image.fromarray(left_red)), height=10, width=20)
    assert pixels.shape == (3, 10, 20)
    assert (pixels[0, :, :8] == 255).all()
    assert (pixels[0, :, 12:] == 0).all()


def test_shrinking_is_antialiased() -> None:
    stripes = np.zeros((64, 64, 3), np.uint8)
    stripes[:, ::2] = 255
    pixels = load_image(_bytes(Image.fromarray(stripes)), height=8, width=8)
    assert np.abs(pixels.astype(int) - 127).max() <= 8  # picking pixels would give 0 or 255


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic", "lanczos"])
@pytest.mark.parametrize(("width", "height"), [(17, 23), (80, 91), (40, 7), (1, 1), (40, 40)])
def test_resizing_is_pillow_s_within_a_rounding(interpolation: str, width: int, height: int) -> None:
    image = _photo(40)
    expected = np.asarray(image.resize((width, height), Image.Resampling[interpolation.upper()]))
    pixels = load_image(_bytes(image), height=height, width=width, interpolation=interpolation)
    assert np.abs(pixels.transpose(1, 2, 0).astype(int) - expected).max() <= 1


def test_an_unknown_interpolation_is_refused() -> None:
    with pytest.raises(DataError, match="known are bilinear, bicubic, lanczos"):
        load_image(_bytes(_photo(8)), height=4, width=4, interpolation="random")


def test_hidden_colours_do_not_bleed_at_the_edge_of_transparency() -> None:
    half = np.zeros((32, 32, 4), np.uint8)
    half[:, :16] = (0, 0, 0, 0)  # hidden black
    half[:, 16:] = (255, 255, 255, 255)
    assert load_image(_bytes(Image.fromarray(half)), height=8, width=8).min() == 255


def test_probing_decodes_no_pixels(monkeypatch: pytest.MonkeyPatch) -> None:
    files = [_bytes(_photo(), kind) for kind in ("JPEG", "PNG", "WEBP", "GIF", "TIFF", "BMP", "PPM")]
    monkeypatch.setattr(ImageFile.ImageFile, "load", _refuse)
    assert [probe(data) for data in files] == [(64, 64)] * len(files)
