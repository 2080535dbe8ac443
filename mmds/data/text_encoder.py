"""Tokenising text in which nothing is a control token, and telling where control tokens are.

A chat template writes control tokens; people write text. Text is encoded by a private copy of the tokenizer
in which control strings match nothing, so that a typed "<|im_end|>" becomes the characters it consists of,
and never the token.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from tokenizers import AddedToken, Tokenizer

_SHORT = 48
"""Most characters of a text whose encoding is remembered: headers and the like come again and again."""


@dataclass(frozen=True, kw_only=True)
class Control:
    """A control token. eats_left, eats_right: the tokenizer drops the white space before, after it."""

    id: int
    text: str
    eats_left: bool = False
    eats_right: bool = False


@dataclass(frozen=True, kw_only=True)
class EncodedText:
    """Token ids of one text and the character span [start, end) of each."""

    ids: tuple[int, ...]
    spans: tuple[tuple[int, int], ...]


def control_tokens(added: Mapping[int, AddedToken], template: str) -> tuple[Control, ...]:
    """The control tokens among added tokens: all special ones, and those in the template's source.

    Added tokens of white space only are ordinary text. added: token id -> token; template: Jinja source.
    """
    return tuple(
        Control(id=i, text=token.content, eats_left=token.lstrip, eats_right=token.rstrip)
        for i, token in sorted(added.items())
        if token.special or (token.content in template and not token.content.isspace())
    )


class TextEncoder:
    """Encodes text as a fast tokenizer does, except that control strings stay text."""

    def __init__(self, backend: Tokenizer, controls: Iterable[Control]) -> None:
        """backend: copied, never changed. controls: what must never match."""
        self.controls = tuple(controls)
        spec = _without_controls(json.loads(backend.to_str()), [control.text for control in self.controls])
        self._first = _load(spec)
        self._later = _load(spec | {"pre_tokenizer": _never_prepend(spec["pre_tokenizer"])})
        self._unknown = _unknown_id(spec)
        self._forbidden = {control.id for control in self.controls} - {self._unknown}
        texts = sorted((control.text for control in self.controls), key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, texts)) or r"(?!)")
        self._encode_short = lru_cache(maxsize=4096)(self._encode)
        self._by_text = {control.text: control for control in self.controls}

    def encode(self, text: str, *, at_start: bool) -> EncodedText:
        """Encode one text. at_start: it opens the prompt, where some tokenizers put a space before it."""
        return (self._encode_short if len(text) <= _SHORT else self._encode)(text, at_start)

    def _encode(self, text: str, at_start: bool) -> EncodedText:
        encoding = (self._first if at_start else self._later).encode(text, add_special_tokens=False)
        assert self._forbidden.isdisjoint(encoding.ids), f"a control token came out of the text {text[:60]!r}"
        return EncodedText(ids=tuple(encoding.ids), spans=tuple(encoding.offsets))

    def has_unknown(self, ids: Iterable[int]) -> bool:
        """Whether some characters of a text were lost to the unknown token."""
        return self._unknown is not None and self._unknown in ids

    def canonical(self, text: str) -> str:
        """The text as decoding can give it back: in the tokenizer's Unicode form, with "▁" as a space."""
        normalizer = self._first.normalizer
        return (text if normalizer is None else str(normalizer.normalize_str(text))).replace("▁", " ")

    def split_controls(self, text: str) -> Iterator[str | Control]:
        """Text that a template wrote, cut at its control tokens; empty texts are left out."""
        end = 0
        for match in self._pattern.finditer(text):
            if match.start() > end:
                yield text[end : match.start()]
            yield self._by_text[match.group()]
            end = match.end()
        if end < len(text):
            yield text[end:]


def _load(spec: dict[str, Any]) -> Tokenizer:
    tokenizer = Tokenizer.from_str(json.dumps(spec))
    tokenizer.encode_special_tokens = True  # "encode" as text: special tokens are not looked for
    return tokenizer


def _without_controls(spec: dict[str, Any], texts: list[str]) -> dict[str, Any]:
    """A tokenizer's JSON in which the given tokens match no text: flagged special, and renamed.

    The new names hold NUL and blanks, which no pre-tokenizer in use lets through as one token; `encode`
    checks the result. The post-processor goes, as it would only add tokens and trim white space from
    character spans.
    """
    renamed = {text: f" \x00control {i}\x00 " for i, text in enumerate(texts)}
    model = dict(spec["model"])
    vocabulary = model["vocab"]
    if isinstance(vocabulary, dict):
        model["vocab"] = {renamed.get(token, token): i for token, i in vocabulary.items()}
    else:  # Unigram: [token, score]
        model["vocab"] = [[renamed.get(token, token), score] for token, score in vocabulary]
    if model.get("unk_token") in renamed:
        model["unk_token"] = renamed[model["unk_token"]]
    if "merges" in model:
        merges = [
            tuple(merge.split(" ", 1)) if isinstance(merge, str) else tuple(merge)
            for merge in model["merges"]
        ]
        model["merges"] = [
            (a, b) for a, b in merges if a not in renamed and b not in renamed and a + b not in renamed
        ]
    added = [
        token | {"content": renamed[token["content"]], "special": True}
        if token["content"] in renamed
        else token
        for token in spec["added_tokens"]
    ]
    none: dict[str, Any] = {"post_processor": None, "truncation": None, "padding": None}
    return spec | none | {"model": model, "added_tokens": added}


def _never_prepend(pre_tokenizer: dict[str, Any] | None) -> dict[str, Any] | None:
    """A pre-tokenizer for text inside the prompt: one that prepends a space "first" prepends none."""
    if pre_tokenizer is None:
        return None
    if pre_tokenizer["type"] == "Sequence":
        return pre_tokenizer | {
            "pretokenizers": [_never_prepend(inner) for inner in pre_tokenizer["pretokenizers"]]
        }
    if pre_tokenizer.get("prepend_scheme") == "first":
        return pre_tokenizer | {"prepend_scheme": "never"}
    return pre_tokenizer


def _unknown_id(spec: dict[str, Any]) -> int | None:
    """Id of the unknown token of a tokenizer's JSON, if its model has one."""
    model = spec["model"]
    if model.get("unk_id") is not None:
        return int(model["unk_id"])
    token = model.get("unk_token")
    found = model["vocab"].get(token) if isinstance(model["vocab"], dict) and token is not None else None
    return None if found is None else int(found)
