"""Sets of the package `datasets`, saved to disk: rows are records, and no network is asked."""

from __future__ import annotations

import socket
import sys
from pathlib import Path
from typing import Any

import datasets
import pytest

from mmds.data.check import check
from mmds.data.prepare import prepare
from mmds.data.shards import ShardSet
from mmds.errors import DataError
from tests.data.raw_sets import chat_tokenizer, picture, record, talk, write_jsonl

TOKENIZER = chat_tokenizer()


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("the network was asked")

    monkeypatch.setattr(socket.socket, "connect", refuse)


def saved(folder: Path, rows: list[dict[str, Any]], **images: Any) -> Path:
    found = datasets.Dataset.from_list(rows)
    for name, feature in images.items():
        found = found.cast_column(name, feature)
    found.save_to_disk(str(folder))
    return folder


def opened(source: Path, out: Path) -> ShardSet:
    prepare([source], None, TOKENIZER, out)
    return ShardSet.open(out, TOKENIZER.fingerprint)


def test_pictures_stored_in_the_set_come_with_their_rows(tmp_path: Path) -> None:
    rows = [
        {
            "id": f"r{i}",
            "image": {"bytes": picture(i), "path": f"x/{i}.png"} if i % 3 else None,
            "conversations": talk("<image>What?" if i % 3 else "What?"),
        }
        for i in range(40)
    ]
    shards = opened(saved(tmp_path / "set", rows, image=datasets.Image()), tmp_path / "out")
    assert len(shards) == 40
    for i in range(40):
        sample = shards.read(i)
        assert sample.key == f"r{i}"
        assert sample.image_bytes == ((picture(i),) if i % 3 else ())
        assert sample.image_paths == ((f"{i}.png",) if i % 3 else ())


def test_lists_of_pictures_and_chat_messages_equal_the_same_set_as_json(tmp_path: Path) -> None:
    part = {"type": "image", "text": None}
    rows = [
        {
            "images": [{"bytes": picture(i), "path": None}, {"bytes": picture(i + 1), "path": None}],
            "messages": [
                {"role": "user", "content": [part, part, {"type": "text", "text": "Which?"}]},
                {"role": "assistant", "content": [{"type": "text", "text": "The first."}]},
            ],
        }
        for i in range(3)
    ]
    source = saved(tmp_path / "set", rows, images=datasets.List(datasets.Image()))
    shards = opened(source, tmp_path / "out")
    plain = record("x", ["a.png", "b.png"], "<image><image>Which?")
    plain["conversations"][1]["value"] = "The first."
    for name in ("a.png", "b.png"):
        (tmp_path / name).write_bytes(picture(1))
    other = opened(write_jsonl(tmp_path / "raw.jsonl", [plain]), tmp_path / "other")
    for i in range(3):
        assert shards.read(i).key == f"set-{i}"
        assert shards.read(i).image_bytes == (picture(i), picture(i + 1))
        assert shards.read(i).ids.tolist() == other.read(0).ids.tolist()


def test_bad_rows_are_named(tmp_path: Path) -> None:
    rows = [
        {"id": "a", "image": {"bytes": picture(1), "path": None}, "conversations": talk("<image>What?")},
        {"id": "b", "image": None, "conversations": talk("<image>What?")},
        {"id": "c", "image": {"bytes": picture(1)[:70], "path": None}, "conversations": talk("<image>?")},
    ]
    source = saved(tmp_path / "set", rows, image=datasets.Image())
    report = check([source], None, TOKENIZER)
    assert report.samples == 1
    wanted = ["1 image markers but 0 images", "image 0 (image-0): "]
    assert [bad.where for bad in report.bad] == [f"{source}:{i}" for i in (1, 2)]
    assert all(words in bad.reason for bad, words in zip(report.bad, wanted, strict=True))


def test_a_set_of_splits_is_refused_with_their_names(tmp_path: Path) -> None:
    rows = [{"id": "a", "conversations": talk("What?")}]
    one = datasets.Dataset.from_list(rows)
    datasets.DatasetDict({"train": one, "test": one}).save_to_disk(str(tmp_path / "set"))
    with pytest.raises(DataError, match=r"holds the splits train, test; name one, such as .*set/train"):
        prepare([tmp_path / "set"], None, TOKENIZER, tmp_path / "out")
    assert len(opened(tmp_path / "set" / "train", tmp_path / "out")) == 1


def test_a_name_on_the_hub_is_asked_for_its_split_and_files_beside_it_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a.png", "gone.png"):
        (tmp_path / name).write_bytes(picture(7))
    rows = [
        {
            "id": name,
            "image": {"bytes": None, "path": str(tmp_path / name)},
            "conversations": talk("<image>?"),
        }
        for name in ("a.png", "gone.png")
    ]
    found = datasets.Dataset.from_list(rows).cast_column("image", datasets.Image())
    asked = []

    def load(name: str, *, split: str) -> datasets.Dataset:
        asked.append((name, split))
        return found

    monkeypatch.setattr(datasets, "load_dataset", load)
    (tmp_path / "gone.png").unlink()
    report = check(["hub:owner/name:some"], None, TOKENIZER)
    assert set(asked) == {("owner/name", "some")}
    assert report.samples == 1
    assert [bad.where for bad in report.bad] == ["hub:owner/name:some:1"]
    assert "gone.png: No such file" in report.bad[0].reason


def test_an_absent_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=r"needs the package datasets: pip install mmds\[datasets\]"):
        prepare(["hub:owner/name:train"], None, TOKENIZER, tmp_path / "out")
