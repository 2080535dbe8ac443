"""transformers' own LLaVA with tiny random weights, the same weights under our names, and its loss and gradients: the sceptic's side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    CLIPImageProcessor,
    CLIPVisionConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
)

from mmds.config_types import ConnectorSection, EncoderSection
from mmds.data.rows import IMAGE_MARKER, LoadedSample
from mmds.model.connector import Connector
from mmds.model.decoder import Decoder
from mmds.model.encoder import Encoder, build_encoder
from mmds.model.mllm import Mllm
from tests import tiny
from tests.model.families import excite

IMAGE_TOKEN = tiny.VOCABULARY + 1
PATCHES = 4  # 28 px / 14 px, squared
VISION = {
    "embed_dim": 16,
    "vision_cfg": {"image_size": 28, "layers": 3, "width": 32, "head_width": 16, "patch_size": 14},
    "quick_gelu": True,
}


def small_parts(image_size: int) -> dict[str, Any]:
    """Settings of a LLaVA in small: CLIP ViT with QuickGELU, its last layer but one without the class token, a 2-layer MLP, Llama."""
    vision = CLIPVisionConfig(
        hidden_size=32,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=2,
        image_size=image_size,
        patch_size=14,
        hidden_act="quick_gelu",
    )
    text = LlamaConfig(
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=tiny.VOCABULARY + 2,
        tie_word_embeddings=False,
    )
    return dict(
        vision_config=vision,
        text_config=text,
        image_token_index=IMAGE_TOKEN,
        projector_hidden_act="gelu",
        vision_feature_layer=-2,
        vision_feature_select_strategy="default",
        attn_implementation="eager",
    )


def stock_llava(seed: int = 0) -> LlavaForConditionalGeneration:
    """LLaVA-1.5 in small."""
    config = LlavaConfig(**small_parts(28))
    torch.manual_seed(seed)
    model = LlavaForConditionalGeneration(config).train()
    excite(model)
    return model


def our_names(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """LLaVA's tensors under our names: query, key and value of the tower fused, linear and convolution weights unchanged."""
    tower, projector, text = "model.vision_tower.", "model.multi_modal_projector.", "model.language_model."
    renamed = {
        "encoder.visual.class_embedding": tensors[tower + "embeddings.class_embedding"],
        "encoder.visual.conv1.weight": tensors[tower + "embeddings.patch_embedding.weight"],
        "encoder.visual.positional_embedding": tensors[tower + "embeddings.position_embedding.weight"],
        "decoder.llm.lm_head.weight": tensors["lm_head.weight"],
    }
    for kind in ("weight", "bias"):
        renamed[f"encoder.visual.ln_pre.{kind}"] = tensors[f"{tower}pre_layrnorm.{kind}"]
        renamed[f"connector.net.up.{kind}"] = tensors[f"{projector}linear_1.{kind}"]
        renamed[f"connector.net.down.{kind}"] = tensors[f"{projector}linear_2.{kind}"]
        for block in range(2):
            theirs, ours = f"{tower}encoder.layers.{block}.", f"encoder.visual.transformer.resblocks.{block}."
            fused = [tensors[f"{theirs}self_attn.{x}_proj.{kind}"] for x in "qkv"]
            renamed[f"{ours}attn.in_proj_{kind}"] = torch.cat(fused)
            renamed[f"{ours}attn.out_proj.{kind}"] = tensors[f"{theirs}self_attn.out_proj.{kind}"]
            renamed[f"{ours}ln_1.{kind}"] = tensors[f"{theirs}layer_norm1.{kind}"]
            renamed[f"{ours}ln_2.{kind}"] = tensors[f"{theirs}layer_norm2.{kind}"]
            renamed[f"{ours}mlp.c_fc.{kind}"] = tensors[f"{theirs}mlp.fc1.{kind}"]
            renamed[f"{ours}mlp.c_proj.{kind}"] = tensors[f"{theirs}mlp.fc2.{kind}"]
    for name, value in tensors.items():
        if name.startswith(text):
            renamed[f"decoder.llm.model.{name.removeprefix(text)}"] = value
    return renamed


def same_mllm(theirs: LlavaForConditionalGeneration, folder: Path) -> Mllm:
    """Our network with the same weights; the encoder comes through an open_clip folder as a user's would."""
    tiny.write_encoder(folder, model_cfg=VISION)
    encoder: Encoder = build_encoder(EncoderSection(name=f"local-dir:{folder}", layer=-2))
    model = Mllm(
        connector=Connector(ConnectorSection(name="mlp2x"), encoder_width=32, decoder_width=48),
        decoder=Decoder(LlamaForCausalLM(deepcopy(theirs.config.text_config))),
        encoder=encoder,
    )
    model.load_state_dict(our_names(dict(theirs.named_parameters())), strict=True)
    return model


def llava_logits(model: LlavaForConditionalGeneration, sample: LoadedSample) -> tuple[Tensor, Tensor]:
    """Logits [T, V] of one sample alone, and its loss (LLaVA's own mean over supervised tokens)."""
    ids, labels = [], []
    for token, supervised in zip(sample.ids.tolist(), sample.supervised.tolist(), strict=True):
        ids += [IMAGE_TOKEN] * PATCHES if token == IMAGE_MARKER else [token]
        labels += [-100] * PATCHES if token == IMAGE_MARKER else [token if supervised else -100]
    processor = CLIPImageProcessor(
        do_resize=False,
        do_center_crop=False,
        image_mean=tiny.PREPROCESS["mean"],
        image_std=tiny.PREPROCESS["std"],
    )
    images = [torch.from_numpy(image)[0] for image in sample.images]
    pixels = processor(images, return_tensors="pt")["pixel_values"] if images else None
    output = model(
        input_ids=torch.tensor([ids]),
        attention_mask=torch.ones(1, len(ids), dtype=torch.int64),
        pixel_values=pixels,
        labels=torch.tensor([labels]),
        use_cache=False,
    )
    return output.logits[0], output.loss


def llava_step(
    model: LlavaForConditionalGeneration, samples: Sequence[LoadedSample]
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Logits [T, V] of all samples, the mean NLL of all supervised tokens, and its gradients under our names."""
    logits, total, count = [], torch.zeros(()), 0
    for sample in samples:
        of_sample, loss = llava_logits(model, sample)
        targets = int(sample.supervised[1:].sum())
        logits.append(of_sample)
        total, count = total + loss * targets, count + targets
    (total / count).backward()
    grads = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}
    return torch.cat(logits).detach(), (total / count).detach(), our_names(grads)
