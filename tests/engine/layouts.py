"""One batch of samples, three steps of it, and every layout in which a run may compute them."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mmds.data.rows import LoadedSample, Row, build_row
from mmds.geometry import Geometry
from tests.tiny import random_sample

STAGES = ("align", "pretrain", "instruct")
CONNECTOR = {"align": "mlp2x", "pretrain": "mlp2x", "instruct": "merge_mlp"}
STEPS, TOTAL, WARMUP = 3, 10, 2
CLIPPING, BETAS, EPS, DECAY = 0.05, (0.9, 0.95), 1e-4, 0.1
RATES = {"encoder.*": 1e-3, "connector.*": 2e-3, "decoder.*": 5e-4}  # of what a stage trains
LORA, LORA_RATE = {"rank": 4, "alpha": 6}, 2e-3

# Pictures of each sample of a step. On 2 ranks x 4 micro-steps a row is one sample, and text-only rows meet rows with pictures
# on either rank; the fourth sample of the first step has no supervised token; the last step has no picture at all.
PICTURES = ((0, 1, 2, 0, 0, 0, 1, 0), (1, 0, 0, 2, 1, 0, 0, 3), (0,) * 8)
SILENT = (0, 3)


class Batch(NamedTuple):
    """What is computed, whatever the layout."""

    stage: str
    weighting: str
    first: int
    steps: int
    lora: bool
    last: int

    @property
    def rates(self) -> dict[str, float]:
        """Pattern -> rate of what trains; the encoder's stands for its last blocks where only those train."""
        frozen = {"align": ("encoder.*", "decoder.*"), "pretrain": (), "instruct": ("encoder.*",)}[self.stage]
        rates = {pattern: rate for pattern, rate in RATES.items() if pattern not in frozen or self.last}
        if self.lora:
            del rates["decoder.*"]
            rates["decoder.*.lora_*"] = LORA_RATE
        return rates


@dataclass(frozen=True)
class Layout:
    """How one run is computed. first: index in PICTURES of its first step; saved: it also saves and resumes after two steps.

    lora: adapters train in the place of the decoder's weights. last: number of encoder blocks that train alone, the last ones; 0: as
    the stage says.
    """

    zero: int
    world: int
    accumulation: int
    stage: str
    recompute: str = "off"  # "torch", "deepspeed"
    weighting: str = "token"
    first: int = 0
    steps: int = STEPS
    saved: bool = False
    lora: bool = False
    last: int = 0  # encoder blocks that train
    extra: Mapping[str, Any] = field(default_factory=dict, hash=False)

    @property
    def name(self) -> str:
        """For file names and test ids."""
        words = [
            f"zero{self.zero}",
            f"{self.world}x{self.accumulation}",
            self.stage,
            self.recompute,
            self.weighting,
        ]
        words += [f"from{self.first}"] if self.first else []
        words += ["lora"] * self.lora + [f"last{self.last}"] * bool(self.last)
        return "-".join(words + sorted(self.extra))

    @property
    def batch(self) -> Batch:
        """What decides the numbers: layouts that share it must agree."""
        return Batch(self.stage, self.weighting, self.first, self.steps, self.lora, self.last)


MATRIX = tuple(
    Layout(
        zero,
        world,
        accumulation,
        stage,
        recompute,
        saved=(world, accumulation, stage, recompute) == (2, 1, "pretrain", "off"),
    )
    for world, zero, accumulation, stage, recompute in itertools.product(
        (1, 2), (0, 1, 2, 3), (1, 4), STAGES, ("off", "torch")
    )
)
WEIGHTED = tuple(
    Layout(zero, world, accumulation, "instruct", weighting=weighting)
    for weighting, (zero, world, accumulation) in itertools.product(
        ("sample", "sqrt"), ((3, 2, 4), (0, 1, 1), (2, 2, 1))
    )
)
BY_DEEPSPEED = tuple(
    Layout(zero, 2, 4, stage, "deepspeed") for zero, stage in itertools.product((1, 3), STAGES)
)
ALL_TEXT = tuple(Layout(3, 2, 1, stage, first=2, steps=1) for stage in ("align", "pretrain"))
OFFLOADED = tuple(
    Layout(zero, 2, 1, "pretrain", extra={"offload_optimizer": {"device": "cpu"}}) for zero in (1, 2, 3)
)
ADAPTED = (
    *(
        Layout(zero, 2, 1, "instruct", recompute, saved=recompute == "off", lora=True)
        for zero, recompute in itertools.product((0, 1, 2, 3), ("off", "torch"))
    ),
    *(Layout(zero, 2, 4, "instruct", "deepspeed", lora=True) for zero in (2, 3)),
    Layout(3, 1, 1, "instruct", lora=True),
    Layout(3, 2, 1, "instruct", first=2, steps=1, lora=True),
)
LAST_BLOCK = (
    *(
        Layout(zero, 2, 1, "instruct", recompute, saved=recompute == "off", last=1)
        for zero, recompute in itertools.product((0, 2, 3), ("off", "torch", "deepspeed"))
    ),
    Layout(3, 2, 4, "pretrain", last=1, lora=True),
)
LAYOUTS = (*MATRIX, *WEIGHTED, *BY_DEEPSPEED, *ALL_TEXT, *OFFLOADED, *ADAPTED, *LAST_BLOCK)


def samples_of(step: int, geometry: Geometry) -> list[LoadedSample]:
    """The samples of a step, the same in every process; lengths and supervised counts differ widely."""
    rng = np.random.default_rng(1000 + step)
    samples = []
    for index, images in enumerate(PICTURES[step]):
        sample = random_sample(rng, geometry, key=f"s{step}-{index}", images=images, length=8 + 3 * index)
        if (step, index) == SILENT:
            sample = replace(sample, supervised=np.zeros_like(sample.supervised))
        samples.append(sample)
    return samples


def rows_of(layout: Layout, step: int, rank: int, geometry: Geometry) -> list[Row]:
    """This rank's rows of a step: the samples dealt out to micro-steps and ranks in turn."""
    samples, parts = samples_of(step, geometry), layout.world * layout.accumulation
    size = len(samples) // parts
    rows = [samples[size * part : size * (part + 1)] for part in range(parts)]
    return [build_row(rows[layout.world * micro + rank], geometry) for micro in range(layout.accumulation)]


def write_config(work: Path, layout: Layout) -> Path:
    """The layout as a config file that a user could have written."""
    config: dict[str, Any] = {
        "gradient_accumulation_steps": layout.accumulation,
        "gradient_clipping": CLIPPING,
        "optimizer": {"type": "AdamW", "params": {"betas": BETAS, "eps": EPS, "weight_decay": DECAY}},
        "zero_optimization": {
            "stage": layout.zero,
            "stage3_param_persistence_threshold": 0,
            **layout.extra,
        },
        "mmds": {
            "stage": {
                "name": layout.stage,
                "rates": layout.batch.rates,
                "max_decoder_rate": 1,
                "lora": LORA if layout.lora else None,
                "encoder_blocks": layout.last or None,
            },
            "output_dir": str(work / "run"),
            "model": {
                "encoder": {"name": f"local-dir:{work / 'encoder'}"},
                "connector": CONNECTOR[layout.stage],
                "decoder": str(work / "decoder"),
            },
            "data": {"mix": [{"name": "none", "path": "none.jsonl"}], "row_tokens": 256},
            "schedule": {"steps": TOTAL, "warmup_steps": WARMUP},
            "weighting": layout.weighting,
        },
    }
    if layout.recompute != "off":
        asked = {"synchronize_checkpoint_boundary": True} if layout.recompute == "deepspeed" else {}
        config["activation_checkpointing"] = asked
    file = work / f"{layout.name}.json"
    file.write_text(json.dumps(config))
    return file


def of_world(world: int) -> Iterator[Layout]:
    """The layouts on that many ranks."""
    return (layout for layout in LAYOUTS if layout.world == world)
