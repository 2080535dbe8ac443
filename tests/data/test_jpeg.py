"""JPEGs decoded at a fraction of their size: the right fraction, the right way up, near a full decode, never cut."""

from __future__ import annotations

import io
import multiprocessing
from typing import Any

import numpy as np
import pytest
import torch
from PIL import ExifTags, Image

from mmds.data import images, jpeg
from mmds.data.images import load_image, probe
from mmds.errors import DataError

UPRIGHT = {
    1: lambda pixels: pixels,
    2: lambda pixels: pixels[:, ::-1],
    3: lambda pixels: pixels[::-1, ::-1],
    4: lambda pixels: pixels[::-1],
    5: lambda pixels: pixels.transpose(1, 0, 2),
    6: lambda pixels: pixels.transpose(1, 0, 2)[:, ::-1],
    7: lambda pixels: pixels.transpose(1, 0, 2)[::-1, ::-1],
    8: lambda pixels: pixels.transpose(1, 0, 2)[::-1],
}
"""EXIF 2.3, tag 274, written out: what each stored [H, W, 3] shows when upright."""


def _scene(width: int, height: int) -> Image.Image:
    """Smooth shapes and a little grain, different in every corner."""
    random = np.random.default_rng(3)
    coarse = random.integers(30, 226, (6, 8, 3), dtype=np.uint8)
    smooth = Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)
    grain = random.normal(0, 2, (height, width, 1))
    return Image.fromarray(np.clip(np.asarray(smooth) + grain, 0, 255).astype(np.uint8))


def _jpeg(image: Image.Image, orientation: int = 1, kind: str = "JPEG", **options: Any) -> bytes:
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    buffer = io.BytesIO()
    image.save(buffer, kind, exif=exif, quality=92, **options)
    return buffer.getvalue()


def _whole(data: bytes, height: int, width: int, orientation: int = 1) -> np.ndarray:
    """[height, width, 3] by Pillow alone: everything decoded, turned upright, resized."""
    pixels = np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))
    upright = Image.fromarray(np.ascontiguousarray(UPRIGHT[orientation](pixels)))
    return np.asarray(upright.resize((width, height), Image.Resampling.BICUBIC))


def _psnr(got: np.ndarray, wanted: np.ndarray) -> float:
    error = np.square(got.transpose(1, 2, 0).astype(float) - wanted).mean()
    return float(10 * np.log10(255**2 / max(error, 1e-9)))


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """(width, height) of everything that was decoded, before the resize."""
    sizes: list[tuple[int, int]] = []
    true_resize = images.resize

    def resize(pixels: np.ndarray, *rest: Any, **options: Any) -> np.ndarray:
        sizes.append((pixels.shape[1], pixels.shape[0]))
        return true_resize(pixels, *rest, **options)

    monkeypatch.setattr(images, "resize", resize)
    return sizes


@pytest.mark.parametrize(
    ("height", "width", "size"),
    [
        (50, 60, (100, 75)),  # 1/8: 75 = 1.5 x 50 and 100 >= 90
        (51, 60, (200, 150)),  # 75 < 1.5 x 51
        (50, 67, (200, 150)),  # 100 < 1.5 x 67
        (100, 100, (200, 150)),
        (101, 100, (400, 300)),
        (10, 200, (400, 300)),
        (200, 266, (400, 300)),
        (201, 200, (800, 600)),
        (600, 800, (800, 600)),
        (900, 900, (800, 600)),
    ],
)
def test_the_smallest_scale_that_leaves_one_and_a_half_times_the_planned_size(
    height: int, width: int, size: tuple[int, int], decoded: list[tuple[int, int]]
) -> None:
    data = _jpeg(_scene(800, 600))
    assert load_image(data, height=height, width=width).shape == (3, height, width)
    assert decoded == [size]


@pytest.mark.parametrize("orientation", UPRIGHT)
def test_scaling_keeps_every_orientation_and_takes_the_sides_as_stored(
    orientation: int, decoded: list[tuple[int, int]]
) -> None:
    data = _jpeg(_scene(640, 320), orientation)
    lying = orientation < 5
    width, height = (200, 100) if lying else (100, 200)
    assert probe(data) == ((640, 320) if lying else (320, 640))
    got = load_image(data, height=height, width=width)
    assert decoded == [(320, 160)]
    assert _psnr(got, _whole(data, height, width, orientation)) >= 50


@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"subsampling": 0}], ids=str)
def test_every_kind_of_jpeg_is_near_a_full_decode(mode: str, options: dict[str, Any]) -> None:
    data = _jpeg(_scene(800, 600).convert(mode), **options)
    assert Image.open(io.BytesIO(data)).mode == mode
    for side in (40, 90, 180, 500, 900):
        assert _psnr(load_image(data, height=side, width=side), _whole(data, side, side)) >= 50


@pytest.mark.parametrize(("width", "height"), [(801, 607), (807, 601), (795, 639), (800, 603), (803, 600)])
def test_sides_that_the_scale_does_not_divide_are_not_shifted(width: int, height: int) -> None:
    stripes = np.zeros((height, width, 3))
    stripes[:] = (
        128 + 60 * np.sin(np.arange(width) / 40)[:, None] + 60 * np.sin(np.arange(height) / 40)[:, None, None]
    )
    data = _jpeg(Image.fromarray(stripes.astype(np.uint8)))
    for side in (45, 90, 180):
        assert _psnr(load_image(data, height=side, width=side + 1), _whole(data, side, side + 1)) >= 50


def test_a_jpeg_that_stores_rgb_itself_has_the_right_colours() -> None:
    data = _jpeg(Image.new("RGB", (160, 160), (250, 10, 60)), keep_rgb=True)
    for side in (10, 100, 200):
        pixels = load_image(data, height=side, width=side)
        assert np.abs(pixels.reshape(3, -1).T.astype(int) - (250, 10, 60)).max() <= 2


def test_of_several_pictures_in_one_file_the_first_is_scaled(decoded: list[tuple[int, int]]) -> None:
    first, second = _scene(640, 480), Image.new("RGB", (640, 480), (255, 0, 0))
    data = _jpeg(first, orientation=6, kind="MPO", save_all=True, append_images=[second])
    assert Image.open(io.BytesIO(data)).format == "MPO"
    assert probe(data) == (480, 640)
    assert _psnr(load_image(data, height=80, width=60), _whole(data, 80, 60, 6)) >= 50
    assert _psnr(load_image(data, height=600, width=450), _whole(data, 600, 450, 6)) >= 50
    assert decoded == [(160, 120), (640, 480)]


@pytest.mark.parametrize("picture", ["gradient", "noise"])
def test_without_scaling_the_pixels_are_a_full_decode_s(picture: str) -> None:
    ramp = np.tile(np.linspace(0, 255, 300, dtype=np.uint8)[:, None], (200, 1, 3))
    noise = np.random.default_rng(5).integers(0, 256, ramp.shape, dtype=np.uint8)
    data = _jpeg(Image.fromarray(ramp if picture == "gradient" else noise))
    height, width = ramp.shape[:2]
    assert np.array_equal(
        load_image(data, height=height, width=width).transpose(1, 2, 0), _whole(data, height, width)
    )


def test_pillow_alone_gives_the_same_pixels(monkeypatch: pytest.MonkeyPatch) -> None:
    files = [_jpeg(_scene(301, 203).convert(mode), orientation=8) for mode in ("RGB", "L")]
    before = [load_image(data, height=200, width=150) for data in files]
    calls: list[object] = []
    true_decode = jpeg.decode_jpeg
    monkeypatch.setattr(jpeg, "decode_jpeg", lambda *a, **k: calls.append(a) or true_decode(*a, **k))
    assert np.array_equal(load_image(files[0], height=200, width=150), before[0])
    assert calls, "the shorter way is not taken"
    monkeypatch.setattr(jpeg, "decode_jpeg", None)
    for data, pixels in zip(files, before, strict=True):
        assert np.array_equal(load_image(data, height=200, width=150), pixels)


@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
@pytest.mark.parametrize("progressive", [False, True])
@pytest.mark.parametrize("side", [20, 60, 120, 300])
def test_a_jpeg_cut_short_is_refused_at_every_scale(mode: str, progressive: bool, side: int) -> None:
    noise = np.random.default_rng(1).integers(0, 256, (300, 300, 3), dtype=np.uint8)
    data = _jpeg(Image.fromarray(noise).convert(mode), progressive=progressive)
    assert load_image(data, height=side, width=side).shape == (3, side, side)
    for kept in (0.1, 0.3, 0.5, 0.7, 0.9, 0.95, 0.98):
        with pytest.raises(DataError):
            load_image(data[: int(len(data) * kept)], height=side, width=side)


@pytest.mark.parametrize("side", [20, 300])
def test_a_size_that_only_the_header_claims_is_refused_without_decoding(side: int) -> None:
    data = bytearray(_jpeg(_scene(64, 64)))
    frame = data.index(b"\xff\xc0")
    data[frame + 5 : frame + 9] = (20_000).to_bytes(2, "big") * 2
    for read in (probe, lambda data: load_image(data, height=side, width=side)):
        with pytest.raises(DataError, match=r"more than the limit|exceeds limit"):
            read(bytes(data))


def _load_in_child(data: bytes, expected: np.ndarray) -> None:
    assert np.array_equal(load_image(data, height=100, width=90), expected)


def test_a_forked_process_can_load_after_its_parent_has_used_threads() -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        torch.ones(3_000_000).sin()  # starts the threads, which a fork does not take along
        data = _jpeg(_scene(640, 480))
        expected = load_image(data, height=100, width=90)
        child = multiprocessing.get_context("fork").Process(target=_load_in_child, args=(data, expected))
        child.start()
        child.join(60)
        if child.exitcode is None:
            child.kill()
        assert child.exitcode == 0
    finally:
        torch.set_num_threads(threads)
