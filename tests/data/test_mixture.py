"""Several sources as one space of samples."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mmds.config import Config, load_config
from mmds.config_types import DataSection, MixEntry
from mmds.cost import CostModel, Terms
from mmds.data.mixture import Mixture, ensure_mixture, open_mixture, plan_run, text_only_share
from mmds.data.prepare import prepare
from mmds.errors import ConfigError, DataError
from tests.data.raw_sets import (
    GEOMETRY,
    chat_tokenizer,
    picture,
    prepared_set,
    record,
    write_jsonl,
    write_set,
)

TOKENIZER = chat_tokenizer()
COST = CostModel(
    encoder=Terms(patches=2.0, patch_squares=0.1), connector=Terms(), decoder=Terms(tokens=3.0, squares=0.1)
)


def test_sources_follow_one_another_and_keep_their_names_apart(tmp_path: Path) -> None:
    sets = [
        prepared_set(tmp_path / name, pictures)
        for name, pictures in (("a", [1, 0]), ("b", [0]), ("c", [2, 0, 1]))
    ]
    mixture = Mixture(["a", "b", "c"], sets)
    assert len(mixture) == 6
    assert [mixture.key(i) for i in range(6)] == ["a:s0", "a:s1", "b:s0", "c:s0", "c:s1", "c:s2"]
    expected = [(shards, i) for shards in sets for i in range(len(shards))]
    for i, (shards, within) in enumerate(expected):
        sample, own = mixture.read(i), shards.read(within)
        assert sample.key == mixture.key(i)
        assert np.array_equal(sample.ids, own.ids) and sample.image_bytes == own.image_bytes
    assert mixture.sizes(GEOMETRY).tokens.tolist() == [
        n for shards in sets for n in shards.sizes(GEOMETRY).tokens
    ]
    entries = tuple(MixEntry(name=name, path="unread") for name in "abc")
    assert text_only_share(DataSection(mix=entries, row_tokens=100), mixture) == pytest.approx(3 / 6)
    for outside in (-1, 6):
        with pytest.raises(IndexError):
            mixture.read(outside)


def test_two_sources_of_one_name_are_refused(tmp_path: Path) -> None:
    shards = prepared_set(tmp_path, [0])
    with pytest.raises(ConfigError, match="unique, got a, a"):
        Mixture(["a", "a"], [shards, shards])


def test_a_mix_of_a_raw_file_and_a_prepared_folder_opens_after_one_preparation(tmp_path: Path) -> None:
    raw, images = write_set(tmp_path / "set", [1, 0, 0]), tmp_path / "set"
    (tmp_path / "records").mkdir()
    moved = raw.rename(tmp_path / "records" / "raw.jsonl")
    prepare([write_set(tmp_path / "other", [1])], None, TOKENIZER, tmp_path / "prepared")
    data = DataSection(
        mix=(
            MixEntry(name="raw", path=str(moved), images=str(images)),
            MixEntry(name="ready", path=str(tmp_path / "prepared")),
        ),
        row_tokens=100,
    )
    with pytest.raises(DataError, match=r'mmds\.data\.mix "raw": .*not a prepared folder'):
        open_mixture(data, TOKENIZER.fingerprint)
    ensure_mixture(data, TOKENIZER)
    mixture = open_mixture(data, TOKENIZER.fingerprint)
    assert [mixture.key(i) for i in range(4)] == ["raw:s0", "raw:s1", "raw:s2", "ready:s0"]


def test_what_is_wrong_with_a_source_names_its_entry(tmp_path: Path) -> None:
    raw = write_set(tmp_path / "set", [1])
    (tmp_path / "set" / "p1.png").unlink()
    bad = DataSection(mix=(MixEntry(name="pets", path=str(raw)),), row_tokens=100)
    with pytest.raises(
        DataError, match=r'mmds\.data\.mix "pets": .*raw\.jsonl:1: sample s0: image 0 \(p1\.png\)'
    ):
        ensure_mixture(bad, TOKENIZER)
    absent = DataSection(mix=(MixEntry(name="gone", path=str(tmp_path / "gone")),), row_tokens=100)
    with pytest.raises(DataError, match=r'mmds\.data\.mix "gone": .*cannot be read'):
        ensure_mixture(absent, TOKENIZER)
    with pytest.raises(DataError, match=r'mmds\.data\.mix "gone": .*cannot be read'):
        open_mixture(absent, TOKENIZER.fingerprint)


def run_config(tmp_path: Path, mix: list[dict[str, Any]], **changes: Any) -> Config:
    """A run over this mix; changes: keys of "data" and "schedule", and "planner"."""
    planner = changes.pop("planner", {})
    schedule = {name: changes.pop(name) for name in ("epochs", "steps") if name in changes}
    config = {
        "train_batch_size": 2,
        "zero_optimization": {"stage": 3},
        "mmds": {
            "stage": "align",
            "output_dir": str(tmp_path / "run"),
            "model": {"encoder": {"name": "local-dir:e"}, "connector": "mlp2x", "decoder": "d"},
            "data": {"mix": mix, "row_tokens": 200, **changes},
            "planner": planner,
            "schedule": {**(schedule or {"epochs": 1}), "warmup_steps": 0},
        },
    }
    file = tmp_path / "run.json"
    file.write_text(json.dumps(config))
    return load_config(file)


def planned(config: Config, mixture: Mixture) -> list[str]:
    """Names of the samples of a run, in order."""
    plan = plan_run(config, mixture, GEOMETRY, rows=2, cost=COST)
    return [mixture.key(i) for step in range(plan.total_steps) for row in plan.step_rows(step) for i in row]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Mixture]:
    """A source of 30 samples with a picture each, and one of 10 without."""
    folder = tmp_path_factory.mktemp("two")
    prepared_set(folder / "seen", [1] * 30)
    prepared_set(folder / "text", [0] * 10)
    paths = [str(path.parent) for name in ("seen", "text") for path in (folder / name).rglob("manifest.json")]
    mix = [{"name": name, "path": path} for name, path in zip(("seen", "text"), paths, strict=True)]
    data = run_config(folder, mix).data
    return folder, open_mixture(data, TOKENIZER.fingerprint)


def entries(mixture: Mixture, **by_name: dict[str, float]) -> list[dict[str, Any]]:
    return [
        {"name": name, "path": str(shards.path), **by_name.get(name, {})}
        for name, shards in zip(mixture.names, mixture.sets, strict=True)
    ]


def test_every_sample_once_an_epoch_or_as_often_as_its_entry_says(two: tuple[Path, Mixture]) -> None:
    folder, mixture = two
    names = planned(run_config(folder, entries(mixture)), mixture)
    assert sorted(names) == sorted(mixture.key(i) for i in range(40))
    config = run_config(folder, entries(mixture, text={"epochs": 3}, seen={"epochs": 0.5}), epochs=2)
    names = planned(config, mixture)
    assert all(names.count(f"text:s{i}") == 6 for i in range(10))
    assert sum(name.startswith("seen:") for name in names) == 30
    assert text_only_share(config.data, mixture) == pytest.approx(30 / 45)


def test_weights_are_shares_of_the_samples_and_go_on_for_as_many_steps_as_asked(
    two: tuple[Path, Mixture],
) -> None:
    folder, mixture = two
    config = run_config(folder, entries(mixture, text={"weight": 3.0}, seen={"weight": 1.0}), steps=40)
    names = planned(config, mixture)
    assert len(names) > 200
    assert sum(name.startswith("text:") for name in names) / len(names) == pytest.approx(0.75, abs=0.02)
    assert text_only_share(config.data, mixture) == pytest.approx(0.75)


def test_whatever_decides_the_plan_decides_its_fingerprint(two: tuple[Path, Mixture]) -> None:
    folder, mixture = two

    def fingerprint(mix: list[dict[str, Any]], **changes: Any) -> str:
        return plan_run(run_config(folder, mix, **changes), mixture, GEOMETRY, rows=2, cost=COST).fingerprint

    base = entries(mixture)
    found = [
        fingerprint(base),
        fingerprint(base, row_tokens=300),
        fingerprint(base, steps=3),
        fingerprint(base, holdout=0.2),
        fingerprint(entries(mixture, text={"epochs": 2})),
        fingerprint(base, planner={"scheme": "token_budget"}),
        fingerprint(base, planner={"objective": "step"}),
        fingerprint(base, planner={"row_patches": 100}),
        fingerprint(base, planner={"row_images": 3}),
        fingerprint(base, planner={"last_step": "drop"}),
        plan_run(
            run_config(folder, base), mixture, replace(GEOMETRY, merge=2), rows=2, cost=COST
        ).fingerprint,
    ]
    assert len(set(found)) == len(found)
    assert fingerprint(base) == found[0]


def test_held_out_samples_share_no_picture_with_training_whatever_it_is_called(tmp_path: Path) -> None:
    """Sample i of the second source shows the picture of sample i of the first, under another name."""
    sources = []
    for name in ("a", "b"):
        records = []
        for i in range(20):
            file = tmp_path / name / f"{name}{i}.png"
            file.parent.mkdir(exist_ok=True)
            file.write_bytes(picture(10 + i))
            records.append(record(f"s{i}", [file.name]))
        raw = write_jsonl(tmp_path / name / "raw.jsonl", records)
        prepare([raw], None, TOKENIZER, tmp_path / f"{name}-out")
        sources.append({"name": name, "path": str(tmp_path / f"{name}-out")})
    config = run_config(tmp_path, sources, holdout=0.3)
    mixture = open_mixture(config.data, TOKENIZER.fingerprint)
    trained = {name.split(":")[1] for name in planned(config, mixture)}
    first, second = mixture.held_out(0.3, seed=config.seed)
    assert first.tolist() == second.tolist() and len(first) == 6
    assert trained == {f"s{i}" for i in range(20)} - {f"s{i}" for i in first.tolist()}


def test_too_long_a_sample_and_too_few_are_named_before_the_run(two: tuple[Path, Mixture]) -> None:
    folder, mixture = two
    with pytest.raises(DataError, match=r"40 samples are larger than a row of 20 tokens: sample seen:s0 \("):
        plan_run(
            run_config(folder, entries(mixture), row_tokens=20, on_long_sample="raise"),
            mixture,
            GEOMETRY,
            rows=2,
            cost=COST,
        )
    with pytest.raises(ConfigError, match=r"needs 50 rows .*only 40 usable"):
        plan_run(run_config(folder, entries(mixture)), mixture, GEOMETRY, rows=50, cost=COST)
