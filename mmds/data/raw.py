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
from dataclasses import dataclass, replace
from os import PathLike
from typing import IO, Any

import jsonlines

from mmds.data.sources import open_file, told
from mmds.errors import DataError

_BLANK = re.compile(r"[ \t\r\n]*")


@dataclass(frozen=True, kw_only=True)
class Scanned:
    """What stands at one place of a raw file. line: counted from 1, where it starts. size: its bytes.

    value: what was parsed; None with a `problem` when it is no strict JSON object. ends_file: the file
    cannot be read on from here.
    """

    line: int
    value: Any
    size: int = 0
    problem: str = ""
    ends_file: bool = False


def read_records(path: str | PathLike[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (where, record) for every record of a JSONL file or of a JSON array, in file order.

    where: "file:line", the line that the record starts on, counted from 1. Raises DataError naming file and
    line for anything that is not strict UTF-8 JSON objects, and for a file without records.
    """
    for found in scan(str(path)):
        if found.value is None:
            raise DataError(f"{path}:{found.line}: {found.problem}")
        yield f"{path}:{found.line}", found.value


def scan(path: str) -> Iterator[Scanned]:
    """Yield what stands at every place of a JSONL file or a JSON array, local or a URL, broken or not.

    The first character that is not blank decides: "[" is an array (read whole into memory), anything else is
    JSONL (read line by line). A broken line of JSONL is one place and reading goes on; a broken array ends
    there. Raises DataError for a file that cannot be opened or read, or that holds nothing.
    """
    empty = True
    with open_file(path) as file:
        try:
            for found in _read_array(file) if _starts_array(file) else _read_lines(file):
                empty = False
                if found.problem or isinstance(found.value, dict):
                    yield found
                else:
                    kind = type(found.value).__name__
                    problem = f"a record must be a JSON object, but this is {kind}"
                    yield replace(found, value=None, problem=problem)
        except OSError as error:
            raise DataError(f"{path}: cannot be read: {told(error)}; check the path") from error
    if empty:
        raise DataError(f"{path}: holds no record; expected JSONL or a JSON array of objects")


def _starts_array(file: IO[bytes]) -> bool:
    """Whether the first byte that is not blank opens an array. Leaves the file at its start."""
    block = file.read(1 << 16).removeprefix(codecs.BOM_UTF8)
    while block and not (text := block.lstrip()):
        block = file.read(1 << 16)
    file.seek(0)
    return bool(block) and text.startswith(b"[")


def _read_lines(file: IO[bytes]) -> Iterator[Scanned]:
    """Every line that is not blank."""
    number = size = 0

    def counted() -> Iterator[bytes]:
        nonlocal number, size
        for number, line in enumerate(file, 1):
            size += len(line)
            blank = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
            yield b"" if not blank.strip() else line

    reader = jsonlines.Reader(counted(), loads=_loads)
    while True:
        value, problem, size = None, "", 0
        try:
            value = reader.read(allow_none=True, skip_empty=True)
        except EOFError:
            return
        except jsonlines.InvalidLineError as error:
            problem = _explain(error.__cause__ or error)
        except RecursionError as error:
            problem = _explain(error)
        yield Scanned(line=number, value=value, size=size, problem=problem)


def _read_array(file: IO[bytes]) -> Iterator[Scanned]:
    """Every element of the one array that the file must be, up to where that is broken."""
    data = file.read().removeprefix(codecs.BOM_UTF8)
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        yield _end(data.count(b"\n", 0, error.start) + 1, _explain(error))
        return
    position, line = _skip_blank(text, 0, 1)
    position, line = _skip_blank(text, position + 1, line)
    while text[position : position + 1] != "]":
        try:
            value, end = _DECODER.raw_decode(text, position)
        except (ValueError, RecursionError) as error:
            inner = text.count("\n", position, error.pos) if isinstance(error, json.JSONDecodeError) else 0
            yield _end(line + inner, _explain(error))
            return
        yield Scanned(line=line, value=value, size=end - position)
        line += text.count("\n", position, end)
        position, line, problem = _next_element(text, end, line)
        if problem:
            yield _end(line, problem)
            return
    position, line = _skip_blank(text, position + 1, line)
    if position < len(text):
        yield _end(line, "text after the array; a file is one array or JSONL, not both")


def _end(line: int, problem: str) -> Scanned:
    return Scanned(line=line, value=None, problem=problem, ends_file=True)


def _next_element(text: str, position: int, line: int) -> tuple[int, int, str]:
    """From the end of an element to the next or to the closing bracket: (position, line, what is wrong)."""
    position, line = _skip_blank(text, position, line)
    if text[position : position + 1] == "]":
        return position, line, ""
    if text[position : position + 1] != ",":
        return position, line, "expected ',' or ']' after an element; the array may be cut short"
    position, line = _skip_blank(text, position + 1, line)
    if text[position : position + 1] == "]":
        return position, line, "a comma before the closing bracket; remove it"
    return position, line, ""


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


def parse_json(text: str) -> Any:
    """One JSON value, strictly. Raises DataError with the reason."""
    try:
        return _loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(_explain(error)) from error


def _loads(line: str | bytes) -> Any:
    """Parse one line with the standard library, strictly."""
    return _DECODER.decode(line if isinstance(line, str) else line.decode("utf-8"))
