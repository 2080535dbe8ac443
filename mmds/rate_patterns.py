"""Patterns of rates: what they match, and the refusal of those that cannot be meant, with the line that overrides.

A pattern (fnmatch, case-sensitive) stands for the parameters whose whole name it matches; of several the first decides.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Collection, Mapping, Sequence
from fnmatch import fnmatchcase

from mmds.errors import ConfigError

Rates = tuple[tuple[str, float | None], ...]

PARTS = ("encoder", "connector", "decoder")

ENCODER, DECODER = "encoder.*", "decoder.*"
ADAPTERS = "decoder.*.lora_*"
"""The adapters' matrices, which are named after the linear modules that they stand beside."""


def check_pattern(pattern: str, rate: float | None, own: Mapping[str, float | None]) -> None:
    """Refuse a pattern or rate of a run that cannot be meant. own: all of the run's patterns, in order."""
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


def check_beside_adapters(own: Mapping[str, float | None]) -> None:
    """With adapters the decoder's weights are frozen, and the adapters are not."""
    for pattern, rate in own.items():
        others = {p: r for p, r in own.items() if p != pattern}
        if rate is None and _takes_all(pattern, ADAPTERS):
            raise ConfigError(
                f'mmds.stage.rates: "{pattern}" freezes the adapters of mmds.stage.lora as well: leave it out (the '
                f"decoder's own weights are frozen without it) with\n    {_replace_rates(others)}"
            )
        if rate is not None and ".lora_" not in pattern and _may_match_below(pattern, "decoder."):
            raise ConfigError(
                f'mmds.stage.rates: "{pattern}" would train the decoder\'s own weights, which mmds.stage.lora freezes: name '
                f'the adapters ("{ADAPTERS}") or another part, as in\n    {_replace_rates({**others, ADAPTERS: rate})}'
            )


def check_beside_blocks(own: Mapping[str, float | None], blocks: int) -> None:
    """Of the whole encoder a run with `encoder_blocks` may give the rate of its last blocks, and nothing else."""
    for pattern, rate in own.items():
        if _takes_all(pattern, ENCODER) and (pattern != ENCODER or rate is None):
            raise ConfigError(
                f'mmds.stage.rates: "{pattern}" decides for the whole encoder, and mmds.stage.encoder_blocks for its last '
                f"{blocks} blocks: take one of the two out, as in\n    --set mmds.stage.encoder_blocks=null"
            )


def check_acting(
    rates: Sequence[tuple[str, float | None]], winners: Mapping[str, str], *, of_rows: Collection[str]
) -> None:
    """Refuse a pattern that matches or decides nothing.

    winners: the pattern that decides, for each parameter name. of_rows: the table's own patterns, which may be hidden.
    """
    acting = set(winners.values())
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


def check_ceiling(rates: Rates, ceiling: float, *, adapters: bool) -> None:
    """Refuse a rate above the ceiling on decoder parameters, which with `adapters` are those of LoRA."""
    above: dict[str, float] = {}
    for pattern, rate in rates:
        if rate is not None and rate > ceiling and _may_match_below(pattern, "decoder."):
            above[pattern] = rate
        if _takes_all(pattern, "decoder.*"):
            break  # later patterns no longer reach the decoder
    if above:
        what, why = "decoder", "a rate made for the connector alone destroys a pretrained decoder"
        if adapters:
            what, why = "decoder's adapters", "adapters do not settle at such a rate"
        shown = ", ".join(f'"{pattern}" trains the {what} at {rate:g}' for pattern, rate in above.items())
        raise ConfigError(
            f"mmds.stage.rates: {shown}, above {ceiling:g}: {why}. "
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


def set_rates(rates: Mapping[str, float | None]) -> str:
    """The words for a shell that put `rates` before all others."""
    return f"--set {shlex.quote('mmds.stage.rates=' + json.dumps(dict(rates)))}"


def _replace_rates(rates: Mapping[str, float | None]) -> str:
    """The words for a shell that make `rates` the only ones before the row's."""
    return "--set mmds.stage.rates=null" + (f" {set_rates(rates)}" if rates else "")
