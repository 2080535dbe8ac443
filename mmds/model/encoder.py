"""Vision encoders: the visual side of any open_clip tower, native ViT, ResNet or timm-backed, up to one feature layer.

What becomes of a tower: its text side, pooling, projection and every block above the feature layer are dropped (they would never
train), class and register tokens never leave it, and pixels are normalised with the tower's own mean and std on the device.
Shapes: N images, H x W pixels, g x g feature cells, c feature width.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import open_clip
import torch
from open_clip.model import _build_vision_tower
from safetensors.torch import load_file
from torch import Tensor, nn

from mmds.config_types import EncoderSection
from mmds.errors import CheckpointError, ConfigError

RANDOM = "random"
LOCAL = "local-dir:"
FOLDER_CONFIG = "open_clip_config.json"


@dataclass(frozen=True, kw_only=True)
class EncoderSpec:
    """All that is needed to build the tower again and to feed it; saved in every model folder.

    model_cfg: open_clip's `embed_dim`, `vision_cfg` and `quick_gelu`. layer: feature block, counted from 0. norm: whether the
    tower's final norm is applied to the features. mean, std: per channel, for pixels in [0, 1]. interpolation: of the resize.
    image_size: pixels a side. patch_size: pixels a side of one feature cell. width: channels of a feature.
    """

    name: str
    model_cfg: dict[str, Any]
    layer: int
    norm: bool
    mean: tuple[float, ...]
    std: tuple[float, ...]
    interpolation: str
    image_size: int
    patch_size: int
    width: int

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> EncoderSpec:
        """The inverse of `to_json`."""
        return EncoderSpec(**{**data, "mean": tuple(data["mean"]), "std": tuple(data["std"])})

    def to_json(self) -> dict[str, Any]:
        """A dict of plain JSON types."""
        return {**asdict(self), "mean": list(self.mean), "std": list(self.std)}


class Encoder(nn.Module):
    """uint8 pixels in, patch features out, with one call for all images of a row."""

    def __init__(self, visual: nn.Module, spec: EncoderSpec) -> None:
        super().__init__()
        self.visual = visual
        self.spec = spec

    def forward(self, pixels: Tensor) -> Tensor:
        """uint8 [N, 3, H, W] upright RGB -> features [N, g*g, c] in reading order, in the weights' dtype."""
        dtype = next(self.visual.parameters()).dtype
        mean = torch.tensor(self.spec.mean, device=pixels.device).view(1, 3, 1, 1)
        std = torch.tensor(self.spec.std, device=pixels.device).view(1, 3, 1, 1)
        normal = ((pixels.float() / 255 - mean) / std).to(dtype)
        maps = _feature_map(self.visual, normal, layer=self.spec.layer, norm=self.spec.norm)
        return maps.flatten(2).transpose(1, 2)

    def train(self, mode: bool = True) -> Encoder:
        """As usual, but batch norms keep their stored statistics: an image's features do not depend on its row."""
        super().train(mode)
        for module in self.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.eval()
        return self

    def set_recompute(self, enable: bool) -> None:
        """Recompute each block's activations in the backward pass. Raises ConfigError for a tower that cannot."""
        if not enable:
            return
        self.visual.set_grad_checkpointing(True)  # type: ignore[operator]
        if not any(getattr(module, "grad_checkpointing", False) for module in self.modules()):
            raise ConfigError(
                f"activation_checkpointing: the encoder {self.spec.name} cannot recompute; freeze it or leave the key out"
            )


def build_encoder(section: EncoderSection) -> Encoder:
    """The encoder that a config names, in fp32 on the CPU.

    Raises ConfigError when its activation or its normalisation would have to be guessed, CheckpointError when weights are missing.
    """
    if section.name.startswith(LOCAL):
        visual, model_cfg, preprocess = _from_folder(section)
    elif section.pretrained == RANDOM:
        model_cfg = _vision_part(_named_config(section.name))
        visual, preprocess = _tower(model_cfg), {}
        _random_preprocess(section)
    else:
        visual, model_cfg, preprocess = _from_open_clip(section)
    if section.activation is not None and (section.activation == "quick_gelu") != model_cfg["quick_gelu"]:
        raise ConfigError(
            f"mmds.model.encoder.activation is {section.activation!r}, but {section.name} computes the other one"
        )
    mean, std = section.mean or preprocess.get("mean"), section.std or preprocess.get("std")
    if not mean or not std:
        mean, std = _random_preprocess(section)
    layer = _prune(visual, section.layer, norm=section.norm)
    image_size, cell, width = _measure(visual, model_cfg, layer=layer, norm=section.norm)
    spec = EncoderSpec(
        name=section.name,
        model_cfg=model_cfg,
        layer=layer,
        norm=section.norm,
        mean=tuple(mean),
        std=tuple(std),
        interpolation=preprocess.get("interpolation", "bicubic"),
        image_size=image_size,
        patch_size=cell,
        width=width,
    )
    return Encoder(visual, spec)


def encoder_from_spec(spec: EncoderSpec) -> Encoder:
    """An encoder of this spec with random weights, to be loaded strictly."""
    visual = _tower(spec.model_cfg)
    _prune(visual, spec.layer, norm=spec.norm)
    return Encoder(visual, spec)


def unused_parameters(encoder: Encoder) -> list[str]:
    """Names of parameters that get no gradient from the features: they could never train."""
    size = encoder.spec.image_size
    encoder.zero_grad()
    encoder(torch.zeros(1, 3, size, size, dtype=torch.uint8)).float().sum().backward()
    names = [name for name, parameter in encoder.named_parameters() if parameter.grad is None]
    encoder.zero_grad()
    return names


def _from_open_clip(section: EncoderSection) -> tuple[nn.Module, dict[str, Any], dict[str, Any]]:
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


def _from_folder(section: EncoderSection) -> tuple[nn.Module, dict[str, Any], dict[str, Any]]:
    """An open_clip `local-dir:` folder; only the visual weights are read and the network is never touched."""
    folder = Path(section.name.removeprefix(LOCAL)).expanduser()
    file = folder / FOLDER_CONFIG
    if not file.is_file():
        raise CheckpointError(
            f"mmds.model.encoder: {file} does not exist; a local-dir: folder needs it beside the weights"
        )
    config = json.loads(file.read_text(encoding="utf-8"))
    model_cfg, preprocess = _vision_part(config["model_cfg"]), dict(config.get("preprocess_cfg", {}))
    visual = _tower(model_cfg)
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


def _tower(model_cfg: Mapping[str, Any]) -> nn.Module:
    """The bare tower of a config. A timm tower is built at its own default size; its config's `image_size` is applied here."""
    vision = dict(model_cfg["vision_cfg"])
    visual: nn.Module = _build_vision_tower(model_cfg["embed_dim"], vision, model_cfg["quick_gelu"])
    trunk = getattr(visual, "trunk", None)
    built = getattr(getattr(trunk, "patch_embed", None), "img_size", None)
    size = vision.get("image_size")
    wanted = (size, size) if isinstance(size, int) else size
    if trunk is not None and built is not None and wanted is not None and tuple(built) != tuple(wanted):
        trunk.set_input_size(img_size=wanted)
    return visual


def _prune(visual: nn.Module, layer: int, *, norm: bool) -> int:
    """Drop what the features do not use; the feature block's index from 0. Raises ConfigError for a layer that is not there."""
    trunk = getattr(visual, "trunk", visual)
    prune = getattr(trunk, "prune_intermediate_layers", None)
    if prune is None:
        if layer < 0:
            raise ConfigError(
                f"mmds.model.encoder.layer: count {type(trunk).__name__}'s stages from 0 (got {layer})"
            )
        if layer > 4:
            raise ConfigError(f"mmds.model.encoder.layer: {layer} is not one of the stages 0 (stem) to 4")
        for above in range(layer + 1, 5):
            setattr(visual, f"layer{above}", nn.Identity())
        kept = [layer]
    else:
        try:
            kept = prune(indices=[layer], prune_norm=not norm, prune_head=True)
        except (AssertionError, ValueError, IndexError) as error:
            raise ConfigError(
                f"mmds.model.encoder.layer: {layer} is not a block of this tower: {error}"
            ) from error
    for gone in ("attn_pool", "attn_pool_contrastive", "attnpool", "head"):
        if isinstance(getattr(visual, gone, None), nn.Module):
            setattr(visual, gone, None)
    return int(kept[0])


def _feature_map(visual: nn.Module, pixels: Tensor, *, layer: int, norm: bool) -> Tensor:
    """[N, 3, H, W] normalised -> [N, c, g, g] of block `layer`, prefix tokens removed."""
    outputs = visual.forward_intermediates(  # type: ignore[operator]
        pixels, indices=[layer], normalize_intermediates=norm, intermediates_only=True, output_fmt="NCHW"
    )
    features: Tensor = outputs["image_intermediates"][-1]
    return features


def _measure(
    visual: nn.Module, model_cfg: Mapping[str, Any], *, layer: int, norm: bool
) -> tuple[int, int, int]:
    """Image size, pixels of one feature cell, and feature width, read off one forward pass."""
    size = model_cfg["vision_cfg"].get("image_size", 224)
    side = size if isinstance(size, int) else size[0]
    if not isinstance(size, int) and size[0] != size[1]:
        raise ConfigError(f"mmds.model.encoder: a fixed input of {size} is not square; not yet supported")
    visual.eval()
    try:
        with torch.no_grad():
            features = _feature_map(visual, torch.zeros(1, 3, side, side), layer=layer, norm=norm)
            plain = _feature_map(visual, torch.zeros(1, 3, side, side), layer=layer, norm=False)
    except (AssertionError, RuntimeError) as error:
        raise ConfigError(f"mmds.model.encoder: the tower takes no images of {side} px: {error}") from error
    if norm and torch.equal(features, plain):
        raise ConfigError("mmds.model.encoder.norm: this tower has no final norm; leave it out")
    _, width, rows, columns = features.shape
    embed = getattr(getattr(visual, "trunk", None), "patch_embed", None)
    patch = getattr(visual, "patch_size", None) or getattr(embed, "patch_size", None) or (1, 1)
    if rows != columns or side % rows or side % patch[0]:
        raise ConfigError(
            f"mmds.model.encoder: {side} px give {rows} x {columns} features; the image size is off the patch grid"
        )
    return side, side // rows, width
