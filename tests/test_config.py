"""load_config: a whole run, its defaults, its resolved form, and the rows of a step."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from small_config import SMALL, Write, writer

from mmds.config import load_config, rows_per_step
from mmds.config_types import ResolutionSection
from mmds.errors import ConfigError


@pytest.fixture
def write(tmp_path: Path) -> Write:
    return writer(tmp_path)


def test_a_small_file_becomes_typed_sections_with_the_documented_defaults(write: Write) -> None:
    config = load_config(write())
    assert config.model is not None
    assert (config.stage.name, config.seed, config.init_from, config.output_dir) == (
        "instruct",
        42,
        None,
        "runs/test",
    )
    assert (config.model.encoder.layer, config.model.encoder.norm) == (-2, False)
    assert (config.model.decoder.name, config.model.decoder.random) == ("some/decoder", False)
    assert config.model.resolution == ResolutionSection(name="fixed") and config.model.positions == "1d"
    assert (config.data.on_bad_sample, config.data.on_long_sample, config.data.workers) == (
        "raise",
        "drop",
        4,
    )
    assert (config.schedule.decay, config.checkpoint.every, config.checkpoint.keep) == ("cosine", None, 2)
    assert "mmds" not in config.deepspeed and config.deepspeed["train_batch_size"] == 4
    assert not config.bf16 and not config.recompute


def test_what_deepspeed_would_assume_in_silence_is_written_out(write: Write) -> None:
    """TRAPS A19: clipping is 1.0 when the key is absent."""
    from deepspeed.runtime.constants import GRADIENT_CLIPPING_DEFAULT

    config = load_config(write())
    assert config.clipping == GRADIENT_CLIPPING_DEFAULT == config.deepspeed["gradient_clipping"]
    assert config.deepspeed["data_types"]["grad_accum_dtype"] == "fp32"
    assert config.deepspeed["optimizer"]["type"] == "AdamW"
    partly = load_config(write(), ["optimizer.params.weight_decay=0.1", "gradient_clipping=0"])
    assert partly.deepspeed["optimizer"]["params"] == {
        "betas": [0.9, 0.999],
        "eps": 1e-8,
        "weight_decay": 0.1,
    }
    assert partly.clipping == 0.0


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ['mmds.stage.rates={"encoder.*": null, "decoder.lm_head.*": 1e-5}', "mmds.stage.min_text_only=0"],
        ["mmds.model=null", "mmds.init_from=runs/before", "bf16.enabled=true", "activation_checkpointing={}"],
        ["mmds.model.encoder.mean=[0.5, 0.5, 0.5]", "mmds.model.encoder.std=[0.5, 0.5, 0.5]"],
        ['mmds.schedule={"epochs": null, "steps": 7, "warmup_ratio": null, "warmup_steps": 0}'],
        ["activation_checkpointing={}", "mmds.recompute.decoder=2", "mmds.weighting=sample"],
    ],
)
def test_the_resolved_run_is_accepted_again_and_means_the_same(write: Write, overrides: list[str]) -> None:
    first = load_config(write(), overrides)
    second = load_config(write(first.resolved, "config.json"))
    assert second.resolved == first.resolved
    assert second.deepspeed == first.deepspeed
    for name in (field.name for field in dataclasses.fields(first) if field.name != "path"):
        assert getattr(second, name) == getattr(first, name)
    assert list(second.stage.rates) == list(first.stage.rates)


def test_config_loads_fast_and_without_torch() -> None:
    code = "import sys, mmds.config; print(sorted({'torch', 'deepspeed', 'numpy', 'transformers'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("overrides", "world", "expected"),
    [
        (["train_batch_size=16"], 1, (16, 16)),
        (["train_batch_size=16"], 8, (16, 2)),
        (["train_batch_size=null", "gradient_accumulation_steps=3"], 4, (12, 3)),
        (["train_batch_size=12", "gradient_accumulation_steps=3"], 4, (12, 3)),
        (["train_batch_size=12", "train_micro_batch_size_per_gpu=1"], 4, (12, 3)),
    ],
)
def test_rows_and_micro_steps_follow_from_either_key(
    write: Write, overrides: list[str], world: int, expected: tuple[int, int]
) -> None:
    assert rows_per_step(load_config(write(), overrides), world) == expected


@pytest.mark.parametrize(
    ("overrides", "world", "says"),
    [
        (["train_batch_size=16"], 6, "use 12 or 18, as in --set train_batch_size=18"),
        (["train_batch_size=4"], 8, "use 8, as in"),
        (["train_batch_size=12", "gradient_accumulation_steps=4"], 4, "--set train_batch_size=16"),
    ],
)
def test_rows_that_do_not_divide_are_refused_with_the_neighbours(
    write: Write, overrides: list[str], world: int, says: str
) -> None:
    with pytest.raises(ConfigError, match="train_batch_size") as error:
        rows_per_step(load_config(write(), overrides), world)
    assert says in str(error.value)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], None),
        (["activation_checkpointing={}"], {"encoder": 1, "connector": 1, "decoder": 1}),
        (
            ["activation_checkpointing={}", "mmds.recompute.decoder=2", "mmds.recompute.encoder=0"],
            {"encoder": 0, "connector": 1, "decoder": 2},
        ),
        (
            ["activation_checkpointing={}", 'mmds.recompute={"connector": 0}'],
            {"encoder": 1, "connector": 0, "decoder": 1},
        ),
    ],
)
def test_activation_checkpointing_turns_recomputation_on_and_recompute_refines_it(
    write: Write, overrides: list[str], expected: dict[str, int] | None
) -> None:
    found = load_config(write(), overrides).recompute
    assert (None if found is None else dataclasses.asdict(found)) == expected


@pytest.mark.parametrize(
    ("section", "deepspeeds"),
    [
        ("{}", False),
        ('{"cpu_checkpointing": false, "profile": false}', False),
        ('{"partition_activations": false}', False),
        ('{"cpu_checkpointing": true}', True),
        ('{"profile": true}', True),
        ('{"synchronize_checkpoint_boundary": true}', True),
    ],
)
def test_a_key_of_deepspeeds_checkpointing_that_is_true_asks_for_deepspeeds_function(
    write: Write, section: str, deepspeeds: bool
) -> None:
    assert load_config(write(), [f"activation_checkpointing={section}"]).deepspeed_recomputes is deepspeeds


def test_weighting_and_the_limit_of_skipped_steps_reach_the_run(write: Write) -> None:
    silent, said = load_config(write()), ["mmds.weighting=sqrt", "mmds.stop_after_skipped=1"]
    assert (silent.weighting, silent.stop_after_skipped) == ("token", 5)
    config = load_config(write(), said)
    assert (config.weighting, config.stop_after_skipped) == ("sqrt", 1)
    assert config.resolved["mmds"]["weighting"] == "sqrt"


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_every_zero_stage_may_be_asked_for(write: Write, stage: int) -> None:
    assert load_config(write(), [f"zero_optimization.stage={stage}"]).zero_stage == stage


def test_schema_in_a_file_is_for_editors_and_reaches_neither_the_run_nor_deepspeed(
    write: Write, tmp_path: Path
) -> None:
    write({"$schema": "schema.json", **SMALL}, "base.json")
    config = load_config(write({"$schema": "schema.json", "extends": "base.json"}))
    assert "$schema" not in config.resolved and "$schema" not in config.deepspeed
    assert config.resolved == load_config(write(SMALL)).resolved


def mixed(*entries: dict[str, Any], **schedule: Any) -> dict[str, Any]:
    """The small config with these entries of the mix."""
    config: dict[str, Any] = json.loads(json.dumps(SMALL))
    config["mmds"]["data"]["mix"] = [
        {"name": f"s{i}", "path": f"shards/{i}", **entry} for i, entry in enumerate(entries)
    ]
    if schedule:
        config["mmds"]["schedule"] = {"warmup_steps": 0, **schedule}
    return config


def test_a_mix_by_weight_or_by_epochs_reaches_the_run(write: Write) -> None:
    weighted = load_config(write(mixed({"weight": 3}, {"weight": 0.5}, steps=10))).data
    assert [entry.weight for entry in weighted.mix] == [3.0, 0.5]
    repeated = load_config(write(mixed({"epochs": 2}, {}))).data
    assert [(entry.weight, entry.epochs) for entry in repeated.mix] == [(None, 2.0), (None, None)]
    assert load_config(write(), ["mmds.data.holdout=0.01"]).data.holdout == 0.01
    assert load_config(write()).data.holdout == 0.0


@pytest.mark.parametrize(
    ("entries", "schedule", "words"),
    [
        (
            [{"weight": 1}, {}],
            {"steps": 5},
            r"mmds\.data\.mix\[1\]\.weight: missing: give every entry a weight",
        ),
        (
            [{"weight": 1}, {"weight": 1, "epochs": 2}],
            {"steps": 5},
            r"mix\[1\]\.epochs: has no meaning beside weights",
        ),
        (
            [{"weight": 1}, {"weight": 2}],
            {"epochs": 1},
            r"mmds\.schedule\.epochs: a mix with weights has no epochs",
        ),
    ],
)
def test_weights_and_epochs_do_not_mix(
    entries: list[dict[str, Any]], schedule: dict[str, Any], words: str, write: Write
) -> None:
    with pytest.raises(ConfigError, match=words):
        load_config(write(mixed(*entries, **schedule)))
