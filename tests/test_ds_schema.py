"""DeepSpeed's part of the file: strict at every depth, and the tables agree with the installed DeepSpeed."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from mmds.ds_keys import TOP_LEVEL, Model, Section
from mmds.ds_schema import check_deepspeed
from mmds.errors import ConfigError
from mmds.jsonc import KeyPath, dotted

VALID: dict[str, Any] = {"train_batch_size": 4, "zero_optimization": {"stage": 3}}


def where(path: KeyPath, problem: str) -> ConfigError:
    return ConfigError(f"{dotted(path)}: {problem}")


def check(**sections: Any) -> None:
    check_deepspeed({**VALID, **sections}, where)


@pytest.mark.parametrize(
    "sections",
    [
        {"bf16": {"enabled": True, "immediate_grad_update": False}},
        {"zero_optimization": {"stage": 3, "reduce_bucket_size": 5e8, "stage3_max_live_parameters": 1e9}},
        {"zero_optimization": {"stage": 3, "param_persistence_threshold": 0, "overlap_comm": False}},
        {"zero_optimization": {"stage": 3, "zero_quantized_weights": False, "zero_hpz_partition_size": 1}},
        {"activation_checkpointing": {"partition_activations": False}},
        {"optimizer": {"type": "adamw", "params": {"betas": [0.9, 0.95], "eps": 1e-6, "torch_adam": True}}},
        {"data_types": {"grad_accum_dtype": "fp32"}},
        {
            "tensorboard": {"enabled": True, "output_path": "x", "job_name": "y"},
            "csv_monitor": {"enabled": True},
        },
        {
            "wandb": {"enabled": False, "project": "p"},
            "comms_logger": {"enabled": True, "prof_ops": ["all_reduce"]},
        },
        {"flops_profiler": {"enabled": True, "profile_step": 5, "module_depth": -1, "output_file": "x"}},
        {"timers": {"throughput": {"enabled": True, "synchronized": False}}},
        {
            "steps_per_print": 10,
            "wall_clock_breakdown": False,
            "log_level": "INFO",
            "disable_python_gc": True,
        },
        {
            "checkpoint": {"tag_validation": "Ignore"},
            "prescale_gradients": False,
            "gradient_predivide_factor": 1,
        },
        {"train_micro_batch_size_per_gpu": 1, "managed_gradient_accumulation": False},
    ],
)
def test_documented_settings_that_can_act_are_accepted(sections: dict[str, Any]) -> None:
    assert check(**sections) is None


@pytest.mark.parametrize(
    ("sections", "says"),
    [
        ({"scheduler": {"type": "WarmupLR"}}, "scheduler: the schedule belongs to mmds: set mmds.schedule"),
        ({"optimizer": {"params": {"lr": 1e-5}}}, "optimizer.params.lr: rates belong to the stage table"),
        ({"optimizer": {"params": {"max_grad_norm": 1.0}}}, "the owner is gradient_clipping"),
        ({"fp16": {"enabled": True}}, "fp16: the owner of precision is"),
        ({"amp": {"enabled": True}}, "amp: the owner of precision is"),
        ({"bfloat16": {"enabled": True}}, "write bf16"),
        ({"curriculum_learning": {}}, "belongs to mmds.data"),
        ({"data_efficiency": {}}, "belongs to mmds.data"),
        ({"train_micro_batch_size_per_gpu": 2}, "must be absent or 1, got 2: a micro-batch is one row"),
        ({"train_micro_batch_size_per_gpu": True}, "must be absent or 1, got true"),
        ({"elasticity": {}}, "DeepSpeed has removed this feature"),
        ({"dataloader_drop_last": True}, "every sample is planned"),
        ({"activation_checkpointing": {"cpu_checkpointing": True}}, "has no effect here"),
        ({"activation_checkpointing": {"number_checkpoints": 4}}, "has no effect here"),
        ({"bf16": {"enabled": True, "bf16_optimizer_states": True}}, "masters and states are fp32"),
    ],
)
def test_a_key_with_another_owner_is_refused_naming_it(sections: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as error:
        check(**sections)
    assert says in str(error.value)


@pytest.mark.parametrize(
    ("sections", "says"),
    [
        ({"activation_checkpointing": {"partitioned_activations": False}}, 'mean "partition_activations"?'),
        ({"flops_profiler": {"enable": True}}, 'flops_profiler.enable: unknown key: did you mean "enabled"?'),
        ({"data_types": {"grad_acum_dtype": "fp32"}}, 'did you mean "grad_accum_dtype"?'),
        ({"checkpoint": {"tag_validaton": "Warn"}}, 'did you mean "tag_validation"?'),
        ({"optimizer": {"type": "AdamW", "parms": {}}}, 'did you mean "params"?'),
        (
            {"optimizer": {"params": {"beta": [0, 0]}}},
            'optimizer.params.beta: unknown key: did you mean "betas"?',
        ),
        ({"zero_optimization": {"stage": 3, "overlap_com": True}}, 'did you mean "overlap_comm"?'),
        ({"bf16": {"enable": True}}, 'bf16.enable: unknown key: did you mean "enabled"?'),
        ({"tensorboard": {"output_dir": "x"}}, "tensorboard.output_dir: unknown key"),
        ({"timers": {"throughput": {"enabeld": True}}}, "timers.throughput.enabeld: unknown key"),
    ],
)
def test_an_unknown_key_is_refused_in_lax_and_in_strict_sections(sections: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as error:
        check(**sections)
    assert says in str(error.value)


@pytest.mark.parametrize(
    ("sections", "says"),
    [
        ({"gradient_clipping": "1.0"}, 'gradient_clipping: expected a number, got "1.0"'),
        ({"gradient_clipping": True}, "expected a number, got true"),
        ({"gradient_clipping": -1}, "expected at least 0, got -1"),
        ({"train_batch_size": 16.5}, "expected an integer, got 16.5"),
        ({"wall_clock_breakdown": 1}, "expected a boolean, got 1"),
        ({"steps_per_print": "10"}, 'expected an integer, got "10"'),
        ({"bf16": True}, "bf16: expected an object"),
        ({"bf16": {"enabled": 1}}, "bf16.enabled: expected a boolean, got 1"),
        ({"bf16": {"enabled": "yes"}}, 'bf16.enabled: expected a boolean, got "yes"'),
        ({"zero_optimization": True}, "zero_optimization: expected an object"),
        ({"zero_optimization": {"stage": "3"}}, 'zero_optimization.stage: expected a number, got "3"'),
        ({"zero_optimization": {"stage": 3, "overlap_comm": "true"}}, "overlap_comm: expected a boolean"),
        (
            {"zero_optimization": {"stage": 3, "reduce_bucket_size": 1.5}},
            "zero_optimization.reduce_bucket_size: ",
        ),
        ({"zero_optimization": {"stage": 3, "reduce_bucket_size": "5e8"}}, "reduce_bucket_size: "),
        (
            {"zero_optimization": {"stage": 3, "prefetch_bucket_size": 1, "stage3_prefetch_bucket_size": 2}},
            'stage3_prefetch_bucket_size: the same setting as "prefetch_bucket_size"',
        ),
        ({"data_types": {"grad_accum_dtype": "fp33"}}, 'expected one of fp32, bf16, got "fp33"'),
        ({"optimizer": {"type": "Lion"}}, "expected one of Adam, AdamW"),
        ({"optimizer": {"params": {"betas": [0.9]}}}, "expected two numbers"),
        ({"optimizer": {"params": {"betas": [0.9, 1.0]}}}, "expected two numbers"),
        ({"tensorboard": {"enabled": True, "job_name": 3}}, "tensorboard.job_name: "),
    ],
)
def test_a_wrong_type_or_value_is_refused(sections: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as error:
        check(**sections)
    assert says in str(error.value)


@pytest.mark.parametrize(
    "sections",
    [
        {"train_batch_size": "auto"},
        {"gradient_clipping": "auto"},
        {"zero_optimization": {"stage": 3, "reduce_bucket_size": "auto"}},
        {"zero_optimization": "auto"},
        {"bf16": {"enabled": "auto"}},
        {"optimizer": {"type": "AdamW", "params": {"weight_decay": "auto"}}},
        {"optimizer": {"params": {"betas": "auto"}}},
        {"comms_logger": {"prof_ops": ["auto"]}},
    ],
)
def test_auto_is_refused_wherever_it_stands(sections: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match='"auto" has no meaning here'):
        check(**sections)


class Watched(dict[str, Any]):
    """A dict that writes down which keys are looked up; sections inside are watched too."""

    def __init__(self, value: dict[str, Any], seen: set[str], prefix: str = "") -> None:
        inner = {k: Watched(v, seen, f"{prefix}{k}.") if isinstance(v, dict) else v for k, v in value.items()}
        super().__init__(inner)
        self.seen, self.prefix = seen, prefix

    def get(self, key: Any, default: Any = None) -> Any:
        self.seen.add(self.prefix + str(key))
        return super().get(key, default)

    def __getitem__(self, key: Any) -> Any:
        self.seen.add(self.prefix + str(key))
        return super().__getitem__(key)

    def __contains__(self, key: Any) -> bool:
        self.seen.add(self.prefix + str(key))
        return super().__contains__(key)

    def keys(self) -> Any:  # `key in d.keys()` is how DeepSpeed asks
        return self

    def __copy__(self) -> Watched:
        return self


@pytest.fixture(scope="module")
def looked_up() -> Iterator[set[str]]:
    """Every key that the installed DeepSpeed asks for when it parses a configuration with all lax sections."""
    from deepspeed.runtime.config import DeepSpeedConfig
    from deepspeed.utils import logger

    seen: set[str] = set()
    lax = {name: {} for name, rule in TOP_LEVEL.items() if isinstance(rule, Section)}
    level = logger.level
    logger.setLevel(logging.ERROR)
    DeepSpeedConfig(
        Watched({"train_batch_size": 1, **lax, "optimizer": {"type": "AdamW", "params": {}}}, seen)
    )
    logger.setLevel(level)
    yield seen


def test_every_top_level_key_that_deepspeed_looks_up_is_in_the_table(looked_up: set[str]) -> None:
    assert len(looked_up) > 50
    assert {key for key in looked_up if "." not in key} - set(TOP_LEVEL) == set()


@pytest.mark.parametrize("name", [name for name, rule in TOP_LEVEL.items() if isinstance(rule, Section)])
def test_every_key_of_a_lax_section_that_deepspeed_looks_up_is_in_the_table(
    looked_up: set[str], name: str
) -> None:
    rule = TOP_LEVEL[name]
    assert isinstance(rule, Section)
    asked = {key.removeprefix(f"{name}.") for key in looked_up if key.startswith(f"{name}.")}
    assert asked, f"DeepSpeed no longer reads {name}"
    assert {key for key in asked if "." not in key} <= set(rule.keys)
    unread = set(rule.keys) - asked
    assert unread <= {"params", "throughput"}, "the table holds keys that DeepSpeed does not read"


def test_the_table_holds_no_top_level_key_that_deepspeed_does_not_know(looked_up: set[str]) -> None:
    elsewhere = {"bfloat16", "sequence_parallel_size", "data_parallel_size"}  # read outside of the parser
    monitors = {"tensorboard", "wandb", "csv_monitor", "comet"}
    assert set(TOP_LEVEL) - looked_up <= elsewhere | monitors | {"vocabulary_size", "expert_parallel"}


def test_removed_features_of_deepspeed_are_known_by_name() -> None:
    from deepspeed.runtime import config

    assert set(config._REMOVED_TOP_LEVEL_CONFIG_KEYS) <= set(TOP_LEVEL)


def test_the_stricter_rules_name_fields_that_deepspeeds_models_have() -> None:
    import importlib

    models = [rule for rule in TOP_LEVEL.values() if isinstance(rule, Model)]
    for rule in models:
        module, name = rule.target.split(":")
        fields = getattr(importlib.import_module(module), name).model_fields
        assert set(rule.keys) <= set(fields), rule.target
    assert len(models) >= 7


def test_adam_parameters_are_those_of_deepspeeds_adam() -> None:
    from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam

    rule = TOP_LEVEL["optimizer"]
    assert isinstance(rule, Section)
    params = rule.keys["params"]
    assert isinstance(params, Section)
    theirs = set(inspect.signature(FusedAdam).parameters) | set(
        inspect.signature(DeepSpeedCPUAdam).parameters
    )
    ours = set(params.keys) - {
        "torch_adam",
        "foreach",
        "max_grad_norm",
    }  # read by the engine, not by the optimizer
    assert ours == theirs - {"params", "model_params", "adamw_mode"}
