"""What a config says of images and positions: short and long forms of the sections, and keys that would not act."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from small_config import SMALL, Write, refusal, writer

from mmds.config import load_config
from mmds.config_types import ConnectorSection, ModelSection, ResolutionSection


@pytest.fixture
def write(tmp_path: Path) -> Write:
    return writer(tmp_path)


def model_of(path: Path, *overrides: str) -> ModelSection:
    model = load_config(path, overrides).model
    assert model is not None
    return model


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("native", ResolutionSection(name="native")),
        ({"name": "native", "min_pixels": 3136}, ResolutionSection(name="native", min_pixels=3136)),
        ("anyres", ResolutionSection(name="anyres")),
        ({"name": "anyres", "max_tiles": 6}, ResolutionSection(name="anyres", max_tiles=6)),
        (
            {"name": "anyres", "grids": ["1x2", "2x1"], "size": 224},
            ResolutionSection(name="anyres", grids=("1x2", "2x1"), size=224),
        ),
        ({"name": "fixed", "size": 448, "fit": "pad"}, ResolutionSection(name="fixed", size=448, fit="pad")),
        ({"name": "native", "min_pixels": None}, ResolutionSection(name="native")),
    ],
)
def test_a_resolution_is_a_mode_or_an_object(write: Write, written: Any, read: ResolutionSection) -> None:
    assert model_of(write(), f"mmds.model.resolution={json.dumps(written)}").resolution == read


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("pixel_shuffle", ConnectorSection(name="pixel_shuffle")),
        ({"name": "merge_mlp"}, ConnectorSection(name="merge_mlp")),
        ("resampler", ConnectorSection(name="resampler")),
        ({"name": "resampler", "queries": 32}, ConnectorSection(name="resampler", queries=32)),
    ],
)
def test_a_connector_is_a_name_or_an_object(write: Write, written: Any, read: ConnectorSection) -> None:
    assert model_of(write(), f"mmds.model.connector={json.dumps(written)}").connector == read


def test_set_and_extends_reach_into_sections_that_were_written_as_strings(write: Write) -> None:
    whole = json.loads(json.dumps(SMALL))
    whole["mmds"]["model"] |= {"connector": "resampler", "resolution": "native"}
    write(whole, "base.json")
    child = write({"extends": "base.json", "mmds": {"model": {"connector": {"queries": 16}}}}, "child.json")
    model = model_of(child, "mmds.model.resolution.min_pixels=784")
    assert model.connector == ConnectorSection(name="resampler", queries=16)
    assert model.resolution == ResolutionSection(name="native", min_pixels=784)
    assert model_of(child, "mmds.model.connector=linear").connector == ConnectorSection(name="linear")


def test_the_resolved_run_is_read_back_to_the_same_sections(write: Write) -> None:
    overrides = [
        'mmds.model.resolution={"name": "anyres", "grids": ["1x2"]}',
        "mmds.model.connector=pixel_shuffle",
        "mmds.model.encoder.rope=true",
    ]
    config = load_config(write(), overrides)
    again = load_config(write(config.resolved, "resolved.json"))
    assert again.model == config.model and again.resolved == config.resolved


IDLE = {
    "size=448": ("native", "fixed and anyres"),
    'fit="pad"': ("anyres native", "fixed"),
    "max_tiles=4": ("fixed native", "anyres"),
    'grids=["1x2"]': ("fixed native", "anyres"),
    "min_pixels=784": ("fixed anyres", "native"),
}


@pytest.mark.parametrize(
    ("setting", "mode", "acts"),
    [(setting, mode, acts) for setting, (modes, acts) in IDLE.items() for mode in modes.split()],
)
def test_a_key_that_would_not_act_in_the_mode_is_refused(
    write: Write, setting: str, mode: str, acts: str
) -> None:
    """And the same key is taken in every mode in which it acts."""
    key = setting.partition("=")[0]
    override = f"mmds.model.resolution.{setting}"
    said = refusal(write(), f"mmds.model.resolution={mode}", override)
    assert f"mmds.model.resolution.{key}: acts only in resolution {acts}: take it out" in said
    assert said.startswith(f"--set {override}")
    for other in acts.split(" and "):
        section = model_of(write(), f"mmds.model.resolution={other}", override).resolution
        assert getattr(section, key) not in (None, "resize")


@pytest.mark.parametrize(
    ("overrides", "key", "says"),
    [
        (
            ['mmds.model.resolution={"name": "anyres", "grids": ["1x2"], "max_tiles": 3}'],
            "resolution.max_tiles",
            "grids says which tiles there are",
        ),
        (
            ['mmds.model.resolution={"name": "anyres", "grids": ["1x2", "2by2"]}'],
            "resolution.grids[1]",
            '"2by2" is not "ROWSxCOLUMNS"',
        ),
        (
            ['mmds.model.resolution={"name": "anyres", "grids": ["0x2"]}'],
            "resolution.grids[0]",
            '"0x2" is not "ROWSxCOLUMNS"',
        ),
        (
            ['mmds.model.resolution={"name": "anyres", "grids": []}'],
            "resolution.grids",
            "at least one item",
        ),
        (["mmds.model.connector.queries=9"], "connector.queries", "acts only with resampler, not with mlp2x"),
        (
            ["mmds.model.resolution=anyres", "mmds.model.connector=resampler"],
            "connector",
            "use another, or resolution fixed or native",
        ),
        (["mmds.model.resolution=anyres", "mmds.model.positions=mrope"], "positions", 'use "1d"'),
        (["mmds.model.connector=resampler", "mmds.model.positions=mrope"], "positions", 'use "1d"'),
    ],
)
def test_keys_that_exclude_each_other_are_refused_with_the_way_out(
    write: Write, overrides: list[str], key: str, says: str
) -> None:
    said = refusal(write(), *overrides)
    assert f": mmds.model.{key}: " in said and says in said


@pytest.mark.parametrize(
    ("resolution", "connector"),
    [("fixed", "mlp2x"), ("fixed", "merge_mlp"), ("native", "linear"), ("native", "pixel_shuffle")],
)
def test_mrope_goes_with_every_mode_and_connector_that_keeps_rows_and_columns(
    write: Write, resolution: str, connector: str
) -> None:
    overrides = [f"mmds.model.resolution={resolution}", f"mmds.model.connector={connector}"]
    assert model_of(write(), *overrides, "mmds.model.positions=mrope").positions == "mrope"
