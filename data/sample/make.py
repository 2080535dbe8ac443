"""Draws the pictures of the sample set and writes its two raw files: `python data/sample/make.py`.

Every picture is drawn here, so the set is free of other people's rights, and every answer is true by
construction. The pictures are of the kinds that real folders hold: JPEG, PNG, WebP, GIF; grey, palette,
transparent, 16-bit, turned by EXIF, wide and tall.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from draw import draw_all

HERE = Path(__file__).parent
PICTURES = HERE / "pictures"


def picture(name: str) -> dict[str, str]:
    """A part of a chat turn that shows a picture."""
    return {"type": "image", "image": f"{PICTURES.name}/{name}"}


def llava(name: str, images: str | list[str] | None, *turns: str) -> dict[str, Any]:
    """A record of LLaVA style; turns alternate human, gpt."""
    record: dict[str, Any] = {"id": name}
    if isinstance(images, str):
        record["image"] = f"{PICTURES.name}/{images}"
    elif images is not None:
        record["image"] = [f"{PICTURES.name}/{image}" for image in images]
    record["conversations"] = [
        {"from": ("human", "gpt")[number % 2], "value": turn} for number, turn in enumerate(turns)
    ]
    return record


def chat(name: str, *turns: str | list[str | dict[str, str]], system: str | None = None) -> dict[str, Any]:
    """A record of chat style; turns alternate user, assistant, and a list holds texts and pictures."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    for number, turn in enumerate(turns):
        content: Any = turn
        if isinstance(turn, list):
            content = [{"type": "text", "text": part} if isinstance(part, str) else part for part in turn]
        messages.append({"role": ("user", "assistant")[number % 2], "content": content})
    return {"id": name, "messages": messages}


LLAVA = [
    llava("shapes-left", "shapes.png", "<image>\nWhich shape is left of the square?", "The red circle."),
    llava(
        "shapes-talk",
        "shapes.png",
        "<image>\nHow many shapes are there?",
        "Three.",
        "Which one is at the bottom?",
        "A yellow triangle.",
    ),
    llava("bars-most", "bars.png", "<image>\nWhich fruit has the tallest bar?", "Pears, with 7."),
    llava("clock", "clock-four.jpg", "What time does this clock show?\n<image>", "Four o'clock."),
    llava(
        "dice-sum",
        ["die-2.png", "die-5.png"],
        "<image>\n<image>\nWhat do the two dice add up to?",
        "2 + 5 = 7.",
    ),
    llava(
        "dice-three",
        ["die-6.png", "die-2.png", "die-5.png"],
        "First <image>, second <image>, third <image>: which die shows most?",
        "The first one, with 6.",
    ),
    llava("sign", "sign.webp", "<image>\nRead the sign.", "STOP"),
    llava(
        "street",
        "street.gif",
        "<image>\nWhich house has a door of another colour?",
        "The third: its door is green.",
    ),
    llava("text-days", None, "How many days has a leap year?", "366."),
    llava(
        "text-haiku",
        None,
        "Write a haiku about rain.",
        "Rain on the tin roof,\na drum for the sleeping cat.\nMorning smells of earth.",
    ),
]
CHAT = [
    chat(
        "receipt-talk",
        [picture("receipt.jpg"), "What did the tea cost?"],
        "3.90",
        "And bread and milk together?",
        "2.40 + 1.20 = 3.60",
        system="You read receipts. Answer briefly.",
    ),
    {
        "id": "stop-in-one-string",
        "images": [f"{PICTURES.name}/sign.webp"],
        "messages": [
            {"role": "user", "content": "<image>What must a driver do here? (Not the tag \\<image>.)"},
            {"role": "assistant", "content": "Stop."},
        ],
    },
    chat("ramp", ["Which side is brighter?", picture("ramp-16bit.png")], "The right side."),
    chat(
        "garden-compare",
        [
            "Monday: ",
            picture("garden-monday.jpg"),
            " Friday: ",
            picture("garden-friday.jpg"),
            " What changed on the tree?",
        ],
        "It has five apples on Friday and had three on Monday.",
    ),
    chat("arrow", [picture("arrow-exif.jpg"), "Where does the arrow point?"], "Up."),
    chat("thermometer", [picture("thermometer.png"), "How warm is it?"], "About 30 degrees."),
    chat("board", [picture("board.png"), "Who has won, and where?"], "Crosses, with the whole top row."),
    chat(
        "clocks",
        [picture("clock-four.jpg"), "What time is it?"],
        "Four o'clock.",
        ["And on this one?", picture("clock-half-past-nine.jpg")],
        "Half past nine.",
    ),
    chat("text-primes", "Name the primes below ten.", "2, 3, 5 and 7."),
    chat(
        "text-tag",
        ["In HTML, which tag shows a picture? Is it <image>?"],
        "It is <img>. Browsers treat <image> as a misspelling of it.",
        system="You teach HTML.",
    ),
]


def main() -> None:
    """Write the pictures, llava.jsonl and chat.jsonl."""
    draw_all(PICTURES)
    for name, records in (("llava.jsonl", LLAVA), ("chat.jsonl", CHAT)):
        lines = [json.dumps(record, ensure_ascii=False) for record in records]
        (HERE / name).write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
