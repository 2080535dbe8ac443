"""Tiny LLaVA models of transformers with random weights, saved by transformers with their processors: the other side of import and export."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from tokenizers import AddedToken
from torch import Tensor
from transformers import (
    AutoModelForImageTextToText,
    AutoProcessor,
    CLIPImageProcessor,
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaNextConfig,
    LlavaNextForConditionalGeneration,
    LlavaNextImageProcessor,
    LlavaNextProcessor,
    LlavaProcessor,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    SiglipVisionConfig,
)

from mmds.data.conversation import Conversation, ImageMarker, Turn
from mmds.generate import Assistant, answer
from tests.chat_fixtures import hf_tokenizer
from tests.model.families import excite

IMAGE = "<image>"
SIDE = 28
MEAN, STD = [0.4, 0.45, 0.5], [0.3, 0.25, 0.2]

VICUNA_PARTS = (
    "{% for message in messages %}{% if message['role'] != 'system' %}{{ message['role'].upper() + ': '}}{% endif %}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>\n' }}{% endfor %}"
    "{% if message['role'] != 'assistant' %}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}{{ content['text'] + ' '}}{% endfor %}"
    "{% else %}{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}"
    "{% generation %}{{ content['text'] + ' '}}{% endgeneration %}{% endfor %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)
"""As published with llava-1.5-7b-hf: parts, and nothing after an assistant turn."""

MISTRAL_PARTS = (
    "{% for message in messages %}{% if message['role'] == 'user' %}{{ '[INST] ' }}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>\n' }}{% endfor %}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}{{ content['text'] }}{% endfor %}"
    "{{' [/INST]' }}{% elif message['role'] == 'assistant' %}{{ ' ' + message['content'][0]['text'] + '</s>'}}"
    "{% endif %}{% endfor %}"
)
"""As llava-v1.6-mistral-7b-hf, with the end of turn."""

CHATML_PARTS = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n'}}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>\n' }}{% endfor %}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}{{ content['text'] }}{% endfor %}"
    "{{'<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def clip(**changes: Any) -> CLIPVisionConfig:
    """A CLIP ViT of 28 px, 2 x 2 patches and 3 blocks, with QuickGELU as OpenAI's."""
    given = {
        "hidden_size": 32, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 2,
        "image_size": SIDE, "patch_size": 14, "hidden_act": "quick_gelu", "projection_dim": 16,
    }  # fmt: skip
    return CLIPVisionConfig(**{**given, **changes})


def siglip(**changes: Any) -> SiglipVisionConfig:
    """A SigLIP ViT of 28 px whose feed-forward is no multiple of its width, as in so400m."""
    given = {
        "hidden_size": 32, "intermediate_size": 119, "num_hidden_layers": 3, "num_attention_heads": 2,
        "image_size": SIDE, "patch_size": 14,
    }  # fmt: skip
    return SiglipVisionConfig(**{**given, **changes})


_TEXT = {
    "llama": (LlamaConfig, "vicuna"),
    "mistral": (MistralConfig, "mistral"),
    "qwen2": (Qwen2Config, "chatml"),
}


def text(family: str, *, rows: int, tied: bool = False) -> PreTrainedConfig:
    """A 2-layer decoder of a family. rows: of its embedding table."""
    kind, _ = _TEXT[family]
    return kind(
        hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=rows, tie_word_embeddings=tied, pad_token_id=None, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip


def tokenizer_of(family: str, *, image: bool = True) -> Any:
    """A tokenizer as the family's are; image: with `<image>`, as those of published LLaVA models."""
    backend = "byte_level_qwen" if family == "qwen2" else "prepend"
    added = (AddedToken(IMAGE, special=True, normalized=False),) if image else ()
    return hf_tokenizer(backend, _TEXT[family][1], added=added)


def write_llava(
    folder: Path,
    *,
    vision: PreTrainedConfig | None = None,
    family: str = "llama",
    tied: bool = False,
    template: str | None = VICUNA_PARTS,
    layer: int = -2,
    spare_rows: int = 63,
    processor: Any = None,
    tiles: list[list[int]] | None = None,
    **config: Any,
) -> PreTrainedModel:
    """Save a LLaVA of transformers with its processor; with `tiles`, sizes in pixels, a LLaVA-NeXT.

    spare_rows: of the embedding, beyond the tokenizer's entries. processor: of images, instead of the one of the published models.
    """
    vision = vision or clip()
    whole = "full" if vision.model_type == "siglip_vision_model" else "default"
    tokenizer = tokenizer_of(family)
    given = {
        "vision_config": vision,
        "text_config": text(family, rows=len(tokenizer) + spare_rows, tied=tied),
        "image_token_index": tokenizer.convert_tokens_to_ids(IMAGE),
        "vision_feature_layer": layer,
        "vision_feature_select_strategy": whole,
        "image_seq_length": 4,
        "tie_word_embeddings": tied,
    }
    torch.manual_seed(0)
    if tiles is None:
        model: PreTrainedModel = LlavaForConditionalGeneration(LlavaConfig(**{**given, **config}))
    else:
        model = LlavaNextForConditionalGeneration(
            LlavaNextConfig(**{**given, "image_grid_pinpoints": tiles, **config})
        )
    model.eval()
    excite(model)
    broken = [i for i in range(len(tokenizer)) if "\ufffd" in tokenizer.decode([i])]
    model.lm_head.weight.data[broken] = 0.0  # parts of characters, of which random text has no whole ones
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(folder)
    pixels: dict[str, Any] = {"size": {"shortest_edge": SIDE}, "crop_size": {"height": SIDE, "width": SIDE}}
    pixels |= {"image_mean": MEAN, "image_std": STD}
    if tiles is None:
        images = processor or CLIPImageProcessor(**pixels)
    else:
        images = LlavaNextImageProcessor(**pixels, image_grid_pinpoints=tiles)
    tokenizer.chat_template = template
    (LlavaProcessor if tiles is None else LlavaNextProcessor)(
        images,
        tokenizer,
        patch_size=14,
        vision_feature_select_strategy=whole,
        chat_template=template,
        num_additional_image_tokens=int(whole == "default"),
    ).save_pretrained(folder)
    return model


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What one side makes of pictures and a question. logits [T, V] of the prompt; said: its greedy text."""

    ids: list[int]
    logits: Tensor
    said: str


QUESTION = "what is in the picture?"


def pictures(count: int, *, width: int = SIDE, height: int | None = None, seed: int = 0) -> list[Image.Image]:
    """Pictures of noise; squares, unless a height is given, of which no processor has anything to crop."""
    rng, shape = np.random.default_rng(seed), (height or width, width, 3)
    return [Image.fromarray(rng.integers(0, 256, shape, dtype=np.uint8)) for _ in range(count)]


@torch.no_grad()
def ask_transformers(folder: Path, images: Sequence[Image.Image], *, tokens: int = 12) -> Asked:
    """transformers' own way: class and processor by name, template with parts (where there is none Vicuna's), generate."""
    model, info = AutoModelForImageTextToText.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    model.eval()
    processor = AutoProcessor.from_pretrained(folder)
    parts = [*({"type": "image", "image": image} for image in images), {"type": "text", "text": QUESTION}]
    inputs = processor.apply_chat_template(
        [{"role": "user", "content": parts}],
        chat_template=processor.chat_template or VICUNA_PARTS,
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
    )
    start = inputs["input_ids"].shape[1]
    generated = model.generate(**inputs, max_new_tokens=tokens, do_sample=False)[0][start:].tolist()
    ends = model.generation_config.eos_token_id
    if generated[-1] in (ends if isinstance(ends, list) else [ends]):
        generated.pop()
    said = processor.tokenizer.decode(generated)
    return Asked(ids=inputs["input_ids"][0].tolist(), logits=model(**inputs).logits[0], said=said)


@torch.no_grad()
def ask_mmds(assistant: Assistant, images: Sequence[Image.Image], *, tokens: int = 12) -> Asked:
    """chat.py's way: a picture a line, then the question."""
    parts: list[str | ImageMarker] = [QUESTION]
    for index in reversed(range(len(images))):
        parts[:0] = [ImageMarker(index=index), "\n"]
    names = tuple(f"{i}.png" for i in range(len(images)))
    conversation = Conversation(key="asked", turns=(Turn(role="user", parts=tuple(parts)),), images=names)
    data = [png(image) for image in images]
    ids = assistant.tokenizer.prompt_ids(conversation)
    row = assistant.row([assistant.sample(ids, np.zeros(len(ids), dtype=np.bool_), data, names)])
    logits = assistant.model.logits(row, torch.arange(len(row.input_ids)), assistant.encoder(row))
    said = "".join(answer(assistant, conversation, data, max_new_tokens=tokens))
    return Asked(ids=row.input_ids.tolist(), logits=logits, said=said)


def png(image: Image.Image) -> bytes:
    """The bytes of a picture."""
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def assert_same(ours: Asked, theirs: Asked, *, image_token: int) -> None:
    """Equal ids outside of images, logits within 1e-5 of the largest, over the rows that both have, and equal text."""
    slots = [token == image_token for token in theirs.ids]
    assert len(ours.ids) == len(theirs.ids)
    assert [a for a, slot in zip(ours.ids, slots, strict=True) if not slot] == [
        b for b, slot in zip(theirs.ids, slots, strict=True) if not slot
    ]
    rows = min(ours.logits.shape[1], theirs.logits.shape[1])
    gap = (ours.logits[:, :rows] - theirs.logits[:, :rows]).abs().max()
    assert float(gap) <= 1e-5 * float(theirs.logits.abs().max())
    assert theirs.said
    assert ours.said == theirs.said
