"""Tars that others wrote: read in any order, or refused by file and member; nothing ever reaches the disk."""

from __future__ import annotations

import gzip
import io
import json
import os
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import webdataset

from mmds.data.check import CheckReport, check
from mmds.data.prepare import prepare
from mmds.data.shards import ShardSet
from mmds.errors import DataError
from tests.data.raw_sets import chat_tokenizer, picture, prepared_set, record, talk

TOKENIZER = chat_tokenizer()

Members = list[tuple[str, bytes]]


def write_tar(path: Path, members: Members, *, layout: int = tarfile.PAX_FORMAT) -> Path:
    with tarfile.open(path, "w", format=layout) as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def as_json(content: dict[str, Any]) -> bytes:
    return json.dumps(content).encode()


def conversation(question: str = "<image>What?", answer: str = "Grey.") -> bytes:
    return as_json({"conversations": talk(question, answer)})


def pair(key: str, grey: int = 1, extension: str = "png") -> Members:
    return [(f"{key}.{extension}", picture(grey)), (f"{key}.json", conversation())]


def opened(tar: Path, out: Path, **options: Any) -> ShardSet:
    prepare([tar], None, TOKENIZER, out, **options)
    return ShardSet.open(out, TOKENIZER.fingerprint)


def keys_and_greys(shards: ShardSet) -> list[tuple[str, list[bytes]]]:
    return [(sample.key, list(sample.image_bytes)) for sample in map(shards.read, range(len(shards)))]


def only_bad(report: CheckReport, where: str, words: str) -> None:
    assert [bad.where for bad in report.bad] == [where], [str(bad) for bad in report.bad]
    assert words in report.bad[0].reason


def test_conversations_and_captions_are_read_as_webdataset_writes_them(tmp_path: Path) -> None:
    path = tmp_path / "set.tar"
    with webdataset.TarWriter(str(path)) as writer:
        writer.write({"__key__": "a", "jpg": picture(1, kind="JPEG"), "json": json.loads(conversation())})
        writer.write({"__key__": "b", "png": picture(2), "txt": "A caption with <image> in it.\n"})
        about = {"caption": "as img2dataset writes it", "width": 40}
        writer.write({"__key__": "c", "png": picture(3), "txt": "Grey.", "json": about})
        writer.write({"__key__": "d", "json": {"conversations": talk("Hi", "Ho")}})
        two = {"id": "named", "image": ["x/1.png", "x/2.png"], "conversations": talk("<image><image>?")}
        writer.write({"__key__": "e", "0.png": picture(4), "1.png": picture(5), "json": two})
    shards = opened(path, tmp_path / "out")
    assert keys_and_greys(shards) == [
        ("a", [picture(1, kind="JPEG")]),
        ("b", [picture(2)]),
        ("c", [picture(3)]),
        ("d", []),
        ("named", [picture(4), picture(5)]),
    ]
    assert TOKENIZER.decode(shards.read(1).ids[shards.read(1).supervised]).startswith(
        "A caption with <image> in it.<|im_end|>"
    )
    assert shards.read(4).image_paths == ("x/1.png", "x/2.png")


def test_our_own_shards_are_read_back(tmp_path: Path) -> None:
    first = prepared_set(tmp_path / "first", [1, 0, 2, 11])
    again = opened(first.path / "shard-00000.tar", tmp_path / "again")
    assert keys_and_greys(again) == keys_and_greys(first)
    assert len(again.read(3).image_bytes) == 11  # in order of number, not of name


def test_the_order_of_members_does_not_matter(tmp_path: Path) -> None:
    members = [member for i in range(6) for member in pair(f"k{i}", i)]
    texts_last = sorted(members, key=lambda member: member[0].endswith("json"))
    shards = opened(write_tar(tmp_path / "set.tar", texts_last), tmp_path / "out")
    assert keys_and_greys(shards) == [(f"k{i}", [picture(i)]) for i in range(6)]


@pytest.mark.parametrize(
    "key",
    [
        "img.001",
        "a/b.c/d.e",
        "häßlich/猫",
        "UPPER case",
        "v" * 150,
        "d/" * 80 + "x",
        "x" * 99 + "ü",
        "tab\there",
    ],
)
@pytest.mark.parametrize("layout", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT])
def test_names_of_every_kind_keep_their_pictures(tmp_path: Path, key: str, layout: int) -> None:
    members = pair(key, 1, "PNG") + pair(f"{key}.2", 2, "Jpeg")
    shards = opened(write_tar(tmp_path / "set.tar", members, layout=layout), tmp_path / "out")
    assert keys_and_greys(shards) == [(key, [picture(1)]), (f"{key}.2", [picture(2)])]


def other_member(name: str, kind: bytes, link: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, link
    return info


@pytest.mark.parametrize(
    ("member", "words"),
    [
        (other_member("l.png", tarfile.SYMTYPE, "/etc/passwd"), "is a link (to '/etc/passwd')"),
        (other_member("l.png", tarfile.LNKTYPE, "a.png"), "is a link (to 'a.png')"),
        (other_member("null.png", tarfile.CHRTYPE), "is no plain file"),
        (other_member("disk.png", tarfile.BLKTYPE), "is no plain file"),
        (other_member("pipe.png", tarfile.FIFOTYPE), "is no plain file"),
        (other_member("../../x.png", tarfile.REGTYPE), "its name leaves the archive"),
        (other_member("a/../../x.png", tarfile.REGTYPE), "its name leaves the archive"),
        (other_member("/etc/x.png", tarfile.REGTYPE), "its name leaves the archive"),
        (other_member("x.exe", tarfile.REGTYPE), "has no extension of a text (json, txt) or of a picture"),
        (other_member(".png", tarfile.REGTYPE), "has no extension of a text (json, txt) or of a picture"),
        (other_member("lonely.png", tarfile.REGTYPE), "there is no lonely.json or lonely.txt"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.name,
)
def test_members_that_are_no_harmless_file_are_refused_by_name(
    tmp_path: Path, member: tarfile.TarInfo, words: str
) -> None:
    path = write_tar(tmp_path / "set.tar", pair("a", 1))
    with tarfile.open(path, "a") as tar:
        tar.addfile(member, io.BytesIO())
        for name, data in pair("b", 2):
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    before = sorted(tmp_path.rglob("*"))
    report = check([path], None, TOKENIZER)
    only_bad(report, f"{path}:{member.name}", words)
    assert report.samples == 2
    assert sorted(tmp_path.rglob("*")) == before
    with pytest.raises(DataError, match=r"set\.tar:.*List all with --check"):
        prepare([path], None, TOKENIZER, tmp_path / "out")
    shards = opened(path, tmp_path / "out", on_bad="skip", max_bad_share=0.5)
    assert keys_and_greys(shards) == [("a", [picture(1)]), ("b", [picture(2)])]


@pytest.mark.parametrize(
    ("members", "where", "words"),
    [
        ([*pair("x", 1), *pair("x", 2)], "x.json", "comes twice"),
        ([*pair("x", 1), ("x.jpg", picture(2))], "x.json", "member 'x.jpg' and 'x.png' are one"),
        ([("x.json", conversation())], "x.json", "1 image markers but 0 images"),
        (
            [("x.json", as_json({**record("x", ["p.png"])}))],
            "x.json",
            "1 pictures are named in the record, but 0",
        ),
        ([("x.txt", b"Words.")], "x.txt", "a caption needs one picture, but x.txt comes with 0"),
        (
            [("x.txt", b"Words."), ("x.0.png", picture(1)), ("x.1.png", picture(2))],
            "x.txt",
            "a caption needs one picture, but x.txt comes with 2",
        ),
        ([("x.txt", b"\xff\xfe"), ("x.png", picture(1))], "x.txt", "member 'x.txt': not UTF-8 (byte 0xff)"),
        ([("x.txt", b" \n"), ("x.png", picture(1))], "x.txt", "is empty"),
        ([("x.json", b'{"a": NaN}'), ("x.png", picture(1))], "x.json", "member 'x.json': NaN is not JSON"),
        ([("x.json", b"[1]"), ("x.png", picture(1))], "x.json", "must be a JSON object, not list"),
        ([("x.json", b'{"a": 1}'), ("x.png", picture(1))], "x.json", "holds neither 'conversations' nor"),
        ([("x.png", picture(1)[:60]), ("x.json", conversation())], "x.json", "image 0 (x.png): "),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else None,
)
def test_samples_that_are_not_whole_are_bad_by_name(
    tmp_path: Path, members: Members, where: str, words: str
) -> None:
    path = write_tar(tmp_path / "set.tar", [*pair("good", 9), *members])
    report = check([path], None, TOKENIZER)
    only_bad(report, f"{path}:{where}", words)
    assert report.samples == 1


def cut(path: Path, keep: Callable[[bytes], bytes]) -> Path:
    path.write_bytes(keep(path.read_bytes()))
    return path


@pytest.mark.parametrize(
    ("keep", "words"),
    [
        (lambda data: data[:3000], "cut short"),
        (lambda data: data.rstrip(b"\0")[:-1000], "cut short"),
        (
            lambda data: data[: len(data.rstrip(b"\0")) // 512 * 512 + 512],
            "the blocks that end it are missing",
        ),
        (lambda data: data[:2048] + b"\x01" * 512 + data[2560:], "damaged"),
        (lambda data: data + data, "another follows in the same file"),
    ],
    ids=["in a member", "in the last", "between members", "header", "two in one"],
)
def test_a_tar_that_is_not_whole_is_an_error_and_never_a_shorter_set(
    tmp_path: Path, keep: Callable[[bytes], bytes], words: str
) -> None:
    members = [member for i in range(6) for member in pair(f"k{i}", i)]
    path = cut(write_tar(tmp_path / "set.tar", members), keep)
    bad = check([path], None, TOKENIZER).bad
    assert bad and bad[-1].where == str(path) and words in bad[-1].reason and bad[-1].ends_file
    with pytest.raises(DataError, match=r"set\.tar"):
        prepare([path], None, TOKENIZER, tmp_path / "out", on_bad="skip", max_bad_share=1.0)
    assert not (tmp_path / "out").exists()


def test_a_compressed_tar_is_refused_with_the_remedy(tmp_path: Path) -> None:
    plain = write_tar(tmp_path / "set.tar", pair("a"))
    for name in ("set.tar.gz", "set.tgz", "named.tar"):
        (tmp_path / name).write_bytes(gzip.compress(plain.read_bytes()))
        with pytest.raises(DataError, match=rf"{name}: is compressed; unpack it first: gunzip"):
            prepare([tmp_path / name], None, TOKENIZER, tmp_path / "out")
    (tmp_path / "page.tar").write_bytes(b"<html>404</html>")
    (tmp_path / "empty.tar").write_bytes(b"")
    for name in ("page.tar", "empty.tar"):
        with pytest.raises(DataError, match=rf"{name}: is not a tar that can be read"):
            prepare([tmp_path / name], None, TOKENIZER, tmp_path / "out")


@pytest.mark.parametrize("layout", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT])
def test_a_member_of_nine_gigabytes_is_passed_over_and_named(tmp_path: Path, layout: int) -> None:
    path, size = tmp_path / "set.tar", 9 * 2**30
    huge = tarfile.TarInfo("huge.png")
    huge.size = size
    after = write_tar(tmp_path / "after.tar", pair("b", 2), layout=layout).read_bytes()
    with path.open("wb") as file:
        file.write(huge.tobuf(layout))
        file.seek(size, os.SEEK_CUR)  # a hole: nothing is written
        file.write(after)
    report = check([path], None, TOKENIZER)
    only_bad(report, f"{path}:huge.png", f"has {size} bytes, more than the limit of")
    shards = opened(path, tmp_path / "out", on_bad="skip", max_bad_share=0.5)
    assert keys_and_greys(shards) == [("b", [picture(2)])]


def test_tars_of_a_folder_are_read_when_it_holds_no_json(tmp_path: Path) -> None:
    for name in ("b", "a"):
        write_tar(tmp_path / f"{name}.tar", pair(name, ord(name)))
    prepare([tmp_path], None, TOKENIZER, tmp_path / "out" / "x")
    shards = ShardSet.open(tmp_path / "out" / "x", TOKENIZER.fingerprint)
    assert keys_and_greys(shards) == [(name, [picture(ord(name))]) for name in "ab"]


def test_parts_and_processes_read_the_same_from_a_tar(tmp_path: Path) -> None:
    members = [member for i in range(40) for member in pair(f"k{i}", i)]
    path = write_tar(tmp_path / "set.tar", members)
    one = opened(path, tmp_path / "one", workers=1)
    two = opened(path, tmp_path / "two", workers=2)
    assert keys_and_greys(one) == keys_and_greys(two) == [(f"k{i}", [picture(i)]) for i in range(40)]
