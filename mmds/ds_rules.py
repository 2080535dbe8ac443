"""What a key of DeepSpeed's may hold: the vocabulary in which `ds_keys` writes its tables. Imports nothing of DeepSpeed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Value:
    """A scalar of one kind ("boolean", "integer", "number", "string"), bounded or one of `choices`.

    `doc`: meaning with unit. `default`: what the run has when the key is absent; None = nothing, or decided by others.
    `any_case`: DeepSpeed reads the word in upper or lower case alike.
    """

    kind: str
    doc: str
    default: Any = None
    least: float | None = None
    most: float | None = None
    choices: tuple[str, ...] = ()
    any_case: bool = False
    required: bool = False


@dataclass(frozen=True)
class Pair:
    """A list of two numbers in [0, 1): Adam's betas."""

    doc: str
    default: tuple[float, float]


@dataclass(frozen=True)
class Only:
    """A key that may be written, but with this value alone, which is also the value of a run that leaves it out."""

    value: Any
    why: str


@dataclass(frozen=True)
class Refused:
    """A key that may not be written; `why` names the owner or the remedy."""

    why: str


@dataclass(frozen=True)
class Section:
    """An object with exactly these keys; used where DeepSpeed is lax."""

    doc: str
    keys: Mapping[str, Rule]


@dataclass(frozen=True)
class Model:
    """An object checked by DeepSpeed's own pydantic model "module:Class".

    `keys`: rules that are stricter than the model, or for names that the model does not have. `docs`: meanings of fields
    that DeepSpeed's source leaves without one.
    """

    doc: str
    target: str
    keys: Mapping[str, Rule] = field(default_factory=dict)
    docs: Mapping[str, str] = field(default_factory=dict)
    required: bool = False


Rule = Value | Pair | Only | Refused | Section | Model
