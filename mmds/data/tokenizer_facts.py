"""Facts about a transformers tokenizer: its template, its BOS habit, its identity."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from tokenizers import Tokenizer

from mmds.errors import DataError

_VERSION = 1
"""Of the rules that turn a conversation into ids and labels; a change of them must change every
fingerprint.
"""


def own_template(hf_tokenizer: Any) -> str:
    """The tokenizer's default chat template. Raises DataError when it has none."""
    try:
        return str(hf_tokenizer.get_chat_template())
    except ValueError as error:
        raise DataError(
            "the tokenizer has no chat template, so roles and ends of turns are unknown; take an "
            f"instruction-tuned tokenizer or give a template ({error})"
        ) from error


def added_bos(hf_tokenizer: Any) -> int | None:
    """The BOS id that the tokenizer puts before any text by itself, if it does."""
    bos = hf_tokenizer.bos_token_id
    return int(bos) if bos is not None and hf_tokenizer("a")["input_ids"][:1] == [bos] else None


def fingerprint_of(hf_tokenizer: Any, backend: Tokenizer, template: str) -> str:
    """16 hex digits that change with anything that changes ids or labels."""
    spec = json.loads(backend.to_str())
    for name in ("truncation", "padding"):  # settings of the last call, not of the tokenizer
        spec.pop(name, None)
    special = {name: str(token) for name, token in hf_tokenizer.special_tokens_map.items()}
    text = json.dumps([_VERSION, spec, template, special], sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]
