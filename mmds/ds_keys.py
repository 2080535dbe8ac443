"""The keys that DeepSpeed reads, and what each may hold here: names and rules only, without deepspeed.

Tests compare the tables with what the installed DeepSpeed really looks up, and with the keys that its documentation names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mmds.ds_rules import Model, Only, Pair, Refused, Rule, Section, Value

# Values that mmds writes out when the file is silent: DeepSpeed's own clipping default is 1.0, and under bf16 it
# would accumulate gradients in bf16.
WRITTEN_OUT: Mapping[str, Any] = {
    "gradient_clipping": 1.0,
    "data_types": {"grad_accum_dtype": "fp32"},
    "optimizer": {"type": "AdamW", "params": {"betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0}},
}

# Keys in which `~` and `${VAR}` are expanded.
PATHS: tuple[tuple[str, str], ...] = (
    ("tensorboard", "output_path"),
    ("csv_monitor", "output_path"),
    ("flops_profiler", "output_file"),
)


def _each(rule: Rule, *names: str) -> Mapping[str, Rule]:
    return dict.fromkeys(names, rule)


def _switch(doc: str, default: bool = False) -> Value:
    return Value("boolean", doc, default)


def _old(name: str, written: str) -> Refused:
    return Refused(f"old name of {name}: write {written}")


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
_FOLDER = "mmds gathers the weights and writes the model folder itself"
_OTHER_OPTIMIZER = Refused(
    "belongs to an optimizer that is not yet supported (Adam and AdamW are): take it out"
)

_ADAM_PARAMS: Mapping[str, Rule] = {
    "betas": Pair("decay rates of Adam's two running means", (0.9, 0.999)),
    "eps": Value("number", "added to the denominator of Adam's update", 1e-8, least=0),
    "weight_decay": Value("number", "weight decay; biases and norms get none", 0.0, least=0),
    "adam_w_mode": _switch(
        "decoupled weight decay; false only with type Adam: decay enters the gradient", True
    ),
    "torch_adam": _switch("torch's Adam instead of DeepSpeed's; always on the CPU without offload"),
    "lr": Refused("rates belong to the stage table: set mmds.stage.rates"),
    "max_grad_norm": Refused("the owner is gradient_clipping"),
    **_each(_LATER, "bias_correction", "amsgrad", "fp32_optimizer_states", "foreach", "set_grad_none"),
}

# Parameters that DeepSpeed documents for Muon, 1-bit Adam, 0/1 Adam and 1-bit LAMB.
OTHER_OPTIMIZERS: Mapping[str, Rule] = {
    **_each(_OTHER_OPTIMIZER, "momentum", "muon_lr", "adam_lr", "ns_method"),
    **_each(_OTHER_OPTIMIZER, "freeze_step", "cuda_aware", "comm_backend_name"),
    **_each(_OTHER_OPTIMIZER, "var_freeze_step", "var_update_scaler"),
    **_each(_OTHER_OPTIMIZER, "local_step_scaler", "local_step_clipper"),
    **_each(_OTHER_OPTIMIZER, "max_coeff", "min_coeff", "coeff_beta"),
    **_each(_OTHER_OPTIMIZER, "factor_max", "factor_min", "factor_threshold"),
}

_OFFLOAD_OPTIMIZER = Model(
    "where optimizer states lie and the update is computed; absent = on the GPU",
    "deepspeed.runtime.zero.offload_config:DeepSpeedZeroOffloadOptimizerConfig",
    {
        "device": Value(
            "string", "cpu: states in the CPU's memory, updated there", "none", choices=("none", "cpu")
        ),
        "ratio": Only(1.0, "a part of the states on the GPU is not yet supported"),
        **_each(_NVME, "nvme_path", "buffer_count", "pipeline_read", "pipeline_write"),
        **_each(_NVME, "fast_init", "super_offload", "cpuadam_cores_perc"),
    },
)

_ZERO: Mapping[str, Rule] = {
    "stage": Value(
        "integer",
        "what is partitioned over the ranks: 0 nothing, 1 optimizer states, 2 gradients too, 3 parameters too",
        least=0,
        most=3,
        required=True,
    ),
    "offload_optimizer": _OFFLOAD_OPTIMIZER,
    "cpu_offload": _old("offload_optimizer", '"offload_optimizer": {"device": "cpu"}'),
    "cpu_offload_use_pin_memory": _old("pin_memory", '"offload_optimizer": {"pin_memory": true}'),
    **_each(_LATER, "offload_param", "cpu_offload_param", "zenflow", "leaf_module"),
    **_each(
        _OFF, "zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients"
    ),
    "zero_hpz_partition_size": Only(1, "more is not yet supported"),
    "compute_grad_norm": Only(True, "the gradient norm of every step is logged"),
    "elastic_checkpoint": Only(False, "DeepSpeed no longer supports it"),
    "legacy_stage1": Only(False, "DeepSpeed has removed this feature"),
    "save_muon_momentum_buffer_in_memory": Only(False, "Muon is not yet supported"),
    **_each(
        Only(False, _FOLDER),
        "gather_16bit_weights_on_model_save",
        "stage3_gather_16bit_weights_on_model_save",
        "stage3_gather_fp16_weights_on_model_save",
    ),
    "grad_hooks": Refused("DeepSpeed documents this key but does not read it: take it out"),
    **_each(_REMOVED, "mics_shard_size", "mics_hierarchical_params_gather", "zeropp_loco_param"),
}

_FLOPS_PROFILER: Mapping[str, Rule] = {
    "enabled": _switch("profile one step; turns wall_clock_breakdown on too"),
    "profile_step": Value("integer", "optimizer step that is profiled", 1, least=1),
    "module_depth": Value("integer", "depth of modules that are listed; -1 = all", -1, least=-1),
    "top_modules": Value("integer", "modules listed at each depth", 1, least=1),
    "detailed": _switch("print every module", True),
    "recompute_fwd_factor": Value(
        "number", "forward passes that recomputation adds, counted into the FLOPs", 0.0, least=0
    ),
    "output_file": Value("string", "path of the report; absent = printed"),
}

_ACTIVATION_CHECKPOINTING: Mapping[str, Rule] = {
    # True for one of these three asks for DeepSpeed's checkpoint function instead of torch's.
    "cpu_checkpointing": _switch("keep the inputs of recomputed blocks in the CPU's memory"),
    "synchronize_checkpoint_boundary": _switch("wait for the device at the boundary of every block"),
    "profile": _switch("log the forward and backward time of every block"),
    **_each(Only(False, _PARTITION), "partition_activations", "contiguous_memory_optimization"),
    "number_checkpoints": Refused(_PARTITION),
    "partitioned_activations": Refused(
        f'DeepSpeed reads this as "partition_activations", which must be absent or false: {_PARTITION}'
    ),
}

TOP_LEVEL: Mapping[str, Rule] = {
    # Rows of a step, and its gradient.
    "train_batch_size": Value(
        "integer", "rows of one optimizer step over all ranks: the same step on any number of GPUs", least=1
    ),
    "gradient_accumulation_steps": Value(
        "integer",
        "micro-steps of one optimizer step, each one row a rank; instead of train_batch_size, or beside it where both agree",
        least=1,
    ),
    "train_micro_batch_size_per_gpu": Only(1, "a micro-batch is one row; its size is mmds.data.row_tokens"),
    "gradient_clipping": Value("number", "largest global gradient norm of a step; 0 = off", 1.0, least=0),
    **_each(Only(False, _MEAN), "managed_gradient_accumulation", "prescale_gradients"),
    "gradient_predivide_factor": Only(1.0, _MEAN),
    "gradient_allreduce_op": Only("mean", _MEAN),
    "communication_data_type": Value(
        "string",
        "type in which gradients travel; absent = that of their accumulation",
        choices=("fp32", "bf16"),
        any_case=True,
    ),
    "optimizer": Section(
        "Adam or AdamW",
        {
            "type": Value(
                "string", "name of the optimizer", "AdamW", choices=("Adam", "AdamW"), any_case=True
            ),
            "params": Section("its parameters, the rate excepted", {**_ADAM_PARAMS, **OTHER_OPTIMIZERS}),
            "legacy_fusion": _LATER,
        },
    ),
    # Precision and memory.
    "bf16": Model(
        "compute in bf16",
        "deepspeed.runtime.precision_config:DeepSpeedBF16Config",
        {
            **_each(
                Only(False, "masters and states are fp32"),
                "bf16_master_weights_and_grads",
                "bf16_optimizer_states",
            ),
            "check_grad_overflow": Only(True, _SKIP),
        },
        {"enabled": "true: compute in bf16 with fp32 masters; absent or false: all fp32"},
    ),
    "data_types": Section(
        "types of stored numbers",
        {
            "grad_accum_dtype": Value(
                "string",
                "type in which gradients are summed over micro-steps",
                "fp32",
                choices=("fp32", "bf16"),
            ),
            **_each(_BF16, "param_dtype", "buffer_dtype", "keep_in_fp32_modules"),
        },
    ),
    "zero_optimization": Model(
        "what is partitioned over the ranks, and how it travels",
        "deepspeed.runtime.zero.config:DeepSpeedZeroConfig",
        _ZERO,
        {
            "overlap_comm": "reduce gradients during the backward pass; absent = on at ZeRO-3",
            "module_granularity_threshold": "modules with fewer parameters a descendant than this are fetched whole",
            "ignore_unused_parameters": "false: a parameter without a gradient is an error, at ZeRO-2",
            "pipeline_loading_checkpoint": "load a checkpoint in a pipeline over the ranks, at ZeRO-3",
        },
        required=True,
    ),
    "activation_checkpointing": Section(
        "present (even {}) = the blocks that back-propagate are recomputed; mmds.recompute says which",
        _ACTIVATION_CHECKPOINTING,
    ),
    # Reports.
    "tensorboard": Model(
        "TensorBoard",
        "deepspeed.monitor.config:TensorBoardConfig",
        {"job_name": Value("string", "folder inside output_path", "tensorboard")},
        {"output_path": "folder of the logs; absent = the run folder"},
    ),
    "wandb": Model("Weights & Biases", "deepspeed.monitor.config:WandbConfig"),
    "csv_monitor": Model(
        "one CSV file a scalar",
        "deepspeed.monitor.config:CSVConfig",
        docs={
            "output_path": "folder of the files; absent = the working folder",
            "job_name": "folder inside output_path",
        },
    ),
    "comet": Model(
        "Comet",
        "deepspeed.monitor.config:CometConfig",
        docs={
            "samples_log_interval": "samples between submissions",
            "online": "false: write an offline experiment to the disk",
            "mode": "get, create or get_or_create (when absent) the experiment",
        },
    ),
    "comms_logger": Model(
        "log of collective operations",
        "deepspeed.comm.config:CommsLoggerConfig",
        docs={
            "enabled": "record every collective operation, which synchronises each",
            "prof_all": "record all operations",
            "prof_ops": "operations that are recorded when prof_all is false",
            "verbose": "print each operation at once",
            "debug": "add the caller's name to each operation",
        },
    ),
    "timers": Section(
        "timers",
        {"throughput": Model("samples a second", "deepspeed.utils.config:DeepSpeedThroughputTimerConfig")},
    ),
    "flops_profiler": Section("DeepSpeed's FLOP counter", _FLOPS_PROFILER),
    "steps_per_print": Value(
        "integer", "steps between DeepSpeed's progress lines; absent = none, mmds has its own", least=1
    ),
    "log_level": Value(
        "string",
        "level of DeepSpeed's log",
        choices=("debug", "info", "warning", "error", "critical"),
        any_case=True,
    ),
    "wall_clock_breakdown": _switch("time forward, backward and update"),
    "memory_breakdown": _switch("print memory at points of the step"),
    "dump_state": _switch("print DeepSpeed's parsed configuration at the start"),
    "disable_python_gc": _switch("turn Python's cyclic garbage collection off while the engine lives"),
    "checkpoint": Section(
        "DeepSpeed's part of a checkpoint; when and how many: mmds.checkpoint",
        {
            "tag_validation": Value(
                "string",
                "what happens when ranks name a checkpoint differently",
                "Warn",
                choices=("Ignore", "Warn", "Fail"),
                any_case=True,
            ),
            **_each(_OFF, "load_universal", "use_node_local_storage"),
            **_each(_LATER, "parallel_write", "writer", "checkpoint_serialization"),
        },
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
    "zero_force_ds_cpu_optimizer": Only(True, "the optimizer is always the one that this file names"),
    **_each(_OFF, "use_data_before_expert_parallelism", "disable_allgather"),
    **_each(
        _REMOVED, "nebula", "compression_training", "quantize_training", "sparse_gradients", "eigenvalue"
    ),
    **_each(_REMOVED, "sparse_attention", "elasticity", "graph_harvesting", "progressive_layer_drop"),
}
