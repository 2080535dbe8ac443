"""DeepSpeed's part of the file, checked before DeepSpeed sees it.

DeepSpeed accepts unknown keys at its top level and in several sections without a word. Sections that it
parses with pydantic are checked by those very models; the rest is the table of `ds_keys`. A key that mmds
owns, or that could not act here, is refused with the reason.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from mmds.config_decode import own_keys, show
from mmds.config_load import Blame
from mmds.config_names import unknown_key
from mmds.ds_keys import TOP_LEVEL, Only, Pair, Refused, Rule, Section, Value
from mmds.jsonc import KeyPath


def check_deepspeed(section: Mapping[str, Any], where: Blame) -> None:
    """Check DeepSpeed's keys (the file without "mmds") at every depth; imports deepspeed.

    `where(key path, problem)` makes the error. Raises ConfigError for an unknown or refused key, a wrong type
    or value, "auto", and a combination that DeepSpeed cannot run.
    """
    _check_keys(section, TOP_LEVEL, (), where)
    _check_zero(section, where)


def _check_zero(section: Mapping[str, Any], where: Blame) -> None:
    """Combinations that DeepSpeed asserts on, or ignores (seen on 0.19.8)."""
    zero = section.get("zero_optimization")
    if zero is None or "stage" not in zero:
        path: KeyPath = ("zero_optimization",) if zero is None else ("zero_optimization", "stage")
        raise where(path, 'missing: write "zero_optimization": {"stage": 3} (0 to 3; 0 = no partitioning)')
    stage = zero["stage"]
    if stage < 2 and zero.get("overlap_comm"):
        path = ("zero_optimization", "overlap_comm")
        raise where(path, f"true has no effect at ZeRO-{stage}: take the key out, or use ZeRO-2 or ZeRO-3")
    if stage == 0 and section.get("bf16", {}).get("enabled"):
        path = ("zero_optimization", "stage")
        raise where(path, "DeepSpeed has no bf16 with fp32 gradient accumulation at ZeRO-0: write 1")
    if stage == 0 and zero.get("offload_optimizer", {}).get("device", "none") != "none":
        path = ("zero_optimization", "offload_optimizer")
        raise where(path, "ZeRO-0 has no optimizer states to offload: use ZeRO-1, 2 or 3")


def _check_keys(section: Mapping[str, Any], keys: Mapping[str, Rule], path: KeyPath, where: Blame) -> None:
    for key, value in section.items():
        if key not in keys:
            raise where((*path, key), unknown_key((*path, key), keys, own_keys()))
        _check(value, keys[key], (*path, key), where)


def _check(value: Any, rule: Rule, path: KeyPath, where: Blame) -> None:
    if isinstance(rule, Refused):
        raise where(path, rule.why)
    _refuse_auto(value, path, where)
    if isinstance(rule, Only):
        if value != rule.value or isinstance(value, bool) != isinstance(rule.value, bool):
            raise where(path, f"must be absent or {show(rule.value)}, got {show(value)}: {rule.why}")
    elif isinstance(rule, Value):
        _check_value(value, rule, path, where)
    elif isinstance(rule, Pair):
        if not (
            isinstance(value, list)
            and len(value) == 2
            and all(_kind(v) == "number" and 0 <= v < 1 for v in value)
        ):
            raise where(
                path, f"expected two numbers from 0 to below 1, as in [0.9, 0.999], got {show(value)}"
            )
    elif not isinstance(value, dict):
        raise where(path, f"expected an object {{...}}, got {show(value)}")
    elif isinstance(rule, Section):
        _check_keys(value, rule.keys, path, where)
    else:
        module, name = rule.target.split(":")
        _check_model(value, getattr(importlib.import_module(module), name), rule.keys, path, where)


def _check_value(value: Any, rule: Value, path: KeyPath, where: Blame) -> None:
    right = (
        _kind(value) == "number" and isinstance(value, int)
        if rule.kind == "integer"
        else _kind(value) == rule.kind
    )
    if not right:
        article = "an" if rule.kind == "integer" else "a"
        raise where(path, f"expected {article} {rule.kind}, got {show(value)}")
    if rule.choices and value.lower() not in [choice.lower() for choice in rule.choices]:
        raise where(
            path, f"expected one of {', '.join(rule.choices)}, got {show(value)} (others are not supported)"
        )
    if rule.least is not None and value < rule.least:
        raise where(path, f"expected at least {rule.least}, got {show(value)}")
    if rule.most is not None and value > rule.most:
        raise where(path, f"expected at most {rule.most}, got {show(value)}")


def _check_model(
    value: dict[str, Any], model: Any, keys: Mapping[str, Rule], path: KeyPath, where: Blame
) -> None:
    """Let the pydantic `model` parse `value`; refuse what it converts in silence ("3" -> 3, 1 -> true)."""
    from pydantic import BaseModel, ValidationError

    attributes = {spec.alias or name: name for name, spec in model.model_fields.items()}
    attributes |= {name: name for name in model.model_fields}
    for key, item in value.items():
        if key not in attributes:
            raise where((*path, key), unknown_key((*path, key), attributes, own_keys()))
        if key in keys:
            _check(item, keys[key], (*path, key), where)
    if len({attributes[key] for key in value}) < len(value):
        twice = next(key for key in value if key != attributes[key] and attributes[key] in value)
        raise where((*path, twice), f'the same setting as "{attributes[twice]}": give one of them')
    try:
        parsed = model(**value)
    except ValidationError as error:
        first = error.errors()[0]
        raise where((*path, *first["loc"]), f"{first['msg']}, got {show(first['input'])}") from None
    for key, item in value.items():
        result = getattr(parsed, attributes[key], None)
        if isinstance(result, BaseModel) and isinstance(item, dict):
            _check_model(item, type(result), {}, (*path, key), where)
        elif item is not None and _kind(result) not in (_kind(item), "other"):
            raise where((*path, key), f"expected a {_kind(result)}, got {show(item)}")


def _kind(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, (int, float)):
        return "number"
    kinds: dict[type, str] = {str: "string", list: "list", dict: "object"}
    return kinds.get(type(value), "other")


def _refuse_auto(value: Any, path: KeyPath, where: Blame) -> None:
    """DeepSpeed passes "auto" on as a string or drops it; only launchers that fill it in may write it."""
    if value == "auto":
        raise where(
            path, '"auto" has no meaning here: write the value, or take the key out for DeepSpeed\'s default'
        )
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        _refuse_auto(item, (*path, key), where)
