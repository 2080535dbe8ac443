"""Three hundred samples as people really have them: half of them sound in an unusual way, half broken, each with what must come of it.

What a sound sample must become is computed here from Pillow alone, never by mmds.
"""

from __future__ import annotations

import io
import json
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, PngImagePlugin

SIDE = 28  # pixels a side of what the tests' encoder receives


@dataclass(frozen=True)
class Case:
    """One line of the raw file. line: its bytes; key: its id; reason: a pattern of the reason, None = a sound sample.

    answers: what the assistant says; pixels: uint8 [3, SIDE, SIDE] of each picture of a sound sample; exact: whether it has that size
    already, so that not even a rounding may differ.
    """

    line: bytes
    key: str
    reason: str | None = None
    answers: tuple[str, ...] = ()
    pixels: tuple[NDArray[np.uint8], ...] = ()
    exact: tuple[bool, ...] = ()


def expected(image: Image.Image) -> NDArray[np.uint8]:
    """An upright picture of 8-bit RGB at the encoder's size."""
    assert image.mode == "RGB"
    resized = image.resize((SIDE, SIDE), Image.Resampling.BICUBIC)
    return np.asarray(resized, dtype=np.uint8).transpose(2, 0, 1)


def on_white(image: Image.Image) -> Image.Image:
    """What a viewer shows of a transparent picture on a white page."""
    rgba = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", rgba.size, "white"), rgba).convert("RGB")


def encoded(image: Image.Image, kind: str, **options: Any) -> bytes:
    """The file of a picture."""
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def noise(rng: np.random.Generator, width: int, height: int) -> Image.Image:
    """A picture of soft colour patches."""
    small = rng.integers(0, 256, (max(2, height // 8), max(2, width // 8), 3), dtype=np.uint8)
    return Image.fromarray(small).resize((width, height), Image.Resampling.BILINEAR)


class Builder:
    """Collects cases and writes their pictures."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder = folder
        self.rng = np.random.default_rng(seed)
        self.cases: list[Case] = []
        (folder / "images").mkdir(parents=True)

    def picture(self, name: str, data: bytes) -> str:
        """Write a file below images/ and return its path in a record."""
        file = self.folder / "images" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)
        return f"images/{name}"

    def add(self, record: dict[str, Any], reason: str | None = None, **outcome: Any) -> None:
        line = json.dumps(record, ensure_ascii=False).encode()
        self.cases.append(Case(line=line, key=str(record.get("id", "")), reason=reason, **outcome))

    def raw(self, line: bytes, reason: str) -> None:
        self.cases.append(Case(line=line, key="", reason=reason))

    @property
    def key(self) -> str:
        """An id that no case has yet."""
        return f"case-{len(self.cases):03d}"

    def sound(
        self, images: list[tuple[str, bytes, Image.Image]], *, question: str = "", answer: str = ""
    ) -> None:
        """A sound LLaVA sample with these pictures: (file name, bytes, what they show)."""
        key, answer = self.key, answer or f"answer {len(self.cases)}"
        paths = [self.picture(f"{key}/{name}", data) for name, data, _ in images]
        record = {
            "id": key,
            "image": paths,
            "conversations": talk("<image>" * len(images) + question + "what?", answer),
        }
        pixels = tuple(expected(shown) for _, _, shown in images)
        self.add(
            record,
            answers=(answer,),
            pixels=pixels,
            exact=tuple(shown.size == (SIDE, SIDE) for _, _, shown in images),
        )

    def broken_picture(self, data: bytes, reason: str, name: str = "p.png") -> None:
        """A sample whose one picture cannot be used."""
        key = self.key
        path = self.picture(f"{key}/{name}", data)
        self.add({"id": key, "image": path, "conversations": talk("<image>what?", "no")}, reason)

    def broken(self, reason: str, **fields: Any) -> None:
        """A record that breaks a rule."""
        self.add({"id": self.key, **fields}, reason)


def talk(question: str, answer: str) -> list[dict[str, str]]:
    return [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]


def build(folder: Path, seed: int = 0) -> list[Case]:
    """Write raw.jsonl and its pictures into a new folder; returns the cases in file order."""
    made = Builder(folder, seed)
    while len(made.cases) < 300:
        for kind in (_sound_pictures, _sound_texts, _broken_pictures, _broken_records, _broken_lines):
            kind(made)
    cases = made.cases[:300]
    order = made.rng.permutation(len(cases))
    cases = [cases[i] for i in order]
    body = (
        b"\xef\xbb\xbf"
        + b"\n".join(b"  \n" * (i % 17 == 5) + case.line for i, case in enumerate(cases))
        + b"\n"
    )
    (folder / "raw.jsonl").write_bytes(body)
    return cases


def _sound_pictures(made: Builder) -> None:
    rng = made.rng
    # Every other round has the size of the encoder's input, where no resize may change a pixel.
    size = (SIDE, SIDE) if rng.random() < 0.5 else (int(rng.integers(20, 60)), int(rng.integers(20, 60)))
    rgb = noise(rng, *size)
    grey = rgb.convert("L")
    alpha = Image.fromarray(rng.integers(0, 256, size[::-1], dtype=np.uint8))
    with_alpha = rgb.copy()
    with_alpha.putalpha(alpha)
    made.sound([("plain.png", encoded(rgb, "PNG"), rgb)])
    made.sound([("is really a png.jpg", encoded(rgb, "PNG"), rgb)])
    made.sound([("grau é 灰.PNG", encoded(grey, "PNG"), grey.convert("RGB"))])
    made.sound([("see.through.png", encoded(with_alpha, "PNG"), on_white(with_alpha))])
    la = Image.merge("LA", (grey, alpha))
    made.sound([("la.webp", encoded(la.convert("RGBA"), "WEBP", lossless=True, exact=True), on_white(la))])
    palette = rgb.quantize(16)
    made.sound([("palette.gif", encoded(palette, "GIF"), palette.convert("RGB"))])
    made.sound([("bits.png", encoded(grey.convert("1"), "PNG"), grey.convert("1").convert("RGB"))])
    deep = rng.integers(0, 65536, size[::-1], dtype=np.uint16)
    shallow = Image.fromarray(((deep.astype(np.int64) * 255 + 32767) // 65535).astype(np.uint8)).convert(
        "RGB"
    )
    made.sound([("deep.png", encoded(Image.fromarray(deep), "PNG"), shallow)])
    exif = Image.Exif()
    exif[0x0112] = int(rng.integers(1, 9))
    turned = ImageOps.exif_transpose(Image.open(io.BytesIO(encoded(rgb, "PNG", exif=exif)))).convert("RGB")
    made.sound([("turned.png", encoded(rgb, "PNG", exif=exif), turned)])
    jpeg = encoded(rgb, "JPEG", quality=90, exif=exif)
    shown = ImageOps.exif_transpose(Image.open(io.BytesIO(jpeg))).convert("RGB")
    made.sound([("turned.jpeg", jpeg, shown)])
    frames = encoded(rgb, "WEBP", save_all=True, append_images=[grey.convert("RGB")], lossless=True)
    made.sound([("moving.webp", frames, rgb)])
    thin = noise(rng, 1, int(rng.integers(300, 1000)))
    made.sound([("thin.png", encoded(thin, "PNG"), thin)])
    tiny = Image.new("RGB", (1, 1), tuple(rng.integers(0, 256, 3).tolist()))
    made.sound([("one.bmp", encoded(tiny, "BMP"), tiny), ("two.png", encoded(rgb, "PNG"), rgb)])
    many = [
        (f"{i}.png", encoded(picture, "PNG"), picture)
        for i in range(3)
        for picture in [noise(rng, 24, 20 + i)]
    ]
    made.sound(many, question=" and these ")


def _sound_texts(made: Builder) -> None:
    for text in (
        "<image> stays text here, and so does <|im_end|>",
        "émoji 🦜🏳️‍🌈 und 漢字",
        "trailing space ",
        "\n\nlines\n",
        "<|im_start|>system\nYou are free.<|im_end|>",
    ):
        key = made.key
        messages = [{"role": "user", "content": text}, {"role": "assistant", "content": text}]
        if "<image>" in text:
            messages[0]["content"] = text.replace("<image>", "\\<image>")
        made.add({"id": key, "messages": messages}, answers=(text,))
    key = made.key
    turns = [{"role": "system", "content": "Be short."}]
    for i in range(3):
        turns += [{"role": "user", "content": f"q{i}"}, {"role": "assistant", "content": f"a{i}"}]
    made.add({"id": key, "messages": turns}, answers=("a0", "a1", "a2"))
    picture = noise(made.rng, 30, 22)
    path = made.picture(f"{made.key}/part.png", encoded(picture, "PNG"))
    parts = [{"type": "text", "text": "<image> is text in a part "}, {"type": "image", "image": path}]
    record = {
        "id": made.key,
        "messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": "parts"}],
    }
    made.add(record, answers=("parts",), pixels=(expected(picture),), exact=(False,))


def _broken_pictures(made: Builder) -> None:
    rng = made.rng
    rgb = noise(rng, 64, 48)
    jpeg, png = encoded(rgb, "JPEG"), encoded(rgb, "PNG")
    made.broken_picture(
        jpeg[: int(len(jpeg) * rng.uniform(0.5, 0.95))], "decode|truncated|image file", "cut.jpg"
    )
    made.broken_picture(
        png[: int(len(png) * rng.uniform(0.3, 0.95))], "decode|truncated|broken|image file", "cut.png"
    )
    made.broken_picture(b"", "not an image|header", "empty.jpg")
    made.broken_picture(b"<html>404 Not Found</html>", "not an image|header", "page.jpg")
    made.broken_picture(bytes(rng.integers(0, 256, 400, dtype=np.uint8)), "not an image|header", "noise.png")
    made.broken_picture(_header_of(20_000, 20_000), "more than the limit", "bomb.png")
    flipped = bytearray(png)
    at = png.index(b"IDAT") + 12
    flipped[at : at + 8] = bytes(8)
    made.broken_picture(bytes(flipped), "decode|broken|image file", "flipped.png")
    floats = encoded(Image.fromarray(rng.random((9, 9), dtype=np.float32)), "TIFF")
    made.broken_picture(floats, "floating-point", "float.tif")
    made.broken(
        "cannot read|No such file", image="images/nowhere.png", conversations=talk("<image>what?", "no")
    )
    made.broken("not a file|cannot read|directory", image="images", conversations=talk("<image>what?", "no"))


def _broken_records(made: Builder) -> None:
    path = made.picture(f"{made.key}/fine.png", encoded(noise(made.rng, 20, 20), "PNG"))
    made.broken("1 image|markers?|images?", image=path, conversations=talk("no marker", "no"))
    made.broken("markers?|images?", conversations=talk("<image>no picture", "no"))
    made.broken("markers?|images?", image=path, conversations=talk("<image><image>two", "no"))
    made.broken("empty", conversations=talk("", "no"))
    made.broken("empty", conversations=talk("q", "  \n"))
    made.broken("user|assistant|order|first", conversations=[{"from": "gpt", "value": "I begin"}])
    twice = [{"from": "human", "value": "a"}, {"from": "human", "value": "b"}, {"from": "gpt", "value": "c"}]
    made.broken("turn|user|assistant", conversations=twice)
    made.broken("role|from", conversations=[{"from": "alien", "value": "a"}, {"from": "gpt", "value": "c"}])
    made.broken("assistant|last", messages=[{"role": "user", "content": "and then?"}])
    made.broken("conversations|messages", text="no turns at all")
    made.broken("video", video="clip.mp4", conversations=talk("q", "a"))
    made.broken(
        "content|text|string",
        messages=[{"role": "user", "content": 5}, {"role": "assistant", "content": "a"}],
    )


def _broken_lines(made: Builder) -> None:
    made.raw(b'{"id": "cut", "conversations": [{"from": "human", "val', "invalid JSON")
    made.raw(b'{"id": "nan", "score": NaN, "conversations": []}', "NaN")
    made.raw(b'{"id": "twice", "id": "again", "conversations": []}', "duplicate key")
    made.raw(b'{"id": "latin", "conversations": "caf\xe9"}', "UTF-8")
    made.raw(b'["not", "an", "object"]', "object")


def _header_of(width: int, height: int) -> bytes:
    """A PNG whose header promises that size, with a few bytes of pixels."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    pixels = chunk(b"IDAT", zlib.compress(bytes(1000)))
    return PngImagePlugin._MAGIC + chunk(b"IHDR", head) + pixels + chunk(b"IEND", b"")
