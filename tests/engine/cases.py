"""The runs that the equality test compares: stages, layouts and which samples have pictures."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mmds.data.rows import LoadedSample, Row
from mmds.geometry import Geometry
from tests.tiny import random_row


@dataclass(frozen=True)
class Case:
    """One step. pictures[rank][micro] lists how many pictures each sample of that row has."""

    stage: str
    pictures: tuple[tuple[tuple[int, ...], ...], ...]
    connector: str = "mlp2x"
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def accumulation(self) -> int:
        return len(self.pictures[0])


ALTERNATE = (
    ((0, 0), (1, 2), (0,)),
    ((2, 0), (0,), (1, 1)),
)  # text-only rows: rank 0 in micro 0 and 2, rank 1 in micro 1
ALL_TEXT = (((0, 0),), ((0,),))
CASES = {
    "align": Case("align", ALTERNATE),
    "pretrain": Case("pretrain", ALTERNATE, extra={"activation_checkpointing": {}}),
    "instruct": Case("instruct", ALTERNATE, connector="merge_mlp"),
    "align_recomputed": Case("align", ALTERNATE, extra={"activation_checkpointing": {}}),
    "align_all_text": Case("align", ALL_TEXT),
    "pretrain_all_text": Case("pretrain", ALL_TEXT),
}


def rows_of(case: Case, geometry: Geometry, rank: int, micro: int) -> tuple[Row, list[LoadedSample]]:
    """The row of a rank in a micro-step, and its samples; the same in every process."""
    return random_row(100 * rank + micro, geometry, case.pictures[rank][micro])


def write_config(work: Path, name: str, case: Case, parts: Path) -> None:
    """The case as a config file that a user could have written."""
    config = {
        "gradient_accumulation_steps": case.accumulation,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        **case.extra,
        "mmds": {
            "stage": case.stage,
            "output_dir": str(work / "run"),
            "model": {
                "encoder": {"name": f"local-dir:{parts / 'encoder'}"},
                "connector": case.connector,
                "decoder": str(parts / "decoder"),
            },
            "data": {"mix": [{"name": "none", "path": "none.jsonl"}], "row_tokens": 256},
            "schedule": {"steps": 10, "warmup_steps": 0},
        },
    }
    (work / f"{name}.json").write_text(json.dumps(config))
