"""Preparation: what is bad is named, what is good is kept, and the folder appears whole or not at all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from multiprocessing import get_context
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from mmds.data import write as write_module
from mmds.data.check import check
from mmds.data.prepare import ensure_prepared, prepare, prepared_folder
from mmds.data.shard_format import Manifest
from mmds.data.shard_writer import ShardWriter
from mmds.data.shards import ShardSet
from mmds.errors import DataError
from tests.chat_fixtures import hf_tokenizer
from tests.data.raw_sets import chat_tokenizer, picture, record, talk, write_jsonl, write_set

ROOT = Path(__file__).resolve().parents[2]
TOKENIZER = chat_tokenizer()


def keys(out: Path) -> list[str]:
    shards = ShardSet.open(out, TOKENIZER.fingerprint)
    return [shards.key(i) for i in range(len(shards))]


def listing(folder: Path) -> dict[str, int]:
    return {str(path.relative_to(folder)): path.lstat().st_mtime_ns for path in sorted(folder.rglob("*"))}


def write_bad_set(folder: Path) -> tuple[Path, list[tuple[int, str, str]]]:
    """A raw file with good and bad samples; and (line, key, words of the reason) of every bad one."""
    whole = picture(50, kind="JPEG", size=(64, 64))
    files = {
        "good.png": picture(1),
        "cut.jpg": whole[: len(whole) // 2],
        "cut.png": picture(2, size=(200, 200))[:-30],
        "empty.png": b"",
        "text.jpg": b"<html>404 not found</html>",
    }
    folder.mkdir(parents=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)
    (folder / "folder.png").mkdir()
    os.mkfifo(folder / "pipe.png")
    cases: list[tuple[dict[str, Any], str | None]] = [
        (record("g1", ["good.png"]), None),
        (record("missing", ["nowhere.png"]), "image 0 (nowhere.png): cannot read"),
        (record("cut-jpeg", ["good.png", "cut.jpg"]), "image 1 (cut.jpg): cannot be decoded"),
        (record("g2"), None),
        (record("cut-png", ["cut.png"]), "image 0 (cut.png): cannot be decoded"),
        (record("empty", ["empty.png"]), "image 0 (empty.png): not an image"),
        (record("html", ["text.jpg"]), "image 0 (text.jpg): not an image"),
        (record("folder", ["folder.png"]), "is not a file"),
        (record("pipe", ["pipe.png"]), "is not a file"),
        (record("no-marker", ["good.png"], "What is it?"), "0 image markers but 1 images"),
        (record("no-image", [], "<image> What is it?"), "1 image markers but 0 images"),
        (record("two-markers", ["good.png"], "<image><image> What?"), "2 image markers but 1 images"),
        ({"id": "roles", "conversations": talk("a") + talk("b")[1:]}, "turn 2"),
        ({"id": "hollow", "conversations": talk("Hi", "  ")}, "empty"),
        ({"id": "styleless", "text": "hello"}, "conversations"),
        ({"id": "lone\ud800", "conversations": talk("a")}, "lone surrogate"),
        ({"id": "noted", "conversations": talk("a"), "note": "\udfff"}, "lone surrogate"),
        (record("null", ["\0.png"]), "cannot read"),
        (record(None, ["nowhere.png"]), "cannot read"),
        (record("g3", ["good.png"]), None),
    ]
    raw = write_jsonl(folder / "raw.jsonl", [case for case, _ in cases])
    bad = [
        (n, case.get("id", f"raw-{n}").replace("\ud800", "\\ud800"), why)
        for n, (case, why) in enumerate(cases, 1)
        if why is not None
    ]
    return raw, bad


def test_a_check_lists_every_bad_sample_with_place_key_and_reason_and_writes_nothing(tmp_path: Path) -> None:
    raw, bad = write_bad_set(tmp_path / "set")
    before = listing(tmp_path)
    report = check([raw], None, TOKENIZER)
    assert [(b.where, b.key) for b in report.bad] == [(f"{raw}:{line}", key) for line, key, _ in bad]
    for found, (_, key, why) in zip(report.bad, bad, strict=True):
        assert why in found.reason
        assert str(raw) not in found.reason and not found.reason.startswith(("sample", ":")), found.reason
        assert str(found) == f"{found.where}: sample {key}: {found.reason}"
    assert (report.samples, report.images, report.text_only) == (3, 2, 1)
    assert 0 < report.supervised < report.tokens
    assert listing(tmp_path) == before


def test_a_bad_sample_stops_the_preparation_and_leaves_nothing(tmp_path: Path) -> None:
    raw, _ = write_bad_set(tmp_path / "set")
    with pytest.raises(
        DataError, match=r"raw\.jsonl:2: sample missing: image 0 \(nowhere\.png\).*--check.*--on-bad skip"
    ):
        prepare([raw], None, TOKENIZER, tmp_path / "new" / "out")
    assert list((tmp_path / "new").iterdir()) == []


def test_skipping_keeps_the_good_and_lists_the_bad(tmp_path: Path) -> None:
    raw, bad = write_bad_set(tmp_path / "set")
    manifest = prepare([raw], None, TOKENIZER, tmp_path / "out", on_bad="skip", max_bad_share=0.9)
    assert keys(tmp_path / "out") == ["g1", "g2", "g3"]
    assert manifest.skipped == len(bad)
    listed = [json.loads(line) for line in (tmp_path / "out" / "skipped.jsonl").read_text().splitlines()]
    assert [(entry["where"], entry["key"]) for entry in listed] == [
        (f"{raw}:{line}", key) for line, key, _ in bad
    ]
    with pytest.raises(DataError, match=rf"leaves out {len(bad)} bad samples"):
        prepare([raw], None, TOKENIZER, tmp_path / "out", on_bad="raise")


def test_too_many_bad_samples_are_not_skipped(tmp_path: Path) -> None:
    raw, bad = write_bad_set(tmp_path / "set")
    with pytest.raises(
        DataError, match=rf"{len(bad)} of 20 samples are bad, more than the allowed share of 10%.*--images"
    ):
        prepare([raw], None, TOKENIZER, tmp_path / "out", on_bad="skip")
    assert not (tmp_path / "out").exists()


def test_a_set_without_a_usable_sample_is_refused(tmp_path: Path) -> None:
    raw = write_jsonl(tmp_path / "raw.jsonl", [record("a", ["nowhere.png"])])
    with pytest.raises(DataError, match=r"no usable sample among 1 records: .*nowhere"):
        prepare([raw], None, TOKENIZER, tmp_path / "out", on_bad="skip", max_bad_share=1.0)


def test_every_broken_line_is_a_bad_sample_and_reading_goes_on(tmp_path: Path) -> None:
    lines = [json.dumps(record(key)).encode() for key in "abcd"]
    broken = [b'{"id": "x", NaN}', b'{"id": "caf\xe9"}', b"[1]", b'{"id": 1, "id": 2}', b'{"id": "cut']
    raw = tmp_path / "raw.jsonl"
    raw.write_bytes(b"\n".join(line for pair in zip(lines, broken, strict=False) for line in pair))
    raw.write_bytes(raw.read_bytes() + b"\n\n" + broken[-1])
    wanted = [
        (2, "invalid JSON"),
        (4, "not UTF-8"),
        (6, "must be a JSON object"),
        (8, "duplicate key"),
        (10, "invalid JSON"),
    ]
    report = check([raw], None, TOKENIZER)
    assert report.samples == 4
    assert [(bad.where, bad.key) for bad in report.bad] == [(f"{raw}:{line}", "") for line, _ in wanted]
    assert all(why in bad.reason for bad, (_, why) in zip(report.bad, wanted, strict=True))
    with pytest.raises(DataError, match=r"raw\.jsonl:2: invalid JSON.*--on-bad skip"):
        prepare([raw], None, TOKENIZER, tmp_path / "out")
    with pytest.raises(DataError, match=r"5 of 9 samples are bad"):
        prepare([raw], None, TOKENIZER, tmp_path / "out", on_bad="skip")
    manifest = prepare([raw], None, TOKENIZER, tmp_path / "out", on_bad="skip", max_bad_share=0.6)
    assert manifest.skipped == 5
    assert keys(tmp_path / "out") == ["a", "b", "c", "d"]
    listed = [json.loads(line) for line in (tmp_path / "out" / "skipped.jsonl").read_text().splitlines()]
    assert [entry["where"] for entry in listed] == [bad.where for bad in report.bad]


def test_a_broken_array_ends_its_file_and_is_never_skipped(tmp_path: Path) -> None:
    raw = tmp_path / "raw.json"
    raw.write_text(f'[{json.dumps(record("a"))},\n {{"id": NaN}}, {json.dumps(record("b"))}]')
    with pytest.raises(DataError, match=r"raw\.json:2: NaN.*nothing after it was read.*--check"):
        prepare([raw], None, TOKENIZER, tmp_path / "out", on_bad="skip", max_bad_share=1.0)
    other = write_jsonl(tmp_path / "other.jsonl", [record("d", ["nowhere.png"])])
    report = check([raw, other, tmp_path / "gone.jsonl"], None, TOKENIZER)
    assert report.samples == 1
    places = [(f"{raw}:2", ""), (f"{other}:1", "d"), (str(tmp_path / "gone.jsonl"), "")]
    assert [(bad.where, bad.key) for bad in report.bad] == places
    assert report.bad[0].reason.endswith("nothing after it was read")


def test_reasons_are_counted_by_kind(tmp_path: Path) -> None:
    (tmp_path / "cut.png").write_bytes(picture(2, size=(200, 200))[:-30])
    records = [record(f"m{i}", [f"nowhere/{i}.png"]) for i in range(3)]
    records += [record(f"c{i}", [], "<image>" * (i + 1) + "What?") for i in range(2)]
    records += [
        {"id": "r", "conversations": talk("a") + talk("b")[1:]},
        record("cut", ["cut.png"]),
        record("ok"),
    ]
    report = check([write_jsonl(tmp_path / "raw.jsonl", records)], None, TOKENIZER)
    counts = dict(report.kinds())
    assert counts["picture: cannot read: No such file or directory"] == 3
    assert counts["N image markers but N images"] == 2
    assert sum(counts.values()) == len(report.bad) == 7
    assert list(counts.values()) == sorted(counts.values(), reverse=True)


@pytest.mark.parametrize("bad_path", ["nowhere.jsonl", ""])
def test_a_raw_file_that_cannot_be_read_is_named(tmp_path: Path, bad_path: str) -> None:
    with pytest.raises(DataError, match=rf"{tmp_path / bad_path}: cannot be read"):
        prepare([tmp_path / bad_path], None, TOKENIZER, tmp_path / "out")
    with pytest.raises(DataError, match=r"images folder .* does not exist"):
        prepare([write_set(tmp_path, [0])], tmp_path / "no-images", TOKENIZER, tmp_path / "out")


def test_both_styles_are_stored_alike(tmp_path: Path) -> None:
    (tmp_path / "p.png").write_bytes(picture(3))
    llava = {
        "id": "a",
        "image": "p.png",
        "conversations": [
            {"from": "system", "value": "Be brief."},
            *talk("<image>\nWhat is it?", "Grey."),
            *talk("Sure? I typed \\<image> and <|im_end|>.", "Yes."),
        ],
    }
    part = {"type": "image", "image": "p.png"}
    chat = {
        "id": "a",
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [part, {"type": "text", "text": "\nWhat is it?"}]},
            {"role": "assistant", "content": "Grey."},
            {"role": "user", "content": [{"type": "text", "text": "Sure? I typed <image> and <|im_end|>."}]},
            {"role": "assistant", "content": [{"type": "text", "text": "Yes."}]},
        ],
    }
    samples = []
    for name, source in (("llava", llava), ("chat", chat)):
        prepare([write_jsonl(tmp_path / f"{name}.jsonl", [source])], None, TOKENIZER, tmp_path / name)
        samples.append(ShardSet.open(tmp_path / name, TOKENIZER.fingerprint).read(0))
    assert np.array_equal(samples[0].ids, samples[1].ids)
    assert np.array_equal(samples[0].supervised, samples[1].supervised)
    assert samples[0].image_bytes == samples[1].image_bytes


def test_the_type_comes_from_the_bytes(tmp_path: Path) -> None:
    for name, kind in (
        ("a.jpg", "PNG"),
        ("b.png", "JPEG"),
        ("c", "WEBP"),
        ("d.JPEG", "TIFF"),
        ("e.txt", "GIF"),
    ):
        (tmp_path / name).write_bytes(picture(9, kind=kind))
    raw = write_jsonl(tmp_path / "raw.jsonl", [record("k", ["a.jpg", "b.png", "c", "d.JPEG", "e.txt"])])
    prepare([raw], None, TOKENIZER, tmp_path / "out")
    names = subprocess.check_output(["tar", "tf", tmp_path / "out" / "shard-00000.tar"], text=True).split()
    assert names == ["k.json", "k.0.png", "k.1.jpg", "k.2.webp", "k.3.tif", "k.4.gif"]


def test_stored_sizes_are_upright(tmp_path: Path) -> None:
    for turn in range(1, 9):
        exif = Image.Exif()
        exif[0x0112] = turn
        (tmp_path / f"{turn}.jpg").write_bytes(picture(9, kind="JPEG", size=(40, 30), exif=exif))
    raw = write_jsonl(tmp_path / "raw.jsonl", [record("k", [f"{turn}.jpg" for turn in range(1, 9)])])
    prepare([raw], None, TOKENIZER, tmp_path / "out")
    shards = ShardSet.open(tmp_path / "out", TOKENIZER.fingerprint)
    assert shards.image_sizes.tolist() == [[40, 30]] * 4 + [[30, 40]] * 4


def test_names_are_ids_or_file_and_line_and_never_collide(tmp_path: Path) -> None:
    first = write_jsonl(
        tmp_path / "a" / "set.jsonl",
        [record("x"), record(None), {**record(None), "id": 7}, record("x"), record("set-5"), record("set-2")],
    )
    second = write_jsonl(tmp_path / "b" / "set.jsonl", [record("x"), record(None), record("7")])
    manifest = prepare([first, second], None, TOKENIZER, tmp_path / "out")
    assert keys(tmp_path / "out") == [
        "x",
        "set-2",
        "7",
        "set-4",
        "set-5",
        "set-6",
        "set-1",
        "set-2-2",
        "set-3",
    ]
    assert manifest.repeated_ids == 4
    assert check([first, second], None, TOKENIZER).repeated_ids == 4


def test_images_start_at_the_given_folder_or_at_the_raw_file(tmp_path: Path) -> None:
    for folder, grey in (("pictures", 1), ("beside", 2)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "p.png").write_bytes(picture(grey))
    absolute = str(tmp_path / "pictures" / "p.png")
    raw = write_jsonl(tmp_path / "beside" / "raw.jsonl", [record("a", ["p.png"]), record("b", [absolute])])
    for images, greys, out in ((tmp_path / "pictures", (1, 1), "out1"), (None, (2, 1), "out2")):
        prepare([raw], images, TOKENIZER, tmp_path / out)
        shards = ShardSet.open(tmp_path / out, TOKENIZER.fingerprint)
        assert [shards.read(i).image_bytes[0] for i in (0, 1)] == [picture(grey) for grey in greys]


def test_the_same_command_again_reuses_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = write_set(tmp_path / "set", [1, 0])
    first = prepare([raw], None, TOKENIZER, tmp_path / "out")
    before = listing(tmp_path / "out")
    monkeypatch.setattr(write_module, "examine", None)  # looking at the data again would fail
    assert prepare([raw], None, TOKENIZER, tmp_path / "out") == first
    assert listing(tmp_path / "out") == before


@pytest.mark.parametrize("change", ["raw", "images", "more"])
def test_other_input_never_overwrites(tmp_path: Path, change: str) -> None:
    raw = write_set(tmp_path / "set", [1, 0])
    prepare([raw], None, TOKENIZER, tmp_path / "out")
    before = listing(tmp_path / "out")
    images: Path | None = None
    files = [raw]
    if change == "raw":
        raw.write_text(raw.read_text().replace("grey", "gray"))
    elif change == "images":
        images = tmp_path
    else:
        files = [raw, write_jsonl(tmp_path / "more.jsonl", [record("m")])]
    with pytest.raises(DataError, match=r"was prepared from other input .*nothing was written"):
        prepare(files, images, TOKENIZER, tmp_path / "out")
    assert listing(tmp_path / "out") == before


def test_only_an_empty_folder_is_replaced(tmp_path: Path) -> None:
    raw = write_set(tmp_path / "set", [0])
    (tmp_path / "empty").mkdir()
    assert prepare([raw], None, TOKENIZER, tmp_path / "empty").samples == 1
    (tmp_path / "file").write_text("mine")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("mine")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    before = listing(tmp_path)
    for name in ("file", "full", "dangling"):
        with pytest.raises(DataError, match="is not a prepared folder; nothing was written"):
            prepare([raw], None, TOKENIZER, tmp_path / name)
    assert listing(tmp_path) == before


def test_a_damaged_folder_is_named_and_not_reused(tmp_path: Path) -> None:
    raw = write_set(tmp_path / "set", [1, 0])
    prepare([raw], None, TOKENIZER, tmp_path / "out")
    os.truncate(tmp_path / "out" / "shard-00000.tar", 512)
    with pytest.raises(DataError, match=r"shard-00000\.tar is cut short"):
        prepare([raw], None, TOKENIZER, tmp_path / "out")


def test_a_failure_midway_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = write_set(tmp_path / "set", [1, 0, 1])
    whole = ShardWriter.add

    def full_disk(self: ShardWriter, **sample: Any) -> None:
        if len(self) == 2:
            raise OSError(28, "No space left on device")
        whole(self, **sample)

    monkeypatch.setattr(ShardWriter, "add", full_disk)
    with pytest.raises(OSError, match="No space left"):
        prepare([raw], None, TOKENIZER, tmp_path / "new" / "out")
    assert list((tmp_path / "new").iterdir()) == []


def prepare_slowly(raw: Path, out: Path, started: Path, seconds: float) -> None:
    """Prepare with a pause after each sample, and create `started` at the first."""
    whole = ShardWriter.add

    def slow(self: ShardWriter, **sample: Any) -> None:
        whole(self, **sample)
        started.touch()
        time.sleep(seconds)

    ShardWriter.add = slow  # type: ignore[method-assign]  # in a process of its own
    prepare([raw], None, TOKENIZER, out)


def start_slow(raw: Path, out: Path, seconds: float) -> ForkProcess:
    """`prepare_slowly` in another process, which has written its first sample on return."""
    started = raw.parent / "started"
    process = get_context("fork").Process(
        target=prepare_slowly, args=(raw, out, started, seconds), daemon=True
    )
    process.start()
    deadline = time.monotonic() + 60
    while not started.exists():
        assert process.is_alive() and time.monotonic() < deadline
        time.sleep(0.01)
    return process


def test_a_killed_preparation_leaves_no_folder_and_the_next_one_cleans_up(tmp_path: Path) -> None:
    raw = write_set(tmp_path / "set", [1, 0, 1])
    process = start_slow(raw, tmp_path / "new" / "out", 60)
    process.kill()
    process.join()
    assert not (tmp_path / "new" / "out").exists()
    assert len(list((tmp_path / "new").iterdir())) == 1
    prepare([raw], None, TOKENIZER, tmp_path / "new" / "out")
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["out"]
    assert keys(tmp_path / "new" / "out") == ["s0", "s1", "s2"]


def test_two_processes_that_race_make_one_good_folder(tmp_path: Path) -> None:
    raw = write_set(tmp_path / "set", [1, 0, 1])
    out = tmp_path / "new" / "out"
    process = start_slow(raw, out, 0.5)
    prepare([raw], None, TOKENIZER, out)  # overtakes the slow one
    before = listing(out)
    process.join(timeout=60)
    assert process.exitcode == 0
    assert listing(out) == before
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["out"]


def test_a_raw_mix_path_is_prepared_once_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = write_set(tmp_path / "set", [1, 0])
    folder = ensure_prepared(raw, TOKENIZER)
    assert folder == prepared_folder(raw) and folder.parent == raw.parent / ".cache" / "mmds"
    assert keys(folder) == ["s0", "s1"]
    with monkeypatch.context() as patch:
        patch.setattr(write_module, "examine", None)
        assert ensure_prepared(raw, TOKENIZER) == folder
        other = chat_tokenizer("unigram")
        assert ensure_prepared(raw, other) == folder  # the ids are added, the pictures stay
    assert len(ShardSet.open(folder, other.fingerprint)) == 2
    raw.write_text(raw.read_text().replace("grey", "gray"))
    assert ensure_prepared(raw, TOKENIZER) != folder
    assert prepared_folder(raw, tmp_path) != prepared_folder(raw)


def test_a_prepared_mix_path_is_taken_as_it_is(tmp_path: Path) -> None:
    out = tmp_path / "out"
    prepare([write_set(tmp_path / "set", [0])], None, TOKENIZER, out)
    assert ensure_prepared(out, TOKENIZER) == out
    with pytest.raises(DataError, match=r"prepare\.py --retokenize NAME"):
        ensure_prepared(out, chat_tokenizer("unigram"))
    with pytest.raises(DataError, match="cannot be read"):
        ensure_prepared(tmp_path / "nowhere.jsonl", TOKENIZER)


def test_a_read_only_data_folder_is_cached_in_the_home_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = write_set(tmp_path / "set", [0])
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    folder = ensure_prepared(raw, TOKENIZER)
    assert folder.is_relative_to(tmp_path / "home")
    assert keys(folder) == ["s0"]


def run_script(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, ROOT / "scripts" / "prepare.py", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT)


def test_the_script_checks_prepares_and_reports(tmp_path: Path) -> None:
    hf_tokenizer("byte_level", "chatml").save_pretrained(tmp_path / "tokenizer")
    raw, bad = write_bad_set(tmp_path / "set")
    done = run_script(raw, "--tokenizer", tmp_path / "tokenizer", "--check")
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    assert all(
        line.startswith(f"{raw}:{n}: sample {key}: ") for line, (n, key, _) in zip(lines, bad, strict=False)
    )
    assert lines[len(bad)].startswith(f"{len(bad)} bad and 3 good samples (1 text-only, 2 images, ")
    assert sum(int(line.split()[0]) for line in lines[len(bad) + 1 :]) == len(bad)  # the summary by reason
    sample = ROOT / "data" / "sample"
    done = run_script(
        sample / "llava.jsonl",
        sample / "chat.jsonl",
        "--tokenizer",
        tmp_path / "tokenizer",
        "--out",
        tmp_path / "out",
    )
    assert done.returncode == 0, done.stderr
    assert "20 samples (4 text-only), 21 images" in done.stdout
    assert "samples=20" in done.stderr  # the bar
    assert Manifest.read(tmp_path / "out").samples == 20


def test_the_sample_set_is_what_its_script_draws(tmp_path: Path) -> None:
    sample = ROOT / "data" / "sample"
    for name in ("make.py", "draw.py"):
        (tmp_path / name).write_bytes((sample / name).read_bytes())
    subprocess.run([sys.executable, tmp_path / "make.py"], check=True, timeout=120)
    for name in ("llava.jsonl", "chat.jsonl"):
        assert (tmp_path / name).read_text() == (sample / name).read_text()
    drawn = {path.name for path in (tmp_path / "pictures").iterdir()}
    assert drawn == {path.name for path in (sample / "pictures").iterdir()}
    report = check([sample / "llava.jsonl", sample / "chat.jsonl"], None, TOKENIZER)
    assert not report.bad
    assert (report.samples, report.text_only, report.images) == (20, 4, 21)
