"""A published LLaVA model trained on: `init_from` imports it, both ranks train it, and the result goes back to transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

from mmds.generate import load_assistant
from mmds.hf_export import export_hf
from tests.model.published import ask_mmds, ask_transformers, assert_same, pictures, write_llava
from tests.runs import Runs, metrics
from tests.spawn import run_ranks


def test_a_llava_next_folder_is_trained_on_and_exported(
    runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MMDS_CACHE", str(tmp_path / "cache"))
    write_llava(tmp_path / "llava", tiles=[[28, 56], [56, 28]])
    data = {**runs.data("data"), "row_tokens": 400}
    start = {"init_from": str(tmp_path / "llava"), "model": None, "data": data}
    arguments = runs.config("from_llava", stage="instruct", steps=2, **start)
    printed = run_ranks("train.py", arguments, world=2)
    assert sum("once on this machine" in output for _, output in printed) == 1
    assert len(list((tmp_path / "cache" / "imported").glob("llava-*/mmds.json"))) == 1
    folder = runs.work / "from_llava"
    assert [line["step"] for line in metrics(folder)] == [1, 2]
    before = next((tmp_path / "cache" / "imported").glob("llava-*/connector/model.safetensors"))
    after = load_file(folder / "model" / "connector" / "model.safetensors")
    assert all((after[name] != value).any() for name, value in load_file(before).items())

    done = export_hf(folder / "model", tmp_path / "hf")
    assert done.name == "LlavaNextForConditionalGeneration"
    images = pictures(1, width=90, height=31)
    ours, theirs = ask_mmds(load_assistant(folder), images), ask_transformers(tmp_path / "hf", images)
    assert_same(ours, theirs, image_token=done.image_token)
