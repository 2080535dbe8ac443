"""Misspelt, misplaced and mistyped keys of every section: each is refused at its line, by its path, with what was meant.

One process reads every file of the table, so that it can be seen what was loaded and opened on the way to the refusals.
"""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from small_config import SMALL

from mmds.jsonc import KeyPath, dotted

RATES, ROW, PIXELS = "mmds.stage.rates", "mmds.data.row_tokens", "mmds.data.max_pixels"
MIX: KeyPath = ("mmds", "data", "mix", 0)
ENCODER: KeyPath = ("mmds", "model", "encoder")
OFFLOAD: KeyPath = ("zero_optimization", "offload_optimizer")

# Key path in the file, the value there, and what the answer names: the nearest key, the owner, or the remedy.
ROWS: list[tuple[KeyPath, Any, str]] = [
    # The top level.
    (("gradient_clipp1ng",), 1.0, '"gradient_clipping"'),
    (("bf_16",), {"enabled": True}, '"bf16"'),
    (("zero_optimisation",), {"stage": 3}, '"zero_optimization"'),
    (("train_batch_sise",), 4, '"train_batch_size"'),
    (("gradient_acumulation_steps",), 4, '"gradient_accumulation_steps"'),
    (("activation_checkpoint",), {}, '"activation_checkpointing"'),
    (("tensorbord",), {"enabled": True}, '"tensorboard"'),
    (("row_tokens",), 4096, ROW),
    (("output_dir",), "runs/x", "mmds.output_dir"),
    (("betas",), [0.9, 0.95], "optimizer.params.betas"),
    (("overlap_comm",), True, "zero_optimization.overlap_comm"),
    (("stage",), 3, "zero_optimization.stage or mmds.stage"),
    (("scheduler",), {"type": "WarmupLR"}, "mmds.schedule"),
    (("fp16",), {"enabled": True}, '"bf16": {"enabled": true}'),
    (("train_micro_batch_size_per_gpu",), 2, ROW),
    (("train_batch_size",), "16", "expected an integer"),
    (("gradient_clipping",), True, "expected a number"),
    (("bf16",), True, '"bf16": {"enabled": true}'),
    # The optimizer.
    (("optimizer", "typ"), "AdamW", '"type"'),
    (("optimizer", "lr"), 1e-5, RATES),
    (("optimizer", "eps"), 1e-6, "optimizer.params.eps"),
    (("optimizer", "type"), "Lion", "Adam, AdamW"),
    (("optimizer", "params", "lr"), 1e-5, RATES),
    (("optimizer", "params", "wieght_decay"), 0.1, '"weight_decay"'),
    (("optimizer", "params", "max_grad_norm"), 1.0, "gradient_clipping"),
    (("optimizer", "params", "betas"), [0.9], "two numbers"),
    (("optimizer", "params", "eps"), "1e-8", "expected a number"),
    # ZeRO.
    (("zero_optimization", "overlap_com"), True, '"overlap_comm"'),
    (("zero_optimization", "stage"), "3", "expected an integer"),
    (("zero_optimization", "reduce_bucket_sise"), 5e8, '"reduce_bucket_size"'),
    (("zero_optimization", "reduce_bucket_size"), "5e8", "valid integer"),
    (("zero_optimization", "stage3_prefetch_bucketsize"), 5e7, '"stage3_prefetch_bucket_size"'),
    (("zero_optimization", "offload_optimiser"), {"device": "cpu"}, '"offload_optimizer"'),
    (("zero_optimization", "cpu_offload"), True, '"offload_optimizer": {"device": "cpu"}'),
    ((*OFFLOAD, "devise"), "cpu", '"device"'),
    ((*OFFLOAD, "device"), "gpu", "none, cpu"),
    ((*OFFLOAD, "pin_memry"), True, '"pin_memory"'),
    ((*OFFLOAD, "nvme_path"), "/disk", "not yet supported"),
    # Precision and recomputation.
    (("bf16", "enable"), True, '"enabled"'),
    (("bf16", "enabled"), "yes", "expected a boolean"),
    (("bf16", "loss_scale"), 0, "the keys here are"),
    (("data_types", "grad_acum_dtype"), "fp32", '"grad_accum_dtype"'),
    (("data_types", "grad_accum_dtype"), "fp33", "fp32, bf16"),
    (("activation_checkpointing", "partitioned_activations"), False, '"partition_activations"'),
    (("activation_checkpointing", "cpu_checkpoint"), True, '"cpu_checkpointing"'),
    (("activation_checkpointing", "number_checkpoints"), 4, "needs tensor parallelism"),
    # Reports and DeepSpeed's checkpoint section.
    (("tensorboard", "output_dir"), "logs", '"output_path"'),
    (("tensorboard", "enabled"), 1, "expected a boolean"),
    (("wandb", "projct"), "p", '"project"'),
    (("csv_monitor", "outputpath"), "logs", '"output_path"'),
    (("comet", "expriment_name"), "x", '"experiment_name"'),
    (("comms_logger", "prof_al"), True, '"prof_all"'),
    (("timers", "throughputs"), {}, '"throughput"'),
    (("timers", "throughput", "enabeld"), True, '"enabled"'),
    (("flops_profiler", "profile_steps"), 5, '"profile_step"'),
    (("checkpoint", "tag_validaton"), "Warn", '"tag_validation"'),
    (("checkpoint", "every"), 500, "mmds.checkpoint.every"),
    # The section "mmds" and those below it.
    (("mmds", "outptu_dir"), "runs/x", '"output_dir"'),
    (("mmds", "gradient_clipping"), 1.0, "gradient_clipping (at the top level)"),
    (("mmds", "zero_optimization"), {"stage": 3}, "zero_optimization (at the top level)"),
    (("mmds", "weightings"), "token", '"weighting"'),
    (("mmds", "stop_after_skiped"), 3, '"stop_after_skipped"'),
    (("mmds", "extends"), "base.json", "the top level of a file"),
    (("mmds", "eval"), {"every": 500}, "not yet supported"),
    (("mmds", "seed"), 1.5, "expected an integer"),
    (("mmds", "stage", "min_text"), 0, '"min_text_only"'),
    (("mmds", "stage", "lora"), 8, "expected an object"),
    (("mmds", "stage", "lora", "rnk"), 8, '"rank"'),
    (("mmds", "stage", "lora", "r"), 8, "mmds.stage.lora.rank"),
    (("mmds", "stage", "lora", "rank"), 0, "at least 1"),
    (("mmds", "stage", "lora", "targets"), [], "at least one item"),
    (("mmds", "stage", "lora", "dropout"), 5, "5 % is 0.05"),
    (("mmds", "stage", "encoder_blocks"), 0, "at least 1"),
    (("mmds", "stage", "encoder_block"), 2, '"encoder_blocks"'),
    (("mmds", "stage", "rates", "vision_tower.*"), None, '"encoder.", "connector." or "decoder."'),
    (("mmds", "stage", "rates", "decoder.*"), "1e-5", "expected a number"),
    (("mmds", "stage", "rates", "connector.*"), 0, "a rate is above 0, and frozen is null"),
    (("mmds", "stage", "rates", "decoder.*"), 1e-3, "--set mmds.stage.max_decoder_rate=0.001"),
    (("mmds", "model", "decodr"), "some/decoder", '"decoder"'),
    (("mmds", "model", "connector"), "mlp3x", '"linear", "mlp2x", "merge_mlp"'),
    (("mmds", "model", "connector", "querys"), 9, '"queries"'),
    (("mmds", "model", "connector", "queries"), 0, "at least 1"),
    (("mmds", "model", "connector", "queries"), 9, "acts only with resampler"),
    (("mmds", "model", "resolution"), "dynamic", '"fixed", "anyres", "native"'),
    (("mmds", "model", "resolution", "max_tile"), 4, '"max_tiles"'),
    (("mmds", "model", "resolution", "max_tiles"), 1, "at least 2"),
    (("mmds", "model", "resolution", "fit"), "crop", '"resize", "pad"'),
    (("mmds", "model", "resolution", "min_pixels"), 784, "acts only in resolution native"),
    (("mmds", "model", "positions"), "2d", '"1d", "mrope"'),
    ((*ENCODER, "rope"), 1, "true or false"),
    (("mmds", "model", "decoder", "randm"), True, '"random"'),
    ((*ENCODER, "layr"), -2, '"layer"'),
    ((*ENCODER, "pretraind"), "openai", '"pretrained"'),
    ((*ENCODER, "norm"), 1, "true or false"),
    (("mmds", "data", "row_token"), 9, '"row_tokens"'),
    (("mmds", "data", "maxpixels"), 112896, '"max_pixels"'),
    (("mmds", "data", "max_pixels"), 336, "336 x 336 = 112896"),
    (("mmds", "data", "holdout"), 0.9, "at most 0.5"),
    (("mmds", "data", "hold_out"), 0.01, 'did you mean "holdout"'),
    ((*MIX, "pth"), "shards/one", '"path"'),
    ((*MIX, "row_tokens"), 9, ROW),
    ((*MIX, "weight"), 0, "at least 1e-06"),
    ((*MIX, "epoch"), 2, '"epochs"'),
    ((*MIX, "images"), "pictures", "acts only on raw data"),
    (("mmds", "schedule", "decy"), "cosine", '"decay"'),
    (("mmds", "schedule", "warmup_ratio"), 3, "warmup_steps"),
    (("mmds", "schedule", "epochs"), "auto", '"auto" has no meaning here'),
    (("mmds", "recompute", "decodr"), 2, '"decoder"'),
    (("mmds", "recompute", "connector"), 2, "at most 1"),
    (("mmds", "checkpoint", "evry"), 500, '"every"'),
    (("mmds", "checkpoint", "keep"), 0, "at least 1"),
    (("mmds", "checkpoint", "tag_validation"), "Warn", "checkpoint.tag_validation"),
    # Names of LLaVA, LLaMA-Factory and ms-swift.
    (("model_name_or_path",), "Qwen/Qwen2.5-7B-Instruct", "mmds.model.decoder"),
    (("mmds", "vision_tower"), "openai/clip-vit-large-patch14-336", "mmds.model.encoder"),
    (("mmds", "model", "mm_projector_type"), "mlp2x_gelu", "mmds.model.connector"),
    ((*ENCODER, "mm_vision_select_layer"), -2, "mmds.model.encoder.layer"),
    (("mmds", "tune_mm_mlp_adapter"), True, 'mmds.stage "align"'),
    (("mmds", "model", "pretrain_mm_mlp_adapter"), "x.bin", "mmds.model.connector_weights"),
    (("mmds", "data", "model_max_length"), 2048, ROW),
    (("mmds", "data", "cutoff_len"), 2048, ROW),
    (("mmds", "data", "image_max_pixels"), 589824, PIXELS),
    ((*MIX, "image_folder"), "images", "mmds.data.mix[].images"),
    ((*MIX, "dataset"), "llava_665k", "mmds.data.mix[].path"),
    (("mmds", "data", "preprocessing_num_workers"), 16, "mmds.data.workers"),
    (("mmds", "data", "neat_packing"), True, "rows are always packed"),
    (("mmds", "data", "template"), "qwen2_vl", "the decoder's own chat template"),
    (("mmds", "stage", "freeze_vision_tower"), True, RATES),
    (("mmds", "stage", "freeze_vit"), True, RATES),
    (("mmds", "stage", "aligner_lr"), 1e-5, RATES),
    (("optimizer", "params", "learning_rate"), 1e-5, RATES),
    (("mmds", "stage", "lora_rank"), 8, "mmds.stage.lora.rank"),
    (("mmds", "lora_r"), 8, "mmds.stage.lora.rank"),
    (("lora_alpha",), 16, "mmds.stage.lora.alpha"),
    (("mmds", "model", "lora_target"), "all", "mmds.stage.lora.targets"),
    (("mmds", "stage", "lora_enable"), True, '"lora": {"rank": 16}'),
    (("finetuning_type",), "lora", "mmds.stage.lora"),
    (("mmds", "model", "load_in_4bit"), True, "QLoRA"),
    (("load_in_8bit",), True, "QLoRA"),
    (("mmds", "quantization_bit"), 4, "QLoRA"),
    (("mmds", "model", "decoder", "bnb_4bit_quant_type"), "nf4", "QLoRA"),
    (("mmds", "schedule", "num_train_epochs"), 1, "mmds.schedule.epochs"),
    (("mmds", "schedule", "max_steps"), 100, "mmds.schedule.steps"),
    (("mmds", "schedule", "lr_scheduler_type"), "cosine", "mmds.schedule.decay"),
    (("mmds", "checkpoint", "save_total_limit"), 2, "mmds.checkpoint.keep"),
    (("mmds", "checkpoint", "save_steps"), 500, "mmds.checkpoint.every"),
    (("per_device_train_batch_size",), 4, "train_batch_size"),
    (("gradient_checkpointing",), True, '"activation_checkpointing": {}'),
    (("torch_dtype",), "bfloat16", '"bf16": {"enabled": true}'),
    (("report_to",), "tensorboard", '"tensorboard": {"enabled": true}'),
    (("tensorboard", "logging_dir"), "logs", "tensorboard.output_path"),
]
NAMES = [f"{dotted(path)}={json.dumps(value)}" for path, value, _ in ROWS]

READ_ALL = """
import json, sys
opened = set()
sys.addaudithook(lambda event, given: opened.add(str(given[0])) if event == "open" else None)
from mmds.config import load_config
from mmds.errors import ConfigError
said = []
for path in json.load(sys.stdin):
    try:
        load_config(path)
        said.append("accepted")
    except ConfigError as error:
        said.append(str(error))
json.dump({"said": said, "modules": sorted(sys.modules), "opened": sorted(opened)}, sys.stdout)
"""


def changed(path: KeyPath, value: Any, parts: Path) -> Any:
    """The small run with real folders for its parts, and `value` at `path`; sections on the way are made or spelt out."""
    whole = copy.deepcopy(SMALL)
    whole["mmds"]["stage"] = {"name": "instruct"}
    whole["mmds"]["model"]["encoder"] = {"name": f"local-dir:{parts}"}
    whole["mmds"]["model"]["decoder"] = {"name": str(parts)}
    whole["mmds"]["model"]["connector"] = {"name": "mlp2x"}
    whole["mmds"]["model"]["resolution"] = {"name": "anyres"}
    whole["mmds"]["data"]["mix"][0]["path"] = str(parts)
    section: Any = whole
    for part in path[:-1]:
        section = section[part] if isinstance(part, int) else section.setdefault(part, {})
    section[path[-1]] = value
    return whole


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the file names of an encoder, a decoder and shards; reading any of them would be too much."""
    folder = tmp_path_factory.mktemp("parts")
    for name in (
        "config.json",
        "model.safetensors",
        "open_clip_config.json",
        "tokenizer.json",
        "manifest.json",
    ):
        (folder / name).write_bytes(b"\0")
    return folder


@pytest.fixture(scope="module")
def read(parts: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What one process said to every row, which modules it had loaded at the end, and which files it had opened."""
    folder = tmp_path_factory.mktemp("rows")
    files = []
    for number, (path, value, _) in enumerate(ROWS):
        file = folder / f"{number}.json"
        file.write_text(json.dumps(changed(path, value, parts), indent=1), encoding="utf-8")
        files.append(str(file))
    command = [sys.executable, "-c", READ_ALL]
    done = subprocess.run(command, input=json.dumps(files), capture_output=True, text=True, check=True)
    return {**json.loads(done.stdout.splitlines()[-1]), "files": files}


def line_of(path: KeyPath, value: Any, parts: Path) -> int:
    """The line of the key: where a mark stands that is put in the place of its value."""
    text = json.dumps(changed(path, "the mark", parts), indent=1)
    return next(n for n, line in enumerate(text.splitlines(), start=1) if '"the mark"' in line)


@pytest.mark.parametrize("row", range(len(ROWS)), ids=NAMES)
def test_a_wrong_key_is_refused_at_its_line_with_what_was_meant(
    row: int, read: dict[str, Any], parts: Path
) -> None:
    path, value, meant = ROWS[row]
    place = f"{read['files'][row]}:{line_of(path, value, parts)}: "
    message = read["said"][row]
    assert message.startswith(place)
    problem = message.removeprefix(place)
    names = (
        dotted(path),
        f'mmds.stage.rates: "{path[-1]}"',
    )  # the second: as the stage table names a pattern
    name = next(name for name in names if problem.startswith(name))
    assert meant in problem.removeprefix(name)


def test_the_table_has_rows_for_every_section() -> None:
    assert len(ROWS) > 100 and len(set(NAMES)) == len(NAMES)


def test_nothing_but_configs_is_loaded_or_opened_before_a_refusal(read: dict[str, Any], parts: Path) -> None:
    heavy = ("open_clip", "transformers", "timm", "torchvision", "accelerate", "safetensors", "tokenizers")
    own = ("mmds.model", "mmds.data", "mmds.engine", "mmds.planner", "mmds.export")
    loaded = [name for name in read["modules"] if name.split(".")[0] in heavy or name.startswith(own)]
    assert loaded == []
    assert set(read["files"]) <= set(read["opened"]), "the hook sees what is opened"
    assert [name for name in read["opened"] if str(parts) in name] == []
    endings = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".onnx", ".tar", ".jsonl")
    assert [name for name in read["opened"] if name.endswith(endings)] == []
