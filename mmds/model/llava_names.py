"""Names of LLaVA's tensors as Hugging Face stores them, and ours: one table for each tower family, read in both directions.

"Theirs" is the layout of the published files (`language_model.model.*`, `vision_tower.*`, `multi_modal_projector.*`); `canonical` brings
the layouts of other versions of transformers into it. "Ours" is `encoder.*`, `connector.*`, `decoder.llm.*`, as in a model folder.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mmds.errors import CheckpointError


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One tensor of ours and those of theirs that make it, joined along the first axis. batch: ours has one more leading axis of 1."""

    ours: str
    theirs: tuple[str, ...]
    batch: bool = False

    def to_ours(self, parts: Sequence[Tensor]) -> Tensor:
        """Their tensors as ours."""
        joined = parts[0] if len(parts) == 1 else torch.cat(list(parts))
        return joined[None] if self.batch else joined

    def to_theirs(self, value: Tensor) -> list[Tensor]:
        """Our tensor as theirs, in the order of `theirs`."""
        whole = value[0] if self.batch else value
        return list(whole.chunk(len(self.theirs)))


_LAYOUTS = (
    (r"^model\.language_model\.", "language_model.model."),
    (r"^lm_head\.", "language_model.lm_head."),
    (r"^model\.(vision_tower|multi_modal_projector)\.", r"\1."),
    (r"^model\.image_newline$", "image_newline"),
    (r"^vision_tower\.vision_model\.", "vision_tower."),
)
"""transformers 4 writes `vision_tower.vision_model.*`; transformers 5 names the modules `model.language_model.*`, `lm_head.*`, ..."""

NEWLINE = "image_newline"
TEXT = "language_model."
TOWER = "vision_tower."

_PAIRS = ("weight", "bias")
_QKV = ("q", "k", "v")

# Per family: tensors outside the blocks (ours: theirs; a lone "*" stands for weight and bias), then those of block {i}.
# Ours of three theirs is their query, key and value, one below the other.
_CLIP_OUTER = {
    "class_embedding": "embeddings.class_embedding",
    "conv1.weight": "embeddings.patch_embedding.weight",
    "positional_embedding": "embeddings.position_embedding.weight",
    "ln_pre.*": "pre_layrnorm.*",
}
_CLIP_BLOCK = {
    "transformer.resblocks.{i}.ln_1.*": "encoder.layers.{i}.layer_norm1.*",
    "transformer.resblocks.{i}.attn.in_proj_*": "encoder.layers.{i}.self_attn.{qkv}_proj.*",
    "transformer.resblocks.{i}.attn.out_proj.*": "encoder.layers.{i}.self_attn.out_proj.*",
    "transformer.resblocks.{i}.ln_2.*": "encoder.layers.{i}.layer_norm2.*",
    "transformer.resblocks.{i}.mlp.c_fc.*": "encoder.layers.{i}.mlp.fc1.*",
    "transformer.resblocks.{i}.mlp.c_proj.*": "encoder.layers.{i}.mlp.fc2.*",
}
_SIGLIP_OUTER = {
    "trunk.patch_embed.proj.*": "embeddings.patch_embedding.*",
    "trunk.pos_embed": "embeddings.position_embedding.weight",
}
_SIGLIP_BLOCK = {
    "trunk.blocks.{i}.norm1.*": "encoder.layers.{i}.layer_norm1.*",
    "trunk.blocks.{i}.attn.qkv.*": "encoder.layers.{i}.self_attn.{qkv}_proj.*",
    "trunk.blocks.{i}.attn.proj.*": "encoder.layers.{i}.self_attn.out_proj.*",
    "trunk.blocks.{i}.norm2.*": "encoder.layers.{i}.layer_norm2.*",
    "trunk.blocks.{i}.mlp.fc1.*": "encoder.layers.{i}.mlp.fc1.*",
    "trunk.blocks.{i}.mlp.fc2.*": "encoder.layers.{i}.mlp.fc2.*",
}
TOWERS: dict[str, tuple[Mapping[str, str], Mapping[str, str]]] = {
    "clip": (_CLIP_OUTER, _CLIP_BLOCK),
    "siglip": (_SIGLIP_OUTER, _SIGLIP_BLOCK),
}
_BATCHED = ("trunk.pos_embed",)
_PROJECTOR = {"net.up.*": "linear_1.*", "net.down.*": "linear_2.*"}


def canonical(name: str) -> str:
    """A stored tensor's name in the layout of the published files, whatever version of transformers wrote it."""
    for pattern, replacement in _LAYOUTS:
        name = re.sub(pattern, replacement, name)
    return name


def tower_rules(family: str, blocks: int) -> list[Rule]:
    """Rules of a tower of `blocks` blocks. family: "clip" or "siglip"."""
    outer, block = TOWERS[family]
    pairs = list(outer.items())
    for i in range(blocks):
        pairs += [
            (ours.replace("{i}", str(i)), theirs.replace("{i}", str(i))) for ours, theirs in block.items()
        ]
    return [rule for ours, theirs in pairs for rule in _expanded("encoder.visual." + ours, TOWER + theirs)]


def joint_rules(*, separator: bool) -> list[Rule]:
    """Rules of the two-layer projector. separator: LLaVA-NeXT's learned vector after each row of an image's features."""
    rules = [
        rule
        for ours, theirs in _PROJECTOR.items()
        for rule in _expanded("connector." + ours, "multi_modal_projector." + theirs)
    ]
    return rules + ([Rule(ours="connector.separator", theirs=(NEWLINE,))] if separator else [])


def text_rule(ours: str) -> Rule:
    """The rule of one tensor `decoder.llm.*` of the decoder, whose names are those of its own family on both sides."""
    return Rule(ours=ours, theirs=(TEXT + ours.removeprefix("decoder.llm."),))


def dropped(name: str, *, layer: int) -> str | None:
    """Why a canonical tensor of theirs has no place with us, or None. layer: index of the feature block, from 0."""
    if name.endswith((".position_ids", "rotary_emb.inv_freq")):
        return "computed, not learned"
    if not name.startswith(TOWER):
        return None
    inner = name.removeprefix(TOWER)
    if inner.startswith("post_layernorm."):
        return "final norm of the tower; features are taken before it"
    if inner.startswith("head."):
        return "pooling head of the tower; features are taken before it"
    block = re.match(r"encoder\.layers\.(\d+)\.", inner)
    if block and int(block[1]) > layer:
        return f"block above the feature layer {layer}"
    return None


_ORIGINAL = {"0": "net.up", "2": "net.down"}


def original_projector(names: Sequence[str], connector: str) -> dict[str, str]:
    """Original LLaVA's projector names -> the connector's: `mm_projector.0.weight` -> `net.up.weight` and so on.

    names: of the file, with any prefix before `mm_projector.`. connector: `linear` or `mlp2x`. Raises CheckpointError naming those
    that have no place.
    """
    found, left = {}, []
    for name in names:
        inner = name.rpartition("mm_projector.")[2] if "mm_projector." in name else ""
        layer, _, kind = inner.rpartition(".")
        target = {"": "net.proj"} if connector == "linear" else _ORIGINAL
        if kind in _PAIRS and layer in target:
            found[name] = f"{target[layer]}.{kind}"
        elif name.endswith(NEWLINE):
            found[name] = "separator"
        else:
            left.append(name)
    if left:
        raise CheckpointError(
            f"no place in the connector {connector!r} for {len(left)} tensors: {', '.join(sorted(left)[:6])}"
        )
    return found


def _expanded(ours: str, theirs: str) -> list[Rule]:
    kinds = _PAIRS if theirs.endswith("*") else ("",)
    rules = []
    for kind in kinds:
        mine, other = ours.replace("*", kind), theirs.replace("*", kind)
        sources = tuple(other.replace("{qkv}", x) for x in _QKV) if "{qkv}" in other else (other,)
        rules.append(Rule(ours=mine, theirs=sources, batch=mine.removeprefix("encoder.visual.") in _BATCHED))
    return rules
