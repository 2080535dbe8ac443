"""All images of a micro-step through a vision transformer in one packed call, each at its own grid of patches.

A tower's own forward takes equal squares. Here its pieces (patch embedding, prefix tokens, position table, blocks, norm) are run on
one sequence: for each image its prefix tokens, then its patches. The position table is interpolated to each image's grid, rotary
positions are made for it, and attention stays inside the image (`Segments`). Held: open_clip's own ViT, and timm's ViT and EVA
classes (SigLIP, SigLIP 2, DINOv2, EVA, PE). Shapes: P patches of all images, p pixels a side of a patch, c width.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from open_clip.transformer import ResidualAttentionBlock, VisionTransformer
from timm.layers import PatchEmbed, RotaryEmbeddingCat, apply_rot_embed_cat
from timm.models.eva import Eva
from timm.models.vision_transformer import VisionTransformer as TimmVit
from torch import Tensor, nn

from mmds.errors import ConfigError
from mmds.geometry import Grid
from mmds.model.rotary import rotary_angles, rotate_by
from mmds.model.segments import Rotation, Segments


class Pieces(Protocol):
    """What packed running needs of a tower; everything is read at the call, when ZeRO-3 has gathered it."""

    head: int
    """Head size."""

    def grid(self) -> Grid:
        """The position table's own grid."""

    def embed(self, patches: Tensor) -> Tensor:
        """uint-normalised [P, 3, p, p] -> [P, c], without positions."""

    def prefix(self) -> Tensor:
        """[n, c] class and register tokens with their positions; n may be 0."""

    def table(self) -> Tensor | None:
        """[rows * columns, c] positions of patches, or None."""

    def before(self, tokens: Tensor) -> Tensor:
        """What the tower does between positions and blocks, [1, T, c] -> [1, T, c]."""

    def block(self, block: nn.Module, tokens: Tensor, segments: Segments) -> Tensor:
        """One block on [1, T, c]."""

    def blocks(self) -> Sequence[nn.Module]:
        """The blocks in order."""

    def after(self, tokens: Tensor) -> Tensor:
        """The tower's final norm."""

    def rotation(self, grids: Sequence[Grid]) -> Rotation | None:
        """The tower's own rotary positions for these grids, prefix tokens left alone."""


def pack(visual: nn.Module, *, norm: bool, rope: bool) -> None:
    """Give the tower a packed forward: `visual(patches, grids)`; its `forward_intermediates` stays as it was.

    norm: whether the final norm is applied. rope: rotate queries and keys by row and column, beside the tower's own positions.
    Raises ConfigError for a tower that cannot run packed.
    """
    host, pieces = _pieces(visual)
    if rope:
        _check_rope(pieces)
    for block in pieces.blocks():
        if isinstance(block, ResidualAttentionBlock):
            _take_segments(block.attn)
    # As the module's own forward, so that hooks on it (ZeRO's, which gather its direct parameters) run.
    host.forward = partial(_forward, pieces, norm, rope)
    if host is not visual:
        visual.forward = host.__call__


def _forward(pieces: Pieces, norm: bool, rope: bool, patches: Tensor, grids: Sequence[Grid]) -> Tensor:
    """Patches [P, 3, p, p] of all images in order, reading order each -> features [P, c]."""
    prefix = pieces.prefix()
    lengths = tuple(rows * columns for rows, columns in grids)
    embedded = pieces.embed(patches)
    table = pieces.table()
    if table is not None:
        embedded = embedded + table_at(table, pieces.grid(), grids).to(embedded.dtype)
    tokens = _with_prefix(prefix.to(embedded.dtype), embedded, lengths)[None]
    rotations = [pieces.rotation(grids)]
    if rope:
        rotations.append(_rotation_2d(grids, prefix.shape[0], pieces.head, tokens.device))
    segments = Segments(
        lengths=tuple(prefix.shape[0] + n for n in lengths),
        rotate=_chain([r for r in rotations if r is not None]),
    )
    tokens = pieces.before(tokens)
    for block in pieces.blocks():
        tokens = pieces.block(block, tokens, segments)
    if norm:
        tokens = pieces.after(tokens)
    return _without_prefix(tokens[0], prefix.shape[0], lengths)


def table_at(table: Tensor, own: Grid, grids: Sequence[Grid]) -> Tensor:
    """Positions [P, c] of images with these grids out of a table [rows * columns, c] for the grid `own`.

    The table itself at its own grid; elsewhere interpolated (bicubic, antialiased, in fp32), also where only the count is equal.
    """
    # contiguous: torch 2.14's interpolation of a channels-last image is wrong where the result has one column
    image = table.reshape(1, *own, -1).permute(0, 3, 1, 2).float().contiguous()
    resized: dict[Grid, Tensor] = {own: table}
    for grid in dict.fromkeys(grids):
        if grid not in resized:
            at_grid = F.interpolate(image, size=grid, mode="bicubic", antialias=True, align_corners=False)
            resized[grid] = at_grid[0].flatten(1).T.to(table.dtype)
    return torch.cat([resized[grid] for grid in grids])


def _with_prefix(prefix: Tensor, patches: Tensor, lengths: Sequence[int]) -> Tensor:
    """[n, c] and [P, c] -> [images * n + P, c]: the prefix before the patches of every image."""
    if not prefix.shape[0]:
        return patches
    return torch.cat([part for image in patches.split(list(lengths)) for part in (prefix, image)])


def _without_prefix(tokens: Tensor, prefix: int, lengths: Sequence[int]) -> Tensor:
    if not prefix:
        return tokens
    parts = tokens.split([n for length in lengths for n in (prefix, length)])
    return torch.cat(parts[1::2])


def _chain(rotations: Sequence[Rotation]) -> Rotation | None:
    if not rotations:
        return None

    def rotate(x: Tensor) -> Tensor:
        for rotation in rotations:
            x = rotation(x)
        return x

    return rotate


def _rotation_2d(grids: Sequence[Grid], prefix: int, head: int, device: torch.device) -> Rotation:
    """Queries and keys by row and column, half of the head each (Qwen2-VL's vision encoder); prefix tokens stay."""
    angles = []
    for grid in grids:
        angles += [torch.zeros(prefix, head // 2), rotary_angles(grid, head)]
    whole = torch.cat(angles).to(device)
    return partial(rotate_by, whole)


def _check_rope(pieces: Pieces) -> None:
    if pieces.head % 4:
        raise ConfigError(
            f"mmds.model.encoder.rope: a head of {pieces.head} cannot be halved into rows and columns; take the key out"
        )


def _pieces(visual: nn.Module) -> tuple[nn.Module, Pieces]:
    """The module whose forward is replaced, and its pieces. A subclass may do more than its parent, so the very class must be known."""
    tower: Any = getattr(visual, "trunk", visual)
    if type(tower) is VisionTransformer:
        if all(isinstance(block, ResidualAttentionBlock) for block in tower.transformer.resblocks):
            return tower, _OpenClip(tower)
    elif type(tower) is TimmVit and type(tower.patch_embed) is PatchEmbed:
        return tower, _Timm(tower)
    elif type(tower) is Eva and isinstance(tower.rope, RotaryEmbeddingCat | None):
        return tower, _Eva(tower)
    parts = [getattr(tower, "patch_embed", None), getattr(tower, "rope", None)]
    parts += list(getattr(getattr(tower, "transformer", None), "resblocks", ()))[:1]
    made_of = ", ".join(type(part).__name__ for part in parts if part is not None)
    raise ConfigError(
        f"mmds.model.encoder: {type(tower).__name__}{f' with {made_of}' if made_of else ''} cannot run images of different sizes in one "
        "packed call; use resolution fixed or anyres at the tower's own size, or a ViT, SigLIP, DINOv2, EVA or PE tower"
    )


class _OpenClip:
    """open_clip's VisionTransformer: one class token, a table with a row for it."""

    def __init__(self, visual: Any) -> None:
        self.visual = visual
        self.head = int(visual.transformer.resblocks[0].attn.head_dim)

    def grid(self) -> Grid:
        rows, columns = self.visual.grid_size
        return int(rows), int(columns)

    def embed(self, patches: Tensor) -> Tensor:
        embedded: Tensor = self.visual.conv1(patches).flatten(1)
        return embedded

    def prefix(self) -> Tensor:
        token: Tensor = self.visual.class_embedding + self.visual.positional_embedding[0]
        return token[None]

    def table(self) -> Tensor:
        table: Tensor = self.visual.positional_embedding[1:]
        return table

    def before(self, tokens: Tensor) -> Tensor:
        normal: Tensor = self.visual.ln_pre(tokens)
        return normal

    def blocks(self) -> Sequence[nn.Module]:
        return list(self.visual.transformer.resblocks)

    def block(self, block: nn.Module, tokens: Tensor, segments: Segments) -> Tensor:
        out: Tensor = block(tokens, None, None, segments)
        return out

    def after(self, tokens: Tensor) -> Tensor:
        normal: Tensor = self.visual.ln_post(tokens)
        return normal

    def rotation(self, grids: Sequence[Grid]) -> Rotation | None:
        return None


class _Timm:
    """timm's VisionTransformer: any prefix tokens, a table with or without rows for them, or none."""

    def __init__(self, trunk: Any) -> None:
        self.trunk = trunk
        self.head = int(trunk.blocks[0].attn.head_dim)

    def grid(self) -> Grid:
        rows, columns = self.trunk.patch_embed.grid_size
        return int(rows), int(columns)

    def embed(self, patches: Tensor) -> Tensor:
        embedded: Tensor = self.trunk.patch_embed.proj(patches).flatten(1)
        normal: Tensor = self.trunk.patch_embed.norm(embedded)
        return normal

    def prefix(self) -> Tensor:
        trunk = self.trunk
        tokens = [token[0] for token in (trunk.cls_token, trunk.reg_token) if token is not None]
        if not tokens:
            weight: Tensor = trunk.patch_embed.proj.weight
            return weight.new_zeros(0, trunk.embed_dim)
        joined = torch.cat(tokens)
        return (
            joined
            if trunk.no_embed_class or trunk.pos_embed is None
            else joined + trunk.pos_embed[0, : len(joined)]
        )

    def table(self) -> Tensor | None:
        positions: Tensor | None = self.trunk.pos_embed
        if positions is None:
            return None
        return positions[0] if self.trunk.no_embed_class else positions[0, self.trunk.num_prefix_tokens :]

    def before(self, tokens: Tensor) -> Tensor:
        normal: Tensor = self.trunk.norm_pre(self.trunk.pos_drop(tokens))
        return normal

    def blocks(self) -> Sequence[nn.Module]:
        return list(self.trunk.blocks)

    def block(self, block: nn.Module, tokens: Tensor, segments: Segments) -> Tensor:
        out: Tensor = block(tokens, segments)
        return out

    def after(self, tokens: Tensor) -> Tensor:
        normal: Tensor = self.trunk.norm(tokens)
        return normal

    def rotation(self, grids: Sequence[Grid]) -> Rotation | None:
        return None


class _Eva(_Timm):
    """timm's Eva: as a VisionTransformer, and its own rotary positions."""

    def block(self, block: nn.Module, tokens: Tensor, segments: Segments) -> Tensor:
        out: Tensor = block(tokens, None, segments)
        return out

    def rotation(self, grids: Sequence[Grid]) -> Rotation | None:
        rope = self.trunk.rope
        if rope is None:
            return None
        prefix = self.trunk.num_prefix_tokens
        parts = []
        for grid in grids:  # sines, then cosines, in fp32
            places = rope._build_embed_cat(grid, rope.bands)
            still = places.new_zeros(prefix, places.shape[1])
            still[:, places.shape[1] // 2 :] = 1.0
            parts += [still, places]
        half = bool(getattr(self.trunk.blocks[0].attn, "rotate_half", False))
        return partial(_turn, torch.cat(parts), half)


def _turn(places: Tensor, half: bool, x: Tensor) -> Tensor:
    """timm's rotation of [1, H, T, D] by sines and cosines [T, 2 D]."""
    turned: Tensor = apply_rot_embed_cat(x, places, half=half)
    return turned


def _take_segments(attention: nn.MultiheadAttention) -> None:
    """Have open_clip's attention, torch's nn.MultiheadAttention, take Segments as its mask; with any other mask it stays as it was."""
    module: Any = attention
    module.forward = partial(_multihead, attention, attention.forward)


def _multihead(
    attention: nn.MultiheadAttention,
    own: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    need_weights: bool = True,
    attn_mask: Any = None,
    **rest: Any,
) -> tuple[Tensor, None]:
    if not isinstance(attn_mask, Segments):
        result: tuple[Tensor, None] = own(
            query, key, value, need_weights=need_weights, attn_mask=attn_mask, **rest
        )
        return result
    qkv = F.linear(query, attention.in_proj_weight, attention.in_proj_bias)
    q, k, v = qkv.unflatten(-1, (3, attention.num_heads, attention.head_dim)).permute(2, 0, 3, 1, 4)
    attended: Tensor = F.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask)  # type: ignore[arg-type]
    return attention.out_proj(attended.transpose(1, 2).flatten(2)), None
