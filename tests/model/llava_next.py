"""transformers' own LLaVA-NeXT with tiny random weights, the same weights under our names, and its logits, loss and gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import (
    CLIPImageProcessor,
    LlamaForCausalLM,
    LlavaNextConfig,
    LlavaNextForConditionalGeneration,
)

from mmds.config_types import ConnectorSection, EncoderSection, ResolutionSection
from mmds.data.rows import IMAGE_MARKER, LoadedSample
from mmds.geometry import Geometry, Grid
from mmds.model.build import build_geometry
from mmds.model.connector import Connector
from mmds.model.decoder import Decoder
from mmds.model.encoder import build_encoder
from mmds.model.mllm import Mllm
from tests import tiny
from tests.model import llava
from tests.model.families import excite

TILE = 56
VISION = {**llava.VISION, "vision_cfg": {**llava.VISION["vision_cfg"], "image_size": TILE}}  # type: ignore[dict-item]
ANYRES = ResolutionSection(name="anyres", max_tiles=6)


def stock_llava_next(grids: Sequence[Grid], seed: int = 0) -> LlavaNextForConditionalGeneration:
    """LLaVA-NeXT in small, with these grids of tiles."""
    pinpoints = [[rows * TILE, columns * TILE] for rows, columns in grids]
    config = LlavaNextConfig(**llava.small_parts(TILE), image_grid_pinpoints=pinpoints)
    torch.manual_seed(seed)
    model = LlavaNextForConditionalGeneration(config).train()
    excite(model)
    return model


def our_names(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """LLaVA-NeXT's tensors under our names: LLaVA's, and the learned end of a row of tiles."""
    return {**llava.our_names(tensors), "connector.separator": tensors["model.image_newline"]}


def same_mllm(folder: Path, resolution: ResolutionSection = ANYRES) -> tuple[Mllm, Geometry]:
    """Our network and its geometry, to be given the same weights by `load`."""
    tiny.write_encoder(folder, model_cfg=VISION)
    encoder = build_encoder(EncoderSection(name=f"local-dir:{folder}", layer=-2))
    section = ConnectorSection(name="mlp2x")
    geometry = build_geometry(encoder.spec, section, max_pixels=None, resolution=resolution)
    config = stock_llava_next(geometry.grids).config.text_config
    connector = Connector(section, encoder_width=32, decoder_width=48, separator=True)
    model = Mllm(connector=connector, decoder=Decoder(LlamaForCausalLM(deepcopy(config))), encoder=encoder)
    return model, geometry


def load(ours: Mllm, theirs: LlavaNextForConditionalGeneration) -> Mllm:
    """Our network with their weights."""
    ours.load_state_dict(our_names(dict(theirs.named_parameters())), strict=True)
    return ours


def sample_of(
    rng: np.random.Generator, geometry: Geometry, sizes: Sequence[tuple[int, int]], *, key: str
) -> LoadedSample:
    """A sample of random ids with pictures of these (width, height) sizes, each of its own random pixels."""
    length = 8 + 2 * len(sizes)
    ids = rng.integers(2, tiny.VOCABULARY, length).astype(np.int32)
    ids[rng.choice(np.arange(1, length - 2), len(sizes), replace=False)] = IMAGE_MARKER
    supervised = (rng.random(length) < 0.5) & (ids != IMAGE_MARKER)
    supervised[-1] = True
    shapes = [geometry.plan(*size).pixel_shape for size in sizes]
    return LoadedSample(
        key=key,
        ids=ids,
        supervised=supervised,
        images=tuple(rng.integers(0, 256, shape).astype(np.uint8) for shape in shapes),
        image_sizes=tuple(sizes),
        image_paths=tuple(f"{key}-{k}.png" for k in range(len(sizes))),
    )


def their_pixels(images: Sequence[np.ndarray]) -> Tensor | None:
    """Our pieces as LLaVA-NeXT takes them: [I, most pieces, 3, H, W], normalised by CLIP's processor, short ones filled up."""
    processor = CLIPImageProcessor(
        do_resize=False,
        do_center_crop=False,
        image_mean=tiny.PREPROCESS["mean"],
        image_std=tiny.PREPROCESS["std"],
    )
    pixels = [
        processor(list(torch.from_numpy(pieces)), return_tensors="pt")["pixel_values"] for pieces in images
    ]
    most = max((len(pieces) for pieces in pixels), default=0)
    filled = [F.pad(pieces, (0, 0, 0, 0, 0, 0, 0, most - len(pieces))) for pieces in pixels]
    return torch.stack(filled) if filled else None


def next_logits(
    model: LlavaNextForConditionalGeneration, sample: LoadedSample, geometry: Geometry
) -> tuple[Tensor, Tensor]:
    """Logits [T, V] of one sample alone, and its loss (the model's own mean over supervised tokens)."""
    counts = iter([geometry.plan(*size).visual_tokens for size in sample.image_sizes])
    ids: list[int] = []
    labels: list[int] = []
    for token, supervised in zip(sample.ids.tolist(), sample.supervised.tolist(), strict=True):
        slots = next(counts) if token == IMAGE_MARKER else 0
        ids += [llava.IMAGE_TOKEN] * slots if slots else [token]
        labels += [-100] * slots if slots else [token if supervised else -100]
    pixels = their_pixels(sample.images)
    sizes = [[height, width] for width, height in sample.image_sizes]
    output = model(
        input_ids=torch.tensor([ids]),
        attention_mask=torch.ones(1, len(ids), dtype=torch.int64),
        pixel_values=pixels,
        image_sizes=torch.tensor(sizes) if sizes else None,
        labels=torch.tensor([labels]),
        use_cache=False,
    )
    return output.logits[0], output.loss


def next_step(
    model: LlavaNextForConditionalGeneration, samples: Sequence[LoadedSample], geometry: Geometry
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Logits [T, V] of all samples, the mean NLL of all supervised tokens, and its gradients under our names."""
    logits, total, count = [], torch.zeros(()), 0
    for sample in samples:
        of_sample, loss = next_logits(model, sample, geometry)
        targets = int(sample.supervised[1:].sum())
        logits.append(of_sample)
        total, count = total + loss * targets, count + targets
    (total / count).backward()
    grads = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}
    return torch.cat(logits).detach(), (total / count).detach(), our_names(grads)
