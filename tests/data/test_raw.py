from __future__ import annotations

import json
import sys
import types
from pathlib import Path

import jsonlines
import pytest

from mmds.data.raw import read_records
from mmds.errors import DataError

RECORDS = [{"id": "a", "text": "café 中 \u2028 x"}, {"id": "b", "n": [1, 2.5, None, True]}, {"id": "c"}]


def _write(folder: Path, data: bytes | str, name: str = "raw.jsonl") -> Path:
    path = folder / name
    path.write_bytes(data.encode("utf-8") if isinstance(data, str) else data)
    return path


def _lines(*, end: str = "\n", ascii_only: bool = False) -> str:
    return end.join(json.dumps(record, ensure_ascii=ascii_only) for record in RECORDS) + end


@pytest.mark.parametrize(
    "text",
    [
        _lines(),
        _lines(ascii_only=True),
        _lines(end="\r\n"),
        _lines().rstrip("\n"),
        "\ufeff" + _lines(),
        json.dumps(RECORDS),
        json.dumps(RECORDS, indent=2, ensure_ascii=False),
        "\ufeff \n" + json.dumps(RECORDS),
    ],
)
def test_jsonl_and_arrays_give_the_same_records_in_order(tmp_path: Path, text: str) -> None:
    assert [record for _, record in read_records(_write(tmp_path, text))] == RECORDS


@pytest.mark.parametrize("name", ["raw.json", "raw.jsonl", "raw", "raw.txt"])
def test_the_content_decides_and_not_the_name(tmp_path: Path, name: str) -> None:
    for text in (_lines(), json.dumps(RECORDS)):
        assert len(list(read_records(_write(tmp_path, text, name)))) == 3


def test_the_place_counts_blank_lines(tmp_path: Path) -> None:
    path = _write(tmp_path, '\n  \n{"id": 1}\r\n\r\n\t\n{"id": 2}\n\n')
    assert [where for where, _ in read_records(path)] == [f"{path}:3", f"{path}:6"]


def test_the_place_in_an_array_is_the_line_where_the_record_starts(tmp_path: Path) -> None:
    path = _write(tmp_path, '[{"id": 1,\n "x": 2},\n\n  {"id": 3}, {"id": 4}\n]\n')
    assert [where for where, _ in read_records(path)] == [f"{path}:1", f"{path}:4", f"{path}:4"]


def test_records_come_before_a_later_line_is_read(tmp_path: Path) -> None:
    records = read_records(_write(tmp_path, '{"id": 1}\n{broken\n'))
    assert next(records)[1] == {"id": 1}
    with pytest.raises(DataError, match="raw.jsonl:2: invalid JSON"):
        next(records)


@pytest.mark.parametrize(
    ("data", "line", "message"),
    [
        (b'{"id": 1}\n{"id": "caf\xe9"}\n', 2, "not UTF-8.*0xe9"),
        (b'{"id": 1}\n\n{"n": NaN}\n', 3, "NaN"),
        (b'{"n": -Infinity}\n', 1, "-Infinity"),
        (b'{"n": 1e999}\n', 1, "too large"),
        (b'{"id": 1}\n{"a": 1, "b": {"c": 1, "c": 2}}\n', 2, "duplicate key 'c'"),
        (b'{"id": 1}\n{"id": 2,}\n', 2, "invalid JSON"),
        (b'{"id": 1} {"id": 2}\n', 1, "invalid JSON"),
        (b'{"id": 1}\n"text"\n', 2, "must be a JSON object"),
        (b'{"id": 1}\nnull\n', 2, "must be a JSON object"),
        (b'{"id": 1}\n[{"id": 2}]\n', 2, "must be a JSON object"),
        (b'{"id": 1}\n{"id": "a\tb"}\n', 2, "invalid JSON"),
        (b'{"id": 1}\n{"id": 2', 2, "invalid JSON"),
        (b'{"id": 1}\n' + b'{"a":' * 100_000 + b"\n", 2, "nested too deeply"),
        (b'[{"id": 1},\n {"id": "caf\xe9"}]', 2, "not UTF-8"),
        (b'[{"id": 1},\n {"n": NaN}]', 2, "NaN"),
        (b'[{"id": 1},\n {"a": 1, "a": 2}]', 2, "duplicate key 'a'"),
        (b'[{"id": 1},\n {"id": \n 2,}]', 3, "invalid JSON"),
        (b'[{"id": 1},\n 5]', 2, "must be a JSON object"),
        (b'[{"id": 1},\n [{"id": 2}]]', 2, "must be a JSON object"),
        (b'[{"id": 1},\n{"id": 2},\n]', 3, "comma before the closing bracket"),
        (b'[{"id": 1}\n{"id": 2}]', 2, "expected ','"),
        (b'[{"id": 1},\n{"id": 2}', 2, "cut short"),
        (b'[{"id": 1},\n', 2, "invalid JSON"),
        (b'[{"id": 1}]\n{"id": 2}\n', 2, "text after the array"),
        (b"[" + b'{"a":' * 100_000, 1, "nested too deeply"),
    ],
)
def test_whatever_is_not_strict_is_refused_with_file_and_line(
    tmp_path: Path, data: bytes, line: int, message: str
) -> None:
    path = _write(tmp_path, data)
    with pytest.raises(DataError, match=message) as caught:
        list(read_records(path))
    assert str(caught.value).startswith(f"{path}:{line}: ")


@pytest.mark.parametrize("data", [b"", b"\n \n", b"[]", b"[ ]\n", b"\xef\xbb\xbf"])
def test_a_file_without_records_is_refused(tmp_path: Path, data: bytes) -> None:
    with pytest.raises(DataError, match="raw.jsonl: holds no record"):
        list(read_records(_write(tmp_path, data)))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="gone.jsonl"):
        list(read_records(tmp_path / "gone.jsonl"))


def test_results_do_not_depend_on_other_parsers_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """jsonlines prefers orjson or ujson where there is one; those take duplicate keys, and NaN or not."""

    def lax(text: str | bytes) -> object:
        return {"parsed by": "another library"}

    fake = types.SimpleNamespace(loads=lax)
    monkeypatch.setitem(sys.modules, "orjson", fake)
    monkeypatch.setattr(jsonlines.jsonlines, "orjson", fake)
    monkeypatch.setattr(jsonlines.jsonlines, "default_loads", lax)
    assert [record for _, record in read_records(_write(tmp_path, _lines()))] == RECORDS


def test_an_array_longer_than_a_block_is_recognised_after_blanks(tmp_path: Path) -> None:
    path = _write(tmp_path, " " * 100_000 + "\n" + json.dumps(RECORDS))
    assert [where for where, _ in read_records(path)] == [f"{path}:2"] * 3
