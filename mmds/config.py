"""One file describes one run: `load_config` reads it, refuses what it does not know, and types the rest."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmds.config_decode import decode, plain
from mmds.config_guards import check_recompute, check_together
from mmds.config_keys import find
from mmds.config_load import Document, expand, load_document
from mmds.config_names import unknown_key
from mmds.config_types import (
    CheckpointSection,
    DataSection,
    DecoderSection,
    EncoderSection,
    MixEntry,
    MmdsSection,
    ModelSection,
    PlannerSection,
    RecomputeSection,
    ScheduleSection,
    StageSection,
)
from mmds.ds_keys import PATHS, WRITTEN_OUT
from mmds.ds_schema import check_deepspeed
from mmds.errors import ConfigError
from mmds.stages import STAGES, Rates, stage_rates

__all__ = [
    "CheckpointSection",
    "Config",
    "DataSection",
    "DecoderSection",
    "EncoderSection",
    "MixEntry",
    "ModelSection",
    "PlannerSection",
    "RecomputeSection",
    "ScheduleSection",
    "StageSection",
    "load_config",
    "rows_per_step",
]


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
    planner: PlannerSection
    schedule: ScheduleSection
    weighting: str  # "token", "sample" or "sqrt"
    recompute: RecomputeSection | None  # None: nothing is recomputed
    stop_after_skipped: int
    checkpoint: CheckpointSection
    resolved: dict[str, Any]  # the whole file with defaults and without extends; load_config accepts it

    @property
    def rates(self) -> Rates:
        """Ordered (parameter pattern, peak rate or None = frozen), for `stages.assign_rates`."""
        return stage_rates(self.stage)

    @property
    def max_pixels(self) -> int:
        """Most pixels (height x width) the encoder receives for one image: the run's, else the stage's."""
        return STAGES[self.stage.name].max_pixels if self.data.max_pixels is None else self.data.max_pixels

    @property
    def objective(self) -> str:
        """What the scheme `cost` makes equal: "zero3", where ranks meet inside every layer, else "step"."""
        return self.planner.objective or ("zero3" if self.zero_stage == 3 else "step")

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
        """True: blocks are recomputed by DeepSpeed's checkpoint function, which alone honours the section's keys."""
        return any(self.deepspeed.get("activation_checkpointing", {}).values())


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read the run that `path` describes, with `overrides` (`a.b=JSON`, as after --set) applied in order.

    Raises ConfigError naming file, line and key path for: bad JSON, a duplicate, unknown or refused key, a
    wrong type or range, an unset variable in a path. Opens nothing but the file and those it extends.
    """
    document = load_document(path, overrides)
    _check_removals(document)
    deepspeed = {key: copy.deepcopy(value) for key, value in document.value.items() if key != "mmds"}
    if "mmds" not in document.value:
        raise document.blame(
            ("mmds",), 'missing: the section that describes the run, "mmds": {"stage": ..., ...}'
        )
    section = decode(MmdsSection, document.value["mmds"], ("mmds",), document.blame)
    check_together(section, document.blame)
    _check_stage(section.stage, document)
    check_deepspeed(deepspeed, document.blame)
    check_recompute(section.recompute, deepspeed.get("activation_checkpointing"), document.blame)
    for outer, inner in PATHS:
        if inner in deepspeed.get(outer, {}):
            deepspeed[outer][inner] = expand(deepspeed[outer][inner], (outer, inner), document.blame)
    deepspeed = _with_defaults(deepspeed)
    recompute = section.recompute or RecomputeSection() if "activation_checkpointing" in deepspeed else None
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
        planner=section.planner,
        schedule=section.schedule,
        weighting=section.weighting,
        recompute=recompute,
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
    merged = {**copy.deepcopy(dict(WRITTEN_OUT)), **deepspeed}
    for outer in ("data_types", "optimizer"):
        merged[outer] = {**WRITTEN_OUT[outer], **merged[outer]}
    merged["optimizer"]["params"] = {
        **WRITTEN_OUT["optimizer"]["params"],
        **merged["optimizer"]["params"],
    }
    return copy.deepcopy(merged)


def _check_stage(stage: StageSection, document: Document) -> None:
    try:
        stage_rates(stage)
    except ConfigError as error:
        named = tuple(pattern for pattern in stage.rates if f'rates: "{pattern}"' in str(error))
        place = document.place(("mmds", "stage", "rates", *named[:1]))
        raise ConfigError(f"{place}: {error}") from None


def _check_removals(document: Document) -> None:
    """A null takes a key back to its default; under a name that is no key it would do nothing, in silence."""
    for path in document.idle:
        for depth in range(len(path)):
            around, key = find(path[:depth]), path[: depth + 1]
            if around is not None and not around.refused and find(key) is None:
                problem = unknown_key(key, [below.name for below in around.keys])
                raise document.blame(key, f"null removes nothing: {problem}")
