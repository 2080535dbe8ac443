"""The keys that DeepSpeed reads, and what each may hold here: names and rules only, without deepspeed.

A test compares the tables with what the installed DeepSpeed really looks up.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Value:
    """A scalar of one kind ("boolean", "integer", "number", "string"), bounded or one of `choices`."""

    kind: str
    least: float | None = None
    most: float | None = None
    choices: tuple[str, ...] = ()


@dataclass(frozen=True)
class Pair:
    """A list of two numbers in [0, 1): Adam's betas."""


@dataclass(frozen=True)
class Only:
    """A key that may be written, but with this value alone."""

    value: Any
    why: str


@dataclass(frozen=True)
class Refused:
    """A key that may not be written; `why` names the owner or the remedy."""

    why: str


@dataclass(frozen=True)
class Section:
    """An object with exactly these keys; used where DeepSpeed is lax."""

    keys: Mapping[str, Rule]


@dataclass(frozen=True)
class Model:
    """An object checked by DeepSpeed's own pydantic model "module:Class"; `keys` are stricter for some."""

    target: str
    keys: Mapping[str, Rule]


Rule = Value | Pair | Only | Refused | Section | Model


def _each(rule: Rule, *names: str) -> Mapping[str, Rule]:
    return dict.fromkeys(names, rule)


_BOOL, _TEXT, _COUNT, _SIZE = (
    Value("boolean"),
    Value("string"),
    Value("integer", least=1),
    Value("number", least=0),
)
_LATER = Refused("not yet supported: take the key out")
_OFF = Only(False, "true is not yet supported")
_REMOVED = Refused("DeepSpeed has removed this feature: take the key out")
_BF16 = Refused('the owner of precision is "bf16": {"enabled": true}; without it the run is fp32')
_ORDER = Refused("the order of samples belongs to mmds.data and its plan: take the key out")
_MEAN = "mmds divides the loss by the supervised tokens of the step itself"
_PARTITION = (
    "it needs tensor parallelism, which mmds does not have; the section's presence turns recomputation on"
)

_NVME = Refused(
    "belongs to offloading that is not yet supported (states go to the CPU's memory): take the key out"
)
_SKIP = "a step with a non-finite gradient is always skipped, counted and named"

_ADAM_PARAMS: Mapping[str, Rule] = {
    "betas": Pair(),
    **_each(_SIZE, "eps", "weight_decay"),
    **_each(_BOOL, "adam_w_mode", "torch_adam"),
    "lr": Refused("rates belong to the stage table: set mmds.stage.rates"),
    "max_grad_norm": Refused("the owner is gradient_clipping"),
    **_each(_LATER, "bias_correction", "amsgrad", "fp32_optimizer_states", "foreach", "set_grad_none"),
}

_ZERO: Mapping[str, Rule] = {
    "stage": Value("integer", least=0, most=3),
    "offload_optimizer": Model(
        "deepspeed.runtime.zero.offload_config:DeepSpeedZeroOffloadOptimizerConfig",
        {
            "device": Value("string", choices=("none", "cpu")),
            "ratio": Only(1.0, "a part of the states on the GPU is not yet supported"),
            **_each(
                _NVME,
                "nvme_path",
                "buffer_count",
                "pipeline_read",
                "pipeline_write",
                "fast_init",
                "super_offload",
                "cpuadam_cores_perc",
            ),
        },
    ),
    **_each(_LATER, "offload_param", "cpu_offload", "cpu_offload_param", "zenflow"),
    **_each(_LATER, "cpu_offload_use_pin_memory", "leaf_module", "elastic_checkpoint"),
    **_each(
        _OFF, "zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients"
    ),
    "zero_hpz_partition_size": Only(1, "more is not yet supported"),
}

_FLOPS_PROFILER: Mapping[str, Rule] = {
    **_each(_BOOL, "enabled", "detailed"),
    **_each(_COUNT, "profile_step", "top_modules"),
    "module_depth": Value("integer", least=-1),
    "recompute_fwd_factor": _SIZE,
    "output_file": _TEXT,
}

TOP_LEVEL: Mapping[str, Rule] = {
    # Rows of a step, and its gradient.
    **_each(_COUNT, "train_batch_size", "gradient_accumulation_steps"),
    "train_micro_batch_size_per_gpu": Only(1, "a micro-batch is one row; its size is mmds.data.row_tokens"),
    "gradient_clipping": _SIZE,
    **_each(Only(False, _MEAN), "managed_gradient_accumulation", "prescale_gradients"),
    "gradient_predivide_factor": Only(1.0, _MEAN),
    "gradient_allreduce_op": Only("mean", _MEAN),
    "communication_data_type": Value("string", choices=("fp32", "bf16")),
    "optimizer": Section(
        {
            "type": Value("string", choices=("Adam", "AdamW")),
            "params": Section(_ADAM_PARAMS),
            "legacy_fusion": _LATER,
        }
    ),
    # Precision and memory.
    "bf16": Model(
        "deepspeed.runtime.precision_config:DeepSpeedBF16Config",
        {
            **_each(
                Only(False, "masters and states are fp32"),
                "bf16_master_weights_and_grads",
                "bf16_optimizer_states",
            ),
            "check_grad_overflow": Only(True, _SKIP),
        },
    ),
    "data_types": Section(
        {
            "grad_accum_dtype": Value("string", choices=("fp32", "bf16")),
            **_each(_BF16, "param_dtype", "buffer_dtype", "keep_in_fp32_modules"),
        }
    ),
    "zero_optimization": Model("deepspeed.runtime.zero.config:DeepSpeedZeroConfig", _ZERO),
    "activation_checkpointing": Section(
        {
            # True for one of these asks for DeepSpeed's checkpoint function instead of torch's.
            **_each(_BOOL, "cpu_checkpointing", "synchronize_checkpoint_boundary", "profile"),
            **_each(Only(False, _PARTITION), "partition_activations", "contiguous_memory_optimization"),
            "number_checkpoints": Refused(_PARTITION),
        }
    ),
    # Reports.
    "tensorboard": Model("deepspeed.monitor.config:TensorBoardConfig", {}),
    "wandb": Model("deepspeed.monitor.config:WandbConfig", {}),
    "csv_monitor": Model("deepspeed.monitor.config:CSVConfig", {}),
    "comet": Model("deepspeed.monitor.config:CometConfig", {}),
    "comms_logger": Model("deepspeed.comm.config:CommsLoggerConfig", {}),
    "timers": Section({"throughput": Model("deepspeed.utils.config:DeepSpeedThroughputTimerConfig", {})}),
    "flops_profiler": Section(_FLOPS_PROFILER),
    "steps_per_print": _COUNT,
    "log_level": Value("string", choices=("debug", "info", "warning", "error", "critical")),
    **_each(_BOOL, "wall_clock_breakdown", "memory_breakdown", "dump_state", "disable_python_gc"),
    "checkpoint": Section(
        {
            "tag_validation": Value("string", choices=("Ignore", "Warn", "Fail")),
            **_each(_OFF, "load_universal", "use_node_local_storage"),
            **_each(_LATER, "parallel_write", "writer", "checkpoint_serialization"),
        }
    ),
    # Owned elsewhere.
    "scheduler": Refused(
        "the schedule belongs to mmds: set mmds.schedule (warmup_ratio or warmup_steps, decay)"
    ),
    **_each(_BF16, "fp16", "amp", "torch_autocast"),
    "bfloat16": Refused("old name: write bf16"),
    **_each(_ORDER, "curriculum_learning", "data_efficiency"),
    "dataloader_drop_last": Only(False, "every sample is planned into a row by mmds"),
    # Known to DeepSpeed, without use here so far.
    **_each(_LATER, "compile", "tensor_parallel", "expert_parallel", "pipeline", "hybrid_engine", "aio"),
    **_each(_LATER, "autotuning", "datastates_ckpt", "weight_quantization", "vocabulary_size"),
    **_each(_LATER, "sequence_parallel_size", "data_parallel_size", "seq_parallel_communication_data_type"),
    "zero_allow_untested_optimizer": _LATER,
    "zero_force_ds_cpu_optimizer": _BOOL,
    **_each(_OFF, "use_data_before_expert_parallelism", "disable_allgather"),
    **_each(
        _REMOVED, "nebula", "compression_training", "quantize_training", "sparse_gradients", "eigenvalue"
    ),
    **_each(_REMOVED, "sparse_attention", "elasticity", "graph_harvesting", "progressive_layer_drop"),
}
