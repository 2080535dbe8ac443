"""Every key that DeepSpeed documents is accepted or answered: none is "unknown".

The tables list the key paths of docs/_pages/config-json.md in DeepSpeed's repository at 0.19.8 (facts, not its text), each section
in the page's order. `*` stands for a name that the user chooses.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from small_config import Write, writer

from mmds.config import load_config
from mmds.ds_schema import check_deepspeed
from mmds.errors import ConfigError
from mmds.jsonc import KeyPath, dotted

# Documented keys that are accepted, each with a value that the page gives or would allow.
ACCEPTED: dict[str, Any] = {
    "train_batch_size": 32,
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 1,
    "managed_gradient_accumulation": False,
    "optimizer.type": "Adam",
    "optimizer.params.betas": [0.8, 0.999],
    "optimizer.params.eps": 1e-8,
    "optimizer.params.weight_decay": 3e-7,
    "optimizer.params.torch_adam": True,
    "optimizer.params.adam_w_mode": True,
    "communication_data_type": "bf16",
    "gradient_allreduce_op": "mean",
    "prescale_gradients": False,
    "gradient_predivide_factor": 1.0,
    "bf16.enabled": True,
    "bf16.bf16_master_weights_and_grads": False,
    "bf16.bf16_optimizer_states": False,
    "gradient_clipping": 1.0,
    "zero_optimization.stage": 2,
    "zero_optimization.allgather_partitions": True,
    "zero_optimization.allgather_bucket_size": 5e8,
    "zero_optimization.overlap_comm": False,
    "zero_optimization.reduce_scatter": True,
    "zero_optimization.reduce_bucket_size": 5e8,
    "zero_optimization.contiguous_gradients": True,
    "zero_optimization.load_from_fp32_weights": True,
    "zero_optimization.round_robin_gradients": False,
    "zero_optimization.stage3_max_live_parameters": 1e9,
    "zero_optimization.stage3_max_reuse_distance": 1e9,
    "zero_optimization.stage3_prefetch_bucket_size": 5e8,
    "zero_optimization.stage3_param_persistence_threshold": 1e6,
    "zero_optimization.sub_group_size": 1e12,
    "zero_optimization.elastic_checkpoint": False,
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": False,
    "zero_optimization.stage3_module_granularity_threshold": 0,
    "zero_optimization.ignore_unused_parameters": True,
    "zero_optimization.zero_hpz_partition_size": 1,
    "zero_optimization.zero_quantized_weights": False,
    "zero_optimization.zero_quantized_gradients": False,
    "zero_optimization.log_trace_cache_warnings": True,
    "zero_optimization.save_muon_momentum_buffer_in_memory": False,
    "zero_optimization.offload_optimizer.device": "cpu",
    "zero_optimization.offload_optimizer.pin_memory": True,
    "zero_optimization.offload_optimizer.ratio": 1,
    "steps_per_print": 10,
    "wall_clock_breakdown": False,
    "dump_state": False,
    "flops_profiler.enabled": False,
    "flops_profiler.profile_step": 1,
    "flops_profiler.module_depth": -1,
    "flops_profiler.top_modules": 1,
    "flops_profiler.detailed": True,
    "flops_profiler.output_file": "flops.txt",
    "activation_checkpointing.partition_activations": False,
    "activation_checkpointing.cpu_checkpointing": True,
    "activation_checkpointing.contiguous_memory_optimization": False,
    "activation_checkpointing.synchronize_checkpoint_boundary": False,
    "activation_checkpointing.profile": True,
    "tensorboard.enabled": True,
    "tensorboard.output_path": "output/ds_logs/",
    "tensorboard.job_name": "train_bert",
    "wandb.enabled": True,
    "wandb.group": "my_group",
    "wandb.team": "my_team",
    "wandb.project": "my_project",
    "comet.enabled": True,
    "comet.workspace": "my_workspace",
    "comet.project": "my_project",
    "comet.samples_log_interval": 50,
    "comet.experiment_name": "llama-fine-tuning",
    "comet.api_key": "0c4a1c4a90664f2a8084e600b19a9d70",
    "comet.experiment_key": "0c4a1c4a90664f2a8084e600b19a9d7",
    "comet.online": False,
    "comet.mode": "get",
    "csv_monitor.enabled": True,
    "csv_monitor.output_path": "output/ds_logs/",
    "csv_monitor.job_name": "train_bert",
    "comms_logger.enabled": True,
    "comms_logger.verbose": False,
    "comms_logger.prof_all": False,
    "comms_logger.debug": False,
    "comms_logger.prof_ops": ["all_reduce", "all_gather"],
    "checkpoint.tag_validation": "Warn",
    "checkpoint.load_universal": False,
    "checkpoint.use_node_local_storage": False,
    "data_types.grad_accum_dtype": "fp32",
}

_LATER, _REMOVED = "not yet supported", "DeepSpeed has removed this feature"
_PRECISION, _ORDER = "the owner of precision is", "the order of samples belongs to mmds.data"
_OTHER = "belongs to an optimizer that is not yet supported"
_NVME = "belongs to offloading that is not yet supported"
_GROUP = """shared_parameters.enabled shared_parameters.schedule_offset shared_parameters.method
    different_groups.*.params.dense_ratio different_groups.*.modules different_groups.*.related_modules"""

# Documented keys that are refused: section, what the answer says, the keys below the section ("" = the section itself).
REFUSED: list[tuple[str, str, str]] = [
    ("optimizer.params", "rates belong to the stage table", "lr"),
    ("optimizer.params", _OTHER, "momentum muon_lr adam_lr ns_method"),
    ("optimizer.params", _OTHER, "freeze_step cuda_aware comm_backend_name"),
    ("optimizer.params", _LATER, "bias_correction"),
    ("optimizer.params", _OTHER, "var_freeze_step var_update_scaler local_step_scaler local_step_clipper"),
    ("optimizer.params", _OTHER, "max_coeff min_coeff coeff_beta factor_max factor_min factor_threshold"),
    (
        "scheduler",
        "the schedule belongs to mmds",
        "type params params.warmup_min_lr params.warmup_max_lr params.warmup_num_steps",
    ),
    ("sparse_gradients", _REMOVED, ""),
    (
        "fp16",
        _PRECISION,
        """enabled auto_cast loss_scale initial_scale_power loss_scale_window hysteresis consecutive_hysteresis
        min_loss_scale fp16_master_weights_and_grads""",
    ),
    ("amp", _PRECISION, "enabled opt_level"),
    ("torch_autocast", _PRECISION, "enabled dtype lower_precision_safe_modules"),
    ("zero_optimization.grad_hooks", "documents this key but does not read it", ""),
    ("zero_optimization.cpu_offload", 'write "offload_optimizer": {"device": "cpu"}', ""),
    (
        "zero_optimization.offload_param",
        _LATER,
        "device nvme_path pin_memory buffer_count buffer_size max_in_cpu",
    ),
    ("zero_optimization.offload_optimizer", _NVME, "nvme_path buffer_count fast_init"),
    ("aio", _LATER, "block_size queue_depth thread_count single_submit overlap_events"),
    (
        "tensor_parallel",
        _LATER,
        """autotp_size preset_model tp_overlap_comm partition_config.use_default_specs partition_config.layer_specs
        partition_config.layer_specs.patterns partition_config.layer_specs.partition_type partition_config.layer_specs.shape
        partition_config.layer_specs.partition_dim partition_config.layer_specs.model_types""",
    ),
    (
        "hybrid_engine",
        _LATER,
        """enabled max_out_tokens inference_tp_size release_inference_cache pin_parameters tp_gather_partition_size
        enable_cuda_graph""",
    ),
    (
        "expert_parallel",
        _LATER,
        """enabled autoep_size expert_tensor_parallel_size preset_model use_grouped_mm disable_triton_grouped_mm moe_layer_pattern
        router_pattern expert_pattern score_func score_apply route_norm route_scale top_k routed_scaling_factor num_expert_groups
        num_limited_groups load_balance_coeff expert_w1 expert_w2 expert_w3 num_experts_attr top_k_attr has_shared_experts
        shared_experts_pattern""",
    ),
    (
        "autotuning",
        _LATER,
        """enabled results_dir exps_dir overwrite metric start_profile_step end_profile_step fast max_train_batch_size mp_size
        num_tuning_micro_batch_sizes tuner_type tuner_early_stopping tuner_num_trials arg_mappings""",
    ),
    ("activation_checkpointing", "needs tensor parallelism", "number_checkpoints"),
    (
        "sparse_attention",
        _REMOVED,
        """mode block different_layout_per_head num_local_blocks num_global_blocks attention horizontal_global_attention
        num_different_global_patterns num_random_blocks local_window_blocks global_block_indices global_block_end_indices
        num_sliding_window_blocks""",
    ),
    (
        "data_efficiency",
        _ORDER,
        """enabled seed data_routing.enabled data_routing.random_ltd.enabled data_routing.random_ltd.total_layer_num
        data_routing.random_ltd.random_ltd_layer_num data_routing.random_ltd.random_ltd_layer_id
        data_routing.random_ltd.model_mask_name data_routing.random_ltd.model_type data_routing.random_ltd.hidden_state_order
        data_routing.random_ltd.random_ltd_schedule.min_value data_routing.random_ltd.random_ltd_schedule.max_value
        data_routing.random_ltd.random_ltd_schedule.schedule_type
        data_routing.random_ltd.random_ltd_schedule.schedule_config.require_steps
        data_routing.random_ltd.random_ltd_schedule.schedule_config.seq_per_step
        data_sampling.enabled data_sampling.num_epochs data_sampling.num_workers data_sampling.curriculum_learning.enabled
        data_sampling.curriculum_learning.data_cluster_path
        data_sampling.curriculum_learning.curriculum_metrics.*.index_to_sample_path
        data_sampling.curriculum_learning.curriculum_metrics.*.index_to_metric_path
        data_sampling.curriculum_learning.curriculum_metrics.*.difficulty_type
        data_sampling.curriculum_learning.curriculum_metrics.*.clustering_type
        data_sampling.curriculum_learning.curriculum_metrics.*.min_difficulty
        data_sampling.curriculum_learning.curriculum_metrics.*.max_difficulty
        data_sampling.curriculum_learning.curriculum_metrics.*.schedule_type
        data_sampling.curriculum_learning.curriculum_metrics.*.schedule_config.total_curriculum_step
        data_sampling.curriculum_learning.curriculum_metrics.*.schedule_config.difficulty_step
        data_sampling.curriculum_learning.curriculum_metrics.*.schedule_config.root_degree
        data_sampling.curriculum_learning.curriculum_metrics.*.schedule_config.difficulty
        data_sampling.curriculum_learning.curriculum_metrics.*.schedule_config.max_step""",
    ),
    (
        "curriculum_learning",
        _ORDER,
        """enabled curriculum_type min_difficulty max_difficulty schedule_type schedule_config.total_curriculum_step
        schedule_config.difficulty_step schedule_config.root_degree schedule_config.difficulty schedule_config.max_step""",
    ),
    (
        "elasticity",
        _REMOVED,
        """enabled max_train_batch_size micro_batch_sizes min_gpus max_gpus min_time prefer_large_batch version
        ignore_non_elastic_batch_info num_gpus_per_node model_parallel_size""",
    ),
    (
        "compression_training.layer_reduction",
        _REMOVED,
        "enabled keep_number_layer module_name_prefix teacher_layer other_module_name",
    ),
    (
        "compression_training.weight_quantization",
        _REMOVED,
        """shared_parameters.enabled shared_parameters.quantizer_kernel shared_parameters.schedule_offset
        shared_parameters.quantize_groups shared_parameters.quantize_verbose shared_parameters.quantization_type
        shared_parameters.rounding shared_parameters.quantize_weight_in_forward shared_parameters.fp16_mixed_quantize.enabled
        shared_parameters.fp16_mixed_quantize.quantize_change_ratio different_groups.*.params.start_bits
        different_groups.*.params.target_bits different_groups.*.params.quantization_period different_groups.*.modules""",
    ),
    (
        "compression_training.activation_quantization",
        _REMOVED,
        """shared_parameters.enabled shared_parameters.quantization_type shared_parameters.range_calibration
        shared_parameters.schedule_offset different_groups.*.params.bits different_groups.*.modules""",
    ),
    (
        "compression_training.sparse_pruning",
        _REMOVED,
        f"""{_GROUP} shared_parameters.schedule_offset_end shared_parameters.schedule_offset_stride
        shared_parameters.block_pattern shared_parameters.dense_ratio shared_parameters.excluded_modules""",
    ),
    ("compression_training.row_pruning", _REMOVED, _GROUP),
    ("compression_training.head_pruning", _REMOVED, f"{_GROUP} shared_parameters.num_heads"),
    ("compression_training.channel_pruning", _REMOVED, _GROUP),
    ("checkpoint.parallel_write", _LATER, "pipeline_stage"),
    (
        "compile",
        _LATER,
        "deepcompile passes offload_activation offload_activation_pin_memory",
    ),
]


def refused_paths() -> list[tuple[str, str]]:
    return [
        (f"{section}.{name}" if name else section, says)
        for section, says, names in REFUSED
        for name in names.split() or [""]
    ]


def nested(path: str, value: Any) -> dict[str, Any]:
    """A valid run of DeepSpeed's keys with `value` at `path`."""
    whole: dict[str, Any] = {"train_batch_size": 4, "zero_optimization": {"stage": 3}}
    *above, last = path.split(".")
    section = whole
    for name in above:
        section = section.setdefault(name, {})
    section[last] = value
    return whole


def where(path: KeyPath, problem: str) -> ConfigError:
    return ConfigError(f"{dotted(path)}: {problem}")


@pytest.mark.parametrize("path", ACCEPTED)
def test_a_documented_key_that_can_act_is_accepted(path: str) -> None:
    assert check_deepspeed(nested(path, ACCEPTED[path]), where) is None  # a refusal is an exception


@pytest.mark.parametrize(("path", "says"), refused_paths(), ids=[path for path, _ in refused_paths()])
def test_every_other_documented_key_is_answered_by_name_and_reason(path: str, says: str) -> None:
    with pytest.raises(ConfigError) as error:
        check_deepspeed(nested(path, 1), where)
    named, _, problem = str(error.value).partition(": ")
    assert path == named or path.startswith(f"{named}.")
    assert says in problem and "unknown key" not in problem and "did you mean" not in problem


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        ("train_micro_batch_size_per_gpu", 8, "mmds.data.row_tokens"),
        ("managed_gradient_accumulation", True, "must be absent or false"),
        ("gradient_allreduce_op", "sum", 'must be absent or "mean"'),
        ("prescale_gradients", True, "must be absent or false"),
        ("gradient_predivide_factor", 2.0, "must be absent or 1.0"),
        ("communication_data_type", "fp16", "expected one of fp32, bf16"),
        ("data_types.grad_accum_dtype", "fp16", "expected one of fp32, bf16"),
        ("optimizer.type", "OneBitAdam", "expected one of Adam, AdamW"),
        ("optimizer.type", "Lamb", "expected one of Adam, AdamW"),
        ("optimizer.type", "OneBitLamb", "expected one of Adam, AdamW"),
        ("optimizer.type", "ZeroOneAdam", "expected one of Adam, AdamW"),
        ("optimizer.type", "Muon", "expected one of Adam, AdamW"),
        ("bf16.bf16_master_weights_and_grads", True, "masters and states are fp32"),
        ("bf16.bf16_optimizer_states", True, "masters and states are fp32"),
        ("zero_optimization.elastic_checkpoint", True, "DeepSpeed no longer supports it"),
        ("zero_optimization.zero_hpz_partition_size", 8, "more is not yet supported"),
        ("zero_optimization.zero_quantized_weights", True, "not yet supported"),
        ("zero_optimization.zero_quantized_gradients", True, "not yet supported"),
        ("zero_optimization.save_muon_momentum_buffer_in_memory", True, "Muon is not yet supported"),
        ("zero_optimization.offload_optimizer.device", "nvme", "expected one of none, cpu"),
        ("zero_optimization.offload_optimizer.ratio", 0.3, "not yet supported"),
        ("activation_checkpointing.partition_activations", True, "needs tensor parallelism"),
        ("activation_checkpointing.contiguous_memory_optimization", True, "needs tensor parallelism"),
        ("checkpoint.load_universal", True, "not yet supported"),
        ("checkpoint.use_node_local_storage", True, "not yet supported"),
    ],
)
def test_a_documented_value_that_cannot_act_is_answered_with_the_reason(
    path: str, value: Any, says: str
) -> None:
    with pytest.raises(ConfigError, match=path) as error:
        check_deepspeed(nested(path, value), where)
    assert says in str(error.value)


def test_the_tables_name_every_section_of_the_page_and_no_key_twice() -> None:
    paths = [*ACCEPTED, *(path for path, _ in refused_paths())]
    assert len(paths) == len(set(paths)) > 250


def test_all_accepted_keys_together_make_a_run(tmp_path: Path) -> None:
    write: Write = writer(tmp_path)
    overrides = [f"{path}={json.dumps(value)}" for path, value in ACCEPTED.items()]
    config = load_config(write(), overrides)
    assert config.deepspeed["zero_optimization"]["stage"] == 2 and config.bf16
