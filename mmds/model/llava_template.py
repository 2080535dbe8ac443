"""Chat templates of LLaVA processors and ours: theirs iterate over parts of a turn, ours take a turn's content as one string."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from mmds.errors import CheckpointError

IMAGE = "<image>"

_STRINGS_TO_PARTS = """\
{%- set turns = namespace(all=[]) -%}
{%- for turn in messages -%}
{%- if turn['content'] is string -%}
{%- set turns.all = turns.all + [dict(turn, content=[{'type': 'text', 'text': turn['content']}])] -%}
{%- else -%}
{%- set turns.all = turns.all + [turn] -%}
{%- endif -%}
{%- endfor -%}
{%- set messages = turns.all -%}
"""

_PARTS_TO_STRINGS = """\
{%- set joined = namespace(all=[]) -%}
{%- for turn in messages -%}
{%- if turn['content'] is string -%}
{%- set joined.all = joined.all + [turn] -%}
{%- else -%}
{%- set said = namespace(text='', image=false) -%}
{%- for part in turn['content'] -%}
{%- if part['type'] == 'text' -%}
{%- set gap = '\\n' if said.image and not part['text'].startswith('\\n') else '' -%}
{%- set said.text = said.text + gap + part['text'] -%}
{%- set said.image = false -%}
{%- elif part['type'] in ('image', 'image_url') -%}
{%- set said.text = said.text + ('\\n' if said.image else '') + '<image>' -%}
{%- set said.image = true -%}
{%- endif -%}
{%- endfor -%}
{%- set joined.all = joined.all + [dict(turn, content=said.text)] -%}
{%- endif -%}
{%- endfor -%}
{%- set messages = joined.all -%}
"""

VICUNA = (
    "{% for turn in messages %}"
    "{% if turn['role'] == 'system' %}{{ turn['content'] + ' ' }}"
    "{% elif turn['role'] == 'user' %}{{ 'USER: ' + turn['content'] + ' ' }}"
    "{% else %}{{ 'ASSISTANT: ' + turn['content'] + eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)
MISTRAL = (
    "{% for turn in messages %}"
    "{% if turn['role'] == 'system' %}{{ '<<SYS>>\\n' + turn['content'] + '\\n<</SYS>>\\n\\n' }}"
    "{% elif turn['role'] == 'user' %}{{ '[INST] ' + turn['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + turn['content'] + eos_token }}{% endif %}{% endfor %}"
)
_KNOWN = {"llama": VICUNA, "mistral": MISTRAL}
"""How LLaVA was trained to speak, by the decoder's family, where the files do not say it or do not end the assistant's turns.

As in the published templates none writes a BOS: these families' tokenizers put it before a prompt themselves.
"""

_SAID = ("Question-1", "Answer-1", "Question-2", "Answer-2")


def source_template(folder: Path, tokenizer: Any) -> str | None:
    """The chat template of a LLaVA folder: the processor's, else the tokenizer's, else None."""
    jinja = folder / "chat_template.jinja"
    if jinja.is_file():
        return jinja.read_text(encoding="utf-8")
    for name in ("chat_template.json", "processor_config.json"):
        file = folder / name
        if file.is_file() and "chat_template" in (data := json.loads(file.read_text(encoding="utf-8"))):
            return str(data["chat_template"])
    own = getattr(tokenizer, "chat_template", None)
    return own if isinstance(own, str) else None


def imported_template(tokenizer: Any, source: str | None, family: str) -> tuple[str, str]:
    """(a template that takes a turn's content as a string, where it comes from). family: the decoder's model_type.

    The source's own is kept where it ends the assistant's turns with a control token, which a model needs to learn to stop (that of
    `llava-1.5-*-hf` does not); else the known form of the family that gives the same prompt. Raises CheckpointError when there is none.
    """
    candidate = None if source is None else _taking_strings(tokenizer, source)
    if candidate is not None and _ends_turns(tokenizer, candidate):
        return candidate, "the source's own"
    known = _KNOWN.get(family)
    if known is not None and (
        candidate is None or _prompt(tokenizer, known) == _prompt(tokenizer, candidate)
    ):
        why = (
            "there is no template"
            if candidate is None
            else "the source's own does not end the assistant's turns"
        )
        return known, f"LLaVA's form for {family} decoders, as {why}"
    problem = "has no chat template" if source is None else "has a chat template that ends no assistant turn"
    raise CheckpointError(
        f"the source {problem}, and LLaVA's form for {family!r} decoders is not known; put a chat_template.jinja that "
        "writes a control token after each assistant turn into its folder"
    )


def processor_template(template: str) -> str:
    """Our template for a processor of transformers: contents may also be parts, whose images become `<image>`.

    An image is followed by a line break unless the text after it starts with one, as chat.py and LLaVA's data write it.
    """
    return _PARTS_TO_STRINGS + template


def render(tokenizer: Any, template: str, turns: list[tuple[str, str]], *, prompt: bool = False) -> str:
    """Turns (role, content) as text. prompt: up to where the assistant is to answer."""
    messages = [{"role": role, "content": content} for role, content in turns]
    return str(
        tokenizer.apply_chat_template(
            messages, chat_template=template, tokenize=False, add_generation_prompt=prompt
        )
    )


def _conversation() -> list[tuple[str, str]]:
    return list(zip(("user", "assistant") * 2, _SAID, strict=True))


def _taking_strings(tokenizer: Any, source: str) -> str:
    """The template itself when it takes strings, else with its contents turned into parts first."""
    try:
        text = render(tokenizer, source, _conversation())
    except Exception:  # noqa: BLE001  a template that wants parts may raise anything for a string
        text = ""
    plain = all(text.count(said) == 1 for said in _SAID) and "'text'" not in text
    return source if plain else _STRINGS_TO_PARTS + source


def _ends_turns(tokenizer: Any, template: str) -> bool:
    """Whether both assistant turns of a conversation are closed alike, with a control token."""
    try:
        text = render(tokenizer, template, _conversation())
    except Exception:  # noqa: BLE001  a template may raise anything; another one is then looked for
        return False
    if any(text.count(said) != 1 for said in _SAID):
        return False
    _, _, rest = text.partition(_SAID[1])
    between, _, rest = rest.partition(_SAID[2])
    tokens = [t.content for t in tokenizer.added_tokens_decoder.values() if t.special]
    pattern = "|".join(re.escape(token) for token in sorted(tokens, key=len, reverse=True)) or r"(?!)"
    closings = []
    for after in (between, rest.partition(_SAID[3])[2]):
        match = re.search(pattern, after)
        closings.append(after[: match.end()] if match else None)
    return closings[0] is not None and closings[0] == closings[1]


def _prompt(tokenizer: Any, template: str) -> str:
    text = render(tokenizer, template, [("user", _SAID[0])], prompt=True)
    return text.removeprefix(tokenizer.bos_token or "").rstrip()
