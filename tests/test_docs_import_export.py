"""The commands and the program of docs/import-export.md run as they stand, one after the other."""

from __future__ import annotations

import re
import runpy
import shlex
import sys
from pathlib import Path

import pytest

from tests.model.published import pictures, png, write_llava
from tests.spawn import ROOT

PAGE = (ROOT / "docs" / "import-export.md").read_text(encoding="utf-8")
COMMANDS = [line.strip() for line in PAGE.splitlines() if line.startswith("    python scripts/")]
(PROGRAM,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def test_the_page_leads_from_a_llava_folder_to_one_that_transformers_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_llava(tmp_path / "llava")
    (tmp_path / "picture.png").write_bytes(png(pictures(1)[0]))
    monkeypatch.chdir(tmp_path)
    said = []
    for command in COMMANDS:
        words = shlex.split(command.replace("$LLAVA", "llava").replace("$PICTURE", "picture.png"))[1:]
        words += ["--max-new-tokens", "20"] if "chat.py" in words[0] else []
        monkeypatch.setattr(sys, "argv", words)
        capsys.readouterr()
        runpy.run_path(str(ROOT / words[0]), run_name="__main__")
        said.append(capsys.readouterr().out.strip())
    imported, answer, exported = said
    assert imported.endswith("llava -> model")
    assert "model -> served: LlavaForConditionalGeneration" in exported
    exec(compile(PROGRAM, "docs/import-export.md", "exec"), {})
    assert capsys.readouterr().out.strip() == answer
