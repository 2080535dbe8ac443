"""A decoder whose NLL is scripted: one supervised token that costs 4 nats, in one sample, and nine that cost 2, in another."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mmds.config_types import ConnectorSection
from mmds.data.rows import IGNORE, Row, filler_row
from mmds.engine import Engine, Ranks
from mmds.engine.core import deepspeed_config, parameter_groups
from mmds.geometry import Geometry
from mmds.model.connector import Connector
from mmds.model.mllm import Mllm

EXPECTED = {"token": 2.2, "sample": 3.0, "sqrt": 2.5}
"""(4 + 9 * 2) / 10; (4 + 2) / 2; (1 * 4 + 3 * 2) / (1 + 3)."""

NLL = (0.1, 4.0, 2.0)
"""NLL of target 0 after the token with this id."""

GEOMETRY = Geometry(mode="fixed", image_size=28, patch_size=14)


class ScriptedDecoder(nn.Module):
    """Logits [K, 2] that follow from the token at each kept position alone."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding.from_pretrained(
            torch.tensor([[-x, math.log(-math.expm1(-x))] for x in NLL]), freeze=False
        )

    def embed(self, input_ids: Tensor) -> Tensor:
        """[T] -> [T, 2]."""
        embedded: Tensor = self.table(input_ids)
        return embedded

    def forward(self, *, inputs_embeds: Tensor, keep: Tensor, **_: Any) -> Tensor:
        """[T, 2] -> [K, 2]."""
        return inputs_embeds[keep]


def row(*samples: tuple[int, int]) -> Row:
    """A text-only row of samples, each (id that decides the NLL, number of supervised tokens); no sample: the filler row."""
    if not samples:
        return filler_row(GEOMETRY)
    empty = filler_row(GEOMETRY)
    lengths = [count + 1 for _, count in samples]
    return Row(
        input_ids=torch.tensor([token for token, count in samples for _ in range(count + 1)]),
        labels=torch.tensor([label for _, count in samples for label in [IGNORE, *[0] * count]]),
        position_ids=torch.cat([torch.arange(length) for length in lengths]),
        cu_seqlens=torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32),
        slots=empty.slots,
        slot_counts=empty.slot_counts,
        pixels=empty.pixels,
        plans=(),
        dummy=empty.dummy,
        image_names=(),
        sample_keys=tuple(f"sample {token}" for token, _ in samples),
    )


ONE, NINE = (1, 1), (2, 9)
SPLITS: dict[int, dict[str, list[list[Row]]]] = {
    # world: name -> rows of each rank
    1: {"one row": [[row(ONE, NINE)]], "two micro-steps": [[row(NINE), row(ONE)]]},
    2: {
        "two ranks": [[row(ONE)], [row(NINE)]],
        "one rank has both": [[row()], [row(NINE, ONE)]],
        "two ranks, two micro-steps": [[row(), row(ONE)], [row(NINE), row()]],
    },
}


def losses(ranks: Ranks) -> dict[str, float]:
    """Loss of a real step, by "ZeRO stage, weighting, split", for every split of this world."""
    found = {}
    for zero, weighting, (split, rows) in itertools.product(range(4), EXPECTED, SPLITS[ranks.world].items()):
        model = Mllm(
            connector=Connector(ConnectorSection(name="linear"), encoder_width=4, decoder_width=2),
            decoder=ScriptedDecoder(),  # type: ignore[arg-type]
            encoder=None,
            weighting=weighting,
        )
        mine = rows[ranks.rank]
        engine = Engine(
            model,
            frozen=lambda _: torch.zeros(4, 4),  # type: ignore[arg-type]
            groups=parameter_groups(model, {name: 1e-3 for name, _ in model.named_parameters()}, 0.0),
            ds_config=_config(zero, len(mine), ranks),
            ranks=ranks,
            factor=lambda _: 1.0,
        )
        found[f"{zero}, {weighting}, {split}"] = engine.step(mine).loss
        engine.ds.destroy()
    return found


def _config(zero: int, accumulation: int, ranks: Ranks) -> dict[str, Any]:
    user = {
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {}},
        "zero_optimization": {"stage": zero, "stage3_param_persistence_threshold": 0},
    }
    return deepspeed_config(
        user,
        rows_per_step=accumulation * ranks.world,
        accumulation=accumulation,
        output_dir=Path("none"),
        device=ranks.device,
    )
