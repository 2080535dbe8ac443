"""The pictures of the sample set, drawn with Pillow: own content, in the file kinds of real folders."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

WHITE, BLACK, RED, GREEN, BLUE, YELLOW = (
    (255, 255, 255),
    (20, 20, 20),
    (214, 48, 49),
    (39, 154, 80),
    (36, 97, 201),
    (241, 196, 15),
)


def font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    """Pillow's own font at a height in pixels."""
    return ImageFont.load_default(size)


def canvas(
    width: int, height: int, color: tuple[int, int, int] = WHITE
) -> tuple[Image.Image, ImageDraw.ImageDraw]:
    """An RGB picture of one colour and its pen."""
    picture = Image.new("RGB", (width, height), color)
    return picture, ImageDraw.Draw(picture)


def shapes() -> Image.Image:
    """A red circle left of a blue square, a yellow triangle below them."""
    picture, pen = canvas(160, 120)
    pen.ellipse((15, 12, 65, 62), fill=RED)
    pen.rectangle((95, 12, 145, 62), fill=BLUE)
    pen.polygon(((80, 72), (55, 112), (105, 112)), fill=YELLOW)
    return picture


def bars() -> Image.Image:
    """A bar chart of apples 3, pears 7, plums 5."""
    picture, pen = canvas(220, 160)
    pen.line((30, 10, 30, 130, 210, 130), fill=BLACK, width=2)
    for number, (name, value, color) in enumerate(
        (("apples", 3, RED), ("pears", 7, GREEN), ("plums", 5, BLUE))
    ):
        left = 45 + 56 * number
        pen.rectangle((left, 130 - 15 * value, left + 34, 129), fill=color)
        pen.text((left + 11, 112 - 15 * value), str(value), fill=BLACK, font=font(14))
        pen.text((left - 4, 136), name, fill=BLACK, font=font(13))
    return picture


def clock(hour: int, minute: int) -> Image.Image:
    """A clock face."""
    picture, pen = canvas(128, 128, (232, 238, 244))
    pen.ellipse((8, 8, 120, 120), fill=WHITE, outline=BLACK, width=3)
    for mark in range(12):
        x, y = math.sin(mark * math.pi / 6), -math.cos(mark * math.pi / 6)
        pen.line((64 + 48 * x, 64 + 48 * y, 64 + 53 * x, 64 + 53 * y), fill=BLACK, width=3)
    for turn, reach, width in (((hour % 12 + minute / 60) / 12, 28, 5), (minute / 60, 44, 3)):
        x, y = math.sin(2 * math.pi * turn), -math.cos(2 * math.pi * turn)
        pen.line((64, 64, 64 + reach * x, 64 + reach * y), fill=BLACK, width=width)
    return picture


def dice(value: int) -> Image.Image:
    """A die that shows 1 to 6."""
    picture, pen = canvas(72, 72, (120, 144, 156))
    pen.rounded_rectangle((8, 8, 64, 64), 10, fill=WHITE)
    low, middle, high = 20, 36, 52
    spots = {
        1: [(middle, middle)],
        2: [(low, low), (high, high)],
        3: [(low, low), (middle, middle), (high, high)],
        4: [(low, low), (high, high), (low, high), (high, low)],
        5: [(low, low), (high, high), (low, high), (high, low), (middle, middle)],
        6: [(x, y) for x in (low, high) for y in (low, middle, high)],
    }
    for x, y in spots[value]:
        pen.ellipse((x - 5, y - 5, x + 5, y + 5), fill=BLACK)
    return picture


def sign() -> Image.Image:
    """A stop sign whose surroundings are transparent."""
    picture = Image.new("RGBA", (120, 120), (0, 0, 0, 0))
    pen = ImageDraw.Draw(picture)
    corners = [
        (60 + 56 * math.sin(a), 60 + 56 * math.cos(a)) for a in (math.pi * (k + 0.5) / 4 for k in range(8))
    ]
    pen.polygon(corners, fill=(*RED, 255), outline=(255, 255, 255, 255))
    pen.text((60, 60), "STOP", fill=(255, 255, 255, 255), font=font(34), anchor="mm")
    return picture


def receipt() -> Image.Image:
    """A tall till receipt: bread 2.40, milk 1.20, tea 3.90, total 7.50."""
    picture, pen = canvas(132, 240)
    lines = ("CORNER SHOP", "", "bread   2.40", "milk    1.20", "tea     3.90", "", "TOTAL   7.50")
    for number, line in enumerate(lines):
        pen.text((12, 16 + 30 * number), line, fill=BLACK, font=font(15))
    return picture


def street() -> Image.Image:
    """A wide row of four houses; the third has the green door."""
    picture, pen = canvas(320, 90, (190, 220, 245))
    pen.rectangle((0, 78, 320, 90), fill=(130, 130, 130))
    for number in range(4):
        left = 12 + 78 * number
        pen.rectangle((left, 36, left + 60, 78), fill=(222, 184, 135))
        pen.polygon(((left - 6, 36), (left + 30, 10), (left + 66, 36)), fill=(150, 75, 60))
        pen.rectangle((left + 24, 54, left + 38, 78), fill=GREEN if number == 2 else RED)
    return picture


def ramp() -> Image.Image:
    """16-bit grey, dark on the left and bright on the right."""
    values = np.linspace(0, 65535, 96, dtype=np.uint16)
    return Image.fromarray(np.tile(values, (48, 1)))


def garden(apples: int) -> Image.Image:
    """A tree with so many apples."""
    picture, pen = canvas(128, 128, (205, 230, 250))
    pen.rectangle((0, 100, 128, 128), fill=(110, 170, 80))
    pen.rectangle((58, 70, 70, 106), fill=(110, 75, 45))
    pen.ellipse((24, 10, 104, 82), fill=(60, 130, 60))
    for x, y in ((44, 34), (78, 30), (60, 54), (86, 58), (38, 60))[:apples]:
        pen.ellipse((x - 6, y - 6, x + 6, y + 6), fill=RED)
    return picture


def arrow() -> Image.Image:
    """An arrow that points up."""
    picture, pen = canvas(80, 120, (245, 245, 220))
    pen.polygon(((40, 10), (70, 50), (50, 50), (50, 110), (30, 110), (30, 50), (10, 50)), fill=BLUE)
    return picture


def thermometer() -> Image.Image:
    """A thermometer at 30 degrees on a scale from 0 to 40."""
    picture, pen = canvas(90, 160)
    pen.rounded_rectangle((30, 10, 46, 130), 8, outline=BLACK, width=2)
    pen.rectangle((35, 45, 41, 130), fill=RED)
    pen.ellipse((24, 122, 52, 150), fill=RED, outline=BLACK)
    for degrees in range(0, 41, 10):
        y = 120 - degrees * 5 // 2
        pen.line((48, y, 56, y), fill=BLACK, width=2)
        pen.text((60, y), str(degrees), fill=BLACK, font=font(13), anchor="lm")
    return picture


def board() -> Image.Image:
    """Noughts and crosses: three crosses in the top row."""
    picture, pen = canvas(120, 120)
    for line in (40, 80):
        pen.line((line, 4, line, 116), fill=BLACK, width=3)
        pen.line((4, line, 116, line), fill=BLACK, width=3)
    for column in range(3):
        left = 40 * column + 10
        pen.line((left, 10, left + 20, 30), fill=BLUE, width=4)
        pen.line((left + 20, 10, left, 30), fill=BLUE, width=4)
    for left, top in ((50, 50), (90, 90)):
        pen.ellipse((left, top, left + 20, top + 20), outline=RED, width=4)
    return picture


def draw_all(folder: Path) -> None:
    """Write every picture into `folder`."""
    folder.mkdir(exist_ok=True)
    shapes().save(folder / "shapes.png")
    bars().save(folder / "bars.png")
    clock(4, 0).save(folder / "clock-four.jpg", quality=90)
    clock(9, 30).save(folder / "clock-half-past-nine.jpg", quality=90)
    for value in (2, 5, 6):
        dice(value).convert("L").save(folder / f"die-{value}.png")
    sign().save(folder / "sign.webp", lossless=True)
    receipt().convert("L").save(folder / "receipt.jpg", quality=90)
    street().quantize(32).save(folder / "street.gif")
    ramp().save(folder / "ramp-16bit.png")
    garden(3).save(folder / "garden-monday.jpg", quality=90)
    garden(5).save(folder / "garden-friday.jpg", quality=90)
    turned = arrow().transpose(
        Image.Transpose.ROTATE_90
    )  # stored lying down; EXIF says how to set it upright
    exif = Image.Exif()
    exif[0x0112] = 6
    turned.save(folder / "arrow-exif.jpg", quality=90, exif=exif)
    thermometer().save(folder / "thermometer.png")
    board().save(folder / "board.png")
