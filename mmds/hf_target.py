"""What a model folder exports to: the class of transformers that computes the same, and its config; or why there is none."""

from __future__ import annotations

from typing import Any

import torch
from transformers import CLIPVisionConfig, LlavaConfig, LlavaNextConfig, SiglipVisionConfig

from mmds.errors import ConfigError
from mmds.model.build import build_geometry
from mmds.model.folder import Description
from mmds.model.llava_towers import transformers_config
from mmds.model.qualify import small_copy

CLASSES = {"fixed": "LlavaForConditionalGeneration", "anyres": "LlavaNextForConditionalGeneration"}
"""The class of transformers for each resolution that has one."""

_TOLERANCE = 1e-5


def exports_to(description: Description, decoder_config: object) -> tuple[str | None, str]:
    """(class of transformers, "") of a model, or (None, the reason why no class computes it). decoder_config: Hugging Face's."""
    resolution, spec = description.resolution, description.encoder
    if resolution.name not in CLASSES:
        return None, f"transformers' LLaVA knows no resolution {resolution.name!r}"
    if resolution.size not in (None, spec.image_size):
        return None, (
            f"resolution.size is {resolution.size}, so the tower's table of positions for {spec.image_size} pixels is interpolated, "
            "which transformers' LLaVA never does"
        )
    if description.positions != "1d":
        return (
            None,
            f"transformers' LLaVA counts positions in one dimension, not as {description.positions!r}",
        )
    if description.connector.name != "mlp2x":
        return (
            None,
            f"transformers' LLaVA has a two-layer projector (mlp2x), not {description.connector.name!r}",
        )
    if spec.rope:
        return None, "encoder.rope rotates the tower's queries and keys, which transformers' towers do not"
    tower = transformers_config(description.encoder)
    if isinstance(tower, str):
        return None, tower
    if problem := _decoder_problem(decoder_config):
        return None, problem
    return CLASSES[resolution.name], ""


def grids_of(description: Description) -> list[list[int]]:
    """Height and width in pixels of each grid of tiles, as transformers' LLaVA-NeXT lists them; empty without tiles."""
    geometry = build_geometry(
        description.encoder,
        description.connector,
        max_pixels=description.max_pixels,
        resolution=description.resolution,
    )
    return [[rows * geometry.image_size, columns * geometry.image_size] for rows, columns in geometry.grids]


def vision_config(description: Description) -> tuple[str, CLIPVisionConfig | SiglipVisionConfig]:
    """(family, config) of the tower of a description that exports."""
    tower = transformers_config(description.encoder)
    assert not isinstance(tower, str), "ask exports_to first"
    return tower


def llava_config(
    description: Description, decoder_config: object, *, image_token: int, rows: int
) -> LlavaConfig | LlavaNextConfig:
    """The whole model's config. rows: of the embedding table, more than `image_token`.

    The tower holds the blocks up to the feature layer, so features are its last hidden state (to which transformers applies no norm).
    """
    family, vision = vision_config(description)
    text = type(decoder_config).from_dict({**decoder_config.to_dict(), "vocab_size": rows})  # type: ignore[attr-defined]
    spec = description.encoder
    common: dict[str, Any] = {
        "vision_config": vision,
        "text_config": text,
        "image_token_index": image_token,
        "image_seq_length": (spec.image_size // spec.patch_size) ** 2,
        "projector_hidden_act": "gelu",
        "vision_feature_select_strategy": "default" if family == "clip" else "full",
        "vision_feature_layer": -1,
        "tie_word_embeddings": bool(text.tie_word_embeddings),
        "architectures": [CLASSES[description.resolution.name]],
        "dtype": description.dtype,
    }
    if grids := grids_of(description):
        return LlavaNextConfig(**common, image_grid_pinpoints=grids)
    return LlavaConfig(**common)


@torch.no_grad()
def _decoder_problem(config: object) -> str:
    """Why LLaVA of transformers cannot hold this decoder, or "": its logits must be a head without bias on the base model's output."""
    family = str(getattr(config, "model_type", type(config).__name__))
    try:
        small = small_copy(config, family)
    except ConfigError as error:
        return str(error)
    base, head = getattr(small, "model", None), getattr(small, "lm_head", None)
    if base is None or not isinstance(head, torch.nn.Linear) or head.bias is not None:
        return f"decoder family {family!r} has no plain head, which transformers' LLaVA puts on every decoder"
    width = int(small.get_input_embeddings().weight.shape[1])
    inputs = torch.randn(1, 7, width, generator=torch.Generator().manual_seed(0))
    own = small(inputs_embeds=inputs, use_cache=False).logits
    plain = head(base(inputs_embeds=inputs, use_cache=False).last_hidden_state)
    if not float((own - plain).abs().max()) <= _TOLERANCE * float(own.abs().max()):
        return f"decoder family {family!r} caps or scales its logits, which transformers' LLaVA does not"
    return ""
