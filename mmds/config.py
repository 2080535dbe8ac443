"""One file describes one run: `load_config` reads it, refuses what it does not know, and types the rest."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmds.config_decode import decode, plain
from mmds.config_load import Blame, Document, expand, load_document
from mmds.config_types import (
    CheckpointSection,
    DataSection,
    DecoderSection,
    EncoderSection,
    MixEntry,
    MmdsSection,
    ModelSection,
    RecomputeSection,
    ScheduleSection,
    StageSection,
)
from mmds.ds_schema import check_deepspeed
from mmds.errors import ConfigError
from mmds.jsonc import KeyPath
from mmds.stages import STAGES, Rates, stage_rates

__all__ = [
    "CheckpointSection",
    "Config",
    "DataSection",
    "DecoderSection",
    "EncoderSection",
    "MixEntry",
    "ModelSection",
    "RecomputeSection",
    "ScheduleSection",
    "StageSection",
    "load_config",
    "rows_per_step",
]

# Values of DeepSpeed's keys that a run has when the file is silent. Written out, so that they can be read:
# DeepSpeed's own clipping default is 1.0, and under bf16 it would accumulate gradients in bf16.
_DEEPSPEED_DEFAULTS: dict[str, Any] = {
    "gradient_clipping": 1.0,
    "data_types": {"grad_accum_dtype": "fp32"},
    "optimizer": {"type": "AdamW", "params": {"betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0}},
}
_DEEPSPEED_PATHS = (
    ("tensorboard", "output_path"),
    ("csv_monitor", "output_path"),
    ("flops_profiler", "output_file"),
)


@dataclass(frozen=True, kw_only=True)
class Config:
    """A run as its file describes it. Treat `deepspeed` and `resolved` as read-only; copy before changing."""

    path: Path
    deepspeed: dict[str, Any]  # DeepSpeed's keys, without "mmds"
    stage: StageSection
    init_from: str | None
    output_dir: str
    seed: int
    model: ModelSection | None  # None only with init_from
    data: DataSection
    schedule: ScheduleSection
    weighting: str  # "token", "sample" or "sqrt"
    recompute: RecomputeSection | None  # None: nothing is recomputed
    stop_after_skipped: int
    checkpoint: CheckpointSection
    resolved: dict[
        str, Any
    ]  # the whole file with defaults and without extends, accepted by load_config again

    @property
    def rates(self) -> Rates:
        """Ordered (parameter pattern, peak rate or None = frozen), for `stages.assign_rates`."""
        return stage_rates(self.stage)

    @property
    def max_pixels(self) -> int:
        """Most pixels (height x width) the encoder receives for one image: the run's, else the stage's."""
        return STAGES[self.stage.name].max_pixels if self.data.max_pixels is None else self.data.max_pixels

    @property
    def clipping(self) -> float:
        """Largest global gradient norm of a step; 0 = no clipping."""
        return float(self.deepspeed["gradient_clipping"])

    @property
    def bf16(self) -> bool:
        """True: compute in bf16 with fp32 masters. False: all fp32."""
        return bool(self.deepspeed.get("bf16", {}).get("enabled", False))

    @property
    def zero_stage(self) -> int:
        """DeepSpeed's ZeRO stage, 0 to 3."""
        return int(self.deepspeed["zero_optimization"].get("stage", 0))

    @property
    def deepspeed_recomputes(self) -> bool:
        """True: blocks are recomputed by DeepSpeed's checkpoint function, which alone honours the keys that the section sets."""
        return any(self.deepspeed.get("activation_checkpointing", {}).values())


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read the run that `path` describes, with `overrides` (`a.b=JSON`, as after --set) applied in order.

    Raises ConfigError naming file, line and key path for: bad JSON, a duplicate, unknown or refused key, a
    wrong type or range, an unset variable in a path. Opens nothing but the file and those it extends.
    """
    document = load_document(path, overrides)
    deepspeed = {key: copy.deepcopy(value) for key, value in document.value.items() if key != "mmds"}
    if "mmds" not in document.value:
        raise document.blame(
            ("mmds",), 'missing: the section that describes the run, "mmds": {"stage": ..., ...}'
        )
    section = decode(MmdsSection, document.value["mmds"], ("mmds",), document.blame)
    _check_together(section, document.blame)
    _check_stage(section.stage, document)
    check_deepspeed(deepspeed, document.blame)
    if section.recompute is not None and "activation_checkpointing" not in deepspeed:
        path: KeyPath = ("mmds", "recompute")
        raise document.blame(
            path,
            'acts only together with activation checkpointing: add "activation_checkpointing": {} at the top level',
        )
    _check_batch(deepspeed, document.blame)
    for outer, inner in _DEEPSPEED_PATHS:
        if inner in deepspeed.get(outer, {}):
            deepspeed[outer][inner] = expand(deepspeed[outer][inner], (outer, inner), document.blame)
    deepspeed = _with_defaults(deepspeed)
    resolved = {**copy.deepcopy(deepspeed), "mmds": plain(section)}
    return Config(
        path=Path(path),
        deepspeed=deepspeed,
        stage=section.stage,
        init_from=section.init_from,
        output_dir=section.output_dir,
        seed=section.seed,
        model=section.model,
        data=section.data,
        schedule=section.schedule,
        weighting=section.weighting,
        recompute=(section.recompute or RecomputeSection())
        if "activation_checkpointing" in deepspeed
        else None,
        stop_after_skipped=section.stop_after_skipped,
        checkpoint=section.checkpoint,
        resolved=resolved,
    )


def rows_per_step(config: Config, world: int) -> tuple[int, int]:
    """(rows of one optimizer step over all ranks, micro-steps of one row a rank) for `world` ranks.

    Raises ConfigError if the rows cannot be divided evenly, naming the nearest counts that can.
    """
    rows = config.deepspeed.get("train_batch_size")
    accumulation = config.deepspeed.get("gradient_accumulation_steps")
    if rows is None:
        assert accumulation is not None  # load_config wants one of the two
        return accumulation * world, accumulation
    if accumulation is not None and rows != accumulation * world:
        raise ConfigError(
            f"{config.path}: train_batch_size is {rows}, but gradient_accumulation_steps {accumulation} on "
            f"{world} ranks makes {accumulation * world} rows: give one of the two, or make them agree: "
            f"--set train_batch_size={accumulation * world}"
        )
    if rows % world:
        below = rows // world * world
        neighbours = " or ".join(str(n) for n in (below, below + world) if n)
        raise ConfigError(
            f"{config.path}: train_batch_size {rows} is not a multiple of the {world} ranks (one row each "
            f"a micro-step): use {neighbours}, as in --set train_batch_size={below + world}"
        )
    return rows, rows // world


def _with_defaults(deepspeed: dict[str, Any]) -> dict[str, Any]:
    merged = {**json.loads(json.dumps(_DEEPSPEED_DEFAULTS)), **deepspeed}
    for outer in ("data_types", "optimizer"):
        merged[outer] = {**_DEEPSPEED_DEFAULTS[outer], **merged[outer]}
    merged["optimizer"]["params"] = {
        **_DEEPSPEED_DEFAULTS["optimizer"]["params"],
        **merged["optimizer"]["params"],
    }
    return merged


def _check_stage(stage: StageSection, document: Document) -> None:
    try:
        stage_rates(stage)
    except ConfigError as error:
        raise ConfigError(f"{document.place(('mmds', 'stage', 'rates'))}: {error}") from None


def _check_batch(deepspeed: dict[str, Any], blame: Blame) -> None:
    if "train_batch_size" not in deepspeed and "gradient_accumulation_steps" not in deepspeed:
        path: KeyPath = ("train_batch_size",)
        raise blame(
            path, "missing: give the rows of one step over all ranks (or gradient_accumulation_steps)"
        )


def _check_together(section: MmdsSection, blame: Blame) -> None:
    """What no single key can show: alternatives, and keys that need each other."""
    schedule = section.schedule
    _exactly_one(("epochs", schedule.epochs), ("steps", schedule.steps), blame)
    _exactly_one(("warmup_ratio", schedule.warmup_ratio), ("warmup_steps", schedule.warmup_steps), blame)
    if schedule.steps is not None and (schedule.warmup_steps or 0) > schedule.steps:
        path: KeyPath = ("mmds", "schedule", "warmup_steps")
        raise blame(path, f"{schedule.warmup_steps} is more than the {schedule.steps} steps of the run")
    names = [entry.name for entry in section.data.mix]
    for index, name in enumerate(names):
        if name in names[:index]:
            raise blame(
                ("mmds", "data", "mix", index, "name"), f'"{name}" is already the name of another entry'
            )
    if section.model is not None:
        _check_encoder(section.model.encoder, blame)
    elif section.init_from is None:
        raise blame(
            ("mmds", "model"), "missing: describe encoder, connector and decoder, or give mmds.init_from"
        )


def _exactly_one(first: tuple[str, Any], second: tuple[str, Any], blame: Blame) -> None:
    if (first[1] is None) == (second[1] is None):
        both = f"both are given: take one out, as in --set mmds.schedule.{first[0]}=null"
        problem = "neither is given" if first[1] is None else both
        raise blame(("mmds", "schedule"), f"{first[0]} or {second[0]}, exactly one: {problem}")


def _check_encoder(encoder: EncoderSection, blame: Blame) -> None:
    path: KeyPath = ("mmds", "model", "encoder")
    if encoder.pretrained is None and not encoder.name.startswith("local-dir:"):
        raise blame(
            (*path, "pretrained"), 'missing: an open_clip tag, a weight file, or "random" for fresh weights'
        )
    if (encoder.mean is None) != (encoder.std is None):
        raise blame(path, "mean and std belong together: give both or neither")
    for key, values in (("mean", encoder.mean), ("std", encoder.std)):
        if values is not None and (len(values) != 3 or (key == "std" and min(values) <= 0)):
            raise blame(
                (*path, key), "expected three numbers, one a channel" + (", above 0" if key == "std" else "")
            )
