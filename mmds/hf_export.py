"""Write a model folder as one of transformers' LLaVA, with its processor, so that transformers and vLLM serve it.

Weights pass one tensor at a time; adapters that the decoder was kept with are merged into them. The vocabulary gets `<image>`, which marks where an image's features go; the rows that were there
stay as they are, bit for bit.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    CLIPImageProcessor,
    GenerationConfig,
    LlavaImageProcessor,
    LlavaNextImageProcessor,
    LlavaNextProcessor,
    LlavaProcessor,
)

from mmds.data.chat_tokenizer import ChatTokenizer
from mmds.data.conversation import Conversation, Turn
from mmds.errors import CheckpointError
from mmds.hf_target import exports_to, llava_config, vision_config
from mmds.model.decoder import load_config, load_tokenizer
from mmds.model.folder import (
    SHARD_BYTES,
    Description,
    ShardWriter,
    part_files,
    read_description,
    read_tensors,
)
from mmds.model.llava_names import TOWER, joint_rules, text_rule, tower_rules
from mmds.model.llava_template import IMAGE, processor_template, render
from mmds.model.lora import stored_adapters

_ROWS = 64
"""A grown embedding table has a multiple of this many rows, as the published models' tables have."""

_RESAMPLE = {"lanczos": 1, "bilinear": 2, "bicubic": 3}


@dataclass(frozen=True, kw_only=True)
class Exported:
    """What was written. name: class of transformers. image_token: id of `<image>`. rows: of the embedding table, before and after."""

    name: str
    image_token: int
    rows: tuple[int, int]
    notes: tuple[str, ...]


def export_hf(folder: Path, out: Path, *, shard_bytes: int = SHARD_BYTES) -> Exported:
    """Write `out`, which appears whole or not at all, from the model folder `folder`, which stays as it is.

    Raises CheckpointError with the reason when transformers has no class that computes this model.
    """
    description, decoder_config = read_description(folder), load_config(str(folder / "decoder"))
    name, reason = exports_to(description, decoder_config)
    if name is None:
        raise CheckpointError(
            f"{folder} has no counterpart in transformers: {reason}; use the model folder as it is"
        )
    if out.exists():
        raise CheckpointError(f"{out} exists; move it, or name another folder")
    chat = ChatTokenizer(load_tokenizer(str(folder / "decoder")))
    tokenizer = load_tokenizer(str(folder / "decoder"))
    image_token = _image_token(tokenizer)
    before = int(decoder_config.vocab_size)
    rows = before if image_token < before else -(-(image_token + 1) // _ROWS) * _ROWS
    config = llava_config(description, decoder_config, image_token=image_token, rows=rows)

    building = out.with_name(out.name + ".tmp")
    shutil.rmtree(building, ignore_errors=True)
    building.mkdir(parents=True)
    writer = ShardWriter(building, shard_bytes)
    for theirs, value in _tensors(folder, description, decoder_config, rows=rows):
        writer.add(theirs, value.contiguous())
    writer.close()
    config.save_pretrained(building)
    template = str(tokenizer.chat_template)
    tokenizer.chat_template = processor_template(template)
    _processor(description, tokenizer, config).save_pretrained(building)
    _image_processor(description, config).save_pretrained(
        building
    )  # vLLM and transformers 4 read it from its own file
    _generation(folder, chat).save_pretrained(building)
    notes = () if _same_prompt(chat, tokenizer, template) else (_OTHER_PROMPT,)
    building.rename(out)
    return Exported(name=name, image_token=image_token, rows=(before, rows), notes=notes)


def _image_token(tokenizer: Any) -> int:
    """The id of `<image>`, which the tokenizer gets when it has none."""
    if IMAGE not in tokenizer.get_added_vocab():
        token = AddedToken(IMAGE, special=True, normalized=False)
        tokenizer.add_tokens([token], special_tokens=True)
    return int(tokenizer.convert_tokens_to_ids(IMAGE))


def _tensors(
    folder: Path, description: Description, decoder_config: Any, *, rows: int
) -> Iterator[tuple[str, Tensor]]:
    """Every tensor under its name in the published layout. Raises CheckpointError for one that is missing or has no name there."""
    family, vision = vision_config(description)
    stored = {
        prefix + name: read
        for part, prefix in (
            ("encoder", "encoder."),
            ("connector", "connector."),
            ("decoder", "decoder.llm."),
        )
        for name, read in read_tensors(part_files(folder / part))
    }
    with torch.device("meta"):
        llm = AutoModelForCausalLM.from_config(decoder_config)
    names = {id(p): f"decoder.llm.{n}" for n, p in llm.named_parameters()}
    tables = {names[id(llm.get_input_embeddings().weight)], names[id(llm.get_output_embeddings().weight)]}
    rules = tower_rules(family, description.encoder.layer + 1)
    rules += joint_rules(separator=description.resolution.name == "anyres")
    rules += [text_rule(name) for name in names.values()]
    missing = sorted({rule.ours for rule in rules} - set(stored))
    tied = {"decoder.llm.lm_head.weight"} if llm.config.tie_word_embeddings else set()
    surplus = sorted(set(stored) - {rule.ours for rule in rules} - tied)
    if missing or surplus:
        raise CheckpointError(
            f"{folder}: " + "; ".join(f"{what} {', '.join(found[:4])}" for what, found in (("missing:", missing), ("without a name in LLaVA:", surplus)) if found)
        )  # fmt: skip
    adapters = stored_adapters(folder / "decoder")
    for rule in rules:
        value = stored[rule.ours]()
        if adapters is not None and rule.ours.startswith("decoder.llm."):
            module = rule.ours.removeprefix("decoder.llm.").removesuffix(".weight")
            value = adapters.merged(module, value)
        if rule.ours in tables:
            value = grown(value, rows)
        for theirs, part in zip(rule.theirs, rule.to_theirs(value), strict=True):
            yield theirs.replace(TOWER, TOWER + "vision_model."), part
    for kind, fill in (("weight", torch.ones), ("bias", torch.zeros)):  # never applied, but looked for
        yield f"{TOWER}vision_model.post_layernorm.{kind}", fill(vision.hidden_size, dtype=value.dtype)


def grown(table: Tensor, rows: int) -> Tensor:
    """[V, d] -> [rows, d]: new rows are the mean of all, so that as a head they never give the largest logit."""
    if rows == len(table):
        return table
    mean = table.float().mean(0).to(table.dtype)
    return torch.cat([table, mean.expand(rows - len(table), -1)])


def _image_processor(description: Description, config: Any) -> Any:
    """The processor that makes of a picture what ours does: a square, a padded square, or an overview and tiles."""
    spec = description.encoder
    square = {"height": spec.image_size, "width": spec.image_size}
    common: dict[str, Any] = {
        "size": square,
        "crop_size": square,
        "do_center_crop": False,
        "image_mean": list(spec.mean),
        "image_std": list(spec.std),
        "resample": _RESAMPLE[spec.interpolation],
    }
    if description.resolution.name == "anyres":
        edge = {"shortest_edge": spec.image_size}  # as published
        pinpoints = config.image_grid_pinpoints
        return LlavaNextImageProcessor(**{**common, "size": edge}, image_grid_pinpoints=pinpoints)
    if description.resolution.fit == "pad":
        return LlavaImageProcessor(**common, do_pad=True)
    return CLIPImageProcessor(**common)


def _processor(description: Description, tokenizer: Any, config: Any) -> LlavaProcessor | LlavaNextProcessor:
    strategy = config.vision_feature_select_strategy
    kind = LlavaNextProcessor if description.resolution.name == "anyres" else LlavaProcessor
    return kind(
        _image_processor(description, config),
        tokenizer,
        patch_size=description.encoder.patch_size,
        vision_feature_select_strategy=strategy,
        chat_template=tokenizer.chat_template,
        image_token=IMAGE,
        num_additional_image_tokens=1 if strategy == "default" else 0,
    )


def _generation(folder: Path, chat: ChatTokenizer) -> GenerationConfig:
    """The decoder's own generation settings, ending where chat.py ends an answer."""
    decoder = folder / "decoder"
    known = (decoder / "generation_config.json").is_file()
    config = GenerationConfig.from_pretrained(decoder) if known else GenerationConfig()
    ends = sorted(chat.end_ids)
    config.eos_token_id = ends if len(ends) > 1 else ends[0]
    if config.pad_token_id is None:
        config.pad_token_id = ends[0] if chat.hf.pad_token_id is None else int(chat.hf.pad_token_id)
    return config


_OTHER_PROMPT = (
    "the chat template's generation prompt (add_generation_prompt) differs from what precedes an answer in training; "
    "transformers and vLLM will use the former, chat.py uses the latter"
)


def _same_prompt(chat: ChatTokenizer, tokenizer: Any, template: str) -> bool:
    """Whether the template's own prompt is that of training, for one question."""
    question = "What is shown?"
    conversation = Conversation(key="probe", turns=(Turn(role="user", parts=(question,)),), images=())
    text = render(tokenizer, template, [("user", question)], prompt=True)
    bos = tokenizer.bos_token
    ids = tokenizer(text, add_special_tokens=not (bos and text.startswith(bos)))["input_ids"]
    return list(ids) == chat.prompt_ids(conversation).tolist()
