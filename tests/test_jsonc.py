"""The reader of JSON with comments: what it accepts, and where it says a fault is."""

from __future__ import annotations

import json

import pytest

from mmds.errors import ConfigError
from mmds.jsonc import parse


def test_comments_and_trailing_commas_are_blank_space() -> None:
    text = '// head\n{"a": [1, 2,], /* two\nlines */ "b": {"c": null,},\n} // tail'
    value, lines = parse(text, "f.json")
    assert value == {"a": [1, 2], "b": {"c": None}}
    assert lines[("a",)] == 2 and lines[("b",)] == 3 and lines[("b", "c")] == 3 and lines[("a", 1)] == 2


def test_comment_signs_inside_strings_stay_text() -> None:
    value, _ = parse(r'{"url": "http://x/*y*/", "q": "a \" // b", "c": "} ,]"}', "f.json")
    assert value == {"url": "http://x/*y*/", "q": 'a " // b', "c": "} ,]"}


@pytest.mark.parametrize(
    "text",
    [
        '{"a": -1.5e-3, "b": 0, "c": 1E5, "d": [], "e": {}, "f": [true, false, null], "g": "\\u00e9\\n"}',
        '[[[]], {"a": {"b": [{}]}}]',
        '"x"',
        "12",
        "  null ",
    ],
)
def test_plain_json_reads_as_the_standard_decoder_reads_it(text: str) -> None:
    assert parse(text, "f.json")[0] == json.loads(text)


@pytest.mark.parametrize(
    ("text", "place", "says"),
    [
        ('{\n "a": 1,\n "a": 2}', "f.json:3:2:", "duplicate key a, first given on line 2"),
        ('{"m": {"x": 1,\n"x": 2}}', "f.json:2:1:", "duplicate key m.x"),
        ('{"a": 1 "b": 2}', "f.json:1:9:", "expected , or }"),
        ('{"a": [1 2]}', "f.json:1:10:", "expected , or ] in a"),
        ('{"a" 1}', "f.json:1:6:", "expected :"),
        ("{a: 1}", "f.json:1:2:", "double quotes"),
        ("{'a': 1}", "f.json:1:2:", "double quotes"),
        ('{"a": NaN}', "f.json:1:7:", "'NaN'"),
        ('{"a": -Infinity}', "f.json:1:7:", "expected a JSON value"),
        ('{"a": 01}', "f.json:1:7:", "expected a JSON value"),
        ('{"a": 1e999}', "f.json:1:7:", "too large"),
        ('{"a": tru}', "f.json:1:7:", "'tru'"),
        ('{"a": "x\ny"}', "f.json:1:9:", "bad string"),
        ('{"a": "x', "f.json:1:7:", "bad string"),
        ('{"a": 1} /* open', "f.json:1:10:", "no closing */"),
        ('{"a": 1}, 2', "f.json:1:9:", "after the end"),
        ('{"a": [,]}', "f.json:1:8:", "expected a JSON value"),
        ("", "f.json:1:1:", "the end of the file"),
        ("[" * 100, "f.json:1:66:", "nested deeper"),
    ],
)
def test_faults_are_named_with_line_and_column(text: str, place: str, says: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse(text, "f.json")
    assert str(error.value).startswith(place) and says in str(error.value)
