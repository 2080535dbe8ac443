"""Tiny real parts for tests: a Llama folder with a trained fast tokenizer, an open_clip tower folder, random rows."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, PreTrainedTokenizerFast

from mmds.config_types import ConnectorSection, EncoderSection
from mmds.data.rows import IMAGE_MARKER, LoadedSample, Row, build_row
from mmds.geometry import Geometry
from mmds.model.connector import Connector
from mmds.model.encoder import EncoderSpec, build_encoder
from mmds.model.encoder_sources import build_tower
from mmds.model.folder import Description

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
VOCABULARY = 300


def write_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with ChatML control tokens, trained on a few words; pad == eos, as many have."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(
        ["user assistant system what colour is the shape red blue green circle"] * 4, trainer
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|im_end|>")
    fast.chat_template = CHATML
    fast.save_pretrained(folder)
    return fast


def decoder_config(*, tied: bool = True, layers: int = 2, std: float = 0.1) -> LlamaConfig:
    """The tiny Llama's config."""
    return LlamaConfig(
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
        tie_word_embeddings=tied,
        initializer_range=std,
        pad_token_id=1,
        bos_token_id=None,
        eos_token_id=1,
    )


def write_decoder(
    folder: Path,
    *,
    seed: int = 0,
    tied: bool = True,
    layers: int = 2,
    std: float = 0.1,
    config: PreTrainedConfig | None = None,
) -> Path:
    """A folder of a decoder with weights and tokenizer: a tiny Llama, or of another config with this vocabulary."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(seed)
    config = config or decoder_config(tied=tied, layers=layers, std=std)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    write_tokenizer(folder)
    return folder


VISION = {
    "embed_dim": 16,
    "vision_cfg": {"image_size": 28, "layers": 3, "width": 32, "head_width": 16, "patch_size": 14},
}
PREPROCESS = {"mean": [0.4, 0.45, 0.5], "std": [0.3, 0.25, 0.2], "interpolation": "bicubic"}


def spec(*, image_size: int = 28, patch_size: int = 14) -> EncoderSpec:
    """The spec of a tower that is never built, for geometry alone."""
    mean, std = (0.4, 0.45, 0.5), (0.3, 0.25, 0.2)
    return EncoderSpec(
        name="none",
        model_cfg={},
        layer=0,
        norm=False,
        mean=mean,
        std=std,
        interpolation="bicubic",
        image_size=image_size,
        patch_size=patch_size,
        width=32,
    )


def write_encoder(
    folder: Path,
    *,
    seed: int = 1,
    model_cfg: Mapping[str, Any] = VISION,
    preprocess: Mapping[str, Any] = PREPROCESS,
    weights: bool = True,
) -> Path:
    """An open_clip folder with random weights, `local-dir:` material: by default a tiny ViT (28 px, 2 x 2 patches).

    weights: False = the description alone, for an encoder that starts random.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = {"model_cfg": {**model_cfg, "text_cfg": {}}, "preprocess_cfg": preprocess}
    (folder / "open_clip_config.json").write_text(json.dumps(config))
    if not weights:
        return folder
    torch.manual_seed(seed)
    visual = build_tower({"quick_gelu": False, **model_cfg})
    state = {f"visual.{name}": value.contiguous() for name, value in visual.state_dict().items()}
    save_file(state, folder / "open_clip_model.safetensors")
    return folder


def write_model_folder(
    folder: Path, *, seed: int = 2, connector: str = "mlp2x", config: PreTrainedConfig | None = None
) -> Path:
    """A whole model folder with random weights, put together by hand: no part of mmds writes its weights."""
    write_decoder(folder / "decoder", seed=seed, config=config)
    source = write_encoder(folder.with_name(folder.name + ".tower"), seed=seed)
    encoder = build_encoder(EncoderSection(name=f"local-dir:{source}"))
    width = json.loads((folder / "decoder" / "config.json").read_text())["hidden_size"]
    torch.manual_seed(seed)
    joint = Connector(ConnectorSection(name=connector), encoder_width=encoder.spec.width, decoder_width=width)
    for part, module in (("encoder", encoder), ("connector", joint)):
        (folder / part).mkdir(parents=True)
        state = {name: value.contiguous() for name, value in module.state_dict().items()}
        save_file(state, folder / part / "model.safetensors")
    Description(encoder=encoder.spec, connector=ConnectorSection(name=connector), decoder_width=width).write(
        folder
    )
    return folder


def random_sample(
    rng: np.random.Generator, geometry: Geometry, *, key: str, images: int, length: int = 12
) -> LoadedSample:
    """A sample of random ids with `images` pictures; about half of its tokens are supervised, never a marker.

    Pictures are of the encoder's own size in resolution `fixed`, else of random sizes up to 90 pixels a side.
    """
    ids = rng.integers(2, VOCABULARY, length).astype(np.int32)
    places = rng.choice(np.arange(1, length - 2), images, replace=False)
    ids[places] = IMAGE_MARKER
    supervised = (rng.random(length) < 0.5) & (ids != IMAGE_MARKER)
    supervised[-1] = True
    square = (geometry.image_size, geometry.image_size)
    sizes = (
        [square] * images
        if geometry.mode == "fixed"
        else [tuple(rng.integers(1, 90, 2).tolist()) for _ in range(images)]
    )
    shapes = [geometry.plan(*size).pixel_shape for size in sizes]
    return LoadedSample(
        key=key,
        ids=ids,
        supervised=supervised,
        images=tuple(rng.integers(0, 256, shape).astype(np.uint8) for shape in shapes),
        image_sizes=tuple(sizes),
        image_paths=tuple(f"{key}-{k}.png" for k in range(images)),
    )


def random_row(seed: int, geometry: Geometry, pictures: Sequence[int]) -> tuple[Row, list[LoadedSample]]:
    """A packed row with one sample per entry of `pictures`, which says how many pictures it has; and those samples."""
    rng = np.random.default_rng(seed)
    samples = [
        random_sample(rng, geometry, key=f"r{seed}s{i}", images=count, length=int(rng.integers(8, 20)))
        for i, count in enumerate(pictures)
    ]
    return build_row(samples, geometry), samples
