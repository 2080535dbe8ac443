"""Where an encoder's tower, weights, activation and pixel normalisation come from; nothing is guessed, nothing silently random.

Sources: a built-in open_clip name with a tag or a weights file, an `hf-hub:` model, a `local-dir:` folder, or explicit random weights.
"""

from __future__ import annotations

import contextlib
import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import open_clip
import timm
import torch
from open_clip.model import _build_vision_tower
from safetensors.torch import load_file
from torch import nn

from mmds.config_types import EncoderSection
from mmds.errors import CheckpointError, ConfigError

RANDOM = "random"
LOCAL = "local-dir:"
FOLDER_CONFIG = "open_clip_config.json"

Tower = tuple[nn.Module, dict[str, Any], dict[str, Any]]
"""A whole tower in fp32, open_clip's description of it, and its preprocessing with `mean` and `std`."""


def load_tower(section: EncoderSection) -> Tower:
    """The tower that a config names, with its weights.

    Raises ConfigError when activation, mean or std would have to be guessed, CheckpointError when weights are missing.
    """
    if section.name.startswith(LOCAL):
        visual, model_cfg, preprocess = _from_folder(section)
    elif section.pretrained == RANDOM:
        model_cfg = _vision_part(_named_config(section.name))
        visual, preprocess = build_tower(model_cfg), {}
    else:
        visual, model_cfg, preprocess = _from_open_clip(section)
    if section.activation is not None and (section.activation == "quick_gelu") != model_cfg["quick_gelu"]:
        raise ConfigError(
            f"mmds.model.encoder.activation is {section.activation!r}, but {section.name} computes the other one"
        )
    mean, std = section.mean or preprocess.get("mean"), section.std or preprocess.get("std")
    if not mean or not std:
        mean, std = _random_preprocess(section)
    return visual, model_cfg, {**preprocess, "mean": tuple(mean), "std": tuple(std)}


def _from_open_clip(section: EncoderSection) -> Tower:
    """A tag or a weights file for a built-in name, or a whole `hf-hub:` model."""
    if section.pretrained is None and not section.name.startswith("hf-hub:"):
        tags = open_clip.list_pretrained_tags_by_model(section.name)
        raise ConfigError(
            f"mmds.model.encoder: {section.name} has no weights named; set pretrained to one of {tags}, a file, or 'random'"
        )
    _check_activation(section)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="QuickGELU mismatch")
        try:
            model = open_clip.create_model(
                section.name, pretrained=section.pretrained, pretrained_text=False, require_pretrained=True
            )
        except (RuntimeError, FileNotFoundError, UserWarning) as error:
            raise CheckpointError(
                f"mmds.model.encoder: {section.name} with {section.pretrained!r}: {error}"
            ) from error
    if section.name.startswith("hf-hub:"):
        from open_clip.factory import _get_hf_config

        model_cfg = _vision_part(_get_hf_config(section.name.removeprefix("hf-hub:"))["model_cfg"])
    else:
        model_cfg = _vision_part(_named_config(section.name))
    declared = _is_file(section)
    preprocess = {} if declared else dict(open_clip.get_model_preprocess_cfg(model))
    return model.visual, model_cfg, preprocess


def _from_folder(section: EncoderSection) -> Tower:
    """An open_clip `local-dir:` folder; only the visual weights are read and the network is never touched."""
    folder = Path(section.name.removeprefix(LOCAL)).expanduser()
    file = folder / FOLDER_CONFIG
    if not file.is_file():
        raise CheckpointError(
            f"mmds.model.encoder: {file} does not exist; a local-dir: folder needs it beside the weights"
        )
    config = json.loads(file.read_text(encoding="utf-8"))
    model_cfg, preprocess = _vision_part(config["model_cfg"]), dict(config.get("preprocess_cfg", {}))
    visual = build_tower(model_cfg)
    if section.pretrained != RANDOM:
        load_visual(visual, folder)
    return visual, model_cfg, preprocess


def load_visual(visual: nn.Module, folder: Path) -> None:
    """Load `visual.*` weights from the folder's safetensors (or .bin / .pt) file, strictly.

    Raises CheckpointError when the folder has no weights, or when a name or a shape differs.
    """
    files = sorted(folder.glob("*.safetensors")) or sorted(
        [*folder.glob("*.bin"), *folder.glob("*.pt"), *folder.glob("*.pth")]
    )
    if len(files) != 1:
        raise CheckpointError(
            f"encoder folder {folder}: expected one weights file, found {[f.name for f in files]}; without weights the encoder would "
            "be random (say pretrained: 'random' if you mean that)"
        )
    safe = files[0].suffix == ".safetensors"
    state = load_file(files[0]) if safe else torch.load(files[0], map_location="cpu", weights_only=True)
    state = {
        name.removeprefix("visual."): value for name, value in state.items() if name.startswith("visual.")
    }
    try:
        visual.load_state_dict(state, strict=True)
    except RuntimeError as error:
        raise CheckpointError(f"encoder weights {files[0]} do not fit {FOLDER_CONFIG}: {error}") from error


def _check_activation(section: EncoderSection) -> None:
    """Weights by path carry no activation and no mean/std: they must be declared; a tag's activation must be the model's."""
    if section.name.startswith("hf-hub:"):
        return
    quick = bool(_named_config(section.name).get("quick_gelu", False))
    if _is_file(section):
        if not Path(section.pretrained or "").is_file():
            tags = open_clip.list_pretrained_tags_by_model(section.name)
            raise ConfigError(
                f"mmds.model.encoder.pretrained: {section.pretrained!r} is neither a file nor one of {section.name}'s tags {tags}"
            )
        missing = [key for key in ("activation", "mean", "std") if getattr(section, key) is None]
        if missing:
            raise ConfigError(
                f"mmds.model.encoder: weights by path ({section.pretrained}) say nothing about {', '.join(missing)}; declare them, "
                'for example "activation": "quick_gelu", "mean": [0.481, 0.458, 0.408], "std": [0.269, 0.261, 0.276]'
            )
        wanted = section.activation == "quick_gelu"
    else:
        tag = open_clip.get_pretrained_cfg(section.name, section.pretrained or "")
        wanted = bool(tag.get("quick_gelu", quick)) if tag else quick
    if wanted != quick:
        names = ("quick_gelu", "gelu") if wanted else ("gelu", "quick_gelu")
        raise ConfigError(
            f"mmds.model.encoder: the weights {section.pretrained!r} were trained with {names[0]}, but {section.name} computes "
            f"{names[1]}; name the model {section.name}-quickgelu or without that suffix"
        )


def _is_file(section: EncoderSection) -> bool:
    if section.pretrained in (None, RANDOM) or section.name.startswith(("hf-hub:", LOCAL)):
        return False
    return open_clip.get_pretrained_cfg(section.name, section.pretrained or "") in (None, {})


def _random_preprocess(section: EncoderSection) -> tuple[Any, Any]:
    """Mean and std of a random tower, which no training has fixed; anything else must say its own."""
    if section.pretrained != RANDOM:
        raise ConfigError(
            f"mmds.model.encoder: {section.name} does not say its pixel mean and std; add mean and std to the config or to "
            f"preprocess_cfg in {FOLDER_CONFIG}"
        )
    return section.mean or (0.5, 0.5, 0.5), section.std or (0.5, 0.5, 0.5)


def _named_config(name: str) -> dict[str, Any]:
    config = open_clip.get_model_config(name)
    if config is None:
        raise ConfigError(
            f"mmds.model.encoder: open_clip knows no model {name!r}; see open_clip.list_models()"
        )
    return dict(config)


def _vision_part(model_cfg: Mapping[str, Any]) -> dict[str, Any]:
    vision = dict(model_cfg["vision_cfg"])
    if "timm_model_name" in vision:
        vision["timm_model_pretrained"] = False
    return {
        "embed_dim": model_cfg["embed_dim"],
        "vision_cfg": vision,
        "quick_gelu": bool(model_cfg.get("quick_gelu", False)),
    }


def build_tower(model_cfg: Mapping[str, Any]) -> nn.Module:
    """The bare tower of a config. A timm tower is built at its own default size; its config's `image_size` is applied here.

    `timm_args` in `vision_cfg`, which open_clip does not know, are arguments of the timm model that override its architecture's own.
    """
    vision = dict(model_cfg["vision_cfg"])
    timm_args = vision.pop("timm_args", None)
    with torch.device("meta") if timm_args else contextlib.nullcontext():
        visual: nn.Module = _build_vision_tower(model_cfg["embed_dim"], vision, model_cfg["quick_gelu"])
    if timm_args:
        own = {"num_classes": 0, "global_pool": vision["timm_pool"]}
        visual.trunk = timm.create_model(vision["timm_model_name"], **own, **timm_args)
    trunk = getattr(visual, "trunk", None)
    built = getattr(getattr(trunk, "patch_embed", None), "img_size", None)
    size = vision.get("image_size")
    wanted = (size, size) if isinstance(size, int) else size
    if trunk is not None and built is not None and wanted is not None and tuple(built) != tuple(wanted):
        trunk.set_input_size(img_size=wanted)
    return visual
