"""The stage table: what trains at which rate, and what a stage asks of its data.

The rate of a parameter is that of the first pattern (fnmatch, case-sensitive) that matches its name; `None`
is frozen. Names start with "encoder.", "connector." or "decoder.". A run may put patterns of its own before
the row's (`mmds.stage.rates`). Other words for the stages: align = LLaVA "pretrain" or stage 1; pretrain =
stage 1.5; instruct = LLaVA "finetune" or stage 2.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from mmds.config_types import StageSection
from mmds.errors import ConfigError

Rates = tuple[tuple[str, float | None], ...]


@dataclass(frozen=True, kw_only=True)
class StageRow:
    """One row of the table."""

    name: str
    rates: Rates  # (pattern, peak learning rate or None = frozen), first match wins
    max_pixels: int  # height x width, most that the encoder receives for one image
    min_text_only: float  # least share of samples without an image, 0..1
    max_decoder_rate: float  # a higher rate on decoder parameters is refused


STAGES: Mapping[str, StageRow] = {
    "align": StageRow(
        name="align",
        rates=(("encoder.*", None), ("connector.*", 1e-3), ("decoder.*", None)),
        max_pixels=672 * 672,
        min_text_only=0.0,
        max_decoder_rate=2e-4,
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
}


def stage_rates(stage: StageSection) -> Rates:
    """The ordered patterns of a run: its own first, then the row's (less those that the run repeats).

    Raises ConfigError where a pattern or rate cannot be meant: no part's name, rate 0, a pattern hidden by an
    earlier one of the run, or a decoder rate above the stage's ceiling.
    """
    own = tuple(stage.rates.items())
    for position, (pattern, rate) in enumerate(own):
        _check_pattern(pattern, rate, earlier=[p for p, _ in own[:position]])
    merged = own + tuple((p, rate) for p, rate in STAGES[stage.name].rates if p not in stage.rates)
    _check_ceiling(merged, stage)
    return merged


def assign_rates(names: Iterable[str], rates: Sequence[tuple[str, float | None]]) -> dict[str, float | None]:
    """The rate of every parameter name, or None where it is frozen. First match wins.

    Raises ConfigError for a parameter that no pattern covers, and for a pattern that matches no parameter: a
    renamed module must not stay frozen, or train, in silence.
    """
    names = list(names)
    assigned: dict[str, float | None] = {}
    for name in names:
        for pattern, rate in rates:
            if fnmatchcase(name, pattern):
                assigned[name] = rate
                break
        else:
            raise ConfigError(
                f"mmds.stage.rates: no pattern covers the parameter {name}: add a pattern with rate or null"
            )
    for pattern, _ in rates:
        if not any(fnmatchcase(name, pattern) for name in names):
            near = ", ".join(names[:3]) or "none"
            raise ConfigError(
                f'mmds.stage.rates: "{pattern}" matches no parameter (there are, e.g., {near}): correct it'
            )
    return assigned


def least_text_share(stage: StageSection) -> float:
    """The least share of text-only samples, 0..1: the run's own, else the row's."""
    return STAGES[stage.name].min_text_only if stage.min_text_only is None else stage.min_text_only


def check_text_share(share: float, stage: StageSection) -> None:
    """Refuse a mix whose share of text-only samples (0..1, by samples) is below the stage's.

    Raises ConfigError, with the line that overrides it. Without text-only data language ability degrades, and
    evaluation on images alone does not show it.
    """
    least = least_text_share(stage)
    if share < least:
        raise ConfigError(
            f'mmds.data.mix: {share:.1%} of the samples are text-only, stage "{stage.name}" wants at least '
            f"{least:.1%}: add text-only conversations to the mix, or override with\n"
            "    --set mmds.stage.min_text_only=0"
        )


def _check_pattern(pattern: str, rate: float | None, earlier: Sequence[str]) -> None:
    where = f'mmds.stage.rates: "{pattern}"'
    if pattern[:1] not in ("*", "?", "[") and not pattern.startswith(("encoder", "connector", "decoder")):
        raise ConfigError(
            f'{where} can match nothing: names start with "encoder.", "connector." or "decoder."'
        )
    if rate is not None and rate <= 0:
        raise ConfigError(f"{where} has the rate {rate:g}: a rate is above 0, and frozen is null")
    for other in earlier:
        if fnmatchcase(pattern, other):
            raise ConfigError(
                f'{where} stands after "{other}", which takes all that it matches: put it before'
            )


def _check_ceiling(rates: Rates, stage: StageSection) -> None:
    row = STAGES[stage.name]
    ceiling = row.max_decoder_rate if stage.max_decoder_rate is None else stage.max_decoder_rate
    for pattern, rate in rates:
        touches_decoder = pattern.startswith("decoder") or fnmatchcase(
            "decoder.model.layers.0.weight", pattern
        )
        if rate is not None and rate > ceiling and touches_decoder:
            raise ConfigError(
                f'mmds.stage.rates: "{pattern}" trains the decoder at {rate:g}, above {ceiling:g}: a rate '
                f"made for the connector alone destroys a pretrained decoder. Lower it, or override with\n"
                f"    --set mmds.stage.max_decoder_rate={rate:g}"
            )
        if pattern in ("decoder.*", "*"):
            return  # later patterns no longer reach the decoder
