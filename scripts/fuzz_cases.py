"""Valid pictures and records, and what chance does to them: the inputs of scripts/fuzz_data.py."""

from __future__ import annotations

import io
import json
import random
import struct
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
from PIL import ExifTags, Image

from mmds.data.images import FORMATS

WIDTH, HEIGHT = 61, 45
EXTREMES = (0, 1, 0x7F, 0x80, 0xFF, 0x7FFF, 0x8000, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF)
"""Numbers at which lengths and sizes go wrong."""

AWKWARD_TEXT = (
    "NaN",
    "1e999",
    '"\\ud800"',
    "<image>",
    "\\<image>",
    "null",
    "[" * 3000,
    '{"a":' * 3000,
    '"',
    "\\u0000",
)
AWKWARD_BYTES = (b"\xff", b"\xef\xbb\xbf", b"\xc3", b"\x00", b"\r\n", b"\n", b",", b"}", b'"id": 1, ')
AWKWARD_VALUES: tuple[Any, ...] = (
    None,
    True,
    0,
    -1,
    1.5,
    "",
    " ",
    "<image>",
    [],
    {},
    [[]],
    [None],
    {"type": "image"},
)


def pictures() -> list[tuple[str, bytes]]:
    """(format, bytes) of valid pictures: every format that is read, in the modes that take different ways."""
    noise = np.random.default_rng(0).integers(0, 256, (HEIGHT, WIDTH, 4), dtype=np.uint8)
    smooth = np.add.outer(np.arange(HEIGHT), np.arange(WIDTH)).astype(np.uint8)
    colour = Image.fromarray(noise[:, :, :3])
    shaded = Image.merge("RGB", [Image.fromarray(smooth * k) for k in (1, 2, 3)])
    alpha, grey, deep = (
        Image.fromarray(noise),
        colour.convert("L"),
        Image.fromarray(smooth.astype(np.uint16) * 500),
    )
    bits, palette = colour.convert("1"), colour.convert("P")
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    more = {"save_all": True, "append_images": [shaded, grey.convert("RGB")]}
    wanted: list[tuple[str, Image.Image, dict[str, Any]]] = [
        ("JPEG", colour, {"exif": exif}),
        ("JPEG", shaded, {"progressive": True}),
        ("JPEG", shaded, {"restart_marker_blocks": 2, "subsampling": 0}),
        ("JPEG", grey, {}),
        ("JPEG", shaded.convert("CMYK"), {}),
        ("MPO", colour, more),
        *(("PNG", image, {}) for image in (colour, alpha, grey, deep, bits)),
        ("PNG", palette, {"transparency": 3, "exif": exif}),
        ("PNG", colour, more),
        ("WEBP", colour, {"exif": exif}),
        ("WEBP", alpha, {"lossless": True}),
        ("WEBP", colour, more),
        ("GIF", palette, {"transparency": 5}),
        ("GIF", colour, more),
        *(("BMP", image, {}) for image in (colour, palette, bits)),
        *(("TIFF", image, {}) for image in (colour, deep, palette, shaded.convert("CMYK"))),
        ("TIFF", colour, {"exif": exif, **more}),
        *(
            ("TIFF", shaded, {"compression": name})
            for name in ("jpeg", "tiff_lzw", "tiff_adobe_deflate", "packbits")
        ),
        ("TIFF", bits, {"compression": "group4"}),
        *(("PPM", image, {}) for image in (colour, grey, deep, bits)),
        ("JPEG2000", colour, {}),
        ("JPEG2000", alpha, {"no_jp2": True, "irreversible": True}),
        ("AVIF", alpha, {"exif": exif}),
        ("AVIF", colour, more),
    ]
    found = []
    for kind, image, options in wanted:
        buffer = io.BytesIO()
        # Copies, since a writer leaves its settings in the images.
        frames = {"append_images": [frame.copy() for frame in options.get("append_images", [])]}
        image.copy().save(buffer, kind, **(options | frames))
        found.append(("JPEG" if kind == "MPO" else kind, buffer.getvalue()))
    missing = set(FORMATS) - {kind for kind, _ in found}
    assert not missing, f"no picture for {missing}"
    return found


def spoil(data: bytes, other: bytes, chance: random.Random) -> bytes:
    """The bytes after one to three accidents; other: a file to mix in."""
    for _ in range(chance.choice((1, 1, 2, 3))):
        data = chance.choice(ACCIDENTS)(data or b"\0", other, chance)
    return _mend_png(data) if chance.random() < 0.5 else data


def _flip_bits(data: bytes, other: bytes, chance: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(chance.choice((1, 2, 8, 64))):
        changed[chance.randrange(len(changed))] ^= 1 << chance.randrange(8)
    return bytes(changed)


def _cut(data: bytes, other: bytes, chance: random.Random) -> bytes:
    return data[: chance.randrange(len(data))]


def _edit_number(data: bytes, other: bytes, chance: random.Random) -> bytes:
    """An extreme number somewhere, three times in four within the header."""
    width, order = chance.choice((1, 2, 4)), chance.choice(("big", "little"))
    start = chance.randrange(min(len(data), chance.choice((40, 120, 400, len(data)))))
    number = (chance.choice(EXTREMES) % (1 << 8 * width)).to_bytes(width, order)
    return data[:start] + number + data[start + width :]


def _slice(data: bytes, chance: random.Random) -> tuple[int, int]:
    start = chance.randrange(len(data))
    return start, start + chance.randrange(1, 200)


def _remove_chunk(data: bytes, other: bytes, chance: random.Random) -> bytes:
    start, end = _slice(data, chance)
    return data[:start] + data[end:]


def _repeat_chunk(data: bytes, other: bytes, chance: random.Random) -> bytes:
    start, end = _slice(data, chance)
    return data[:end] + data[start:end] * chance.choice((1, 1, 20)) + data[end:]


def _move_chunk(data: bytes, other: bytes, chance: random.Random) -> bytes:
    start, end = _slice(data, chance)
    rest = data[:start] + data[end:]
    place = chance.randrange(len(rest) + 1)
    return rest[:place] + data[start:end] + rest[place:]


def _swap_halves(data: bytes, other: bytes, chance: random.Random) -> bytes:
    middle = len(data) // 2
    return data[middle:] + data[:middle]


def _borrow(data: bytes, other: bytes, chance: random.Random) -> bytes:
    """The beginning of this file, the end of the other."""
    share = chance.random()
    return data[: int(share * len(data))] + other[int(share * len(other)) :]


Accident = Callable[[bytes, bytes, random.Random], bytes]
ACCIDENTS: tuple[Accident, ...] = (
    _flip_bits,
    _cut,
    _edit_number,
    _edit_number,
    _remove_chunk,
    _repeat_chunk,
    _move_chunk,
    _swap_halves,
    _borrow,
)


def _mend_png(data: bytes) -> bytes:
    """A PNG with right checksums, without which a decoder looks no further."""
    if not data.startswith(b"\x89PNG\r\n\x1a\n"):
        return data
    changed, position = bytearray(data), 8
    while position + 12 <= len(data):
        end = position + 8 + int.from_bytes(data[position : position + 4], "big")
        if end + 4 > len(data):
            break
        changed[end : end + 4] = struct.pack(">I", zlib.crc32(data[position + 4 : end]))
        position = end + 4
    return bytes(changed)


def records() -> list[dict[str, Any]]:
    """Valid records of both styles."""
    ask, tell = "<image>\nWas steht hier? 这 \\<image>", "A cat."
    return [
        {
            "id": "a",
            "image": "cat.jpg",
            "conversations": [{"from": "human", "value": ask}, {"from": "gpt", "value": tell}],
        },
        {
            "id": 7,
            "images": ["a.png", "b.png"],
            "conversations": [
                {"from": "system", "value": "Be brief."},
                {"from": "human", "value": "<image><image>"},
                {"from": "gpt", "value": tell},
                {"from": "human", "value": "And?"},
                {"from": "gpt", "value": "é"},
            ],
        },
        {
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "image", "image": "cat.jpg"},
                        {"type": "text", "text": "What <image>?"},
                    ],
                },
                {"role": "assistant", "content": [{"type": "text", "text": tell}]},
            ]
        },
        {
            "id": "d",
            "messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4."}],
        },
    ]


def spoiled_lines(chance: random.Random) -> bytes:
    """One to three lines of JSONL, one of them spoilt in its structure, in its text or in its bytes."""
    valid = records()
    lines = [json.dumps(chance.choice(valid), ensure_ascii=False) for _ in range(chance.choice((1, 1, 2, 3)))]
    number, way = chance.randrange(len(lines)), chance.randrange(3)
    if way == 0:
        lines[number] = json.dumps(_other_structure(json.loads(lines[number]), chance))
    elif way == 1:
        line, place = lines[number], chance.randrange(len(lines[number]))
        lines[number] = line[:place] + chance.choice(AWKWARD_TEXT) + line[place + chance.choice((0, 1, 4)) :]
    data = "\n".join(lines).encode()
    if way < 2:
        return data
    place = chance.randrange(len(data))
    if chance.random() < 0.3:
        return data[:place] + chance.choice(AWKWARD_BYTES) + data[place:]
    return spoil(data, json.dumps(valid).encode(), chance)


def _other_structure(value: Any, chance: random.Random) -> Any:
    """A JSON value with one part replaced, removed, repeated or renamed."""
    if not isinstance(value, list | dict) or not value or chance.random() < 0.1:
        return chance.choice(AWKWARD_VALUES)
    place = chance.choice(list(value) if isinstance(value, dict) else range(len(value)))
    way = chance.randrange(6)
    if way == 0:
        del value[place]
    elif way == 1 and isinstance(value, list):
        value.insert(place, value[place])
    elif way == 1:
        names = ("image", "images", "conversations", "messages", "role", "from", "content", "video")
        value[chance.choice(names)] = value.pop(place)
    else:
        value[place] = _other_structure(value[place], chance)
    return value
