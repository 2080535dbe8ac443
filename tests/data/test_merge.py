"""Parts made by several jobs join to what one preparation gives."""

from __future__ import annotations

import os
import shutil
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import numpy as np
import pytest

from mmds.data.merge import merge
from mmds.data.parts import Part
from mmds.data.prepare import add_tokens, prepare
from mmds.data.shard_format import COLUMNS, Manifest
from mmds.data.shards import ShardSet
from mmds.errors import DataError
from tests.chat_fixtures import hf_tokenizer
from tests.data.raw_sets import chat_tokenizer, file_digests, write_set
from tests.data.test_restart import OPTIONS, write_mixed_set

ROOT = Path(__file__).resolve().parents[2]
TOKENIZER = chat_tokenizer()
CUT = {"shard_start", "record_block", "image_block"}
"""Columns that say where shards are cut."""


def make_parts(raw: Path, out: Path, count: int) -> list[Path]:
    """Every part, the last one first."""
    folders = []
    for index in range(count, 0, -1):
        part = Part(index=index, count=count)
        folders.append(part.folder(out))
        prepare([raw], None, TOKENIZER, folders[-1], part=part, max_bad_share=1.0, **OPTIONS)
    return folders[::-1]


@pytest.mark.parametrize("count", [1, 2, 7])
def test_joined_parts_equal_one_preparation(tmp_path: Path, count: int) -> None:
    raw = write_mixed_set(tmp_path / "set")
    prepare([raw], None, TOKENIZER, tmp_path / "whole", **OPTIONS)
    parts = make_parts(raw, tmp_path / "out", count)
    inodes = [path.stat().st_ino for part in parts for path in sorted(part.glob("*.tar"))]
    manifest = merge(tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "set", "whole"]
    assert [path.stat().st_ino for path in sorted((tmp_path / "out").glob("*.tar"))] == inodes

    joined = ShardSet.open(tmp_path / "out", TOKENIZER.fingerprint)
    whole = ShardSet.open(tmp_path / "whole", TOKENIZER.fingerprint)
    assert len(joined) == len(whole) > 30
    for i in range(len(whole)):
        a, b = joined.read(i), whole.read(i)
        assert (a.key, a.image_bytes, a.image_paths, a.image_sizes) == (
            b.key,
            b.image_bytes,
            b.image_paths,
            b.image_sizes,
        )
        assert joined.index.record(i) == whole.index.record(i)
        assert np.array_equal(a.ids, b.ids) and np.array_equal(a.supervised, b.supervised)
    same = [f"index/{name}.npy" for name in COLUMNS if count == 1 or name not in CUT] + ["skipped.jsonl"]
    same += [name for name in file_digests(tmp_path / "whole") if name.startswith("tokens/")]
    assert len(same) > 12
    digests, expected = file_digests(tmp_path / "out"), file_digests(tmp_path / "whole")
    assert {name: digests[name] for name in same} == {name: expected[name] for name in same}
    if count == 1:
        assert digests == expected
    other = Manifest.read(tmp_path / "whole")
    for name in ("samples", "images", "text_only", "skipped", "repeated_ids", "digest", "part", "raw"):
        assert getattr(manifest, name) == getattr(other, name), name
    assert prepare([raw], None, TOKENIZER, tmp_path / "out", **OPTIONS) == manifest  # it counts as prepared


def test_more_parts_than_records_leave_some_empty(tmp_path: Path) -> None:
    raw = write_set(tmp_path / "set", [1, 0])
    parts = make_parts(raw, tmp_path / "out", 5)
    assert [Manifest.read(part).samples for part in parts] == [0, 0, 1, 0, 1]
    merge(tmp_path / "out")
    shards = ShardSet.open(tmp_path / "out", TOKENIZER.fingerprint)
    assert [shards.read(i).key for i in range(len(shards))] == ["s0", "s1"]


def test_parts_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    raw, out = write_set(tmp_path / "set", [1, 0, 1, 0]), tmp_path / "out"
    with pytest.raises(DataError, match=r"there is no part beside .*out"):
        merge(out)
    parts = make_parts(raw, out, 2)
    kept = tmp_path / "kept"
    parts[0].rename(kept)
    with pytest.raises(DataError, match=r"parts of .*out are missing: 1/2"):
        merge(out)
    shutil.copytree(parts[1], parts[0])
    with pytest.raises(DataError, match=r"part 1/2 was prepared from other input .* or as another part"):
        merge(out)
    shutil.rmtree(parts[0])
    raw.write_text(raw.read_text().replace("greys", "shades"))
    prepare([raw], None, TOKENIZER, parts[0], part=Part(index=1, count=2))
    with pytest.raises(DataError, match=r"part 2/2 was prepared from other input"):
        merge(out)
    shutil.rmtree(parts[0])
    kept.rename(parts[0])
    third = Part(index=1, count=3).folder(out)
    third.mkdir()
    with pytest.raises(DataError, match=r"there is parts of 2 and of 3 beside"):
        merge(out)
    third.rmdir()
    os.truncate(parts[1] / "shard-00000.tar", 512)
    with pytest.raises(DataError, match=r"part-2-of-2/shard-00000\.tar is cut short"):
        merge(out)
    assert not out.exists() and all(part.exists() for part in parts)
    out.mkdir()
    (out / "thesis.txt").write_text("mine")
    with pytest.raises(DataError, match=r"out exists; nothing was written"):
        merge(out)


def test_a_part_is_no_whole_and_a_merge_keeps_every_common_tokenizer(tmp_path: Path) -> None:
    raw, other = write_set(tmp_path / "set", [1, 0, 1, 0]), chat_tokenizer("unigram")
    parts = make_parts(raw, tmp_path / "out", 2)
    with pytest.raises(DataError, match="was prepared from other input"):
        prepare([raw], None, TOKENIZER, parts[0])
    for part in parts:
        add_tokens(part, other)
    merge(tmp_path / "out")
    for tokenizer in (TOKENIZER, other):
        assert len(ShardSet.open(tmp_path / "out", tokenizer.fingerprint)) == 4


@pytest.mark.parametrize("text", ["0/2", "3/2", "1", "a/b", "1/0", "-1/2"])
def test_a_part_that_makes_no_sense_is_refused(text: str) -> None:
    with pytest.raises(DataError, match="write i/n with i from 1 to n"):
        Part.parse(text)


@pytest.mark.parametrize(("records", "count"), [(0, 3), (1, 3), (10, 3), (10, 10), (7, 16)])
def test_parts_cover_every_record_once(records: int, count: int) -> None:
    spans = [Part(index=i, count=count).span(records) for i in range(1, count + 1)]
    assert [n for first, last in spans for n in range(first, last)] == list(range(records))
    sizes = [last - first for first, last in spans]
    assert max(sizes) - min(sizes) <= 1


def test_the_script_makes_parts_joins_and_retokenizes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = spec_from_file_location("prepare_script", ROOT / "scripts" / "prepare.py")
    assert spec is not None and spec.loader is not None
    script = module_from_spec(spec)
    spec.loader.exec_module(script)
    for name in ("byte_level", "unigram"):
        hf_tokenizer(name, "chatml").save_pretrained(tmp_path / name)
    raw, out = str(write_set(tmp_path / "set", [1, 0, 1, 0])), tmp_path / "out"

    def run(*arguments: str) -> str:
        assert script.main([*arguments, "--out", str(out)]) == 0, capsys.readouterr().err
        return capsys.readouterr().out

    for part in ("1/2", "2/2"):
        assert "2 samples" in run(raw, "--tokenizer", str(tmp_path / "byte_level"), "--part", part)
    assert f"{out}: 4 samples, 2 images" in run("--merge")
    before = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in out.glob("*.tar")}
    assert len(before) == 2
    assert f"{out}: 4 samples" in run("--retokenize", str(tmp_path / "unigram"))
    assert {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in out.glob("*.tar")} == before
    assert len(list((out / "tokens").iterdir())) == 2
    for wrong in (
        ["--merge", raw, "--out", "x"],
        ["--merge"],
        ["--retokenize", "x", "--check", "--out", "x"],
        ["--retokenize", "x"],
        [raw, "--tokenizer", "x", "--workers", "0", "--out", "x"],
        [raw, "--out", "x"],
        [raw, "--tokenizer", "x"],
        ["--tokenizer", "x", "--part", "1/2", "--out", "x"],
        [raw, "--tokenizer", "x", "--part", "1/2", "--out", "s3://b/x"],
        [raw, "--tokenizer", "x", "--part", "1/2", "--check"],
    ):
        with pytest.raises(SystemExit) as caught:
            script.parse_arguments(wrong)
        assert caught.value.code == 2
