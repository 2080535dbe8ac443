"""A prepared folder gives back what was put in, plans without pictures, and is refused when damaged."""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
import tarfile
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest

from mmds.data import local_folder
from mmds.data.conversation import parse_record
from mmds.data.images import load_image
from mmds.data.prepare import add_tokens, prepare
from mmds.data.rows import IMAGE_MARKER, LoadedSample, build_row
from mmds.data.shard_format import MANIFEST
from mmds.data.shard_index import ShardIndex
from mmds.data.shard_writer import MAX_STEM, member_stem
from mmds.data.shards import ShardSet
from mmds.errors import DataError
from mmds.planner import plan_lengths
from tests.data.raw_sets import GEOMETRY, chat_tokenizer, picture, prepared_set, record, write_jsonl

ODD_KEYS = [
    "a.b.c",
    "A.B.C",
    "UPPER case",
    "häßlich/猫.jpg",
    "../../etc/passwd",
    "/abs/olute",
    "tab\tand\nline",
    "100%25",
    "~",
    "x" * 500,
    "x" * 499 + "y",
    "猫" * 200,
    ".",
    "..",
    "-rf",
]


def webdataset_groups(paths: list[Path]) -> dict[str, dict[str, bytes]]:
    """Samples as webdataset forms them: neighbours whose names agree up to the first dot of the base name."""
    groups: dict[str, dict[str, bytes]] = {}
    current = None
    for path in paths:
        with tarfile.open(path, "r|") as tar:
            for member in tar:
                match = re.match(r"^((?:.*/|)[^.]+)[.]([^/]*)$", member.name)
                assert match is not None, member.name
                stem, extension = match.groups()
                if stem != current:
                    assert stem not in groups, f"{stem} comes twice"
                    groups[stem], current = {}, stem
                file = tar.extractfile(member)
                assert file is not None
                groups[stem][extension] = file.read()
    return groups


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> ShardSet:
    """Nine samples with 0 to 3 pictures in several shards."""
    return prepared_set(tmp_path_factory.mktemp("small"), [1, 0, 2, 3, 0, 1, 1, 2, 0], shard_bytes=4_000)


@pytest.fixture
def copy(small: ShardSet, tmp_path: Path) -> Path:
    """A copy of the small set to damage."""
    return Path(shutil.copytree(small.path, tmp_path / "copy"))


def test_samples_come_back_as_they_were_put_in(tmp_path: Path) -> None:
    files = {
        "deep/cat.jpg": picture(90, kind="JPEG", size=(31, 17)),
        "dog.png": picture(10, size=(5, 9)),
        "bird.webp": picture(200, kind="WEBP", size=(64, 8)),
    }
    for name, data in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(data)
    records = [record("first", ["dog.png", "deep/cat.jpg"]), record("second"), record("third", ["bird.webp"])]
    raw, tokenizer = write_jsonl(tmp_path / "raw.jsonl", records), chat_tokenizer()
    manifest = prepare([raw], None, tokenizer, tmp_path / "out")
    shards = ShardSet.open(tmp_path / "out", tokenizer.fingerprint)
    assert len(shards) == manifest.samples == 3
    assert (manifest.images, manifest.text_only) == (3, 1)
    for i, source in enumerate(records):
        sample = shards.read(i)
        encoded = tokenizer.encode(parse_record(source, where="x:1"))
        assert sample.key == shards.key(i) == source["id"]
        assert sample.ids.dtype == np.int32 and sample.supervised.dtype == np.bool_
        assert np.array_equal(sample.ids, encoded.ids)
        assert np.array_equal(sample.supervised, encoded.supervised)
        assert sample.image_paths == tuple(source.get("image", ()))
        assert sample.image_bytes == tuple(files[name] for name in sample.image_paths)
        assert json.loads(shards.index.record(i)) == source
    assert shards.read(0).image_sizes == ((5, 9), (31, 17))
    assert shards.image_sizes.tolist() == [[5, 9], [31, 17], [64, 8]]
    assert shards.image_start.tolist() == [0, 2, 2, 3]
    with pytest.raises(IndexError):
        shards.read(3)


def test_shards_are_webdataset_tars(small: ShardSet) -> None:
    paths = [small.path / name for name in small.index.manifest.shards]
    assert len(paths) > 1
    groups = webdataset_groups(paths)
    assert list(groups) == [small.key(i) for i in range(len(small))]
    for i, files in enumerate(groups.values()):
        sample = small.read(i)
        assert list(files) == ["json", *(f"{k}.png" for k in range(len(sample.image_bytes)))]
        assert tuple(files.values())[1:] == sample.image_bytes
        assert json.loads(files["json"])["id"] == sample.key


def test_odd_names_stay_apart_and_harmless(tmp_path: Path) -> None:
    (tmp_path / "p.png").write_bytes(picture(1))
    raw = write_jsonl(tmp_path / "raw.jsonl", [record(key, ["p.png"]) for key in ODD_KEYS])
    tokenizer = chat_tokenizer()
    manifest = prepare([raw], None, tokenizer, tmp_path / "out")
    shards = ShardSet.open(tmp_path / "out", tokenizer.fingerprint)
    assert [shards.read(i).key for i in range(len(shards))] == ODD_KEYS
    groups = webdataset_groups([tmp_path / "out" / name for name in manifest.shards])
    assert len(groups) == len(ODD_KEYS)
    for stem, files in groups.items():
        assert set(files) == {"json", "0.png"}
        assert re.fullmatch(r"[A-Za-z0-9_%~-]+", stem) and len(stem) <= MAX_STEM


def test_member_stems_never_collide() -> None:
    keys = [*ODD_KEYS, "a%2Eb", "a.b", "x" * 120, "x" * 121, "%7E", "~" * 60]
    assert len({member_stem(key) for key in keys}) == len(keys)


def test_row_lengths_are_those_of_the_rows_that_are_built(small: ShardSet) -> None:
    lengths = small.sizes(GEOMETRY).tokens
    assert lengths.dtype == np.int64
    for i in range(len(small)):
        stored = small.read(i)
        assert int((stored.ids == IMAGE_MARKER).sum()) == len(stored.image_bytes)
        assert small.text_tokens[i] == len(stored.ids)
        assert small.supervised[i] == stored.supervised.sum() > 0
        loaded = LoadedSample(
            key=stored.key,
            ids=stored.ids,
            supervised=stored.supervised,
            images=tuple(load_image(data, height=28, width=28)[None] for data in stored.image_bytes),
            image_sizes=stored.image_sizes,
            image_paths=stored.image_paths,
        )
        assert build_row([loaded], GEOMETRY).input_ids.numel() == lengths[i]


def test_planning_needs_no_shard_at_all(copy: Path, small: ShardSet) -> None:
    shards = ShardSet.open(copy, small.fingerprint)
    for path in copy.glob("*.tar"):
        path.unlink()
    plan = plan_lengths(
        shards.sizes(GEOMETRY).tokens, row_tokens=200, rows_per_step=2, seed=0, epochs=1, names=shards.key
    )
    assert plan.total_steps > 0
    with pytest.raises(DataError, match=r"sample s0: cannot read .*shard-00000\.tar"):
        shards.read(0)


def test_a_shard_stays_below_its_size_unless_one_sample_is_larger(tmp_path: Path) -> None:
    shards = prepared_set(tmp_path, [1] * 12 + [5] + [1] * 3, shard_bytes=4_000)
    sizes = [shards.index.manifest.files[name] for name in shards.index.manifest.shards]
    assert len(sizes) > 4
    assert sum(size > 4_000 + 1024 for size in sizes) == 1
    assert [shards.read(i).key for i in range(16)] == [f"s{i}" for i in range(16)]


def test_the_same_input_gives_the_same_bytes(tmp_path: Path) -> None:
    first, second = (prepared_set(tmp_path / name, [2, 0, 1]) for name in "ab")
    for name in [*first.index.manifest.files, f"tokens/{first.fingerprint}/ids.bin"]:
        assert (first.path / name).read_bytes() == (second.path / name).read_bytes()


def test_the_index_of_a_sample_with_one_picture_takes_less_than_64_bytes_beside_its_names(
    tmp_path: Path,
) -> None:
    """Counted by adding samples, with the two columns that belong to the ids of a tokenizer."""
    index, tokens = [], []
    for count in (10, 60):
        shards = prepared_set(tmp_path / str(count), [1] * count)
        files = [
            path
            for path in Path(shards.path).glob("index/*.npy")
            if path.stem not in ("key_text", "path_text")
        ]
        index.append(sum(path.stat().st_size for path in files))
        tokens.append(sum(path.stat().st_size for path in Path(shards.path).glob("tokens/*/*.npy")))
    assert (index[1] - index[0]) / 50 == 48
    assert (index[1] + tokens[1] - index[0] - tokens[0]) / 50 == 60 < 64


def test_text_only_sets_have_no_images(tmp_path: Path) -> None:
    shards = prepared_set(tmp_path, [0, 0])
    assert shards.image_sizes.shape == (0, 2)
    assert np.array_equal(shards.sizes(GEOMETRY).tokens, shards.text_tokens)
    assert shards.read(1).image_bytes == ()


def _read_key(shards: ShardSet) -> tuple[str, bytes]:
    sample = shards.read(3)
    return sample.key, sample.image_bytes[0]


def test_forked_workers_read_the_same(small: ShardSet) -> None:
    expected = _read_key(small)  # opens handles that a forked worker must not use
    with get_context("fork").Pool(2) as pool:
        assert pool.map(_read_key, [small] * 4) == [expected] * 4


def test_a_pickled_set_carries_its_path_only(small: ShardSet) -> None:
    data = pickle.dumps(small)
    assert len(data) < 1000
    assert _read_key(pickle.loads(data)) == _read_key(small)


def test_few_handles_stay_open(small: ShardSet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_folder, "OPEN_SHARDS", 2)
    shards = ShardSet.open(small.path, small.fingerprint)
    assert len(shards.index.manifest.shards) > 3
    before = len(os.listdir("/proc/self/fd"))
    for i in [*range(len(shards)), 0, 8, 3]:
        shards.read(i)
    assert len(os.listdir("/proc/self/fd")) <= before + 2
    del shards
    assert len(os.listdir("/proc/self/fd")) <= before


@pytest.mark.parametrize(
    "name", ["shard-00002.tar", "index/image_block.npy", "tokens/FP/ids.bin", "tokens/FP/starts.npy"]
)
@pytest.mark.parametrize("damage", ["cut", "longer", "missing", "empty"])
def test_a_file_of_another_size_is_named(copy: Path, small: ShardSet, name: str, damage: str) -> None:
    path = copy / name.replace("FP", small.fingerprint)
    data = path.read_bytes()
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes({"cut": data[:-600] or data[:-1], "longer": data + b"x", "empty": b""}[damage])
    words = {"missing": "is missing", "longer": "is too long"}.get(damage, "is cut short")
    with pytest.raises(DataError, match=f"{re.escape(str(path))} {words}.*again"):
        ShardSet.open(copy, small.fingerprint)


def test_a_shard_cut_after_opening_is_named_with_its_sample(copy: Path, small: ShardSet) -> None:
    shards = ShardSet.open(copy, small.fingerprint)
    for name in shards.index.manifest.shards:
        os.truncate(copy / name, 100)
    with pytest.raises(DataError, match=r"shard-0000\d\.tar is cut short: sample s7 needs bytes"):
        shards.read(7)


def test_a_missing_half_is_named(copy: Path, small: ShardSet) -> None:
    names = small.index.manifest.shards
    for name in names[len(names) // 2 :]:
        (copy / name).unlink()
    with pytest.raises(DataError, match=rf"{names[len(names) // 2]} is missing"):
        ShardSet.open(copy, small.fingerprint)


def test_an_index_that_points_outside_its_shard_is_refused(copy: Path, small: ShardSet) -> None:
    path = copy / "index" / "image_block.npy"
    blocks = np.load(path)
    blocks[2] += 10**6
    np.save(path, blocks)
    with pytest.raises(DataError, match=r"points past the end of shard-0000\d\.tar"):
        ShardSet.open(copy, small.fingerprint)


def test_an_index_of_other_counts_is_refused(copy: Path, small: ShardSet) -> None:
    content = json.loads((copy / MANIFEST).read_text())
    content["samples"] += 1
    (copy / MANIFEST).write_text(json.dumps(content))
    with pytest.raises(DataError, match=r"record_block\.npy has 9 entries, not 10"):
        ShardSet.open(copy, small.fingerprint)


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "{}", '{"format": "mmds-shards-0"}', '{"format": "mmds-shards-1"}']
)
def test_a_damaged_manifest_is_named(copy: Path, small: ShardSet, content: str) -> None:
    (copy / MANIFEST).write_text(content)
    with pytest.raises(
        DataError, match=r"manifest\.json is (damaged|not of format).*prepare the folder again"
    ):
        ShardSet.open(copy, small.fingerprint)


def test_a_damaged_column_is_named(copy: Path, small: ShardSet) -> None:
    path = copy / "index" / "shard_start.npy"
    path.write_bytes(b"\0" * path.stat().st_size)
    with pytest.raises(DataError, match=r"shard_start\.npy is damaged"):
        ShardSet.open(copy, small.fingerprint)


def test_a_folder_that_nobody_prepared_is_refused_with_the_command(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "shard-00000.tar", "w"):
        pass
    with pytest.raises(DataError, match=r"no manifest\.json.*scripts/prepare\.py"):
        ShardSet.open(tmp_path, "abc")
    with pytest.raises(DataError, match=r"no manifest\.json"):
        ShardSet.open(tmp_path / "nowhere", "abc")


def test_another_tokenizer_is_refused_with_the_command_that_adds_it(copy: Path, small: ShardSet) -> None:
    other = chat_tokenizer("unigram")
    with pytest.raises(
        DataError,
        match=rf"{other.fingerprint}.*{small.fingerprint}.*prepare\.py --retokenize NAME --out {copy}",
    ):
        ShardSet.open(copy, other.fingerprint)
    pictures = {path: path.read_bytes() for path in [*copy.glob("*.tar"), *copy.glob("index/*")]}
    add_tokens(copy, other)
    shards, old = ShardSet.open(copy, other.fingerprint), ShardSet.open(copy, small.fingerprint)
    assert {path: path.read_bytes() for path in pictures} == pictures
    for i in range(len(shards)):
        conversation = parse_record(json.loads(shards.index.record(i)), where="x:1")
        assert np.array_equal(shards.read(i).ids, other.encode(conversation).ids)
        assert np.array_equal(old.read(i).ids, small.read(i).ids)
    assert sorted(path.name for path in (copy / "tokens").iterdir()) == sorted(
        [other.fingerprint, small.fingerprint]
    )


def test_ids_of_another_preparation_are_refused(copy: Path, small: ShardSet, tmp_path: Path) -> None:
    other = prepared_set(tmp_path / "other", [1, 1])
    shutil.rmtree(copy / "tokens")
    shutil.copytree(other.path / "tokens", copy / "tokens")
    with pytest.raises(DataError, match="another preparation: 2 of 9 samples"):
        ShardSet.open(copy, small.fingerprint)


def test_the_index_alone_needs_no_tokenizer(small: ShardSet) -> None:
    index = ShardIndex(small.path)
    assert len(index) == 9
    assert index.key(3) == "s3" and index.image_paths(3) == ("p4.png", "p5.png", "p6.png")
