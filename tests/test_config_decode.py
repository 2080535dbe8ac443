"""What load_config refuses in "mmds", and how it says so."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from small_config import SMALL, Write, refusal, writer


@pytest.fixture
def write(tmp_path: Path) -> Write:
    return writer(tmp_path)


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("mmds.data.row_token=9", 'mmds.data.row_token: unknown key: did you mean "row_tokens"?'),
        ("mmds.model.encoder.layr=9", 'mmds.model.encoder.layr: unknown key: did you mean "layer"?'),
        (
            'mmds.data.mix=[{"nam": "a", "path": "b"}]',
            'mmds.data.mix[0].nam: unknown key: did you mean "name"?',
        ),
        ("mmds.outptu_dir=x", 'mmds.outptu_dir: unknown key: did you mean "output_dir"?'),
        ("mmds.zzz=1", "mmds.zzz: unknown key: the keys here are checkpoint, data, init_from"),
        ("row_tokens=9", "row_tokens: unknown key in this place: it belongs at mmds.data.row_tokens"),
        ("mmds.row_tokens=9", "it belongs at mmds.data.row_tokens"),
        ("mmds.path=x", "it belongs at mmds.data.mix[].path"),
        ("mmds.gradient_clipping=1", "it belongs at gradient_clipping (at the top level)"),
        ("mmds.data.stage=align", "it belongs at zero_optimization.stage or mmds.stage"),
        ("optimizer.betas=[0.9, 0.95]", "it belongs at optimizer.params.betas"),
        ("reduce_bucket_size=1", "it belongs at zero_optimization.reduce_bucket_size"),
        ("mmds.scheduler={}", "refused at scheduler: the schedule belongs to mmds"),
        ("gradient_clipp1ng=1", 'gradient_clipp1ng: unknown key: did you mean "gradient_clipping"?'),
        ("bf_16={}", 'did you mean "bf16"?'),
        ("zero_optimisation={}", 'did you mean "zero_optimization"?'),
    ],
)
def test_an_unknown_key_is_refused_with_its_path_and_the_nearest(
    write: Write, override: str, says: str
) -> None:
    """TRAPS A13."""
    assert says in refusal(write(), override)


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("cutoff_len", "mmds.data.row_tokens"),
        ("model_max_length", "mmds.data.row_tokens"),
        ("image_max_pixels", "mmds.data.max_pixels"),
        ("image_folder", "mmds.data.mix[].images"),
        ("freeze_vision_tower", "mmds.stage.rates"),
        ("tune_mm_mlp_adapter", 'mmds.stage "align"'),
        ("save_total_limit", "mmds.checkpoint.keep"),
        ("learning_rate", "mmds.stage.rates"),
        ("per_device_train_batch_size", "train_batch_size"),
        ("num_train_epochs", "mmds.schedule.epochs"),
        ("gradient_checkpointing", "activation_checkpointing"),
        ("packing", "rows are always packed"),
    ],
)
@pytest.mark.parametrize("section", ["", "mmds.", "mmds.data.", "mmds.stage.", "mmds.model."])
def test_names_of_other_trainers_are_answered_with_ours(
    write: Write, section: str, name: str, ours: str
) -> None:
    message = refusal(write(), f"{section}{name}=1")
    assert f"{section}{name}: " in message and ours in message


@pytest.mark.parametrize(
    "override",
    [
        'mmds.eval={"every": 5}',
        'zero_optimization.offload_optimizer={"device": "cpu", "nvme_path": "/disk"}',
        'zero_optimization.offload_param={"device": "nvme"}',
        "zero_optimization.zero_quantized_weights=true",
        "hybrid_engine={}",
    ],
)
def test_documented_keys_of_later_versions_are_refused_as_not_yet_supported(
    write: Write, override: str
) -> None:
    message = refusal(write(), override)
    assert "not yet supported" in message
    assert override.split("=")[0].split(".")[-1] in message


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (
            ["mmds.recompute={}"],
            'mmds.recompute: acts only with activation checkpointing: add "activation_checkpointing": {}',
        ),
        (
            [
                'mmds.recompute={"encoder": 0, "connector": 0, "decoder": 0}',
                'activation_checkpointing={"profile": true}',
            ],
            "activation_checkpointing.profile: has no effect: mmds.recompute is 0 for every part",
        ),
        (
            ["mmds.recompute.connector=2"],
            "mmds.recompute.connector: expected at least 0 and at most 1, got 2",
        ),
        (["mmds.recompute.decoder=-1"], "mmds.recompute.decoder: expected at least 0, got -1"),
        (["mmds.recompute.encoder=true"], "mmds.recompute.encoder: expected an integer, got true"),
        (
            ["mmds.weighting=tokens"],
            'mmds.weighting: expected one of "token", "sample", "sqrt", got "tokens"',
        ),
        (["mmds.stop_after_skipped=0"], "mmds.stop_after_skipped: expected at least 1, got 0"),
        (["mmds.stop_after_skipped=null", "mmds.stop_after_skiped=3"], 'did you mean "stop_after_skipped"?'),
    ],
)
def test_recompute_weighting_and_skipped_steps_hold_only_what_can_act(
    write: Write, overrides: list[str], says: str
) -> None:
    assert says in refusal(write(), *overrides)


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("mmds.output_dir=auto", 'mmds.output_dir: "auto" has no meaning here'),
        (
            "mmds.model.encoder.pretrained=auto",
            '"auto" has no meaning here: write the value, or take the key out',
        ),
        ("mmds.model.encoder.norm=auto", '"auto" has no meaning here'),
        ("mmds.schedule.decay=auto", '"auto" has no meaning here'),
        ("mmds.model.decoder=auto", 'mmds.model.decoder: "auto" has no meaning here'),
        (
            'mmds.stage.rates={"decoder.*": "auto"}',
            'mmds.stage.rates."decoder.*": "auto" has no meaning here',
        ),
        ("mmds.data=auto", 'mmds.data: "auto" has no meaning here'),
    ],
)
def test_auto_is_refused_wherever_it_stands(write: Write, override: str, says: str) -> None:
    assert says in refusal(write(), override)


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("mmds.schedule.warmup_ratio=3", "for a number of steps give warmup_steps"),
        ("mmds.schedule.warmup_steps=0.03", "for a share of the steps give warmup_ratio"),
        ("mmds.schedule.epochs=0.5", "for a part of a pass give steps"),
        ("mmds.stage.min_text_only=5", "5 % is 0.05"),
        ("mmds.data.max_pixels=336", "a side of 336 pixels is 336 x 336 = 112896"),
    ],
)
def test_a_number_in_another_unit_is_answered_with_the_right_one(
    write: Write, override: str, says: str
) -> None:
    assert refusal(write(), override).endswith(says)


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (
            ["mmds.data.mix.0.images=pictures"],
            "mmds.data.mix[0].images: acts only on raw data",
        ),
        (
            ["mmds.model.encoder.name=local-dir:tower", "mmds.model.encoder.pretrained=openai"],
            "mmds.model.encoder.pretrained: has no effect: local-dir:tower brings its own weights",
        ),
        (
            ["mmds.init_from=runs/before"],
            'mmds.model.encoder.pretrained: "random" has no effect: the weights come from',
        ),
        (
            ["mmds.init_from=m", "mmds.model.encoder.pretrained=openai", "mmds.model.decoder.random=true"],
            "mmds.model.decoder.random: true has no effect: the weights come from init_from",
        ),
        (
            ["mmds.init_from=runs/test/", "mmds.model=null"],
            "mmds.output_dir: is the run that init_from names (runs/test/)",
        ),
    ],
)
def test_a_key_that_another_one_makes_idle_is_refused(write: Write, overrides: list[str], says: str) -> None:
    assert says in refusal(write(), *overrides)


def test_extends_inside_a_section_is_told_its_place(write: Write) -> None:
    assert '"extends" stands at the top level of a file' in refusal(write(), "mmds.data.extends=base.json")


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("mmds.seed=1.5", "mmds.seed: expected an integer, got 1.5"),
        ("mmds.seed=true", "expected an integer, got true"),
        ('mmds.data.row_tokens="128"', 'expected an integer, got "128"'),
        ("mmds.data.row_tokens=auto", '"auto"'),
        ("mmds.data.row_tokens=0", "expected at least 1, got 0"),
        ("mmds.data.workers=-1", "expected at least 0, got -1"),
        ("mmds.data.mix=[]", "expected a list with at least one item"),
        ("mmds.data.mix={}", "expected a list"),
        ("mmds.data=3", "mmds.data: expected an object"),
        ('mmds.output_dir=""', "expected a non-empty string"),
        ("mmds.output_dir=3", "expected a non-empty string, got 3"),
        ("mmds.model.encoder.norm=1", "expected true or false, got 1"),
        ("mmds.model.encoder.activation=relu", 'expected one of "gelu", "quick_gelu", got "relu"'),
        ("mmds.model.encoder.mean=[0.5, 0.5, 0.5]", "mean and std belong together"),
        ("mmds.model.encoder.mean=[0.5, 0.5]", "expected a list of 3 numbers, got [0.5, 0.5]"),
        (
            "mmds.model.encoder.std=[0.5, 0.5, 0]",
            "mmds.model.encoder.std[2]: expected above 0 and at most 1, got 0",
        ),
        ("mmds.model.encoder.pretrained=null", "mmds.model.encoder.pretrained: missing"),
        ("mmds.model=null", "mmds.model: missing"),
        (
            'mmds.stage.rates."decoder.*"="1e-5"',
            'mmds.stage.rates."decoder.*": expected a number, got "1e-5"',
        ),
        ("mmds.stage.min_text_only=5", "at most 1, got 5 (least share"),
        ("mmds.schedule.warmup_ratio=3", "at most 1, got 3 (share of the steps"),
        ("mmds.schedule.steps=5", "both are given: take one out, as in --set mmds.schedule.epochs=null"),
        ("mmds.schedule.warmup_steps=5", "warmup_ratio or warmup_steps, exactly one: both are given"),
        ("mmds.schedule.epochs=null", "epochs or steps, exactly one: neither is given"),
        ("mmds.schedule.warmup_ratio=null", "warmup_ratio or warmup_steps, exactly one: neither is given"),
        ("mmds.output_dir=null", "mmds.output_dir: missing: run folder"),
        ("mmds=null", "mmds: missing"),
        ("train_batch_size=null", "train_batch_size: missing"),
        ("zero_optimization=null", "zero_optimization: missing"),
    ],
)
def test_wrong_types_ranges_and_combinations_are_refused(write: Write, override: str, says: str) -> None:
    assert says in refusal(write(), override)


def test_two_entries_of_one_name_and_a_warm_up_longer_than_the_run_are_refused(
    write: Write,
) -> None:
    mix = json.dumps([{"name": "a", "path": "x"}, {"name": "a", "path": "y"}])
    assert 'mmds.data.mix[1].name: "a" is already' in refusal(write(), f"mmds.data.mix={mix}")
    schedule = {"steps": 5, "warmup_steps": 6, "epochs": None, "warmup_ratio": None}
    assert "6 is more than the 5 steps" in refusal(write(), f"mmds.schedule={json.dumps(schedule)}")


def test_a_fault_is_named_with_the_file_and_line_that_hold_it(write: Write, tmp_path: Path) -> None:
    write('{"mmds": {\n"data": {\n"cutoff_len": 5}}}', "base.json")
    child = write({"extends": "base.json", **SMALL})
    assert refusal(child).startswith(f"{tmp_path}/base.json:3: mmds.data.cutoff_len: ")
    twice = write('{"mmds": {"seed": 1,\n "seed": 2}}')
    assert refusal(twice).startswith(f"{twice}:2:2: duplicate key mmds.seed")
