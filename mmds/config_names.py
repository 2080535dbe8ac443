"""What to answer to a key that is not ours: not yet, a name from elsewhere, or the nearest that we know."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping, Sequence

from mmds.config_keys import LATER, NOT_YET, Key, named, pattern, walk, whole_tree
from mmds.jsonc import KeyPath

_ROW = "mmds.data.row_tokens (tokens a row)"
_PIXELS = "mmds.data.max_pixels (height x width)"
_IMAGES = "mmds.data.mix[].images"
_PATH = "mmds.data.mix[].path"
_RATES = 'mmds.stage.rates, as in "stage": {"name": "instruct", "rates": {"decoder.*": 1e-5}}'
_FROZEN = 'mmds.stage.rates with null, as in "stage": {"name": "pretrain", "rates": {"encoder.*": null}}'
_ALIGN = 'mmds.stage "align" (only the connector trains)'
_LORA = 'mmds.stage.lora, as in "stage": {"name": "finetune", "lora": {"rank": 16}}'
_BATCH = "train_batch_size (rows a step over all ranks; a micro-batch is one row of mmds.data.row_tokens)"

# Names from LLaVA, LLaMA-Factory, ms-swift and the Hugging Face Trainer -> ours.
FOREIGN: Mapping[str, str] = {
    **dict.fromkeys(
        ("cutoff_len", "model_max_length", "max_length", "max_seq_length", "max_seq_len", "seq_length"), _ROW
    ),
    **dict.fromkeys(("image_max_pixels", "max_image_pixels", "image_resolution"), _PIXELS),
    **dict.fromkeys(("image_folder", "image_dir", "media_dir"), _IMAGES),
    **dict.fromkeys(("data_path", "dataset", "dataset_dir", "dataset_path"), _PATH),
    **dict.fromkeys(
        ("dataloader_num_workers", "preprocessing_num_workers", "num_workers"), "mmds.data.workers"
    ),
    **dict.fromkeys(("freeze_vision_tower", "freeze_vit", "freeze_llm", "freeze_language_model"), _FROZEN),
    **dict.fromkeys(
        ("freeze_backbone", "freeze_aligner", "freeze_multi_modal_projector", "freeze_mm_mlp_adapter"),
        _FROZEN,
    ),
    **dict.fromkeys(("tune_mm_mlp_adapter", "train_mm_mlp_adapter_only"), _ALIGN),
    **dict.fromkeys(
        ("learning_rate", "lr", "mm_projector_lr", "mm_vision_tower_lr", "aligner_lr", "vit_lr"), _RATES
    ),
    **dict.fromkeys(("mm_tunable_parts", "freeze_parameters", "trainable_parameters"), _RATES),
    "unfreeze_mm_vision_tower": 'mmds.stage "pretrain" (all parts train), or mmds.stage.encoder_blocks (the last ones)',
    **dict.fromkeys(("lora_enable", "use_lora", "lora_config", "peft_config"), _LORA),
    **dict.fromkeys(
        ("finetuning_type", "train_type", "tuner_type"), f"{_LORA} (LoRA), or a stage without it (full)"
    ),
    **dict.fromkeys(("lora_r", "lora_rank", "r"), "mmds.stage.lora.rank"),
    "lora_alpha": "mmds.stage.lora.alpha",
    "lora_dropout": "mmds.stage.lora.dropout",
    **dict.fromkeys(("lora_target", "lora_target_modules", "target_modules"), "mmds.stage.lora.targets"),
    **dict.fromkeys(("model_name_or_path", "model_id_or_path", "model_path"), "mmds.model.decoder"),
    "vision_tower": "mmds.model.encoder",
    "mm_projector_type": "mmds.model.connector",
    "mm_vision_select_layer": "mmds.model.encoder.layer",
    "image_aspect_ratio": "mmds.model.resolution",
    "pretrain_mm_mlp_adapter": "mmds.model.connector_weights (its mm_projector.bin)",
    **dict.fromkeys(
        ("adapter_name_or_path", "lora_weight_path"), "mmds.init_from (a model folder with decoder/adapter)"
    ),
    **dict.fromkeys(("per_device_train_batch_size", "per_gpu_train_batch_size"), _BATCH),
    **dict.fromkeys(("micro_batch_size", "global_batch_size"), _BATCH),
    "num_train_epochs": "mmds.schedule.epochs",
    "max_steps": "mmds.schedule.steps",
    "lr_scheduler_type": "mmds.schedule.decay",
    "num_warmup_steps": "mmds.schedule.warmup_steps",
    "optim": "optimizer.type (Adam or AdamW)",
    "weight_decay": "optimizer.params.weight_decay",
    "adam_beta1": "optimizer.params.betas",
    "adam_beta2": "optimizer.params.betas",
    "adam_epsilon": "optimizer.params.eps",
    "max_grad_norm": "gradient_clipping",
    "clip_grad": "gradient_clipping",
    **dict.fromkeys(
        ("gradient_checkpointing", "vit_gradient_checkpointing"),
        '"activation_checkpointing": {} (present = on; mmds.recompute says where)',
    ),
    **dict.fromkeys(("torch_dtype", "dtype", "pure_bf16"), '"bf16": {"enabled": true} (without it fp32)'),
    "save_steps": "mmds.checkpoint.every",
    "save_strategy": "mmds.checkpoint.every",
    "save_total_limit": "mmds.checkpoint.keep",
    "resume_from_checkpoint": "the flag --resume PATH",
    "report_to": '"tensorboard": {"enabled": true} (or wandb, csv_monitor)',
    "logging_dir": "tensorboard.output_path",
}

_DATA = "data is prepared once and then read by index"
_PACKED = "rows are always packed, and samples in a row never see each other"
_TEMPLATE = "the decoder's own chat template is used"

# Names from elsewhere that need no key here, with the reason.
NEEDLESS: Mapping[str, str] = {
    **dict.fromkeys(("packing", "neat_packing", "group_by_length", "group_by_modality_length"), _PACKED),
    **dict.fromkeys(("template", "chat_template", "conv_template"), _TEMPLATE),
    **dict.fromkeys(("streaming", "lazy_preprocess", "lazy_tokenize", "overwrite_cache"), _DATA),
    **dict.fromkeys(("flash_attn", "attn_impl", "attn_implementation", "padding_free"), _PACKED),
    "remove_unused_columns": _DATA,
    "mm_vision_select_feature": "class and register tokens never reach the decoder",
    "logging_steps": "every step is logged",
    "deepspeed": "DeepSpeed's keys stand at the top level of this file",
}

# Names from elsewhere of what mmds does not do.
_QUANTISED = (
    "quantised decoders (QLoRA) are not supported, for ZeRO partitions and merges real weights: take the key out; LoRA in bf16 "
    "(mmds.stage.lora) trains a 7B decoder on a card of 24 GB, see ds_configs/finetune_lora_24gb.json"
)
UNSUPPORTED: Mapping[str, str] = dict.fromkeys(
    (
        "load_in_4bit",
        "load_in_8bit",
        "quantization_bit",
        "quantization_method",
        "quantization_type",
        "quantization_config",
        "quant_method",
        "quant_bits",
        "double_quantization",
        "double_quant",
        "quant_type",
        "bits",
        "bnb_4bit_compute_dtype",
        "bnb_4bit_quant_type",
        "bnb_4bit_use_double_quant",
        "bnb_4bit_quant_storage",
        "bnb_config",
        "qlora",
    ),
    _QUANTISED,
) | dict.fromkeys(
    (
        "use_dora",
        "use_rslora",
        "pissa_init",
        "lora_bias",
        "loraplus_lr_ratio",
        "modules_to_save",
        "additional_target",
    ),
    "adapters are plain LoRA (mmds.stage.lora), and rates go by pattern (mmds.stage.rates): take the key out",
)

LATER_NAMES = {
    "eval_steps",
    "eval_strategy",
    "evaluation_strategy",
    "val_size",
    "split_dataset_ratio",
    "image_grid_pinpoints",
    "video_max_pixels",
}


def unknown_key(path: KeyPath, known: Collection[str]) -> str:
    """The problem text for the unknown key `path[-1]`, where only the keys `known` may stand.

    Answered in this order: a key or name that comes later, a name from elsewhere, a right name in a wrong place, a slip of the
    pen in the right place, and one in a wrong place.
    """
    name = str(path[-1])
    if name in LATER_NAMES or pattern(path) in NOT_YET:
        return LATER
    if name in ("extends", "$schema"):
        return f'unknown key in this place: "{name}" stands at the top level of a file'
    if name in UNSUPPORTED:
        return f"refused: {UNSUPPORTED[name]}"
    if name in FOREIGN:
        return f"unknown key: here it is {FOREIGN[name]}"
    if name in NEEDLESS:
        return f"unknown key, and none is needed: {NEEDLESS[name]}"
    near = "".join(difflib.get_close_matches(name, known, n=1, cutoff=0.6))
    if there := _elsewhere(named(name, deep=not near)):
        return f"unknown key in this place{there}" + (f', or did you mean "{near}" here?' if near else "")
    if near:
        return f'unknown key: did you mean "{near}"?'
    names = {key.name: key for key in walk(whole_tree(deep=True)) if not key.refused}
    if far := difflib.get_close_matches(name, names, n=1, cutoff=0.75):
        return f"unknown key: did you mean {_place(names[far[0]])}?"
    return f"unknown key: the keys here are {', '.join(sorted(known))}"


def _elsewhere(keys: Sequence[Key]) -> str:
    """Where a key of this name belongs, when the name says enough alone."""
    if not 0 < len(keys) < 3:
        return ""
    places = [_place(key) for key in keys if not key.refused]
    if places:
        return f": it belongs at {' or '.join(places)}"
    return f", and refused at {keys[0].path}: {keys[0].refused}"


def _place(key: Key) -> str:
    return key.path if "." in key.path else f"{key.path} (at the top level)"
