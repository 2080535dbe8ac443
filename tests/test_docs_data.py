"""The commands of docs/data.md run as they stand."""

from __future__ import annotations

import runpy
import shlex
import shutil
import sys
from pathlib import Path

import pytest

from tests import tiny
from tests.spawn import ROOT

PAGE = ROOT / "docs" / "data.md"
COMMANDS = [
    line.strip()
    for line in PAGE.read_text(encoding="utf-8").splitlines()
    if line.startswith("    python scripts/prepare.py")
]


def test_every_preparation_of_the_page_works_and_gives_the_sample_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(
        ROOT / "data" / "sample", tmp_path / "data" / "sample", ignore=shutil.ignore_patterns(".cache")
    )
    decoder = tiny.write_decoder(tmp_path / "decoder")
    monkeypatch.chdir(tmp_path)
    assert len(COMMANDS) >= 8
    for command in COMMANDS:
        words = shlex.split(command.replace("$DECODER", str(decoder)))[1:]
        monkeypatch.setattr(
            sys,
            "argv",
            [*words, *(["--workers", "1"] if "--merge" not in words and "--retokenize" not in words else [])],
        )
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(ROOT / words[0]), run_name="__main__")
        output = capsys.readouterr()
        assert ended.value.code in (0, None), (command, output.err[-2000:])
        if "--part" not in words:
            assert "20 samples" in output.out or "20 good samples" in output.out, (command, output.out)
