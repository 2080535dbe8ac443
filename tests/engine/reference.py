"""The sceptic's reference: no DeepSpeed, no packing, no mmds attention or splice; each sample alone through stock eager attention."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from mmds.data.rows import IMAGE_MARKER, LoadedSample


def stock_nll(
    llm: nn.Module,
    visual: nn.Module,
    connector: Callable[[Tensor, Sequence[tuple[int, int]]], Tensor],
    sample: LoadedSample,
    *,
    layer: int,
    mean,
    std,
) -> Tensor:
    """Sum of NLL of one sample: embeddings joined piece by piece with torch.cat, stock transformers forward, cross_entropy.

    connector: features [patches, c] of one picture and its grid -> visual tokens [V, d].
    """
    embed = llm.get_input_embeddings()
    pieces, labels, start = [], [], 0
    ids = torch.from_numpy(sample.ids.astype("int64"))
    supervised = torch.from_numpy(sample.supervised)
    places = [i for i, token in enumerate(sample.ids) if token == IMAGE_MARKER]
    for picture, place in zip(sample.images, places, strict=True):
        pieces.append(embed(ids[start:place]))
        labels += [
            int(t) if s else -100 for t, s in zip(ids[start:place], supervised[start:place], strict=True)
        ]
        pixels = (torch.from_numpy(picture).float() / 255 - mean.view(1, 3, 1, 1)) / std.view(1, 3, 1, 1)
        tokens = visual._embeds(pixels)
        for block in visual.transformer.resblocks[: layer + 1]:
            tokens = block(tokens)
        grid = tuple(side // visual.conv1.kernel_size[0] for side in pixels.shape[2:])
        visual_tokens = connector(tokens[0, 1:], [grid])
        pieces.append(visual_tokens)
        labels += [-100] * visual_tokens.shape[0]
        start = place + 1
    pieces.append(embed(ids[start:]))
    labels += [int(t) if s else -100 for t, s in zip(ids[start:], supervised[start:], strict=True)]
    logits = llm(inputs_embeds=torch.cat(pieces)[None], use_cache=False).logits[0]
    return F.cross_entropy(logits[:-1].float(), torch.tensor(labels[1:]), ignore_index=-100, reduction="sum")


def stock_llm(folder: str) -> nn.Module:
    """The decoder through transformers alone, eager, fp32."""
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).train()


def compare(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> list[str]:
    """Names of parameters outside the tolerance: 1e-5 of the part's largest, and 1e-3 relative unless below 1e-6 of the largest."""
    wrong = []
    for part in ("encoder", "connector", "decoder"):
        names = [n for n in theirs if n.startswith(part + ".")]
        largest = max((float(theirs[n].abs().max()) for n in names), default=0.0)
        for name in names:
            a, b = ours[name].float(), theirs[name].float()
            gap, size = float((a - b).abs().max()), float(b.abs().max())
            if gap > 1e-5 * largest or (size > 1e-6 * largest and gap > 1e-3 * size) or a.shape != b.shape:
                wrong.append(f"{name}: gap {gap:.2e}, size {size:.2e}, part's largest {largest:.2e}")
    return wrong


def as_list(rows: Sequence[Sequence[LoadedSample]]) -> list[LoadedSample]:
    """All samples of a step."""
    return [sample for row in rows for sample in row]
