"""What a LLaVA folder of transformers says about pictures and features, in our terms: encoder spec and resolution."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mmds.config_types import ResolutionSection
from mmds.errors import CheckpointError
from mmds.model.encoder import EncoderSpec
from mmds.model.llava_towers import open_clip_config

_INTERPOLATION = {1: "lanczos", 2: "bilinear", 3: "bicubic"}


def encoder_spec(config: Any, processor: Mapping[str, Any]) -> EncoderSpec:
    """The tower and how pixels reach it. config: LLaVA's; processor: preprocessor_config.json.

    Raises CheckpointError where the folder asks for features or pictures that no tower of ours gives.
    """
    vision = config.vision_config
    tower, model_cfg = open_clip_config(vision)
    strategy = "full" if vision.model_type == "siglip_vision_model" else "default"
    if config.vision_feature_select_strategy != strategy:
        raise CheckpointError(
            f"vision_feature_select_strategy is {config.vision_feature_select_strategy!r}; a {vision.model_type} is taken with "
            f"{strategy!r} (every patch, and no class token)"
        )
    size = processor.get("crop_size") if processor.get("do_center_crop") else processor.get("size")
    side = _side(size)
    if side != vision.image_size:
        raise CheckpointError(
            f"preprocessor_config.json makes images of {side} pixels, but vision_config.image_size is {vision.image_size}"
        )
    return EncoderSpec(
        name=tower,
        model_cfg=model_cfg,
        layer=_feature_block(config.vision_feature_layer, vision.num_hidden_layers),
        norm=False,
        mean=tuple(processor["image_mean"]),
        std=tuple(processor["image_std"]),
        interpolation=_INTERPOLATION[processor["resample"]],
        image_size=vision.image_size,
        patch_size=vision.patch_size,
        width=vision.hidden_size,
    )


def resolution(config: Any, processor: Mapping[str, Any]) -> tuple[ResolutionSection, str]:
    """Our resolution, and in words what becomes of pictures that are no squares."""
    if config.model_type == "llava_next":
        return _tiles(config, processor), "a square overview, then tiles"
    if processor.get("do_pad"):
        return ResolutionSection(name="fixed", fit="pad"), "padded to a square"
    if processor.get("do_center_crop") and "shortest_edge" in processor["size"]:
        words = "padded to a square, as LLaVA-1.5 was trained (the source's processor crops them to their middle square)"
        return ResolutionSection(name="fixed", fit="pad"), words
    return ResolutionSection(name="fixed"), "resized to a square"


def _tiles(config: Any, processor: Mapping[str, Any]) -> ResolutionSection:
    """LLaVA-NeXT's grids of tiles, in the order in which equal ones are preferred."""
    pinpoints, side = config.image_grid_pinpoints, config.vision_config.image_size
    if processor.get("image_grid_pinpoints", pinpoints) != pinpoints:
        raise CheckpointError("image_grid_pinpoints of config.json and of the processor differ")
    odd = [size for size in pinpoints if size[0] % side or size[1] % side]
    if odd:
        raise CheckpointError(f"image_grid_pinpoints: {odd} are no multiples of the tile of {side} pixels")
    return ResolutionSection(name="anyres", grids=tuple(f"{h // side}x{w // side}" for h, w in pinpoints))


def _feature_block(layer: Any, blocks: int) -> int:
    """Our index from 0 of the block whose output transformers calls hidden state `layer`, of `blocks` + 1 hidden states."""
    if not isinstance(layer, int):
        raise CheckpointError(
            f"vision_feature_layer is {layer}: features of several layers are joined; not supported"
        )
    block = blocks + layer if layer < 0 else layer - 1
    if not 0 <= block < blocks:
        raise CheckpointError(
            f"vision_feature_layer is {layer}, which is no block of a tower of {blocks} blocks"
        )
    return block


def _side(size: Any) -> int | None:
    """Pixels a side of a processor's size, however it is written; None where it is not square."""
    if isinstance(size, int):
        return size
    sides = {value for value in (size or {}).values() if value is not None}
    return int(sides.pop()) if len(sides) == 1 else None


def read_processor(source: Path) -> dict[str, Any]:
    """The image processor's settings. Raises CheckpointError when there are none or they are not plain resize and normalise."""
    for name in ("preprocessor_config.json", "processor_config.json"):
        file = source / name
        if file.is_file():
            data = json.loads(file.read_text(encoding="utf-8"))
            found = dict(data.get("image_processor", data))
            if "image_mean" in found:
                break
    else:
        raise CheckpointError(
            "no image_mean in preprocessor_config.json or processor_config.json: pixels cannot be normalised"
        )
    for key, wanted in {"do_resize": True, "do_rescale": True, "do_normalize": True}.items():
        if found.get(key, wanted) != wanted:
            raise CheckpointError(
                f"{file.name}: {key} is {found[key]}; only images resized and normalised can be taken"
            )
    if abs(found.get("rescale_factor", 1 / 255) - 1 / 255) > 1e-9:
        raise CheckpointError(f"{file.name}: rescale_factor is {found['rescale_factor']}, not 1/255")
    if found.setdefault("resample", 3) not in _INTERPOLATION:
        raise CheckpointError(f"{file.name}: resample {found['resample']} is none of {_INTERPOLATION}")
    return found
