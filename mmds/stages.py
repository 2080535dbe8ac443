"""The stage table: what trains at which rate, and what a stage asks of its data.

The rate of a parameter is that of the first pattern (fnmatch, case-sensitive) that matches its name; `None`
is frozen. Names start with "encoder.", "connector." or "decoder.". A run may put patterns of its own before
the row's (`mmds.stage.rates`). Other words for the stages: align = LLaVA "pretrain" or stage 1; pretrain =
stage 1.5; instruct = LLaVA "finetune" or stage 2.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from mmds.config_types import StageSection
from mmds.errors import ConfigError

Rates = tuple[tuple[str, float | None], ...]

PARTS = ("encoder", "connector", "decoder")


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

    Raises ConfigError, with the line that overrides it, where a pattern or rate cannot be meant: no part's name, rate 0, a
    pattern hidden by an earlier one of the run, or a decoder rate above the stage's ceiling.
    """
    for pattern, rate in stage.rates.items():
        _check_pattern(pattern, rate, stage.rates)
    row = STAGES[stage.name].rates
    merged = (*stage.rates.items(), *((p, rate) for p, rate in row if p not in stage.rates))
    _check_ceiling(merged, stage)
    return merged


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
                f"    {_set_rates({name: None})}"
            )
        winners[name], assigned[name] = winner
    _check_acting(rates, winners)
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


def _check_pattern(pattern: str, rate: float | None, own: Mapping[str, float | None]) -> None:
    where = f'mmds.stage.rates: "{pattern}"'
    if not any(_may_match_below(pattern, f"{part}.") for part in PARTS):
        others = {p: r for p, r in own.items() if p != pattern}
        raise ConfigError(
            f'{where} can match nothing: names start with "encoder.", "connector." or "decoder.": correct it, or leave it '
            f"out with\n    {_replace_rates(others)}"
        )
    if rate is not None and rate <= 0:
        raise ConfigError(
            f"{where} has the rate {rate:g}: a rate is above 0, and frozen is null:\n"
            f"    {_replace_rates({**own, pattern: None})}"
        )
    for other in own:
        if other == pattern:
            return
        if _takes_all(other, pattern):
            swapped = [p for p in own if p != pattern]
            swapped.insert(swapped.index(other), pattern)
            raise ConfigError(
                f'{where} stands after "{other}", which takes all that it matches: put it before, as with\n'
                f"    {_replace_rates({p: own[p] for p in swapped})}"
            )


def _check_acting(rates: Sequence[tuple[str, float | None]], winners: Mapping[str, str]) -> None:
    """winners: the pattern that decides, for each parameter name."""
    acting, of_rows = set(winners.values()), {p for row in STAGES.values() for p, _ in row.rates}
    for pattern, _ in rates:
        matched = [name for name in winners if fnmatchcase(name, pattern)]
        if matched and (pattern in acting or pattern in of_rows):
            continue
        problem = f"matches no parameter (there are, e.g., {', '.join([*winners][:3]) or 'none'}): correct it"
        if matched:
            earlier = winners[matched[0]]
            problem = f'decides nothing, for all that it matches goes to earlier ones such as "{earlier}": put it before'
        rest: dict[str, float | None] = {}
        for other, rate in rates:
            if other != pattern and not any(_takes_all(before, other) for before in rest):
                rest[other] = rate
        raise ConfigError(
            f'mmds.stage.rates: "{pattern}" {problem}, or leave it out with\n    {_replace_rates(rest)}'
        )


def _check_ceiling(rates: Rates, stage: StageSection) -> None:
    row = STAGES[stage.name]
    ceiling = row.max_decoder_rate if stage.max_decoder_rate is None else stage.max_decoder_rate
    above: dict[str, float] = {}
    for pattern, rate in rates:
        if rate is not None and rate > ceiling and _may_match_below(pattern, "decoder."):
            above[pattern] = rate
        if _takes_all(pattern, "decoder.*"):
            break  # later patterns no longer reach the decoder
    if above:
        shown = ", ".join(f'"{pattern}" trains the decoder at {rate:g}' for pattern, rate in above.items())
        raise ConfigError(
            f"mmds.stage.rates: {shown}, above {ceiling:g}: a rate made for the connector alone destroys a pretrained decoder. "
            f"Lower it, or override with\n    --set mmds.stage.max_decoder_rate={json.dumps(max(above.values()))}"
        )


def _takes_all(first: str, second: str) -> bool:
    """Whether pattern `first` matches every name that pattern `second` does, judged by its shortest and by long unusual names."""
    longest = second.replace("*", "\0\0\0").replace("?", "\0")
    shortest = second.replace("*", "").replace("?", "\0")
    return fnmatchcase(longest, first) and fnmatchcase(shortest, first)


def _may_match_below(pattern: str, start: str) -> bool:
    """Whether a pattern can match some name that begins with `start`."""
    ends = (token.end() for token in re.finditer(r"\[!?\]?[^\]]*\]|.", pattern, re.DOTALL))
    return any(fnmatchcase(start, pattern[:end]) for end in ends)


def _set_rates(rates: Mapping[str, float | None]) -> str:
    """The words for a shell that put `rates` before all others."""
    return f"--set {shlex.quote('mmds.stage.rates=' + json.dumps(dict(rates)))}"


def _replace_rates(rates: Mapping[str, float | None]) -> str:
    """The words for a shell that make `rates` the only ones before the row's."""
    return "--set mmds.stage.rates=null" + (f" {_set_rates(rates)}" if rates else "")
