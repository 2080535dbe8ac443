"""Vision towers of LLaVA in both descriptions: transformers' CLIP and SigLIP configs, and open_clip's native or timm-backed ViT."""

from __future__ import annotations

from typing import Any

import open_clip
import torch
from open_clip.transformer import LayerNorm as NativeNorm
from open_clip.transformer import QuickGELU, ResidualAttentionBlock
from timm.layers.activations import GELUTanh
from timm.models.vision_transformer import Block
from torch import nn
from transformers import CLIPVisionConfig, SiglipVisionConfig

from mmds.errors import CheckpointError
from mmds.model.encoder import EncoderSpec, encoder_from_spec, tower_blocks

TIMM_BASE = "vit_base_patch16_siglip_224"
"""timm's SigLIP architecture; its sizes and activation are overridden by `timm_args`."""

_ACTIVATIONS = {
    "clip_vision_model": {"quick_gelu": "quick_gelu", "gelu": "gelu"},
    "siglip_vision_model": {"gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_tanh": "gelu_tanh"},
}
_SIGLIP_EPS = 1e-6
_CLIP_EPS = 1e-5
FAMILIES = {"clip_vision_model": "clip", "siglip_vision_model": "siglip"}
"""transformers' model_type of the tower: its table in `llava_names.TOWERS`."""


def open_clip_config(vision: Any) -> tuple[str, dict[str, Any]]:
    """(name, open_clip's model config) of the tower that transformers' vision config describes.

    Raises CheckpointError for another family, activation or epsilon than open_clip and timm can compute.
    """
    kind = vision.model_type
    if kind not in FAMILIES:
        raise CheckpointError(
            f"vision_config: the tower is a {kind!r}; only CLIP (clip_vision_model) and SigLIP (siglip_vision_model) can be taken"
        )
    act = _ACTIVATIONS[kind].get(vision.hidden_act)
    if act is None:
        raise CheckpointError(
            f"vision_config.hidden_act is {vision.hidden_act!r}, which a {kind} tower here cannot compute; it can "
            f"{', '.join(_ACTIVATIONS[kind])}"
        )
    if vision.num_channels != 3:
        raise CheckpointError(
            f"vision_config.num_channels is {vision.num_channels}; only RGB towers can be taken"
        )
    if kind == "clip_vision_model":
        return _native_config(vision, act)
    return _timm_config(vision, act)


def _native_config(vision: Any, act: str) -> tuple[str, dict[str, Any]]:
    section: dict[str, Any] = {
        "image_size": vision.image_size,
        "layers": vision.num_hidden_layers,
        "width": vision.hidden_size,
        "head_width": vision.hidden_size // vision.num_attention_heads,
        "patch_size": vision.patch_size,
        "mlp_ratio": _ratio(vision.intermediate_size, vision.hidden_size),
    }
    if vision.layer_norm_eps != _CLIP_EPS:
        section["norm_kwargs"] = {"eps": vision.layer_norm_eps}
    config = {"embed_dim": vision.projection_dim, "vision_cfg": section, "quick_gelu": act == "quick_gelu"}
    return _built_in_name(config) or f"clip-vit-{section['width']}x{section['layers']}", config


def _timm_config(vision: Any, act: str) -> tuple[str, dict[str, Any]]:
    if vision.layer_norm_eps != _SIGLIP_EPS:
        raise CheckpointError(
            f"vision_config.layer_norm_eps is {vision.layer_norm_eps}, but timm's SigLIP towers compute with {_SIGLIP_EPS}"
        )
    args = {
        "img_size": vision.image_size,
        "patch_size": vision.patch_size,
        "embed_dim": vision.hidden_size,
        "depth": vision.num_hidden_layers,
        "num_heads": vision.num_attention_heads,
        "mlp_ratio": _ratio(vision.intermediate_size, vision.hidden_size),
        "act_layer": act,
    }
    section = {
        "image_size": vision.image_size,
        "timm_model_name": TIMM_BASE,
        "timm_model_pretrained": False,
        "timm_pool": "map",
        "timm_proj": "none",
        "timm_args": args,
    }
    config = {"embed_dim": vision.hidden_size, "vision_cfg": section, "quick_gelu": False}
    return f"siglip-vit-{vision.hidden_size}x{vision.num_hidden_layers}", config


def _ratio(inner: int, width: int) -> float:
    """A ratio of which int(width * ratio) is `inner`, as open_clip and timm compute it."""
    ratio = inner / width
    return ratio if int(width * ratio) == inner else (inner + 0.5) / width


def _built_in_name(config: dict[str, Any]) -> str | None:
    """open_clip's name of this very tower, the shortest where it has several."""
    wanted = {"mlp_ratio": 4.0, **config["vision_cfg"]}
    names = []
    for name in open_clip.list_models():
        known = open_clip.get_model_config(name) or {}
        section = {"head_width": 64, "mlp_ratio": 4.0, **known.get("vision_cfg", {})}
        same = section == wanted and known.get("embed_dim") == config["embed_dim"]
        if same and bool(known.get("quick_gelu")) == config["quick_gelu"]:
            names.append(name)
    return min(names, key=len, default=None)


def transformers_config(spec: EncoderSpec) -> tuple[str, CLIPVisionConfig | SiglipVisionConfig] | str:
    """(family, transformers' config of the tower up to its feature block), or the reason why there is none."""
    if spec.norm:
        return "the tower's final norm is applied to the features, which LLaVA of transformers never does"
    with torch.device("meta"):
        visual = encoder_from_spec(spec).visual
    blocks = tower_blocks(visual)
    if all(type(block) is ResidualAttentionBlock for block in blocks) and hasattr(visual, "class_embedding"):
        return _clip_config(spec, visual, blocks)
    if blocks and all(type(block) is Block for block in blocks):
        return _siglip_config(spec, visual, blocks)
    return f"the tower {spec.name} is neither a CLIP ViT nor a SigLIP ViT of transformers"


def _clip_config(spec: EncoderSpec, visual: Any, blocks: list[Any]) -> tuple[str, CLIPVisionConfig] | str:
    first = blocks[0]
    acts = {"quick_gelu": QuickGELU, "gelu": nn.GELU}
    act = next((name for name, kind in acts.items() if type(first.mlp.gelu) is kind), None)
    same = isinstance(visual.ln_pre, NativeNorm) and isinstance(first.ls_1, nn.Identity)
    if (
        act is None
        or not same
        or spec.model_cfg["vision_cfg"].get("pos_embed_type", "learnable") != "learnable"
    ):
        return f"the tower {spec.name} is a ViT that CLIP of transformers cannot compute (its norms, activation or positions)"
    return "clip", CLIPVisionConfig(
        hidden_size=spec.width,
        intermediate_size=first.mlp.c_fc.out_features,
        num_hidden_layers=spec.layer + 1,
        num_attention_heads=first.attn.num_heads,
        image_size=spec.image_size,
        patch_size=spec.patch_size,
        hidden_act=act,
        layer_norm_eps=first.ln_1.eps,
        projection_dim=spec.model_cfg["embed_dim"],
    )


def _siglip_config(spec: EncoderSpec, visual: Any, blocks: list[Any]) -> tuple[str, SiglipVisionConfig] | str:
    trunk, first = visual.trunk, blocks[0]
    acts = {"gelu_pytorch_tanh": GELUTanh, "gelu": nn.GELU}
    act = next((name for name, kind in acts.items() if type(first.mlp.act) is kind), None)
    plain = [trunk.norm_pre, first.ls1, first.ls2, first.attn.q_norm, first.attn.k_norm, first.attn.norm]
    same = (
        trunk.cls_token is None
        and trunk.num_prefix_tokens == 0
        and trunk.pos_embed is not None
        and trunk.patch_embed.proj.bias is not None
        and first.attn.qkv.bias is not None
        and all(isinstance(module, nn.Identity) for module in plain)
        and isinstance(first.norm1, nn.LayerNorm)
    )
    if act is None or not same:
        return f"the tower {spec.name} is a timm ViT that SigLIP of transformers cannot compute (class token, norms or activation)"
    return "siglip", SiglipVisionConfig(
        hidden_size=spec.width,
        intermediate_size=first.mlp.fc1.out_features,
        num_hidden_layers=spec.layer + 1,
        num_attention_heads=first.attn.num_heads,
        image_size=spec.image_size,
        patch_size=spec.patch_size,
        hidden_act=act,
        layer_norm_eps=first.norm1.eps,
        vision_use_head=False,
    )
