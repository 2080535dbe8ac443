"""Raw records from JSONL or a JSON array, read strictly and with the place of each record.

Strict means: UTF-8 (a byte order mark at the start is skipped), one object per record, no NaN or infinity, no
duplicate key. Blank lines are skipped. The standard library's parser is used whatever else is installed, so
results never differ.
"""

from __future__ import annotations

import codecs
import json
import math
import re
from collections.abc import Iterator
from os import PathLike
from pathlib import Path
from typing import IO, Any

import jsonlines

from mmds.errors import DataError

_BLANK = re.compile(r"[ \t\r\n]*")


def read_records(path: str | PathLike[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (where, record) for every record of a JSONL file or of a JSON array, in file order.

    where: "file:line", the line that the record starts on, counted from 1. The first character that is not
    blank decides: "[" is an array (read whole into memory), anything else is JSONL (read line by line).
    Raises DataError naming file and line for anything that is not strict UTF-8 JSON objects, and for a file
    without records.
    """
    path = Path(path)
    try:
        file = path.open("rb")
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}; check the path") from error
    with file:
        records = _read_array(path, file) if _starts_array(file) else _read_lines(path, file)
        empty = True
        for line, record in records:
            empty = False
            if not isinstance(record, dict):
                kind = type(record).__name__
                raise DataError(f"{path}:{line}: a record must be a JSON object, but this is {kind}")
            yield f"{path}:{line}", record
    if empty:
        raise DataError(f"{path}: holds no record; expected JSONL or a JSON array of objects")


def _starts_array(file: IO[bytes]) -> bool:
    """Whether the first byte that is not blank opens an array. Leaves the file at its start."""
    block = file.read(1 << 16).removeprefix(codecs.BOM_UTF8)
    while block and not (text := block.lstrip()):
        block = file.read(1 << 16)
    file.seek(0)
    return bool(block) and text.startswith(b"[")


def _read_lines(path: Path, file: IO[bytes]) -> Iterator[tuple[int, Any]]:
    """Yield (line number, value) of each line that is not blank."""
    number = 0

    def counted() -> Iterator[bytes]:
        nonlocal number
        for number, line in enumerate(file, 1):
            blank = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
            yield b"" if not blank.strip() else line

    reader = jsonlines.Reader(counted(), loads=_loads)
    while True:
        try:
            value = reader.read(allow_none=True, skip_empty=True)
        except EOFError:
            return
        except jsonlines.InvalidLineError as error:
            reason = error.__cause__ or error
            raise DataError(f"{path}:{number}: {_explain(reason)}") from error
        except RecursionError as error:
            raise DataError(f"{path}:{number}: nested too deeply") from error
        yield number, value


def _read_array(path: Path, file: IO[bytes]) -> Iterator[tuple[int, Any]]:
    """Yield (line number, value) of each element of the one array that the file must be."""
    data = file.read().removeprefix(codecs.BOM_UTF8)
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise DataError(f"{path}:{line}: {_explain(error)}") from error
    position, line = _skip_blank(text, 0, 1)
    position, line = _skip_blank(text, position + 1, line)
    while text[position : position + 1] != "]":
        try:
            value, end = _DECODER.raw_decode(text, position)
        except (ValueError, RecursionError) as error:
            inner = text.count("\n", position, error.pos) if isinstance(error, json.JSONDecodeError) else 0
            raise DataError(f"{path}:{line + inner}: {_explain(error)}") from error
        yield line, value
        position, line = _next_element(path, text, end, line + text.count("\n", position, end))
    position, line = _skip_blank(text, position + 1, line)
    if position < len(text):
        raise DataError(f"{path}:{line}: text after the array; a file is one array or JSONL, not both")


def _next_element(path: Path, text: str, position: int, line: int) -> tuple[int, int]:
    """From the end of an element to the next or to the closing bracket: (position, line number)."""
    position, line = _skip_blank(text, position, line)
    if text[position : position + 1] == "]":
        return position, line
    if text[position : position + 1] != ",":
        raise DataError(f"{path}:{line}: expected ',' or ']' after an element; the array may be cut short")
    position, line = _skip_blank(text, position + 1, line)
    if text[position : position + 1] == "]":
        raise DataError(f"{path}:{line}: a comma before the closing bracket; remove it")
    return position, line


def _skip_blank(text: str, position: int, line: int) -> tuple[int, int]:
    """Move over JSON white space; returns (position, line number there)."""
    match = _BLANK.match(text, position)
    end = match.end() if match else position
    return end, line + text.count("\n", position, end)


def _explain(error: BaseException) -> str:
    """One sentence for a parser's or decoder's error."""
    if isinstance(error, UnicodeDecodeError):
        return f"not UTF-8 (byte {error.object[error.start]:#04x}); convert the file to UTF-8"
    if isinstance(error, RecursionError):
        return "nested too deeply"
    if isinstance(error, json.JSONDecodeError):
        return f"invalid JSON: {error.msg}, column {error.colno}"
    return str(error)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object whose keys are all different."""
    record: dict[str, Any] = {}
    for key, value in pairs:
        if key in record:
            raise ValueError(f"duplicate key {key!r}; keep one of them")
        record[key] = value
    return record


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON; write null or a number")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {text} is too large")
    return value


_DECODER = json.JSONDecoder(
    object_pairs_hook=_unique, parse_constant=_refuse_constant, parse_float=_finite, strict=True
)


def _loads(line: str | bytes) -> Any:
    """Parse one line with the standard library, strictly."""
    return _DECODER.decode(line if isinstance(line, str) else line.decode("utf-8"))
