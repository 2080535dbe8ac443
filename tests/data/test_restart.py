"""A preparation that is killed leaves nothing under a final name, and the next one goes on from it."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

from mmds.data import write as write_module
from mmds.data.examine import examine
from mmds.data.prepare import prepare
from mmds.data.shard_writer import ShardWriter
from mmds.data.work import Work, working
from mmds.errors import DataError
from tests.data.raw_sets import chat_tokenizer, file_digests, picture, record, write_jsonl, write_set

TOKENIZER = chat_tokenizer()
OPTIONS: dict[str, Any] = {"shard_bytes": 8_000, "on_bad": "skip"}
COUNT = 60


def write_mixed_set(folder: Path) -> Path:
    """Pictures, text, bad samples and ids that come twice, all along the file."""
    raw = write_set(folder, [1, 0, 2] * (COUNT // 3))
    lines = raw.read_text().splitlines()
    for i in range(7, COUNT, 20):
        lines[i] = "{broken"
        lines[i + 1] = json.dumps(record("s0"))
        lines[i + 2] = json.dumps(record(None))
    raw.write_text("\n".join(lines) + "\n")
    return raw


def prepare_slowly(raw: Path, out: Path, workers: int) -> None:
    """Prepare, in a process group of its own, with a pause at each sample, so that a kill hits anywhere."""
    os.setpgid(0, 0)
    whole = ShardWriter.add

    def slow(self: ShardWriter, **sample: Any) -> None:
        time.sleep(0.004)
        whole(self, **sample)

    ShardWriter.add = slow  # type: ignore[method-assign]  # in a process of its own
    prepare([raw], None, TOKENIZER, out, workers=workers, **OPTIONS)


def killed_after(seconds: float, raw: Path, out: Path, workers: int) -> bool:
    """Start `prepare_slowly`, kill it so many seconds after its first sign of work; whether it was still at work."""
    process = get_context("fork").Process(target=prepare_slowly, args=(raw, out, workers))
    process.start()
    begun = out.parent / f".{out.name}.work"
    deadline = time.monotonic() + 30  # forking a process that holds gigabytes takes its time
    while process.is_alive() and not begun.exists() and time.monotonic() < deadline:
        time.sleep(0.005)
    process.join(seconds)
    alive = process.is_alive()
    process.kill()  # the process alone: its workers have to notice
    process.join()
    return alive


def group_is_empty(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return True
    return False


def test_a_run_killed_at_any_moment_is_gone_on_with_to_the_same_bytes(tmp_path: Path) -> None:
    raw = write_mixed_set(tmp_path / "set")
    prepare([raw], None, TOKENIZER, tmp_path / "clean", **OPTIONS)
    expected, draw = file_digests(tmp_path / "clean"), random.Random(0)
    went_on = 0
    for round_ in range(4):
        out = tmp_path / f"new{round_}" / "out"
        for _ in range(3):
            if not killed_after(draw.uniform(0.05, 0.4), raw, out, workers=1 + round_ % 2):
                break
            if out.exists():  # it was killed between its last word and its end
                break
            names = [path.name for path in out.parent.iterdir()] if out.parent.exists() else []
            assert names in ([], [".out.work"])
            journal = out.parent / ".out.work" / "journal.jsonl"
            went_on += journal.exists()
        prepare([raw], None, TOKENIZER, out, **OPTIONS)
        assert file_digests(out) == expected
        assert [path.name for path in out.parent.iterdir()] == ["out"]
    assert went_on > 0, "no kill came after the first shard"


def test_what_a_run_left_that_was_killed_after_its_last_word_goes_with_the_next(tmp_path: Path) -> None:
    raw, out = write_mixed_set(tmp_path / "set"), tmp_path / "new" / "out"
    prepare([raw], None, TOKENIZER, out, **OPTIONS)
    left = out.parent / ".out.work"
    left.mkdir()
    (left / "lock").touch()
    (left / "journal.jsonl").write_text("{}")
    prepare([raw], None, TOKENIZER, out, **OPTIONS)
    assert [path.name for path in out.parent.iterdir()] == ["out"]


def test_workers_end_with_a_run_that_is_killed(tmp_path: Path) -> None:
    raw = write_mixed_set(tmp_path / "set")
    process = get_context("fork").Process(target=prepare_slowly, args=(raw, tmp_path / "out", 2))
    process.start()
    assert process.pid is not None
    deadline = time.monotonic() + 60
    while len(children(process.pid)) < 2:
        assert process.is_alive() and time.monotonic() < deadline
    process.kill()
    process.join()
    deadline = time.monotonic() + 10
    while not (ended := group_is_empty(process.pid)) and time.monotonic() < deadline:
        time.sleep(0.01)
    if not ended:
        os.killpg(process.pid, signal.SIGKILL)
    assert ended, "workers are left"


def children(process: int) -> list[str]:
    return Path(f"/proc/{process}/task/{process}/children").read_text().split()


def stop_at(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the preparation end at one sample as if its process had been killed there."""
    whole = ShardWriter.add

    def stops(self: ShardWriter, **sample: Any) -> None:
        if len(self) == number:
            raise KeyboardInterrupt
        whole(self, **sample)

    monkeypatch.setattr(ShardWriter, "add", stops)


def test_finished_shards_are_not_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw, out = write_mixed_set(tmp_path / "set"), tmp_path / "new" / "out"
    prepare([raw], None, TOKENIZER, tmp_path / "clean", **OPTIONS)
    with monkeypatch.context() as patch:
        stop_at(COUNT // 2, patch)
        with pytest.raises(KeyboardInterrupt):
            prepare([raw], None, TOKENIZER, out, **OPTIONS)
    work = Work(out.parent / ".out.work", out)
    start = work.checkpoint()
    assert start is not None and start.shards > 2 and start.skipped > 0 and start.repeated > 0
    times = {path.name: path.stat().st_mtime_ns for path in work.folder.glob("*.tar")}
    firsts = []

    def noted(*arguments: Any, first: int, **options: Any) -> Any:
        firsts.append(first)
        return examine(*arguments, first=first, **options)

    monkeypatch.setattr(write_module, "examine", noted)
    prepare([raw], None, TOKENIZER, out, workers=2, **OPTIONS)
    assert firsts == [start.records] and start.records > COUNT // 4
    kept = [f"shard-{number:05d}.tar" for number in range(start.shards)]
    assert [(out / name).stat().st_mtime_ns for name in kept] == [times[name] for name in kept]
    assert file_digests(out) == file_digests(tmp_path / "clean")


@pytest.mark.parametrize("damage", ["cut", "garbage"])
def test_a_journal_line_that_was_not_written_whole_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    raw, out = write_mixed_set(tmp_path / "set"), tmp_path / "new" / "out"
    prepare([raw], None, TOKENIZER, tmp_path / "clean", **OPTIONS)
    with monkeypatch.context() as patch:
        stop_at(COUNT // 2, patch)
        with pytest.raises(KeyboardInterrupt):
            prepare([raw], None, TOKENIZER, out, **OPTIONS)
    journal = out.parent / ".out.work" / "journal.jsonl"
    text = journal.read_text()
    journal.write_text(text[:-20] if damage == "cut" else text + "{}\n")
    prepare([raw], None, TOKENIZER, out, **OPTIONS)
    assert file_digests(out) == file_digests(tmp_path / "clean")


@pytest.mark.parametrize("change", ["raw", "shard_bytes", "on_bad"])
def test_the_work_of_another_preparation_is_thrown_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    raw, out = write_mixed_set(tmp_path / "set"), tmp_path / "new" / "out"
    with monkeypatch.context() as patch:
        stop_at(COUNT // 2, patch)
        with pytest.raises(KeyboardInterrupt):
            prepare([raw], None, TOKENIZER, out, **OPTIONS)
    options = dict(OPTIONS)
    if change == "raw":
        raw.write_text(raw.read_text().replace("greys", "shades"))
    elif change == "shard_bytes":
        options["shard_bytes"] = 20_000
    else:
        with pytest.raises(DataError, match=r"raw\.jsonl:8: invalid JSON"):
            prepare([raw], None, TOKENIZER, out, shard_bytes=8_000)
        return
    prepare([raw], None, TOKENIZER, tmp_path / "clean", **options)
    prepare([raw], None, TOKENIZER, out, **options)
    assert file_digests(out) == file_digests(tmp_path / "clean")


def test_a_bad_sample_found_late_costs_only_what_follows_the_last_finished_shard(tmp_path: Path) -> None:
    raw, out = write_set(tmp_path / "set", [1] * COUNT), tmp_path / "new" / "out"
    (tmp_path / "set" / "p50.png").rename(tmp_path / "p50.png")
    with pytest.raises(DataError, match=r"sample s49: image 0 \(p50\.png\): cannot read"):
        prepare([raw], None, TOKENIZER, out, shard_bytes=8_000)
    assert not out.exists()
    start = Work(out.parent / ".out.work", out).checkpoint()
    assert start is not None and 25 < start.records < 50
    (tmp_path / "p50.png").rename(tmp_path / "set" / "p50.png")
    assert prepare([raw], None, TOKENIZER, out, shard_bytes=8_000).samples == COUNT
    prepare([raw], None, TOKENIZER, tmp_path / "clean", shard_bytes=8_000)
    assert file_digests(out) == file_digests(tmp_path / "clean")


def test_the_lock_survives_the_removal_of_its_folder(tmp_path: Path) -> None:
    with working(tmp_path / "out"):
        assert (tmp_path / ".out.work" / "lock").exists()
    assert list(tmp_path.iterdir()) == []
    with working(tmp_path / "out") as work:
        assert work.checkpoint() is None


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_any_number_of_processes_gives_the_same_bytes(tmp_path: Path, workers: int) -> None:
    raw = write_mixed_set(tmp_path / "set")
    prepare([raw], None, TOKENIZER, tmp_path / "one", workers=1, **OPTIONS)
    prepare([raw], None, TOKENIZER, tmp_path / "more", workers=workers, **OPTIONS)
    assert len(list((tmp_path / "more").glob("*.tar"))) > 3
    assert file_digests(tmp_path / "more") == file_digests(tmp_path / "one")


def test_a_worker_that_is_killed_is_an_error_that_names_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "p.png").write_bytes(picture(1))
    raw = write_jsonl(tmp_path / "raw.jsonl", [record(f"s{i}", ["p.png"]) for i in range(COUNT)])
    monkeypatch.setattr("mmds.data.examine.load_image", lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))
    with pytest.raises(DataError, match=r"a worker process was killed.*--workers"):
        prepare([raw], None, TOKENIZER, tmp_path / "out", workers=2)
