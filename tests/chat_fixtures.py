"""Tiny fast tokenizers and chat templates that behave like the published families, made on the spot (no
download).

byte_level: GPT-2/Qwen/Llama-3 kind (byte-level BPE, no prefix space). prepend: Llama-2 kind (a prefix space
for every text between control tokens). metaspace_first: newer Llama-2 kind (prefix space only where the
prompt starts). unigram: sentencepiece unigram, whose vocabulary itself holds the control strings.
"""

from __future__ import annotations

import json
from collections.abc import Callable

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast

CONTROLS = (
    "<s>",
    "</s>",
    "<|im_start|>",
    "<|im_end|>",
    "<|begin_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<bos>",
    "<start_of_turn>",
    "<end_of_turn>",
    "<|user|>",
    "<|assistant|>",
    "<|end|>",
)

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

CHATML_DEFAULT_SYSTEM = (
    "{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}{% endif %}"
    + CHATML
)

LLAMA2 = (
    "{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}"
    "{% set system_message = messages[0]['content'] %}"
    "{% else %}{% set loop_messages = messages %}{% set system_message = false %}{% endif %}"
    "{% for message in loop_messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if loop.index0 == 0 and system_message != false %}"
    "{% set content = '<<SYS>>\n' + system_message + '\n<</SYS>>\n\n' + message['content'] %}"
    "{% else %}{% set content = message['content'] %}{% endif %}"
    "{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ ' ' + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)

LLAMA3 = (
    "{% for m in messages %}{% set content = '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n'"
    " + m['content'] | trim + '<|eot_id|>' %}"
    "{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)

GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}{% if m['role'] == 'assistant' %}{% set role = 'model' %}"
    "{% else %}{% set role = m['role'] %}{% endif %}"
    "{{ '<start_of_turn>' + role + '\n' + m['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)

VICUNA = (
    "{% if messages[0]['role'] == 'system' %}{{ messages[0]['content'] + ' ' }}"
    "{% set rest = messages[1:] %}{% else %}{% set rest = messages %}{% endif %}"
    "{% for m in rest %}{% if m['role'] == 'user' %}{{ 'USER: ' + m['content'] + ' ' }}"
    "{% else %}{{ 'ASSISTANT: ' + m['content'] + eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)

PHI3 = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>\n' + m['content'] + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"
)

MISTRAL = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + m['content'] + eos_token }}{% endif %}{% endfor %}"
)

TEMPLATES = {
    "chatml": CHATML,
    "chatml_default_system": CHATML_DEFAULT_SYSTEM,
    "llama2": LLAMA2,
    "llama3": LLAMA3,
    "gemma": GEMMA,
    "vicuna": VICUNA,
    "mistral": MISTRAL,
    "phi3": PHI3,
}

_CORPUS = [
    "the cat sat on the mat. What is in the picture? Describe it in detail: colours, shapes and 12 numbers.",
    "system user assistant model USER: ASSISTANT: [INST] [/INST] <<SYS>> <</SYS>> hello world, how many are there?",
    "You are a helpful assistant. Be brief, and exact. There are 3 of them. I counted.\n\n- one\n- two\n",
    "café naïve 中文 émoji 🙂 <image> <|im_end|> </s> tab\tand  two spaces",
    "a\n\nb\n\nc:\n\nd.\n\ne\n\n\nf\n\n",
] * 8

_QWEN_SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def byte_level(*, regex: str = "gpt2") -> Tokenizer:
    """Byte-level BPE; regex "gpt2" or "qwen" (which joins line breaks to punctuation and to each other)."""
    tokenizer = Tokenizer(models.BPE())
    if regex == "gpt2":
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        tokenizer.normalizer = normalizers.NFC()
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(_QWEN_SPLIT), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    trainer = trainers.BpeTrainer(
        vocab_size=560,
        special_tokens=list(CONTROLS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    return tokenizer


def _sentencepiece_bpe() -> Tokenizer:
    """BPE with byte tokens for unseen characters, as in Llama 2: no piece holds a line break or a space
    inside or at its end.
    """
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="always", split=True)
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=["<unk>", *CONTROLS, *(f"<0x{byte:02X}>" for byte in range(256))],
        show_progress=False,
    )
    tokenizer.train_from_iterator([line for text in _CORPUS for line in text.split("\n")], trainer)
    spec = json.loads(tokenizer.to_str())
    spec["added_tokens"] = [token for token in spec["added_tokens"] if not token["content"].startswith("<0x")]
    trained = Tokenizer.from_str(json.dumps(spec))
    trained.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return _bos_adding(trained)


def prepend() -> Tokenizer:
    """Llama-2's first fast tokenizer: a normalizer puts a space before every text, no pre-tokenizer."""
    tokenizer = _sentencepiece_bpe()
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.pre_tokenizer = None
    return tokenizer


def metaspace_first() -> Tokenizer:
    """Llama-2's later fast tokenizer: a prefix space only at the start of the prompt."""
    tokenizer = _sentencepiece_bpe()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=False)
    return tokenizer


def unigram() -> Tokenizer:
    """Sentencepiece unigram with Metaspace; its vocabulary spells control strings out of ordinary text if it
    is let.
    """
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="never", split=True)
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse()])
    alphabet = [chr(code) for code in range(32, 127)] + ["\n", "\t"]
    trainer = trainers.UnigramTrainer(
        vocab_size=420,
        special_tokens=["<unk>", *CONTROLS],
        unk_token="<unk>",
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    return tokenizer


def _bos_adding(tokenizer: Tokenizer) -> Tokenizer:
    """The tokenizer, putting <s> before every text by itself."""
    bos = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    return tokenizer


_EOS = {
    **dict.fromkeys(("llama2", "vicuna", "mistral"), "</s>"),
    "llama3": "<|eot_id|>",
    "gemma": "<end_of_turn>",
    "phi3": "<|endoftext|>",
}
_BOS = {
    **dict.fromkeys(("llama2", "vicuna", "mistral"), "<s>"),
    "llama3": "<|begin_of_text|>",
    "gemma": "<bos>",
}

BACKENDS: dict[str, Callable[[], Tokenizer]] = {
    "byte_level": byte_level,
    "byte_level_qwen": lambda: byte_level(regex="qwen"),
    "prepend": prepend,
    "metaspace_first": metaspace_first,
    "unigram": unigram,
}

_MADE: dict[str, str] = {}


def hf_tokenizer(
    backend: str, template: str, *, added: tuple[AddedToken, ...] = ()
) -> PreTrainedTokenizerFast:
    """A transformers tokenizer: a backend's name, and a template's name or source. Trained once a process."""
    if backend not in _MADE:
        _MADE[backend] = BACKENDS[backend]().to_str()
    core = Tokenizer.from_str(_MADE[backend])
    core.add_tokens(list(added))
    eos = _EOS.get(template, "<|im_end|>")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token=_BOS.get(template), eos_token=eos, pad_token=eos
    )
    tokenizer.chat_template = TEMPLATES.get(template, template)
    return tokenizer
