"""What no single key of "mmds" can show: alternatives, keys that need each other, and keys that another one makes idle."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from mmds.config_load import Blame
from mmds.config_types import (
    EncoderSection,
    MixEntry,
    MmdsSection,
    ModelSection,
    PlannerSection,
    RecomputeSection,
    ScheduleSection,
    StageSection,
)
from mmds.jsonc import KeyPath
from mmds.stages import STAGES


def check_together(section: MmdsSection, blame: Blame) -> None:
    """Refuse keys that contradict each other. Raises the ConfigError that `blame(key path, problem)` makes."""
    _check_schedule(section.schedule, blame)
    _check_mix(section.data.mix, blame)
    _check_weights(section, blame)
    _check_stage(section.stage, section.init_from, blame)
    _check_planner(section.planner, blame)
    if section.model is not None:
        _check_encoder(section.model.encoder, blame)
        _check_images(section.model, blame)
    if section.init_from is not None:
        _check_start(section.init_from, section, blame)
    elif section.model is None:
        raise blame(
            ("mmds", "model"), "missing: describe encoder, connector and decoder, or give mmds.init_from"
        )


def check_recompute(
    recompute: RecomputeSection | None, checkpointing: Mapping[str, Any] | None, blame: Blame
) -> None:
    """Refuse `mmds.recompute` without `activation_checkpointing`, and keys of the latter where nothing is recomputed."""
    if recompute is None:
        return
    if checkpointing is None:
        raise blame(
            ("mmds", "recompute"),
            'acts only with activation checkpointing: add "activation_checkpointing": {} at the top level',
        )
    idle = [key for key, value in checkpointing.items() if value]
    if idle and recompute == RecomputeSection(encoder=0, connector=0, decoder=0):
        raise blame(
            ("activation_checkpointing", idle[0]),
            "has no effect: mmds.recompute is 0 for every part; take one of the two out",
        )


def _check_schedule(schedule: ScheduleSection, blame: Blame) -> None:
    _exactly_one(("epochs", schedule.epochs), ("steps", schedule.steps), blame)
    _exactly_one(("warmup_ratio", schedule.warmup_ratio), ("warmup_steps", schedule.warmup_steps), blame)
    if schedule.steps is not None and (schedule.warmup_steps or 0) > schedule.steps:
        path: KeyPath = ("mmds", "schedule", "warmup_steps")
        raise blame(path, f"{schedule.warmup_steps} is more than the {schedule.steps} steps of the run")


def _check_stage(stage: StageSection, init_from: str | None, blame: Blame) -> None:
    """What a row asks of the run's start and of its decoder."""
    row = STAGES[stage.name]
    if row.needs_trained and init_from is None:
        raise blame(
            ("mmds", "init_from"),
            f'missing: stage "{stage.name}" starts from a model that already follows instructions, and without init_from the '
            'connector would be fresh, which no rate of this stage makes up for: train it with stage "align" and "instruct" '
            "first, or take a published model, and name it:\n    --set mmds.init_from=RUN_OR_MODEL",
        )
    if stage.lora is not None and row.lora_rate is None:
        able = ", ".join(f'"{name}"' for name, other in STAGES.items() if other.lora_rate is not None)
        raise blame(
            ("mmds", "stage", "lora"),
            f'stage "{stage.name}" does not train the decoder, so adapters have no use: take a stage that does ({able}), or\n'
            "    --set mmds.stage.lora=null",
        )


def _check_planner(planner: PlannerSection, blame: Blame) -> None:
    """Keys that only the scheme `cost` looks at."""
    if planner.scheme == "cost":
        return
    for key in ("objective", "row_patches", "row_images", "calibration"):
        if getattr(planner, key) is not None:
            raise blame(
                ("mmds", "planner", key),
                f'acts only with scheme "cost", not with "{planner.scheme}": take it out, or\n    --set mmds.planner.scheme=\'"cost"\'',
            )


def _exactly_one(first: tuple[str, Any], second: tuple[str, Any], blame: Blame) -> None:
    if (first[1] is None) == (second[1] is None):
        both = f"both are given: take one out, as in --set mmds.schedule.{first[0]}=null"
        problem = "neither is given" if first[1] is None else both
        raise blame(("mmds", "schedule"), f"{first[0]} or {second[0]}, exactly one: {problem}")


def _check_mix(mix: tuple[MixEntry, ...], blame: Blame) -> None:
    names = [entry.name for entry in mix]
    for index, entry in enumerate(mix):
        path: KeyPath = ("mmds", "data", "mix", index)
        if entry.name in names[:index]:
            raise blame((*path, "name"), f'"{entry.name}" is already the name of another entry')
        if entry.images is not None and not _may_be_raw(entry.path):
            raise blame(
                (*path, "images"),
                f"acts only on raw data (.json, .jsonl, a glob, a URL): the shards {entry.path} hold their images; take it out",
            )


def _may_be_raw(path: str) -> bool:
    """Whether a mix path can name raw data; a plain folder is a prepared one."""
    return path.endswith((".json", ".jsonl")) or "://" in path or any(sign in path for sign in "*?[")


def _check_weights(section: MmdsSection, blame: Blame) -> None:
    """Weights make a stream without epochs."""
    mix = section.data.mix
    weighted = [index for index, entry in enumerate(mix) if entry.weight is not None]
    if not weighted:
        return
    missing = next((index for index, entry in enumerate(mix) if entry.weight is None), None)
    if missing is not None:
        raise blame(
            ("mmds", "data", "mix", missing, "weight"), "missing: give every entry a weight, or none of them"
        )
    for index, entry in enumerate(mix):
        if entry.epochs is not None:
            raise blame(
                ("mmds", "data", "mix", index, "epochs"),
                "has no meaning beside weights: take one of the two out",
            )
    if section.schedule.epochs is not None:
        raise blame(
            ("mmds", "schedule", "epochs"),
            "a mix with weights has no epochs: give mmds.schedule.steps, or mix[].epochs in place of the weights",
        )


def _check_encoder(encoder: EncoderSection, blame: Blame) -> None:
    path: KeyPath = ("mmds", "model", "encoder")
    folder = encoder.name.startswith("local-dir:")
    if encoder.pretrained is None and not folder:
        raise blame(
            (*path, "pretrained"), 'missing: an open_clip tag, a weight file, or "random" for fresh weights'
        )
    if folder and encoder.pretrained not in (None, "random"):
        raise blame(
            (*path, "pretrained"),
            f'has no effect: {encoder.name} brings its own weights; take the key out, or write "random"',
        )
    if (encoder.mean is None) != (encoder.std is None):
        raise blame(path, "mean and std belong together: give both or neither")


def _check_images(model: ModelSection, blame: Blame) -> None:
    """Keys of the resolution and the connector act in some modes only."""
    resolution, connector = model.resolution, model.connector
    path: KeyPath = ("mmds", "model", "resolution")
    acting = {
        "size": ("fixed", "anyres"),
        "fit": ("fixed",),
        "max_tiles": ("anyres",),
        "grids": ("anyres",),
        "min_pixels": ("native",),
    }
    for key, modes in acting.items():
        if getattr(resolution, key) not in (None, "resize") and resolution.name not in modes:
            raise blame((*path, key), f"acts only in resolution {' and '.join(modes)}: take it out")
    if resolution.grids is not None and resolution.max_tiles is not None:
        raise blame((*path, "max_tiles"), "grids says which tiles there are: take one of the two out")
    for index, grid in enumerate(resolution.grids or ()):
        if re.fullmatch(r"[1-9]\d?x[1-9]\d?", grid) is None:
            raise blame(
                (*path, "grids", index),
                f'"{grid}" is not "ROWSxCOLUMNS", such as "2x1" (one above the other)',
            )
    if connector.queries is not None and connector.name != "resampler":
        raise blame(
            ("mmds", "model", "connector", "queries"),
            f"acts only with resampler, not with {connector.name}: take it out",
        )
    if resolution.name == "anyres" and connector.name == "resampler":
        raise blame(
            ("mmds", "model", "connector"),
            "the resampler's tokens cannot be laid side by side as tiles: use another, or resolution fixed or native",
        )
    if model.positions == "mrope" and (resolution.name == "anyres" or connector.name == "resampler"):
        raise blame(
            ("mmds", "model", "positions"),
            'mrope gives a visual token a row and a column of its image, which anyres and resampler do not keep: use "1d"',
        )


def _check_start(init_from: str, section: MmdsSection, blame: Blame) -> None:
    if os.path.normpath(init_from) == os.path.normpath(section.output_dir):
        raise blame(
            ("mmds", "output_dir"),
            f"is the run that init_from names ({init_from}): a stage writes to a folder of its own. To go on with an "
            "interrupted run take init_from out; it resumes by itself",
        )
    if section.model is not None:
        for path, word in _fresh_weights(section.model):
            raise blame(
                path, f"{word} has no effect: the weights come from init_from; take one of the two out"
            )


def _fresh_weights(model: ModelSection) -> list[tuple[KeyPath, str]]:
    """Where a model asks for fresh weights."""
    fresh: list[tuple[KeyPath, str]] = []
    if model.encoder.pretrained == "random":
        fresh.append((("mmds", "model", "encoder", "pretrained"), '"random"'))
    if model.decoder.random:
        fresh.append((("mmds", "model", "decoder", "random"), "true"))
    return fresh
