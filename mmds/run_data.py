"""The data of a run as `train.py` would read it, opened without weights and without a process group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmds.config import Config, load_config, rows_per_step
from mmds.data.chat_tokenizer import ChatTokenizer
from mmds.data.loader import StepLoader
from mmds.data.mixture import Mixture, ensure_mixture, open_mixture, plan_run
from mmds.geometry import Geometry
from mmds.model.build import describe_light, find_source, geometry_of
from mmds.model.decoder import load_tokenizer
from mmds.planner import RunPlan


@dataclass(frozen=True, kw_only=True)
class RunData:
    """Everything that decides a run's rows on `world` ranks; accumulation: rows of a rank in a step."""

    config: Config
    tokenizer: ChatTokenizer
    mixture: Mixture
    geometry: Geometry
    plan: RunPlan
    world: int
    accumulation: int

    def loader(self, *, rank: int = 0, workers: int = 0, **options: Any) -> StepLoader:
        """The loader of a rank; options: as for `StepLoader`."""
        return StepLoader(
            self.mixture,
            self.plan,
            self.geometry,
            rank=rank,
            world=self.world,
            accumulation=self.accumulation,
            workers=workers,
            on_bad=self.config.data.on_bad_sample,
            **options,
        )


def open_run_data(path: str | Path, overrides: Sequence[str] = (), *, world: int = 1) -> RunData:
    """Read the config and open its data; raw files are prepared on the way. Raises what the run itself would."""
    config = load_config(path, overrides)
    rows, accumulation = rows_per_step(config, world)
    source = find_source(config.init_from, config.model)
    tokenizer = ChatTokenizer(load_tokenizer(source.decoder_name))
    encoder, connector = describe_light(source)
    geometry = geometry_of(source, encoder, connector, max_pixels=config.max_pixels)
    ensure_mixture(config.data, tokenizer, progress=True)
    mixture = open_mixture(config.data, tokenizer.fingerprint)
    return RunData(
        config=config,
        tokenizer=tokenizer,
        mixture=mixture,
        geometry=geometry,
        plan=plan_run(config, mixture, geometry, rows=rows),
        world=world,
        accumulation=accumulation,
    )
