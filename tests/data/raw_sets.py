"""Small raw sets with real pictures for the tests of preparation, shards and loader."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

from PIL import Image

from mmds.data.chat_tokenizer import ChatTokenizer
from mmds.data.prepare import prepare
from mmds.data.shards import ShardSet
from mmds.geometry import Geometry
from tests.chat_fixtures import hf_tokenizer

GEOMETRY = Geometry(mode="fixed", image_size=28, patch_size=14)  # 4 slots an image


def chat_tokenizer(backend: str = "byte_level") -> ChatTokenizer:
    """A small real tokenizer with ChatML."""
    return ChatTokenizer(hf_tokenizer(backend, "chatml"))


def picture(value: int, *, kind: str = "PNG", size: tuple[int, int] = (40, 30), **options: Any) -> bytes:
    """An encoded picture of one grey."""
    file = io.BytesIO()
    Image.new("RGB", size, (value, value, value)).save(file, kind, **options)
    return file.getvalue()


def write_jsonl(path: Path, records: Sequence[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def talk(question: str, answer: str = "It is grey.") -> list[dict[str, str]]:
    return [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]


def record(key: str | None, images: Sequence[str] = (), question: str | None = None) -> dict[str, Any]:
    """A LLaVA record with one marker per image."""
    made: dict[str, Any] = {
        "conversations": talk(question or "<image>" * len(images) + "What is in the picture?")
    }
    if key is not None:
        made["id"] = key
    if images:
        made["image"] = list(images)
    return made


def write_set(folder: Path, pictures: Sequence[int], *, stem: str = "raw") -> Path:
    """Samples s0, s1, ... with so many pictures each.

    Picture number n of the set (from 1) is all grey of value n. The text of a sample names the greys of its
    pictures, which lets a test tell what belongs together.
    """
    records, number = [], 0
    for i, count in enumerate(pictures):
        greys = range(number + 1, number + count + 1)
        names = []
        for grey in greys:
            names.append(f"p{grey}.png")
            (folder / names[-1]).parent.mkdir(parents=True, exist_ok=True)
            (folder / names[-1]).write_bytes(picture(grey, size=(20 + grey % 7, 20 + grey % 5)))
        number += count
        question = (
            "<image>" * count + "greys" + "".join(f" {grey}" for grey in greys) + " end" + " word" * (i % 5)
        )
        records.append(record(f"s{i}", names, question))
    return write_jsonl(folder / f"{stem}.jsonl", records)


def file_digests(folder: Path) -> dict[str, str]:
    """SHA-256 of every file of a prepared folder; of the manifest without what names the input."""
    found = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        data = path.read_bytes()
        if path.name == "manifest.json":
            kept = {
                name: value
                for name, value in json.loads(data).items()
                if name not in ("raw", "images_dir", "digest")
            }
            data = json.dumps(kept).encode()
        found[str(path.relative_to(folder))] = sha256(data).hexdigest()
    return found


def prepared_set(folder: Path, pictures: Sequence[int], **options: Any) -> ShardSet:
    """`write_set`, prepared and opened."""
    raw, tokenizer = write_set(folder / "raw", pictures), chat_tokenizer()
    prepare([raw], None, tokenizer, folder / "prepared", **options)
    return ShardSet.open(folder / "prepared", tokenizer.fingerprint)
