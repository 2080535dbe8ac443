"""Raw data and prepared folders by file, folder, glob and URL: the same samples come out of each."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from mmds.data import upload as upload_module
from mmds.data.prepare import ensure_prepared, prepare
from mmds.data.shard_format import MANIFEST
from mmds.data.shards import ShardSet
from mmds.data.sources import joined
from mmds.errors import DataError
from tests.chat_fixtures import hf_tokenizer
from tests.data.raw_sets import chat_tokenizer, file_digests, record, write_jsonl, write_set

ROOT = Path(__file__).resolve().parents[2]
TOKENIZER = chat_tokenizer()
COUNT = 40  # samples: several chunks, so that worker processes fetch too


@pytest.fixture
def memory() -> Iterator[str]:
    """An empty place in fsspec's memory."""
    system = fsspec.filesystem("memory")
    system.store.clear()
    yield "memory://place"
    system.store.clear()


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """The end point of an S3 server with the bucket "bucket"."""
    from moto.server import ThreadedMotoServer

    moto = ThreadedMotoServer(port=0, verbose=False)
    moto.start()
    host, port = moto.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            patch.setenv(name, "testing")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        patch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        fsspec.get_filesystem_class("s3").clear_instance_cache()
        store = fsspec.filesystem("s3")
        if store.exists("bucket"):  # moto's servers of one process share what they hold
            store.rm("bucket", recursive=True)
        store.mkdir("bucket")
        yield f"http://{host}:{port}"
        fsspec.filesystem("s3").clear_instance_cache()
    moto.stop()


def put(folder: Path, url: str) -> None:
    system, root = fsspec.core.url_to_fs(url)
    for path in folder.iterdir():
        system.pipe_file(f"{root}/{path.name}", path.read_bytes())


def pictures_and_two_files(folder: Path) -> Path:
    """A folder with pictures, b.jsonl and a.json, where a.json holds the records after those of b.jsonl."""
    raw = write_set(folder, [1, 0] * (COUNT // 2), stem="b")
    lines = raw.read_text().splitlines()
    raw.write_text("\n".join(lines[: COUNT // 2]) + "\n")
    (folder / "a.json").write_text(f"[{','.join(lines[COUNT // 2 :])}]")
    (folder / "notes.txt").write_text("not data")
    return folder


def keys(out: Path) -> list[str]:
    shards = ShardSet.open(out, TOKENIZER.fingerprint)
    return [shards.key(i) for i in range(len(shards))]


SORTED = [f"s{i}" for i in [*range(COUNT // 2, COUNT), *range(COUNT // 2)]]  # a.json before b.jsonl


def test_a_folder_and_a_glob_stand_for_their_files_in_order_of_name(tmp_path: Path) -> None:
    data = pictures_and_two_files(tmp_path / "data")
    (data / "deeper").mkdir()
    write_jsonl(data / "deeper" / "c.jsonl", [record("not-me")])
    prepare([data / "a.json", data / "b.jsonl"], None, TOKENIZER, tmp_path / "files")
    for name, raw in {"folder": data, "glob": data / "[ab].json*"}.items():
        prepare([raw], None, TOKENIZER, tmp_path / name)
        assert keys(tmp_path / name) == SORTED
        assert file_digests(tmp_path / name) == file_digests(tmp_path / "files")
    with pytest.raises(DataError, match=r"z\*\.jsonl: no file matches the pattern"):
        prepare([data / "z*.jsonl"], None, TOKENIZER, tmp_path / "none")
    with pytest.raises(DataError, match="it is a prepared folder already"):
        prepare([tmp_path / "files"], None, TOKENIZER, tmp_path / "again")


def test_a_file_whose_name_looks_like_a_pattern_is_that_file(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", [record("other")])
    raw = write_jsonl(tmp_path / "[a].jsonl", [record("mine")])
    prepare([raw], None, TOKENIZER, tmp_path / "out")
    assert keys(tmp_path / "out") == ["mine"]


def test_pictures_are_found_from_folders_urls_and_by_themselves() -> None:
    assert joined("data", "a/b.jpg") == "data/a/b.jpg"
    assert joined("data", "/a/b.jpg") == "/a/b.jpg"
    assert joined("s3://bucket/data/", "a/b.jpg") == "s3://bucket/data/a/b.jpg"
    assert joined("s3://bucket/data", "/a/b.jpg") == "/a/b.jpg"
    for base in ("data", "s3://bucket/data"):
        assert joined(base, "s3://other/b.jpg") == "s3://other/b.jpg"


def check_store(folder: Path, store: str, tmp_path: Path) -> None:
    """Everything that a store is for: raw files, pictures, globs, and the prepared folder itself."""
    put(folder, f"{store}/data")
    prepare([folder], None, TOKENIZER, tmp_path / "local", shard_bytes=8_000)
    expected = file_digests(tmp_path / "local")
    for name, raw, images in (
        ("folder", f"{store}/data", None),
        ("glob", f"{store}/data/*.json*", None),
        ("pictures", str(folder), f"{store}/data"),
    ):
        for workers in (1, 2):
            out = tmp_path / f"{name}{workers}"
            prepare([raw], images, TOKENIZER, out, shard_bytes=8_000, workers=workers)
            assert file_digests(out) == expected
    manifest = prepare([folder], None, TOKENIZER, f"{store}/out", shard_bytes=8_000)
    assert len(manifest.shards) > 2
    system, root = fsspec.core.url_to_fs(f"{store}/out")
    system.get(root, str(tmp_path / "back"), recursive=True)
    assert file_digests(tmp_path / "back") == expected
    assert keys(tmp_path / "back") == SORTED


def test_a_store_holds_raw_data_pictures_and_the_prepared_folder(
    tmp_path: Path, memory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    check_store(pictures_and_two_files(tmp_path / "data"), memory, tmp_path)
    assert (
        list((tmp_path / "home" / ".cache" / "mmds").iterdir()) == []
    )  # what was uploaded takes no room here


def test_s3_holds_raw_data_pictures_and_the_prepared_folder(
    tmp_path: Path, server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    check_store(pictures_and_two_files(tmp_path / "data"), "s3://bucket/one", tmp_path)


def test_the_script_finds_the_end_point_in_fsspecs_own_variable(tmp_path: Path, server: str) -> None:
    data = pictures_and_two_files(tmp_path / "data")
    put(data, "s3://bucket/two")
    hf_tokenizer("byte_level", "chatml").save_pretrained(tmp_path / "tokenizer")
    environment = {name: value for name, value in os.environ.items() if name != "AWS_ENDPOINT_URL"}
    environment |= {"FSSPEC_S3_ENDPOINT_URL": server, "HOME": str(tmp_path / "home")}
    command = [
        sys.executable,
        ROOT / "scripts" / "prepare.py",
        "s3://bucket/two",
        "--out",
        "s3://bucket/three",
    ]
    done = subprocess.run(
        [*command, "--tokenizer", tmp_path / "tokenizer"],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    assert f"s3://bucket/three: {COUNT} samples" in done.stdout
    assert "prepare: 100%" in done.stderr and "upload: 100%" in done.stderr
    assert fsspec.filesystem("s3").exists(f"bucket/three/{MANIFEST}")


def test_what_a_store_does_not_hold_is_named(tmp_path: Path, memory: str) -> None:
    raw = write_set(tmp_path, [1])
    with pytest.raises(DataError, match=r"memory://place/gone\.jsonl: cannot be read: No such file"):
        prepare([f"{memory}/gone.jsonl"], None, TOKENIZER, tmp_path / "out")
    with pytest.raises(DataError, match=r"images folder memory://place/pictures does not exist"):
        prepare([raw], f"{memory}/pictures", TOKENIZER, tmp_path / "out")
    fsspec.filesystem("memory").pipe_file("/place/raw.jsonl", raw.read_bytes())
    with pytest.raises(
        DataError, match=r"image 0 \(p1\.png\): cannot read memory://place/p1\.png: No such file"
    ):
        prepare([f"{memory}/raw.jsonl"], None, TOKENIZER, tmp_path / "out")
    with pytest.raises(DataError, match=r"nowhere://x/raw\.jsonl: cannot be opened"):
        prepare(["nowhere://x/raw.jsonl"], None, TOKENIZER, tmp_path / "out")


def test_one_missing_picture_of_a_store_does_not_cost_its_neighbours(tmp_path: Path, memory: str) -> None:
    folder = pictures_and_two_files(tmp_path / "data")
    (folder / "p3.png").unlink()
    put(folder, memory)
    manifest = prepare([memory], None, TOKENIZER, tmp_path / "out", on_bad="skip")
    assert (manifest.samples, manifest.skipped) == (COUNT - 1, 1)


def test_the_manifest_is_uploaded_last_and_an_upload_goes_on(
    tmp_path: Path, memory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    raw, system = write_set(tmp_path / "set", [1, 0, 1]), fsspec.filesystem("memory")
    whole, sent = system.put_file, []

    def broken(local: str, target: str, **options: object) -> None:
        sent.append(target)
        if len(sent) == 5:
            raise OSError(5, "Input/output error")
        whole(local, target, **options)

    with monkeypatch.context() as patch:
        patch.setattr(system, "put_file", broken)
        with pytest.raises(DataError, match=r"memory://place/out: cannot be written: Input/output error"):
            prepare([raw], None, TOKENIZER, f"{memory}/out")
        assert not system.exists(f"/place/out/{MANIFEST}")
        sent.extend("over the broken one")
        manifest = prepare([raw], None, TOKENIZER, f"{memory}/out")
        assert sent[-1] == f"/place/out/{MANIFEST}" and sent.count(sent[-1]) == 1
    assert json.loads(system.cat_file(f"/place/out/{MANIFEST}"))["samples"] == manifest.samples == 3
    assert not system.exists(f"/place/out/{upload_module.UPLOADING}")
    with monkeypatch.context() as patch:
        patch.setattr(system, "put_file", None)  # a second run has nothing to send
        assert prepare([raw], None, TOKENIZER, f"{memory}/out") == manifest
    raw.write_text(raw.read_text().replace("grey", "gray"))
    with pytest.raises(DataError, match="memory://place/out was prepared from other input"):
        prepare([raw], None, TOKENIZER, f"{memory}/out")
    system.pipe_file("/place/mine/thesis.txt", b"mine")
    with pytest.raises(DataError, match="memory://place/mine holds something that is no prepared folder"):
        prepare([raw], None, TOKENIZER, f"{memory}/mine")
    assert system.find("/place/mine") == ["/place/mine/thesis.txt"]


def test_a_mix_path_may_be_a_glob_or_a_url(
    tmp_path: Path, memory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    data = pictures_and_two_files(tmp_path / "data")
    put(data, memory)
    shutil.rmtree(data / ".cache", ignore_errors=True)
    local = ensure_prepared(f"{data}/*.json*", TOKENIZER)
    remote = ensure_prepared(f"{memory}/*.json*", TOKENIZER)
    assert local.parent == data / ".cache" / "mmds"
    assert remote.parent == tmp_path / "home" / ".cache" / "mmds"
    assert keys(local) == keys(remote) == SORTED
