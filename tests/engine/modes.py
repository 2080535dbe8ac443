"""Runs in every way an image can become tokens and positions: each trains all three parts, with rows that have no image."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mmds.data.rows import LoadedSample
from mmds.geometry import Geometry
from tests.tiny import random_sample

STEPS = 2
RATE, EPS = 1e-2, 1e-2
PICTURES = ((0, 2, 1, 0), (1, 0, 0, 3))
"""Pictures of each sample of a step: on 2 ranks x 2 micro-steps a row is one sample, and text-only rows meet rows with pictures."""

ENCODER_VISION = {"image_size": 56, "layers": 3, "width": 32, "head_width": 16, "patch_size": 14}


@dataclass(frozen=True)
class Mode:
    """A `model` section, ZeRO's stage, and whether blocks recompute."""

    name: str
    connector: Any
    resolution: Any
    positions: str = "1d"
    rope: bool = False
    zero: int = 3
    recompute: bool = False


MODES = (
    Mode("native-mrope", "merge_mlp", {"name": "native", "min_pixels": 784}, "mrope"),
    Mode("native-mrope-zero2", "merge_mlp", "native", "mrope", zero=2, recompute=True),
    Mode("native-rope", "pixel_shuffle", "native", rope=True, recompute=True),
    Mode("native-resampler", {"name": "resampler", "queries": 3}, "native"),
    Mode("anyres", "mlp2x", {"name": "anyres", "max_tiles": 3}),
    Mode("anyres-zero2", "merge_mlp", {"name": "anyres", "grids": ["1x2", "2x1"]}, zero=2, recompute=True),
    Mode("forced", "linear", {"name": "fixed", "size": 42, "fit": "pad"}, "mrope"),
)


def write_config(work: Path, mode: Mode) -> Path:
    """The mode as a config file that a user could have written."""
    config: dict[str, Any] = {
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW", "params": {"eps": EPS, "weight_decay": 0.0}},
        "zero_optimization": {"stage": mode.zero, "stage3_param_persistence_threshold": 0},
        "mmds": {
            "stage": {
                "name": "pretrain",
                "rates": dict.fromkeys(("encoder.*", "connector.*", "decoder.*"), RATE),
                "max_decoder_rate": 1,
            },
            "output_dir": str(work / "run"),
            "model": {
                "encoder": {"name": f"local-dir:{work / 'encoder'}", "rope": mode.rope},
                "connector": mode.connector,
                "decoder": str(work / "decoder"),
                "resolution": mode.resolution,
                "positions": mode.positions,
            },
            "data": {"mix": [{"name": "none", "path": "none.jsonl"}], "row_tokens": 256, "max_pixels": 28224},
            "schedule": {"steps": 10, "warmup_steps": 0, "decay": "constant"},
        },
    }
    if mode.recompute:
        config["activation_checkpointing"] = {}
    file = work / f"{mode.name}.json"
    file.write_text(json.dumps(config))
    return file


def samples_of(step: int, geometry: Geometry) -> Iterator[LoadedSample]:
    """The samples of a step, the same in every process; their pictures have sizes of their own."""
    rng = np.random.default_rng(2000 + step)
    for index, images in enumerate(PICTURES[step]):
        yield random_sample(rng, geometry, key=f"s{step}-{index}", images=images, length=8 + 3 * index)
