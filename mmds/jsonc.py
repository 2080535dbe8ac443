"""JSON with `//` and `/* */` comments and trailing commas, and the line of every key.

Strict otherwise: duplicate keys, NaN, bare words and single quotes are errors, each with file, line and
column. The standard decoder knows neither comments nor where a key stood, so objects and arrays are read
here; strings and numbers are left to it.
"""

from __future__ import annotations

import json
import re
from typing import Any

from mmds.errors import ConfigError

KeyPath = tuple[str | int, ...]

_MAX_DEPTH = 64
_BLANK = re.compile(r"[ \t\r\n]+|//[^\n]*|/\*.*?\*/", re.DOTALL)
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?(?![0-9A-Za-z_.+])")
_WORDS = {"true": True, "false": False, "null": None}
_decode_string = json.JSONDecoder().raw_decode


def dotted(path: KeyPath) -> str:
    """`("mmds", "data", "mix", 0, "path")` -> `mmds.data.mix[0].path`; a key that holds a dot is quoted."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            text += ("." if text else "") + (json.dumps(part) if "." in part or not part else part)
    return text or "(top level)"


def parse(text: str, name: str) -> tuple[Any, dict[KeyPath, int]]:
    """Parse `text`; `name` is the file named in errors.

    Returns the value and the line (from 1) of every key and list item; errors name `name:line:column`.
    """
    reader = _Reader(text, name)
    value = reader.value(())
    reader.skip_blanks()
    if reader.at < len(text):
        raise reader.error(f"{reader.seen()} after the end of the value", reader.at)
    return value, reader.lines


class _Reader:
    """A cursor over one text."""

    def __init__(self, text: str, name: str) -> None:
        self.text = text
        self.name = name
        self.at = 0
        self.lines: dict[KeyPath, int] = {}

    def error(self, problem: str, at: int) -> ConfigError:
        line = self.text.count("\n", 0, at) + 1
        column = at - (self.text.rfind("\n", 0, at) + 1) + 1
        return ConfigError(f"{self.name}:{line}:{column}: {problem}")

    def seen(self) -> str:
        return repr(self.text[self.at]) if self.at < len(self.text) else "the end of the file"

    def skip_blanks(self) -> None:
        while match := _BLANK.match(self.text, self.at):
            self.at = match.end()
        if self.text.startswith("/*", self.at):
            raise self.error("this comment has no closing */", self.at)

    def takes(self, sign: str) -> bool:
        self.skip_blanks()
        found = self.text.startswith(sign, self.at)
        self.at += len(sign) if found else 0
        return found

    def mark(self, path: KeyPath) -> None:
        self.lines[path] = self.text.count("\n", 0, self.at) + 1

    def value(self, path: KeyPath) -> Any:
        if len(path) > _MAX_DEPTH:
            raise self.error(f"nested deeper than {_MAX_DEPTH} levels", self.at)
        if self.takes("{"):
            return self.object(path)
        if self.takes("["):
            return self.array(path)
        return self.scalar()

    def object(self, path: KeyPath) -> dict[str, Any]:
        result: dict[str, Any] = {}
        while not self.takes("}"):
            if not self.text.startswith('"', self.at):
                raise self.error(f'expected a "key" in double quotes or }}, found {self.seen()}', self.at)
            start = self.at
            key = self.string()
            if key in result:
                first = self.lines[(*path, key)]
                raise self.error(f"duplicate key {dotted((*path, key))}, first given on line {first}", start)
            self.mark((*path, key))
            if not self.takes(":"):
                raise self.error(f'expected : after "{key}", found {self.seen()}', self.at)
            result[key] = self.value((*path, key))
            self.separator("}", path)
        return result

    def array(self, path: KeyPath) -> list[Any]:
        result: list[Any] = []
        while not self.takes("]"):
            here = (*path, len(result))
            self.mark(here)
            result.append(self.value(here))
            self.separator("]", path)
        return result

    def separator(self, closing: str, path: KeyPath) -> None:
        if self.takes(",") or self.text.startswith(closing, self.at):
            return
        raise self.error(f"expected , or {closing} in {dotted(path)}, found {self.seen()}", self.at)

    def string(self) -> str:
        try:
            text, self.at = _decode_string(self.text, self.at)
        except json.JSONDecodeError as error:
            raise self.error(f"bad string: {error.msg}", error.pos) from None
        assert isinstance(text, str)
        return text

    def scalar(self) -> Any:
        if self.text.startswith('"', self.at):
            return self.string()
        if match := _NUMBER.match(self.text, self.at):
            number = json.loads(match[0])
            if number in (float("inf"), float("-inf")):
                raise self.error(f"the number {match[0]} is too large", self.at)
            self.at = match.end()
            return number
        if (word := re.compile(r"\w*").match(self.text, self.at)) and word[0] in _WORDS:
            self.at = word.end()
            return _WORDS[word[0]]
        found = repr(word[0]) if word and word[0] else self.seen()
        raise self.error(f"expected a JSON value, found {found}", self.at)
