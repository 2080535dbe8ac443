"""Small random towers of every family that runs packed, and each image alone through the tower's own forward pass: the sceptic's side."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import open_clip
import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.transforms.functional import normalize

from mmds.config_types import EncoderSection
from mmds.geometry import Grid
from mmds.model.encoder import Encoder, build_encoder
from mmds.model.encoder_sources import build_tower
from tests import tiny
from tests.model.families import excite

SMALL: dict[str, Any] = {"depth": 3, "embed_dim": 48, "num_heads": 3}
NATIVE: dict[str, Any] = {"image_size": 56, "layers": 3, "width": 32, "head_width": 16, "patch_size": 14}


def _native(*, quick_gelu: bool = False, **vision: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    return {"embed_dim": 16, "vision_cfg": {**NATIVE, **vision}, "quick_gelu": quick_gelu}, {}


def _timm(
    name: str, size: int = 64, pool: str = "", proj: str = "linear", **small: Any
) -> tuple[dict[str, Any], dict[str, Any]]:
    """open_clip's description of a timm tower, and what makes it small."""
    vision = {"timm_model_name": name, "timm_pool": pool, "timm_proj": proj, "image_size": size}
    return {"embed_dim": 16, "vision_cfg": vision}, {**SMALL, "img_size": size, **small}


def _named(name: str, size: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """One of open_clip's own timm-backed models, in small."""
    cfg = open_clip.get_model_config(name)
    assert cfg is not None
    vision = {**cfg["vision_cfg"], "image_size": size}
    return {"embed_dim": cfg["embed_dim"], "vision_cfg": vision}, {**SMALL, "img_size": size}


# tower: open_clip's description and timm's arguments; every table of positions is 4 x 4, but two
TOWERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "open_clip ViT": _native(),
    "open_clip ViT, QuickGELU": _native(quick_gelu=True),
    "open_clip ViT, no norm before, LayerScale": _native(no_ln_pre=True, ls_init_value=0.1),
    "open_clip ViT, sines": _native(pos_embed_type="sin_cos_2d"),
    "open_clip ViT, average pool": _native(pool_type="avg", final_ln_after_pool=True),
    "timm ViT, class token": _timm("vit_tiny_patch16_224"),
    "timm ViT, QK norm": _timm("vit_tiny_patch16_224", qk_norm=True),
    "timm ViT, register, average pool": _timm("test_vit2", pool="avg"),
    "timm ViT, register, attention pool": _timm("test_vit3", pool="map", proj="none"),
    "timm ViT, no prefix, RMS norm": _timm("test_vit4", pool="avg", reg_tokens=0),
    "timm ViT, post-norm": _timm("vit_base_patch16_rpn_224", pool="avg"),
    "DeiT 3, positions without class": _timm("deit3_small_patch16_224"),
    "SigLIP": _named("ViT-B-16-SigLIP", 64),
    "SigLIP 2": _named("ViT-B-16-SigLIP2-256", 96),
    "DINOv2": _timm("vit_small_patch14_dinov2", 56),
    "DINOv2, registers": _timm("vit_small_patch14_reg4_dinov2", 56),
    "EVA-01": _timm("eva_giant_patch14_224", 56),
    "EVA-02": _timm("eva02_tiny_patch14_224", 56),
    "EVA-02, separate queries": _timm("eva02_large_patch14_224", 56),
    "BEiT 3": _timm("beit3_base_patch16_224"),
    "PE core": _timm("vit_pe_core_tiny_patch16_384", pool="map"),
    "PE spatial": _timm("vit_pe_spatial_tiny_patch16_512", 96),
}

# towers that squares alone can run through: description, arguments, and the name that a refusal must say
UNPACKABLE: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "ResNet": (
        {
            "embed_dim": 16,
            "vision_cfg": {"image_size": 64, "layers": [1, 1, 1, 1], "width": 8, "head_width": 16},
        },
        {},
        "ModifiedResNet",
    ),
    "ConvNeXt": (
        {
            "embed_dim": 16,
            "vision_cfg": {
                "timm_model_name": "test_convnext",
                "timm_pool": "",
                "timm_proj": "linear",
                "image_size": 160,
            },
        },
        {},
        "ConvNeXt",
    ),
    "hybrid of ResNet and ViT": (*_timm("vit_tiny_r_s16_p8_224"), "HybridEmbed"),
    "relative positions": (
        *_timm("vit_relpos_small_patch16_224", pool="avg", init_values=None),
        "VisionTransformerRelPos with PatchEmbed",
    ),
    "distillation token": (
        *_timm("deit_tiny_distilled_patch16_224"),
        "VisionTransformerDistilled with PatchEmbed",
    ),
    "DINOv3's rotary positions": (*_timm("vit_small_patch16_dinov3"), "RotaryEmbeddingDinoV3"),
    "open_clip's own attention": (*_native(qk_norm=True), "CustomResidualAttentionBlock"),
}


def write_folder(folder: Path, cfg: dict[str, Any]) -> Path:
    """A `local-dir:` folder of the tower, without weights."""
    return tiny.write_encoder(folder, model_cfg=cfg, weights=False)


def small(arguments: dict[str, Any]) -> Any:
    """While this holds, open_clip makes its timm towers with these arguments."""
    return patch.object(timm, "create_model", partial(timm.create_model, **arguments))


def make(
    folder: Path, name: str, *, layer: int = -2, norm: bool = False, rope: bool = False
) -> tuple[Encoder, nn.Module]:
    """The encoder as a user's config would make it, and the whole tower with the same weights, in eval mode."""
    cfg, arguments = TOWERS[name]
    with small(arguments):
        section = EncoderSection(
            name=f"local-dir:{write_folder(folder, cfg)}",
            pretrained="random",
            layer=layer,
            norm=norm,
            rope=rope,
        )
        encoder = build_encoder(section)
        torch.manual_seed(0)
        tower: Any = build_tower({"quick_gelu": False, **cfg})
    excite(tower)
    patches = tower.trunk.patch_embed.proj if hasattr(tower, "trunk") else tower.conv1
    with torch.no_grad():  # so that positions and attention weigh as much as pixels
        patches.weight.mul_(0.02)
    state = tower.state_dict()
    encoder.visual.load_state_dict({key: state[key] for key in encoder.visual.state_dict()})
    return encoder.eval(), tower.eval()


def random_images(grids: Sequence[Grid], side: int, *, seed: int = 0) -> list[Tensor]:
    """uint8 [3, H, W] for each grid of patches."""
    dice = torch.Generator().manual_seed(seed)
    return [
        torch.randint(0, 256, (3, rows * side, columns * side), dtype=torch.uint8, generator=dice)
        for rows, columns in grids
    ]


def cut(images: Sequence[Tensor], side: int) -> Tensor:
    """uint8 [P, 3, p, p]: the patches of these images in reading order."""
    windows = [image.unfold(1, side, side).unfold(2, side, side) for image in images]
    return torch.cat([w.permute(1, 2, 0, 3, 4).reshape(-1, 3, side, side) for w in windows])


class _AtBlock(nn.Module):
    """The tower's own forward pass up to one block."""

    def __init__(self, tower: nn.Module, layer: int, norm: bool) -> None:
        super().__init__()
        self.tower, self.layer, self.norm = tower, layer, norm

    def forward(self, pixels: Tensor) -> Tensor:
        outputs = self.tower.forward_intermediates(
            pixels,
            indices=[self.layer],
            normalize_intermediates=self.norm,
            intermediates_only=True,
            output_fmt="NCHW",
        )
        return outputs["image_intermediates"][-1]


def resized(table: Tensor, own: Grid, grid: Grid) -> Tensor:
    """Positions [rows * columns, c] of a table for the grid `own` at another grid: torch's interpolation, in fp64 and contiguous."""
    if grid == own:
        return table
    image = table.double().unflatten(0, own).permute(2, 0, 1)[None].contiguous()
    places = F.interpolate(image, grid, mode="bicubic", antialias=True, align_corners=False)
    return places[0].flatten(1).T.to(table.dtype)


def own_features(tower: Any, image: Tensor, *, layer: int, norm: bool = False) -> Tensor:
    """Features [P, c] of one uint8 image [3, H, W] by the tower itself, set to this size; gradients reach the tower's parameters."""
    size = (image.shape[1], image.shape[2])
    pixels = normalize(image.float().div(255), tiny.PREPROCESS["mean"], tiny.PREPROCESS["std"])
    sized = deepcopy(tower)
    parameters = {f"tower.{name}": parameter for name, parameter in tower.named_parameters()}
    if hasattr(tower, "trunk"):
        trunk = tower.trunk
        sized.trunk.set_input_size(img_size=size)
        if trunk.pos_embed is not None:
            prefix = 0 if trunk.no_embed_class else trunk.num_prefix_tokens
            grids = trunk.patch_embed.grid_size, sized.trunk.patch_embed.grid_size
            places = resized(trunk.pos_embed[0, prefix:], *grids)
            parameters["tower.trunk.pos_embed"] = torch.cat([trunk.pos_embed[0, :prefix], places])[None]
    else:
        grid = (size[0] // tower.patch_size[0], size[1] // tower.patch_size[1])
        table = tower.positional_embedding
        parameters["tower.positional_embedding"] = torch.cat(
            [table[:1], resized(table[1:], tower.grid_size, grid)]
        )
    features = torch.func.functional_call(_AtBlock(sized, layer, norm), parameters, (pixels[None],))
    return features[0].flatten(1).T
