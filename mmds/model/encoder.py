"""Vision encoders: the visual side of any open_clip tower, native ViT, ResNet or timm-backed, up to one feature layer.

Squares of the tower's own size run through its own forward; images of any other grid run packed (`packed_tower`).

What becomes of a tower: its text side, pooling, projection and every block above the feature layer are dropped (they would never
train), class and register tokens never leave it, and pixels are normalised with the tower's own mean and std on the device.
Shapes: N pieces of images, H x W pixels, g x g feature cells, P cells in all, p pixels a side of a cell, c feature width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mmds.config_types import EncoderSection
from mmds.errors import ConfigError
from mmds.geometry import Grid
from mmds.model.encoder_sources import build_tower, load_tower
from mmds.model.packed_tower import pack
from mmds.model.recompute import Checkpoint, recompute_blocks


@dataclass(frozen=True, kw_only=True)
class EncoderSpec:
    """All that is needed to build the tower again and to feed it; saved in every model folder.

    model_cfg: open_clip's `embed_dim`, `vision_cfg` and `quick_gelu`. layer: feature block, counted from 0. norm: whether the
    tower's final norm is applied to the features. mean, std: per channel, for pixels in [0, 1]. interpolation: of the resize.
    image_size: pixels a side. patch_size: pixels a side of one feature cell. width: channels of a feature. rope: whether
    queries and keys are rotated by row and column, beside the tower's own positions.
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
    rope: bool = False

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> EncoderSpec:
        """The inverse of `to_json`."""
        return EncoderSpec(**{**data, "mean": tuple(data["mean"]), "std": tuple(data["std"])})

    def to_json(self) -> dict[str, Any]:
        """A dict of plain JSON types."""
        return {**asdict(self), "mean": list(self.mean), "std": list(self.std)}


class Encoder(nn.Module):
    """uint8 pixels in, patch features out, with one call for all images of a row.

    pruned: the pieces of the tower that the features never use and that were therefore dropped, with their parameter counts.
    """

    def __init__(self, visual: nn.Module, spec: EncoderSpec, pruned: Mapping[str, int] | None = None) -> None:
        super().__init__()
        self.visual = visual
        self.spec = spec
        self.pruned = dict(pruned or {})
        self.unpackable = ""
        try:
            pack(visual, norm=spec.norm, rope=spec.rope)
        except ConfigError as error:
            self.unpackable = str(error)

    def forward(self, pixels: Tensor, grids: Sequence[Grid] | None = None) -> Tensor:
        """Features [P, c] in the weights' dtype, piece by piece, in reading order.

        pixels: uint8 upright RGB, [N, 3, H, W] of the tower's own size; or, with `grids`, patches [P, 3, p, p] of pieces with these
        rows and columns, in one packed call. Raises ConfigError for grids on a tower that cannot run packed.
        """
        dtype = next(self.visual.parameters()).dtype
        mean = torch.tensor(self.spec.mean, device=pixels.device).view(1, 3, 1, 1)
        std = torch.tensor(self.spec.std, device=pixels.device).view(1, 3, 1, 1)
        normal = ((pixels.float() / 255 - mean) / std).to(dtype)
        if grids is not None:
            self.must_pack()
            packed: Tensor = self.visual(normal, grids)
            return packed
        maps = _feature_map(self.visual, normal, layer=self.spec.layer, norm=self.spec.norm)
        return maps.flatten(2).transpose(1, 2).flatten(0, 1)

    def must_pack(self) -> None:
        """Raise ConfigError, with the reason, for a tower that cannot run images of different sizes in one packed call."""
        if self.unpackable:
            raise ConfigError(self.unpackable)

    def train(self, mode: bool = True) -> Encoder:
        """As usual, but batch norms keep their stored statistics: an image's features do not depend on its row."""
        super().train(mode)
        for module in self.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.eval()
        return self

    def set_recompute(self, every: int, checkpoint: Checkpoint) -> None:
        """Recompute every n-th block in the backward pass; every = 0: none. Raises ConfigError for a tower without known blocks."""
        blocks = tower_blocks(self.visual)
        if every and not blocks:
            raise ConfigError(
                f"activation_checkpointing: the blocks of the encoder {self.spec.name} are not known, so they cannot recompute; "
                "override with\n    --set mmds.recompute.encoder=0"
            )
        recompute_blocks(blocks, every, checkpoint)


def tower_blocks(visual: nn.Module) -> list[nn.Module]:
    """The blocks of a tower in order: transformer blocks, or residual blocks of its stages; empty for an unknown make."""
    trunk = getattr(visual, "trunk", visual)
    for path in ("transformer.resblocks", "blocks"):
        found: Any = trunk
        for name in path.split("."):
            found = getattr(found, name, None)
        if isinstance(found, (nn.ModuleList, nn.Sequential)):
            return list(found)
    stages = getattr(trunk, "stages", None) or [getattr(trunk, f"layer{i}", None) for i in range(1, 5)]
    blocks: list[nn.Module] = []
    for stage in stages:
        inner = getattr(stage, "blocks", stage)
        blocks += list(inner) if isinstance(inner, (nn.ModuleList, nn.Sequential)) else []
    return blocks


def build_encoder(section: EncoderSection) -> Encoder:
    """The encoder that a config names, in fp32 on the CPU, with all that its features do not use dropped.

    Raises ConfigError when something would have to be guessed or does not fit, CheckpointError when weights are missing.
    """
    visual, model_cfg, preprocess = load_tower(section)
    whole = _sizes(visual)
    layer = _prune(visual, section.layer, norm=section.norm)
    image_size, cell, width = _measure(visual, model_cfg, layer=layer, norm=section.norm)
    spec = EncoderSpec(
        name=section.name,
        model_cfg=model_cfg,
        layer=layer,
        norm=section.norm,
        mean=preprocess["mean"],
        std=preprocess["std"],
        interpolation=preprocess.get("interpolation", "bicubic"),
        image_size=image_size,
        patch_size=cell,
        width=width,
        rope=section.rope,
    )
    return Encoder(visual, spec, _pieces_gone(whole, visual))


def encoder_from_spec(spec: EncoderSpec) -> Encoder:
    """An encoder of this spec with random weights, to be loaded strictly."""
    visual = build_tower(spec.model_cfg)
    whole = _sizes(visual)
    _prune(visual, spec.layer, norm=spec.norm)
    return Encoder(visual, spec, _pieces_gone(whole, visual))


def describe_pruned(pruned: Mapping[str, int]) -> str:
    """What `Encoder.pruned` holds in one line: its pieces, the blocks of one stack as a range, and the parameters in all."""
    if not pruned:
        return "nothing"
    stacks: dict[str, list[str]] = {}
    for piece in pruned:
        stack, dot, number = piece.rpartition(".")
        stacks.setdefault(stack if dot else piece, []).extend([number] if dot else [])
    shown = []
    for name, numbers in stacks.items():
        blocks = "-".join(dict.fromkeys((numbers[0], numbers[-1]))) if numbers else ""
        shown.append(f"{name}.{blocks}" if blocks else name)
    return f"{', '.join(shown)}: {sum(pruned.values()):,} parameters that the features never use"


def unused_parameters(encoder: Encoder) -> list[str]:
    """Names of parameters that get no gradient from the features: they could never train."""
    size = encoder.spec.image_size
    encoder.zero_grad()
    encoder(torch.zeros(1, 3, size, size, dtype=torch.uint8)).float().sum().backward()
    names = [name for name, parameter in encoder.named_parameters() if parameter.grad is None]
    encoder.zero_grad()
    return names


def _sizes(visual: nn.Module) -> dict[str, int]:
    return {name: parameter.numel() for name, parameter in visual.named_parameters()}


def _pieces_gone(whole: Mapping[str, int], visual: nn.Module) -> dict[str, int]:
    """Parameter counts of what `whole` had and `visual` has no more, by block or, outside of blocks, by outermost module."""
    left, gone = _sizes(visual), dict[str, int]()
    for name, size in whole.items():
        if name not in left:
            parts = name.removeprefix("trunk.").split(".")
            numbers = [i for i, part in enumerate(parts) if part.isdecimal()]
            piece = ".".join(parts[: numbers[0] + 1 if numbers else 1])
            gone[piece] = gone.get(piece, 0) + size
    return gone


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
