"""DeepSpeed's part of the file: strict at every depth, and the tables agree with the installed DeepSpeed."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import pytest

from mmds.config_keys import Key, deepspeed_keys, walk
from mmds.ds_keys import OTHER_OPTIMIZERS, TOP_LEVEL, WRITTEN_OUT
from mmds.ds_models import load_model, written_names
from mmds.ds_rules import Model, Only, Refused, Rule, Section
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
        {"zero_optimization": {"stage": 0}},
        {"zero_optimization": {"stage": 1, "overlap_comm": False}, "bf16": {"enabled": True}},
        {"zero_optimization": {"stage": 2, "overlap_comm": True, "round_robin_gradients": True}},
        {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu", "pin_memory": False}}},
        {"zero_optimization": {"stage": 0, "offload_optimizer": {"device": "none"}}},
        {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 1}}},
        {"activation_checkpointing": {"cpu_checkpointing": True, "profile": True}},
        {"activation_checkpointing": {"synchronize_checkpoint_boundary": True}},
        {"data_types": {"grad_accum_dtype": "bf16"}, "bf16": {"enabled": True}},
        {"optimizer": {"type": "Adam", "params": {"adam_w_mode": False}}},
        {"gradient_accumulation_steps": 2, "communication_data_type": "FP32"},
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
        ({"activation_checkpointing": {"partition_activations": True}}, "needs tensor parallelism"),
        ({"activation_checkpointing": {"contiguous_memory_optimization": True}}, "needs tensor parallelism"),
        ({"activation_checkpointing": {"number_checkpoints": 4}}, "needs tensor parallelism"),
        (
            {"activation_checkpointing": {"partitioned_activations": False}},
            'DeepSpeed reads this as "partition_activations"',
        ),
        ({"bf16": {"enabled": True, "bf16_optimizer_states": True}}, "masters and states are fp32"),
        ({"bf16": {"enabled": True, "check_grad_overflow": False}}, "always skipped, counted and named"),
        (
            {"zero_optimization": {"stage": 2, "cpu_offload": True}},
            'write "offload_optimizer": {"device": "cpu"}',
        ),
        ({"zero_optimization": {"stage": 3, "mics_shard_size": 2}}, "DeepSpeed has removed this feature"),
        (
            {"zero_optimization": {"stage": 1, "compute_grad_norm": False}},
            "the gradient norm of every step is logged",
        ),
        (
            {"zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True}},
            "mmds gathers the weights and writes the model folder itself",
        ),
        ({"optimizer": {"params": {"muon_lr": 1e-3}}}, "belongs to an optimizer that is not yet supported"),
        ({"zero_force_ds_cpu_optimizer": False}, "the one that this file names"),
    ],
)
def test_a_key_with_another_owner_is_refused_naming_it(sections: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as error:
        check(**sections)
    assert says in str(error.value)


@pytest.mark.parametrize(
    ("sections", "says"),
    [
        ({"activation_checkpointing": {"partition_activation": False}}, 'mean "partition_activations"?'),
        ({"zero_optimization": {"stage": 2, "offload_optimizer": {"devise": "cpu"}}}, 'mean "device"?'),
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
        ({"zero_optimization": {"stage": "3"}}, 'zero_optimization.stage: expected an integer, got "3"'),
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
        ({"bf16": True}, 'bf16: expected an object {...}, got true: write "bf16": {"enabled": true}'),
        ({"flops_profiler": False}, 'write "flops_profiler": {"enabled": false}'),
        ({"zero_optimization": 3}, "zero_optimization: expected an object {...}, got 3"),
        ({"zero_optimization": {"stage": 4}}, "expected at least 0 and at most 3, got 4"),
        ({"zero_optimization": {"stage": True}}, "zero_optimization.stage: expected an integer, got true"),
        ({"zero_optimization": {"overlap_comm": True}}, "zero_optimization.stage: missing"),
        (
            {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "nvme"}}},
            "expected one of none, cpu",
        ),
        (
            {"zero_optimization": {"stage": 1, "offload_optimizer": "cpu"}},
            "offload_optimizer: expected an object",
        ),
        (
            {"zero_optimization": {"stage": 3, "offload_optimizer": {"pin_memory": 1}}},
            "pin_memory: expected a boolean",
        ),
        ({"data_types": {"grad_accum_dtype": "FP32"}}, 'expected one of fp32, bf16, got "FP32"'),
    ],
)
def test_a_wrong_type_or_value_is_refused(sections: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as error:
        check(**sections)
    assert says in str(error.value)


@pytest.mark.parametrize(
    ("sections", "says"),
    [
        ({"zero_optimization": {"stage": 1, "overlap_comm": True}}, "true has no effect at ZeRO-1"),
        ({"zero_optimization": {"stage": 0}, "bf16": {"enabled": True}}, "at ZeRO-0: write 1"),
        (
            {"zero_optimization": {"stage": 0, "offload_optimizer": {"device": "cpu"}}},
            "ZeRO-0 has no optimizer states to offload: use ZeRO-1, 2 or 3",
        ),
        ({"data_types": {"grad_accum_dtype": "bf16"}}, 'bf16 needs "bf16": {"enabled": true}'),
        ({"optimizer": {"params": {"adam_w_mode": False}}}, 'no effect on AdamW: write "type": "Adam"'),
        (
            {"train_batch_size": 10, "gradient_accumulation_steps": 4},
            "no multiple of gradient_accumulation_steps 4",
        ),
    ],
)
def test_keys_that_cannot_act_together_are_refused_with_the_remedy(
    sections: dict[str, Any], says: str
) -> None:
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
    unread = set(rule.keys) - asked - {"partitioned_activations"}  # the last: only in DeepSpeed's own example
    assert unread <= {"params", "throughput"}, "the table holds keys that DeepSpeed does not read"


def test_the_table_holds_no_top_level_key_that_deepspeed_does_not_know(looked_up: set[str]) -> None:
    elsewhere = {"bfloat16", "sequence_parallel_size", "data_parallel_size"}  # read outside of the parser
    monitors = {"tensorboard", "wandb", "csv_monitor", "comet"}
    assert set(TOP_LEVEL) - looked_up <= elsewhere | monitors | {"vocabulary_size", "expert_parallel"}


def test_removed_features_of_deepspeed_are_known_by_name() -> None:
    from deepspeed.runtime import config

    assert set(config._REMOVED_TOP_LEVEL_CONFIG_KEYS) <= set(TOP_LEVEL)


def models(keys: Mapping[str, Rule]) -> Iterator[Model]:
    """Every rule that leaves a section to a model of DeepSpeed's, at any depth."""
    for rule in keys.values():
        if isinstance(rule, Model):
            yield rule
        if isinstance(rule, (Model, Section)):
            yield from models(rule.keys)


def test_the_stricter_rules_name_fields_that_deepspeeds_models_have() -> None:
    """A name that the model does not have may only be refused: DeepSpeed has removed it, or documents without reading it."""
    found = list(models(TOP_LEVEL))
    for rule in found:
        known = written_names(load_model(rule))
        strange = {name for name, below in rule.keys.items() if name not in known}
        assert all(isinstance(rule.keys[name], Refused) for name in strange), rule.target
        assert set(rule.docs) <= set(known), rule.target
    assert len(found) >= 9


def test_keys_that_deepspeed_has_removed_from_its_zero_section_are_refused_as_removed() -> None:
    from deepspeed.runtime import config

    for name in config._REMOVED_ZERO_CONFIG_KEYS:
        with pytest.raises(ConfigError, match=f"zero_optimization.{name}: DeepSpeed has removed"):
            check(zero_optimization={"stage": 3, name: 1})


def test_a_model_field_with_one_value_has_that_value_by_default() -> None:
    """ "Absent or X" is true only where absent means X."""
    for rule in models(TOP_LEVEL):
        model = load_model(rule)
        for name, below in rule.keys.items():
            if isinstance(below, Only):
                field = model.model_fields[written_names(model)[name]]
                assert field.get_default() == below.value, f"{rule.target} {name}"


def test_defaults_in_the_table_are_those_of_deepspeed_or_those_that_mmds_writes_out() -> None:
    from deepspeed.runtime.config import DeepSpeedConfig

    parsed = DeepSpeedConfig({"train_batch_size": 1})
    given = {
        "train_batch_size",
        "gradient_accumulation_steps",
        "managed_gradient_accumulation",
    }  # by mmds, always
    tops = [key for key in deepspeed_keys(deep=False) if not key.keys and not key.refused]
    compared = {key.name: key.default for key in tops if hasattr(parsed, key.name) and key.name not in given}
    assert compared == {name: getattr(parsed, name) for name in compared} and len(compared) > 12
    written = flat(WRITTEN_OUT)
    assert {path: value for path, value in leaves(deepspeed_keys(deep=False)) if path in written} == written


def leaves(keys: Iterable[Key]) -> Iterator[tuple[str, Any]]:
    yield from ((key.path, key.default) for top in keys for key in walk(top) if not key.keys)


def flat(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, item in value.items():
        found |= flat(item, f"{prefix}{key}.") if isinstance(item, dict) else {prefix + key: item}
    return found


def test_defaults_of_the_lax_sections_are_those_of_deepspeed() -> None:
    from deepspeed.runtime.config import DeepSpeedConfig

    parsed = DeepSpeedConfig({"train_batch_size": 1})
    holders = {
        "flops_profiler": parsed.flops_profiler_config,
        "activation_checkpointing": parsed.activation_checkpointing_config,
    }
    for top in deepspeed_keys(deep=False):
        for key in top.keys if top.path in holders else ():
            if not key.refused:
                assert getattr(holders[top.path], key.name) == key.default, key.path
    assert parsed.load_universal_checkpoint is False and parsed.use_node_local_storage is False
    assert parsed.checkpoint_tag_validation_enabled and not parsed.checkpoint_tag_validation_fail  # Warn


def test_adam_parameters_are_those_of_deepspeeds_adam() -> None:
    from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam

    rule = TOP_LEVEL["optimizer"]
    assert isinstance(rule, Section)
    params = rule.keys["params"]
    assert isinstance(params, Section)
    theirs = set(inspect.signature(FusedAdam).parameters) | set(
        inspect.signature(DeepSpeedCPUAdam).parameters
    )
    ours = (
        set(params.keys)
        - set(OTHER_OPTIMIZERS)
        - {
            "torch_adam",
            "foreach",
            "max_grad_norm",
        }
    )  # read by the engine, not by the optimizer
    assert ours == theirs - {"params", "model_params", "adamw_mode"}
    assert not set(OTHER_OPTIMIZERS) & theirs
