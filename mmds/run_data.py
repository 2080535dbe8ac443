"""The data of a run as `train.py` would read it, opened without weights and without a process group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmds.config import Config, load_config, rows_per_step
from mmds.data.chat_tokenizer import ChatTokenizer
from mmds.data.loader import StepLoader
from mmds.data.mixture import Mixture, ensure_mixture, open_mixture, plan_run, text_only_share
from mmds.geometry import Geometry
from mmds.model.build import Source, describe_light, find_source, geometry_of
from mmds.model.connector import Connector
from mmds.model.decoder import load_tokenizer
from mmds.model.encoder import Encoder
from mmds.planner import Balance, RunPlan
from mmds.run_outline import Outline, outline
from mmds.stages import check_text_share


@dataclass(frozen=True, kw_only=True)
class RunData:
    """Everything that decides a run's rows on `world` ranks; accumulation: rows of a rank in a step. text_share: text-only samples, 0 to 1."""

    config: Config
    tokenizer: ChatTokenizer
    mixture: Mixture
    geometry: Geometry
    plan: RunPlan
    outline: Outline
    text_share: float
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

    def balance(self, step: int) -> Balance | None:
        """How equal the ranks' rows of a step are by their predicted costs."""
        return self.plan.balance_of(step, world=self.world, objective=self.config.objective)


def plan_data(
    config: Config,
    source: Source,
    encoder: Encoder,
    connector: Connector,
    tokenizer: ChatTokenizer,
    *,
    world: int,
) -> RunData:
    """Open the data of a run, prepared before, and plan it. encoder, connector: the run's, with or without their weights.

    Raises ConfigError where the mix, the stage, the batch and the ranks do not fit each other, DataError for data that cannot be used.
    """
    rows, accumulation = rows_per_step(config, world)
    geometry = geometry_of(source, encoder, connector, max_pixels=config.max_pixels)
    mixture = open_mixture(config.data, tokenizer.fingerprint)
    text_share = text_only_share(config.data, mixture)
    check_text_share(text_share, config.stage)
    known = outline(config, source, encoder, connector)
    return RunData(
        config=config,
        tokenizer=tokenizer,
        mixture=mixture,
        geometry=geometry,
        plan=plan_run(config, mixture, geometry, rows=rows, cost=known.cost(config)),
        outline=known,
        text_share=text_share,
        world=world,
        accumulation=accumulation,
    )


def open_run_data(path: str | Path, overrides: Sequence[str] = (), *, world: int = 1) -> RunData:
    """Read the config and open its data; raw files are prepared on the way. Raises what the run itself would."""
    config = load_config(path, overrides)
    rows_per_step(config, world)
    source = find_source(config.init_from, config.model)
    tokenizer = ChatTokenizer(load_tokenizer(source.decoder_name))
    encoder, connector = describe_light(source)
    ensure_mixture(config.data, tokenizer, progress=True)
    return plan_data(config, source, encoder, connector, tokenizer, world=world)
