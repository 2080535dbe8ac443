"""docs/config.md and ds_configs/schema.json are made from the keys, are up to date, and say what load_config does."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from json_schema import faults
from small_config import SMALL

from mmds.config import load_config
from mmds.config_keys import deepspeed_keys, own_tree, walk
from mmds.jsonc import parse
from tests import test_refused_keys as refused

ROOT = Path(__file__).parents[1]
CONFIGS = sorted(path for path in (ROOT / "ds_configs").rglob("*.json") if path.name != "schema.json")
PAGE = (ROOT / "docs" / "config.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "config_reference", ROOT / "scripts" / "config_reference.py"
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def schema() -> dict[str, Any]:
    return json.loads((ROOT / "ds_configs" / "schema.json").read_text(encoding="utf-8"))


def test_the_page_and_the_schema_are_up_to_date(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    for path, text in script.generated().items():
        assert path.read_text(encoding="utf-8") == text, (
            f"{path} is stale: python scripts/config_reference.py"
        )


def test_the_script_writes_what_is_stale_and_check_only_says_so(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("docs/config.template.md", "ds_configs/stage2.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    monkeypatch.setattr(script, "ROOT", tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["config_reference.py", "--check"])
    assert script.main() == 1
    assert "docs/config.md is stale" in capsys.readouterr().out and not Path("docs/config.md").exists()
    monkeypatch.setattr("sys.argv", ["config_reference.py"])
    assert script.main() == 0
    assert Path("docs/config.md").read_text(encoding="utf-8") == PAGE
    monkeypatch.setattr("sys.argv", ["config_reference.py", "--check"])
    assert script.main() == 0


def test_the_page_lists_every_key_that_may_be_set_with_its_default() -> None:
    rows = [line.split(" | ") for line in PAGE.splitlines() if line.startswith("| `mmds.")]
    listed = {cells[0].strip("| `"): cells[2].strip("` ") for cells in rows}
    for key in walk(own_tree()):
        if not key.keys and not key.refused:
            default = "{}" if key.kind == "rates" else json.dumps(key.default)
            assert listed.pop(key.path) == ("required" if key.required else default), key.path
    assert not listed, "the page lists keys that do not exist"


def test_the_page_names_every_key_of_deepspeeds() -> None:
    named = set(re.findall(r"`([a-z][\w.]*)`", PAGE))
    keys = [key for top in deepspeed_keys(deep=True) for key in walk(top)]
    assert {key.path for key in keys if not key.keys} <= named and len(keys) > 180


def test_no_level_of_the_schema_takes_keys_that_it_does_not_name(schema: dict[str, Any]) -> None:
    levels = 0
    stack: list[Any] = [{name: part for name, part in schema.items() if name not in ("if", "then")}]
    while stack:
        node = stack.pop()
        if isinstance(node, dict):
            if "object" in node.get("type", ()) and isinstance(node["type"], (str, list)):
                assert node["additionalProperties"] is False
                levels += 1
            stack.extend(part for name, part in node.items() if name != "allOf")
        elif isinstance(node, list):
            stack.extend(node)
    assert levels > 25


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_schema_takes_every_shipped_run_written_and_resolved(path: Path, schema: dict[str, Any]) -> None:
    written, _ = parse(path.read_text(encoding="utf-8"), str(path))
    assert list(faults(written, schema)) == []
    assert list(faults(load_config(path).resolved, schema)) == []
    assert (path.parent / written["$schema"]).resolve() == ROOT / "ds_configs" / "schema.json"


@pytest.mark.parametrize(
    "value",
    [
        {"extends": "stage2.json", "mmds": {"schedule": {"steps": 5, "epochs": None}}},
        {"extends": "stage2.json", "tensorboard": None, "mmds": {"model": {"encoder": {"layer": -1}}}},
        {**SMALL, "optimizer": {"type": "adamw"}, "log_level": "INFO", "scheduler": None},
        {
            **SMALL,
            "zero_optimization": {"stage": 3, "prefetch_bucket_size": 5e7, "zero_hpz_partition_size": 1},
        },
    ],
)
def test_the_schema_takes_what_load_config_takes(value: dict[str, Any], schema: dict[str, Any]) -> None:
    assert list(faults(value, schema)) == []


# What the schema cannot see, since it is said by two keys or by the stage table.
BETWEEN_KEYS = {
    'mmds.data.mix[0].images="pictures"',
    'mmds.stage.rates."decoder.*"=0.001',
    "mmds.model.connector.queries=9",
    "mmds.model.resolution.min_pixels=784",
}


@pytest.mark.parametrize("row", range(len(refused.ROWS)), ids=refused.NAMES)
def test_the_schema_rejects_every_key_that_load_config_refuses(row: int, schema: dict[str, Any]) -> None:
    path, value, _ = refused.ROWS[row]
    found = list(faults(refused.changed(path, value, Path("parts")), schema))
    assert bool(found) == (refused.NAMES[row] not in BETWEEN_KEYS)


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"mmds": {**SMALL["mmds"], "output_dir": None}}, ".mmds.output_dir: not"),
        ({"mmds": {k: v for k, v in SMALL["mmds"].items() if k != "data"}}, ".mmds: required data"),
        ({"zero_optimization": {}}, ".zero_optimization: required stage"),
        (
            {"mmds": {**SMALL["mmds"], "data": {"mix": [{"name": "one"}], "row_tokens": 128}}},
            ".mmds.data.mix[0]: required path",
        ),
        ({"scheduler": {}}, ".scheduler: type"),
        ({"train_micro_batch_size_per_gpu": True}, ".train_micro_batch_size_per_gpu: enum"),
        ({"optimizer": {"type": "Lion"}}, ".optimizer.type: anyOf"),
        ({"optimizer": {"params": {"betas": [0.9, 1.0]}}}, ".optimizer.params.betas[1]: exclusiveMaximum"),
    ],
)
def test_the_schema_names_the_place_of_a_fault(
    change: dict[str, Any], fault: str, schema: dict[str, Any]
) -> None:
    assert list(faults({**SMALL, **change}, schema)) == [fault]
