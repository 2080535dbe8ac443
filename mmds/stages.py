"""The stage table: what trains at which rate, and what a stage asks of its data.

The rate of a parameter is that of the first pattern (fnmatch, case-sensitive) that matches its name; `None`
is frozen. Names start with "encoder.", "connector." or "decoder.". A run may put patterns of its own before
the row's (`mmds.stage.rates`). Other words for the stages: align = LLaVA "pretrain" or stage 1; pretrain =
stage 1.5; instruct = LLaVA "finetune" or stage 2.

Two keys stand for patterns: `mmds.stage.lora` freezes the decoder's weights and trains the adapters beside them, and
`mmds.stage.encoder_blocks` trains the last blocks of the encoder alone.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from mmds.config_types import StageSection
from mmds.errors import ConfigError
from mmds.rate_patterns import (
    ADAPTERS,
    DECODER,
    ENCODER,
    PARTS,
    Rates,
    check_acting,
    check_beside_adapters,
    check_beside_blocks,
    check_ceiling,
    check_pattern,
    set_rates,
)

__all__ = [
    "PARTS",
    "STAGES",
    "Rates",
    "StageRow",
    "assign_rates",
    "check_text_share",
    "least_text_share",
    "stage_rates",
    "with_last_blocks",
]

log = logging.getLogger("mmds")

LAST_BLOCKS_RATE = 2e-6
"""Of the last encoder blocks, in a stage whose row has the encoder frozen."""


@dataclass(frozen=True, kw_only=True)
class StageRow:
    """One row of the table."""

    name: str
    rates: Rates  # (pattern, peak learning rate or None = frozen), first match wins
    max_pixels: int  # height x width, most that the encoder receives for one image
    min_text_only: float  # least share of samples without an image, 0..1
    max_decoder_rate: float  # a higher rate on decoder parameters is refused
    lora_rate: float | None = 2e-4  # of adapters; None: the decoder does not train, and has none
    max_lora_rate: float = 2e-3  # with adapters, in the place of max_decoder_rate
    needs_trained: bool = (
        False  # whether a run must start from a trained model; then a mix without text is a warning
    )


STAGES: Mapping[str, StageRow] = {
    "align": StageRow(
        name="align",
        rates=(("encoder.*", None), ("connector.*", 1e-3), ("decoder.*", None)),
        max_pixels=672 * 672,
        min_text_only=0.0,
        max_decoder_rate=2e-4,
        lora_rate=None,
    ),
    "pretrain": StageRow(
        name="pretrain",
        rates=(("encoder.*", 2e-6), ("connector.*", 2e-5), ("decoder.*", 2e-5)),
        max_pixels=1344 * 896,
        min_text_only=0.05,
        max_decoder_rate=2e-4,
    ),
    "instruct": StageRow(
        name="instruct",
        rates=(("encoder.*", None), ("connector.*", 2e-5), ("decoder.*", 2e-5)),
        max_pixels=1344 * 896,
        min_text_only=0.05,
        max_decoder_rate=2e-4,
    ),
    "finetune": StageRow(
        name="finetune",
        rates=(("encoder.*", None), ("connector.*", 2e-5), ("decoder.*", 1e-5)),
        max_pixels=1344 * 896,
        min_text_only=0.0,
        max_decoder_rate=2e-4,
        needs_trained=True,
    ),
}


def stage_rates(stage: StageSection) -> Rates:
    """The ordered patterns of a run: its own first, then the row's (less those that the run repeats).

    Raises ConfigError, with the line that overrides it, where a pattern or rate cannot be meant: no part's name, rate 0, a
    pattern hidden by an earlier one of the run, one that contradicts `lora` or `encoder_blocks`, or a decoder rate above the
    stage's ceiling. The patterns of `encoder_blocks` need the tower: `with_last_blocks` puts them in.
    """
    for pattern, rate in stage.rates.items():
        check_pattern(pattern, rate, stage.rates)
    row = STAGES[stage.name]
    rates = row.rates
    if stage.lora is not None:
        check_beside_adapters(stage.rates)
        others = tuple((pattern, rate) for pattern, rate in rates if pattern != DECODER)
        rates = (*others, (ADAPTERS, row.lora_rate), (DECODER, None))
    if stage.encoder_blocks is not None:
        check_beside_blocks(stage.rates, stage.encoder_blocks)
    merged = (*stage.rates.items(), *((p, rate) for p, rate in rates if p not in stage.rates))
    of_row = row.max_decoder_rate if stage.lora is None else row.max_lora_rate
    ceiling = of_row if stage.max_decoder_rate is None else stage.max_decoder_rate
    check_ceiling(merged, ceiling, adapters=stage.lora is not None)
    return merged


def with_last_blocks(rates: Rates, blocks: Sequence[str]) -> Rates:
    """The patterns of a run with `encoder_blocks`: these blocks train at the encoder's rate, the rest of the encoder is frozen.

    blocks: the patterns of the blocks, such as "encoder.visual.blocks.11.*"; none: `rates` as they are.
    """
    if not blocks:
        return rates
    place = [pattern for pattern, _ in rates].index(ENCODER)
    rate = rates[place][1] or LAST_BLOCKS_RATE
    return (*rates[:place], *((block, rate) for block in blocks), (ENCODER, None), *rates[place + 1 :])


def assign_rates(names: Iterable[str], rates: Sequence[tuple[str, float | None]]) -> dict[str, float | None]:
    """The rate of every parameter name, or None where it is frozen. First match wins.

    Raises ConfigError, with the line that overrides it, for a parameter that no pattern covers, for a pattern that matches no
    parameter, and for one whose parameters all go to earlier patterns (a row's own may be hidden so): a renamed module must
    not stay frozen, or train, in silence.
    """
    names = list(names)
    assigned: dict[str, float | None] = {}
    winners: dict[str, str] = {}
    for name in names:
        winner = next(((p, rate) for p, rate in rates if fnmatchcase(name, p)), None)
        if winner is None:
            raise ConfigError(
                f"mmds.stage.rates: no pattern covers the parameter {name}: give it a rate, or freeze it with\n"
                f"    {set_rates({name: None})}"
            )
        winners[name], assigned[name] = winner
    check_acting(rates, winners, of_rows={ADAPTERS, *(p for row in STAGES.values() for p, _ in row.rates)})
    return assigned


def least_text_share(stage: StageSection) -> float:
    """The least share of text-only samples, 0..1: the run's own, else the row's."""
    return STAGES[stage.name].min_text_only if stage.min_text_only is None else stage.min_text_only


def check_text_share(share: float, stage: StageSection) -> None:
    """Refuse a mix whose share of text-only samples (0..1, by samples) is below the stage's; warn where the row only asks for some.

    Raises ConfigError, with the line that overrides it. Without text-only data language ability degrades, and
    evaluation on images alone does not show it.
    """
    least = least_text_share(stage)
    if share == 0 and stage.min_text_only is None and STAGES[stage.name].needs_trained:
        log.warning(
            'mmds.data.mix: no sample is text-only: stage "%s" may cost the model some of its language ability, which scores on '
            "images do not show; add some text-only conversations, or say that none is meant with\n"
            "    --set mmds.stage.min_text_only=0",
            stage.name,
        )
    if share < least:
        raise ConfigError(
            f'mmds.data.mix: {share:.1%} of the samples are text-only, stage "{stage.name}" wants at least '
            f"{least:.1%}: add text-only conversations to the mix, or override with\n"
            "    --set mmds.stage.min_text_only=0"
        )
