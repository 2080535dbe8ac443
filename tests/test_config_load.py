"""How files, --set, home folders and environment variables make one configuration."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from small_config import SMALL, Write, refusal, writer

from mmds.config import load_config
from mmds.config_keys import own_tree, walk
from mmds.config_load import SHORTHANDS


@pytest.fixture
def write(tmp_path: Path) -> Write:
    return writer(tmp_path)


def test_extends_merges_objects_replaces_lists_and_removes_by_null(write: Write) -> None:
    write(SMALL, "a.json")
    write({"extends": "a.json", "steps_per_print": 5, "mmds": {"data": {"workers": 1}, "seed": 7}}, "b.json")
    top = {
        "extends": "b.json",
        "steps_per_print": None,
        "mmds": {"data": {"mix": [{"name": "two", "path": "p"}]}, "schedule": {"epochs": None, "steps": 9}},
    }
    config = load_config(write(top))
    assert [entry.name for entry in config.data.mix] == ["two"]
    assert (config.data.workers, config.data.row_tokens, config.seed) == (1, 128, 7)
    assert (config.schedule.epochs, config.schedule.steps) == (None, 9)
    assert "steps_per_print" not in config.deepspeed and "extends" not in config.resolved


@pytest.mark.parametrize(
    ("child", "overrides", "says"),
    [
        (
            {"tensorbord": None},
            [],
            'run.json:3: tensorbord: null removes nothing: unknown key: did you mean "tensorboard"?',
        ),
        (
            {"mmds": {"schedule": {"epoch": None}}},
            [],
            'null removes nothing: unknown key: did you mean "epochs"?',
        ),
        ({"tensorbord": {"enabled": None}}, [], "tensorbord: null removes nothing"),
        ({"zero_optimization": {"overlap_com": None}}, [], 'did you mean "overlap_comm"?'),
        ({}, ["mmds.data.mix.0.imags=null"], 'did you mean "images"?'),
        (
            {},
            ["mmds.sed=null"],
            '--set mmds.sed=null: mmds.sed: null removes nothing: unknown key: did you mean "seed"?',
        ),
        ({"mmds": {"model": {"num_train_epochs": None}}}, [], "here it is mmds.schedule.epochs"),
    ],
)
def test_a_null_that_removes_nothing_is_refused_unless_the_key_is_known(
    write: Write, child: dict[str, Any], overrides: list[str], says: str
) -> None:
    write(SMALL, "base.json")
    assert says in refusal(write({"extends": "base.json", **child}), *overrides)


def test_a_null_takes_out_what_a_base_file_holds_known_or_not(write: Write) -> None:
    write({**SMALL, "scheduler": {"type": "WarmupLR"}, "someone_elses": 1}, "base.json")
    gone = {"extends": "base.json", "scheduler": None, "someone_elses": None, "tensorboard": None}
    assert load_config(write(gone)).deepspeed.keys().isdisjoint(gone)
    assert load_config(write(SMALL), ["scheduler=null", "mmds.init_from=null", "mmds.recompute.decoder=null"])


def test_an_object_of_nulls_does_not_turn_its_section_on(write: Write) -> None:
    assert load_config(write(), ["activation_checkpointing.profile=null"]).recompute is None
    assert load_config(write(), ["activation_checkpointing={}"]).recompute is not None
    write(SMALL, "base.json")
    top = {"extends": "base.json", "activation_checkpointing": {"profile": None}, "wandb": {"team": None}}
    assert load_config(write(top)).deepspeed == load_config(write(SMALL)).deepspeed


def test_schema_must_be_text_and_stands_in_files_only(write: Write) -> None:
    assert "$schema: must be the path" in refusal(write({"$schema": 3, **SMALL}))
    assert "stands at the top level of a file" in refusal(write(), "$schema=schema.json")


def test_extends_is_relative_to_its_own_file(write: Write, tmp_path: Path) -> None:
    (tmp_path / "deep" / "er").mkdir(parents=True)
    write(SMALL, "base.json")
    write({"extends": "../base.json", "mmds": {"seed": 1}}, "deep/middle.json")
    assert load_config(write({"extends": "../middle.json"}, "deep/er/top.json")).seed == 1


def test_a_circle_of_extends_and_a_missing_base_are_named(write: Write, tmp_path: Path) -> None:
    write({"extends": "b.json"}, "a.json")
    message = refusal(write({"extends": "a.json"}, "b.json"))
    assert "circle" in message and f"{tmp_path}/b.json -> {tmp_path}/a.json -> {tmp_path}/b.json" in message
    message = refusal(write({"extends": "nowhere.json"}, "c.json"))
    assert "nowhere.json" in message and "c.json" in message
    assert "must be the path of one file" in refusal(write({"extends": ["a.json"]}, "d.json"))


def test_null_inside_rates_is_frozen_and_the_later_file_goes_first(write: Write) -> None:
    base = copy.deepcopy(SMALL)
    base["mmds"]["stage"] = {"name": "pretrain", "rates": {"decoder.*": 1e-5, "connector.*": 1e-4}}
    write(base, "base.json")
    top = {"extends": "base.json", "mmds": {"stage": {"rates": {"decoder.lm_head.*": None}}}}
    config = load_config(write(top))
    assert list(config.stage.rates.items()) == [
        ("decoder.lm_head.*", None),
        ("decoder.*", 1e-5),
        ("connector.*", 1e-4),
    ]
    assert config.rates == (*config.stage.rates.items(), ("encoder.*", 2e-6))


def test_set_reads_json_bare_words_list_items_and_quoted_keys(write: Write) -> None:
    overrides = [
        "mmds.seed=7",
        "mmds.output_dir=runs/a=b",
        'mmds.stage.rates."decoder.*"=1e-5',
        "mmds.data.mix.0.path=elsewhere",
        "bf16.enabled=true",
        "mmds.seed=8",
    ]
    config = load_config(write(), overrides)
    assert (config.seed, config.output_dir, config.bf16) == (8, "runs/a=b", True)
    assert config.stage.rates == {"decoder.*": 1e-5} and config.stage.name == "instruct"
    assert [(entry.name, entry.path) for entry in config.data.mix] == [("one", "elsewhere")]


def test_set_reaches_into_a_section_that_was_written_as_a_string(write: Write) -> None:
    config = load_config(write(), ["mmds.stage.min_text_only=0", "mmds.model.decoder.random=true"])
    assert (config.stage.name, config.stage.min_text_only) == ("instruct", 0.0)
    assert config.model is not None
    assert (config.model.decoder.name, config.model.decoder.random) == ("some/decoder", True)
    assert (
        load_config(write(), ["mmds.stage.min_text_only=0", "mmds.stage=align"]).stage.min_text_only is None
    )


def test_the_sections_that_may_be_strings_are_the_same_for_merging_and_for_reading() -> None:
    assert {tuple(key.path.split(".")) for key in walk(own_tree()) if key.shorthand} == SHORTHANDS


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("nonsense", "write KEY=VALUE"),
        ("=3", "write KEY=VALUE"),
        ("a b", "write KEY=VALUE"),
        ("mmds.data.mix=[1,", "--set mmds.data.mix=[1,:1:4: expected a JSON value"),
        ("mmds.data.mix.1.path=x", "is a list of 1: no item '1'"),
        ("mmds.data.mix.first.path=x", "no item 'first'"),
        ("mmds.seed=", "expected a JSON value"),
        ("mmds.seed.deep=1", "mmds.seed: expected an integer"),
        ("extends=base.json", "give that file to --config"),
    ],
)
def test_an_override_that_cannot_be_applied_is_named(write: Write, override: str, says: str) -> None:
    message = refusal(write(), override)
    assert says in message and message.startswith("--set ")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"[1]", "must hold one JSON object"),
        (b"\xff{}", "not UTF-8"),
        (b"", "expected a JSON value"),
    ],
)
def test_a_file_that_is_no_configuration_is_named(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(content)
    assert says in refusal(path) and str(path) in refusal(path)
    assert "there is no file" in refusal(tmp_path / "absent.json")
    assert "cannot read" in refusal(tmp_path)


def test_a_byte_order_mark_is_no_fault(tmp_path: Path) -> None:
    path = tmp_path / "bom.json"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(SMALL).encode())
    assert load_config(path).seed == 42


def test_home_and_variables_are_expanded_in_every_path(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ann")
    monkeypatch.setenv("MMDS_TEST_DATA", "/big/disk")
    overrides = [
        "mmds.output_dir=~/runs",
        "mmds.init_from=${MMDS_TEST_DATA}/m",
        "mmds.model.encoder.pretrained=${MMDS_TEST_DATA}/w.pt",
        "mmds.model.decoder=${MMDS_TEST_DATA}/${MMDS_TEST_DATA}",
        'mmds.data.mix=[{"name": "a", "path": "~/s.jsonl", "images": "${MMDS_TEST_DATA}/i"}]',
        "tensorboard.output_path=~/tb",
    ]
    config = load_config(write(), overrides)
    assert config.model is not None
    assert (config.output_dir, config.init_from) == ("/home/ann/runs", "/big/disk/m")
    assert config.model.encoder.pretrained == "/big/disk/w.pt"
    assert config.model.decoder.name == "/big/disk//big/disk"
    assert (config.data.mix[0].path, config.data.mix[0].images) == ("/home/ann/s.jsonl", "/big/disk/i")
    assert config.deepspeed["tensorboard"]["output_path"] == "/home/ann/tb"
    folder = ["mmds.model.encoder.name=local-dir:~/tower", "mmds.model.encoder.pretrained=null"]
    model = load_config(write(), folder).model
    assert model is not None and model.encoder.name == "local-dir:/home/ann/tower"


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("${MMDS_TEST_UNSET}/x", "'MMDS_TEST_UNSET'"),
        ("${MMDS_TEST_EMPTY}/x", "'MMDS_TEST_EMPTY'"),
        ("$HOME/x", "write variables as ${NAME}"),
        ("~nobody-of-this-name/x", "no home folder"),
    ],
)
@pytest.mark.parametrize("key", ["mmds.output_dir", "mmds.data.mix.0.path", "csv_monitor.output_path"])
def test_an_unset_variable_in_a_path_is_an_error(
    write: Write, monkeypatch: pytest.MonkeyPatch, key: str, value: str, says: str
) -> None:
    monkeypatch.delenv("MMDS_TEST_UNSET", raising=False)
    monkeypatch.setenv("MMDS_TEST_EMPTY", "")
    message = refusal(write(), f"{key}={value}")
    assert says in message and key.replace(".0", "[0]") in message
