"""DeepSpeed's part of the file, checked before DeepSpeed sees it.

DeepSpeed accepts unknown keys at its top level and in several sections without a word. Sections that it
parses with pydantic are checked by those very models; the rest is the table of `ds_keys`. A key that mmds
owns, or that could not act here, is refused with the reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mmds.config_load import Blame
from mmds.config_names import unknown_key
from mmds.config_text import AUTO, bounds_text, show
from mmds.ds_keys import TOP_LEVEL
from mmds.ds_models import load_model, written_names
from mmds.ds_rules import Model, Only, Pair, Refused, Rule, Section, Value
from mmds.jsonc import KeyPath


def check_deepspeed(section: Mapping[str, Any], where: Blame) -> None:
    """Check DeepSpeed's keys (the file without "mmds") at every depth; imports deepspeed.

    `where(key path, problem)` makes the error. Raises ConfigError for an unknown or refused key, a wrong type
    or value, "auto", and a combination that DeepSpeed cannot run, or in which one key makes another one idle.
    """
    _check_keys(section, TOP_LEVEL, (), where)
    _check_zero(section, where)
    _check_batch(section, where)
    _check_optimizer(section, where)
    bf16 = section.get("bf16", {}).get("enabled", False)
    if section.get("data_types", {}).get("grad_accum_dtype", "fp32") == "bf16" and not bf16:
        path: KeyPath = ("data_types", "grad_accum_dtype")
        raise where(path, 'bf16 needs "bf16": {"enabled": true}: without it the run is fp32 throughout')


def _check_zero(section: Mapping[str, Any], where: Blame) -> None:
    """What DeepSpeed asserts on, or ignores (seen on 0.19.8)."""
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


def _check_batch(section: Mapping[str, Any], where: Blame) -> None:
    rows, accumulation = section.get("train_batch_size"), section.get("gradient_accumulation_steps")
    path: KeyPath = ("train_batch_size",)
    if rows is None and accumulation is None:
        raise where(
            path, "missing: give the rows of one step over all ranks (or gradient_accumulation_steps)"
        )
    if rows is not None and accumulation is not None and rows % accumulation:
        raise where(
            path,
            f"{rows} rows are no multiple of gradient_accumulation_steps {accumulation}, so no number of ranks fits: "
            f"give one of the two, as in --set gradient_accumulation_steps=null",
        )


def _check_optimizer(section: Mapping[str, Any], where: Blame) -> None:
    optimizer = section.get("optimizer", {})
    adamw = optimizer.get("type", "AdamW").lower() == "adamw"
    if adamw and not optimizer.get("params", {}).get("adam_w_mode", True):
        path: KeyPath = ("optimizer", "params", "adam_w_mode")
        raise where(path, 'false has no effect on AdamW: write "type": "Adam", or take the key out')


def _check_keys(section: Mapping[str, Any], keys: Mapping[str, Rule], path: KeyPath, where: Blame) -> None:
    for key, value in section.items():
        if key not in keys:
            raise where((*path, key), unknown_key((*path, key), keys))
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
        raise where(path, f"expected an object {{...}}, got {show(value)}{_as_switch(value, rule, path)}")
    elif isinstance(rule, Section):
        _check_keys(value, rule.keys, path, where)
    else:
        _check_model(value, load_model(rule), rule.keys, path, where)


def _as_switch(value: Any, rule: Section | Model, path: KeyPath) -> str:
    """What `true` for a section was meant to say, where the section has a switch."""
    keys = rule.keys if isinstance(rule, Section) else written_names(load_model(rule))
    if not isinstance(value, bool) or "enabled" not in keys:
        return ""
    return f': write "{path[-1]}": {{"enabled": {show(value)}}}'


def _check_value(value: Any, rule: Value, path: KeyPath, where: Blame) -> None:
    right = (
        _kind(value) == "number" and isinstance(value, int)
        if rule.kind == "integer"
        else _kind(value) == rule.kind
    )
    if not right:
        article = "an" if rule.kind == "integer" else "a"
        raise where(path, f"expected {article} {rule.kind}, got {show(value)}")
    word = str.lower if rule.any_case else str
    if rule.choices and word(value) not in [word(choice) for choice in rule.choices]:
        raise where(
            path, f"expected one of {', '.join(rule.choices)}, got {show(value)} (others are not supported)"
        )
    least, most = rule.least, rule.most
    if (least is not None and value < least) or (most is not None and value > most):
        raise where(path, f"expected {bounds_text(least, None, most)}, got {show(value)} ({rule.doc})")


def _check_model(
    value: dict[str, Any], model: Any, keys: Mapping[str, Rule], path: KeyPath, where: Blame
) -> None:
    """Let the pydantic `model` parse `value`; refuse what it converts in silence ("3" -> 3, 1 -> true)."""
    from pydantic import BaseModel, ValidationError

    attributes = written_names(model)
    for key, item in value.items():
        if key in keys:
            _check(item, keys[key], (*path, key), where)
        elif key not in attributes:
            raise where((*path, key), unknown_key((*path, key), attributes))
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
        raise where(path, f"{AUTO}, or take the key out for DeepSpeed's default")
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        _refuse_auto(item, (*path, key), where)
