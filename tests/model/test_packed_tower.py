from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from timm.layers import resample_abs_pos_embed
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode
from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLVisionConfig
from transformers.models.qwen2_vl.modeling_qwen2_vl import (
    Qwen2VLVisionRotaryEmbedding,
    apply_rotary_pos_emb_vision,
)

from mmds.config_types import (
    FIXED,
    ConnectorSection,
    DecoderSection,
    EncoderSection,
    ModelSection,
    ResolutionSection,
)
from mmds.data.rows import build_row
from mmds.errors import ConfigError, DataError
from mmds.geometry import Grid
from mmds.model.build import build_geometry, build_light, find_source
from mmds.model.connector import Connector
from mmds.model.decoder import Decoder, load_llm
from mmds.model.encoder import Encoder, build_encoder, tower_blocks
from mmds.model.mllm import FrozenEncoder, Mllm
from mmds.model.packed_tower import table_at
from mmds.model.recompute import non_reentrant
from mmds.model.segments import Segments
from tests import tiny
from tests.model.families import BY_DEEPSPEED, gap, gradients, worst
from tests.model.towers import (
    TOWERS,
    UNPACKABLE,
    cut,
    make,
    own_features,
    random_images,
    resized,
    small,
    write_folder,
)

MIXED: list[Grid] = [(4, 4), (2, 8), (1, 1), (3, 5), (4, 4), (1, 7), (6, 6)]  # tables are 4 x 4, some 6 x 6
SOME = ("open_clip ViT", "DINOv2, registers", "SigLIP", "EVA-02", "PE core")
Maker = Callable[..., tuple[Encoder, nn.Module]]


@pytest.fixture
def towers(tmp_path: Path) -> Maker:
    return lambda name, **how: make(tmp_path / "tower", name, **how)


def packed(encoder: Encoder, images: list[Tensor], grids: list[Grid]) -> Tensor:
    return encoder(cut(images, encoder.spec.patch_size), grids)


def normalised(encoder: Encoder, images: list[Tensor]) -> Tensor:
    """What the tower itself is given: fp32 patches [P, 3, p, p]."""
    mean, std = (torch.tensor(x).view(1, 3, 1, 1) for x in (encoder.spec.mean, encoder.spec.std))
    return (cut(images, encoder.spec.patch_size).float() / 255 - mean) / std


@pytest.mark.parametrize("name", TOWERS)
def test_a_packed_call_equals_the_towers_own_forward_for_each_image_alone(name: str, towers: Maker) -> None:
    """Forward, and the gradients of every parameter and of nothing else; no class or register token leaves the tower."""
    encoder, tower = towers(name)
    encoder.train()
    images = random_images(MIXED, encoder.spec.patch_size)
    ours = packed(encoder, images, MIXED)
    theirs = torch.cat([own_features(tower, image, layer=encoder.spec.layer) for image in images])
    assert ours.shape == (sum(r * c for r, c in MIXED), encoder.spec.width)
    assert gap(ours, theirs) < 1e-5
    weights = torch.randn(ours.shape, generator=torch.Generator().manual_seed(1))
    (ours * weights).sum().backward()
    (theirs * weights).sum().backward()
    own = {name: p.grad for name, p in tower.named_parameters() if p.grad is not None}
    trained = {name for name, p in encoder.visual.named_parameters() if p.requires_grad}
    assert set(own) == trained
    assert all(bool(grad.any()) for key, grad in own.items() if not key.endswith("k_proj.bias"))
    mine = {key: grad for key, grad in gradients(encoder.visual).items() if key in trained}
    assert worst(mine, own) == []


@pytest.mark.parametrize("name", ["open_clip ViT", "DINOv2", "SigLIP 2", "PE core", "timm ViT, QK norm"])
def test_the_final_norm_is_applied_where_it_is_declared(name: str, towers: Maker) -> None:
    encoder, tower = towers(name, norm=True, layer=-1)
    images = random_images(MIXED, encoder.spec.patch_size)
    ours = packed(encoder, images, MIXED)
    last = encoder.spec.layer
    assert gap(ours, torch.cat([own_features(tower, i, layer=last, norm=True) for i in images])) < 1e-5
    assert gap(ours, torch.cat([own_features(tower, i, layer=last) for i in images])) > 1e-2


@pytest.mark.parametrize("count", [1, 2, 9, 20])
@pytest.mark.parametrize("name", SOME)
def test_random_mixtures_of_sizes_equal_each_image_alone(name: str, count: int, towers: Maker) -> None:
    encoder, tower = towers(name)
    dice = random.Random(count)
    grids = [(dice.randint(1, 9), dice.randint(1, 9)) for _ in range(count)]
    images = random_images(grids, encoder.spec.patch_size, seed=count)
    with torch.no_grad():
        ours = packed(encoder, images, grids).split([rows * columns for rows, columns in grids])
        for image, grid, features in zip(images, grids, ours, strict=True):
            assert gap(features, own_features(tower, image, layer=encoder.spec.layer)) < 1e-5
            assert gap(features, packed(encoder, [image], [grid])) < 1e-5


@pytest.mark.parametrize("name", TOWERS)
def test_at_the_towers_own_size_features_are_its_own(name: str, towers: Maker) -> None:
    """Packed, and as squares without grids; against open_clip's or timm's forward pass of all squares at once."""
    encoder, tower = towers(name, layer=-1)
    side = encoder.spec.image_size // encoder.spec.patch_size
    grids = [(side, side)] * 3
    images = random_images(grids, encoder.spec.patch_size)
    mean, std = (torch.tensor(x).view(1, 3, 1, 1) for x in (encoder.spec.mean, encoder.spec.std))
    squares: Any = (torch.stack(images).float() / 255 - mean) / std
    with torch.no_grad():
        own: Any = tower.forward_intermediates(  # type: ignore[operator]
            squares, indices=[encoder.spec.layer], intermediates_only=True, output_fmt="NLC"
        )
        theirs = own["image_intermediates"][0].flatten(0, 1)
        assert gap(packed(encoder, images, grids), theirs) < 1e-5
        assert gap(encoder(torch.stack(images)), theirs) < 1e-5


@pytest.mark.parametrize(
    "name", ["timm ViT, class token", "DINOv2, registers", "SigLIP", "EVA-02", "PE core"]
)
def test_normed_features_of_the_last_block_are_timms_forward_features(name: str, towers: Maker) -> None:
    encoder, tower = towers(name, layer=-1, norm=name != "EVA-02")
    trunk: Any = tower.trunk
    side = encoder.spec.image_size // encoder.spec.patch_size
    images = random_images([(side, side)], encoder.spec.patch_size)
    mean, std = (torch.tensor(x).view(1, 3, 1, 1) for x in (encoder.spec.mean, encoder.spec.std))
    with torch.no_grad():
        own = trunk.forward_features((images[0][None].float() / 255 - mean) / std)[0]
        assert gap(packed(encoder, images, [(side, side)]), own[trunk.num_prefix_tokens :]) < 1e-5


@pytest.mark.parametrize("name", SOME)
def test_an_image_does_not_change_when_the_others_of_its_row_do(name: str, towers: Maker) -> None:
    encoder, _ = towers(name)
    images = random_images(MIXED, encoder.spec.patch_size)
    others = random_images(MIXED, encoder.spec.patch_size, seed=9)
    lengths = [rows * columns for rows, columns in MIXED]
    with torch.no_grad():
        before = packed(encoder, images, MIXED).split(lengths)
        after = packed(encoder, [*others[:3], images[3], *others[4:]], MIXED).split(lengths)
    assert torch.equal(before[3], after[3])
    assert not any(torch.equal(a, b) for i, (a, b) in enumerate(zip(before, after, strict=True)) if i != 3)
    pixels = normalised(encoder, images).requires_grad_()
    encoder.visual(pixels, MIXED).split(lengths)[3].square().sum().backward()
    assert pixels.grad is not None
    touched = [bool(grad.any()) for grad in pixels.grad.split(lengths)]
    assert touched == [i == 3 for i in range(len(MIXED))]


class _Largest(TorchDispatchMode):
    """The most elements of any tensor that is made."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for value in made if isinstance(made, (tuple, list)) else (made,):
            if isinstance(value, Tensor):
                self.elements = max(self.elements, value.numel())
        return made


@pytest.mark.parametrize("backend", [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION])
@pytest.mark.parametrize("name", SOME)
def test_no_tensor_of_tokens_by_tokens_is_made(name: str, backend: SDPBackend, towers: Maker) -> None:
    """64 images of 64 patches: memory grows with the sum of squares, forward and backward."""
    encoder, _ = towers(name)
    grids: list[Grid] = [(8, 8)] * 64
    pixels = cut(random_images(grids, encoder.spec.patch_size), encoder.spec.patch_size)
    tokens = 64 * 64
    with _Largest() as largest, sdpa_kernel([backend, SDPBackend.MATH]):
        encoder(pixels, grids).square().sum().backward()
    pixel_elements = pixels.numel()
    assert largest.elements <= max(pixel_elements, 70 * 4 * 192 * 64)
    assert largest.elements < tokens**2 / 4


@pytest.mark.parametrize("name", ["open_clip ViT", "SigLIP", "EVA-02"])
def test_attention_flops_are_the_sum_of_squares(name: str, towers: Maker) -> None:
    encoder, tower = towers(name)
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        packed(encoder, random_images(MIXED, encoder.spec.patch_size), MIXED)
    counted = counter.get_flop_counts()["Global"][torch.ops.aten.bmm]
    prefix = 1 if name.startswith("open_clip") else tower.trunk.num_prefix_tokens  # type: ignore[union-attr]
    squares = sum((rows * columns + prefix) ** 2 for rows, columns in MIXED)
    blocks = len(tower_blocks(encoder.visual))
    assert counted == 4 * encoder.spec.width * squares * blocks


TABLE = torch.randn(16, 6, generator=torch.Generator().manual_seed(0))


def test_a_table_is_itself_at_its_own_grid() -> None:
    assert torch.equal(table_at(TABLE, (4, 4), [(4, 4)]), TABLE)
    assert torch.equal(table_at(TABLE, (2, 8), [(2, 8), (2, 8)]), torch.cat([TABLE, TABLE]))
    half = TABLE.bfloat16()
    assert torch.equal(table_at(half, (4, 4), [(4, 4)]), half)


@pytest.mark.parametrize("grid", [(2, 8), (8, 2), (4, 4), (1, 16), (16, 1), (3, 5), (9, 7), (3, 1), (1, 1)])
@pytest.mark.parametrize("own", [(4, 4), (2, 8), (8, 2), (16, 1)])
def test_a_table_is_resized_whenever_the_grid_differs_even_at_equal_count(own: Grid, grid: Grid) -> None:
    """TRAPS D8, and sources that are not square.

    timm's function, told the source's grid, is right but for one column: there torch's interpolation of channels-last images is not.
    """
    ours = table_at(TABLE, own, [grid])
    assert ours.shape == (grid[0] * grid[1], 6)
    assert gap(ours, resized(TABLE, own, grid)) < 1e-6
    assert (grid == own) == torch.equal(ours, TABLE)
    if grid[1] > 1:
        timms = resample_abs_pos_embed(TABLE[None], list(grid), old_size=list(own), num_prefix_tokens=0)
        assert gap(ours, timms[0]) < 1e-6


def test_tables_of_several_grids_stand_in_the_images_order() -> None:
    grids = [(2, 3), (4, 4), (2, 3), (3, 2)]
    parts = table_at(TABLE, (4, 4), grids).split([6, 16, 6, 6])
    for grid, part in zip(grids, parts, strict=True):
        assert torch.equal(part, table_at(TABLE, (4, 4), [grid]))
    assert torch.equal(parts[0], parts[2])
    assert not torch.equal(parts[0], parts[3])


@pytest.mark.parametrize("grid", [(2, 8), (4, 4), (3, 5)])
def test_a_tower_of_a_non_square_size_packs_at_exactly_its_own_grid(grid: Grid, towers: Maker) -> None:
    """The table of a tower built for 28 x 112 pixels is 2 x 8, in a packed call as in its own forward pass."""
    encoder, tower = towers("timm ViT, class token")
    wide: Any = tower
    wide.trunk.set_input_size(img_size=(32, 128))
    ours = Encoder(wide, encoder.spec)
    images = random_images([grid], 16)
    with torch.no_grad():
        features = ours.visual(normalised(encoder, images), [grid])
    assert gap(features, own_features(wide, images[0], layer=2)) < 1e-5


def _qwen_rotated(q: Tensor, grids: list[Grid], prefix: int) -> Tensor:
    """[1, H, T, D] rotated image by image by Qwen2-VL's own vision rotary, tokens before the patches left alone."""
    head = q.shape[-1]
    config = Qwen2VLVisionConfig(embed_dim=head * q.shape[1], num_heads=q.shape[1])
    rotary = Qwen2VLVisionRotaryEmbedding(config)
    parts, start = [], 0
    for rows, columns in grids:
        place = torch.stack(
            [torch.arange(rows).repeat_interleave(columns), torch.arange(columns).repeat(rows)]
        )
        cos, sin = rotary(q, place.T)
        parts.append(q[:, :, start : start + prefix])
        start += prefix
        patches = q[0, :, start : start + rows * columns].transpose(0, 1)
        parts.append(apply_rotary_pos_emb_vision(patches, patches, cos, sin)[0].transpose(0, 1)[None])
        start += rows * columns
    return torch.cat(parts, dim=2)


@pytest.mark.parametrize("name", ["open_clip ViT", "DINOv2, registers", "SigLIP", "EVA-01", "EVA-02"])
def test_2d_rope_equals_qwen2_vls_vision_rotary_and_leaves_prefix_tokens_alone(
    name: str, towers: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder, tower = towers(name, rope=True)
    plain, _ = towers(name)
    seen: list[Segments] = []
    actual = F.scaled_dot_product_attention
    images = random_images(MIXED, encoder.spec.patch_size)
    prefix = 1 if name.startswith("open_clip") else tower.trunk.num_prefix_tokens  # type: ignore[union-attr]

    def spy(q: Tensor, k: Tensor, v: Tensor, attn_mask: Any = None, **rest: Any) -> Tensor:
        """Attention as it should be, written out: queries and keys turned as Qwen2-VL turns them, under a dense mask."""
        if not isinstance(attn_mask, Segments):
            return actual(q, k, v, attn_mask=attn_mask, **rest)
        seen.append(attn_mask)
        own = inner.rotation(MIXED) if (inner := plain_pieces(plain)) is not None else None
        q, k = ((own(x) if own is not None else x) for x in (q, k))
        q, k = (_qwen_rotated(x, MIXED, prefix) for x in (q, k))
        numbers = torch.arange(len(attn_mask.lengths)).repeat_interleave(torch.tensor(attn_mask.lengths))
        return actual(q, k, v, attn_mask=numbers[:, None] == numbers[None])

    with torch.no_grad():
        ours = packed(encoder, images, MIXED)
        monkeypatch.setattr(F, "scaled_dot_product_attention", spy)
        theirs = packed(plain, images, MIXED)
        monkeypatch.undo()
        assert gap(ours, theirs) < 1e-5
        assert gap(ours, packed(plain, images, MIXED)) > 1e-3
    assert len(seen) == len(tower_blocks(plain.visual))


def plain_pieces(encoder: Encoder) -> Any:
    """The pieces of an EVA tower, which has rotary positions of its own; None for other towers."""
    visual: Any = encoder.visual
    pieces = getattr(visual, "trunk", visual).forward.args[0]
    return pieces if pieces.rotation([(1, 1)]) is not None else None


def test_2d_rope_runs_packed_at_the_own_size_too_and_needs_a_head_of_four(tmp_path: Path) -> None:
    encoder, _ = make(tmp_path / "a", "open_clip ViT", rope=True)
    geometry = build_geometry(encoder.spec, ConnectorSection(name="linear"), max_pixels=None)
    assert geometry.packed
    odd = {"embed_dim": 12, "vision_cfg": {**tiny.VISION["vision_cfg"], "width": 12, "head_width": 6}}
    section = EncoderSection(
        name=f"local-dir:{write_folder(tmp_path / 'b', odd)}", pretrained="random", rope=True
    )
    with pytest.raises(ConfigError, match="head of 6 cannot be halved"):
        build_encoder(section).must_pack()


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("name", SOME)
def test_gradients_are_equal_with_recomputation(name: str, every: int, towers: Maker) -> None:
    results, passes = [], []
    for n, checkpoint in ((0, non_reentrant), (every, non_reentrant), (every, BY_DEEPSPEED)):
        encoder, _ = towers(name, layer=-1)
        encoder.train().set_recompute(n, checkpoint)
        count: list[int] = []
        for block in tower_blocks(encoder.visual):
            inner = next(module for module in block.modules() if not list(module.children()))
            inner.register_forward_pre_hook(lambda *_, count=count: count.append(1))
        packed(encoder, random_images(MIXED, encoder.spec.patch_size), MIXED).sin().sum().backward()
        results.append(gradients(encoder))
        passes.append(len(count))
    assert passes == ([3, 6, 6] if every == 1 else [3, 5, 5])
    assert all(bool(g.any()) for g in results[0].values())
    assert worst(results[1], results[0]) == worst(results[2], results[0]) == []


@pytest.mark.parametrize("name", ["open_clip ViT", "EVA-02"])
def test_gradients_are_equal_with_recomputation_when_the_last_block_alone_trains(
    name: str, towers: Maker
) -> None:
    results = []
    for n, checkpoint in ((0, non_reentrant), (1, non_reentrant), (1, BY_DEEPSPEED)):
        encoder, _ = towers(name, layer=-1)
        last = {id(p) for p in tower_blocks(encoder.visual)[-1].parameters()}
        for parameter in encoder.parameters():
            parameter.requires_grad_(id(parameter) in last)
        encoder.train().set_recompute(n, checkpoint)
        packed(encoder, random_images(MIXED, encoder.spec.patch_size), MIXED).sin().sum().backward()
        assert {id(p) for p in encoder.parameters() if p.grad is not None} == last
        results.append(gradients(encoder))
    assert worst(results[1], results[0]) == worst(results[2], results[0]) == []


@pytest.mark.parametrize(
    "name", ["timm ViT, class token", "EVA-01", "EVA-02", "PE core", "timm ViT, QK norm"]
)
def test_an_attention_that_is_not_torchs_fused_one_raises_and_never_leaks(name: str, towers: Maker) -> None:
    encoder, _ = towers(name)
    for block in tower_blocks(encoder.visual):
        attention: Any = block.attn
        attention.fused_attn = False
    with pytest.raises((TypeError, AttributeError), match="Segments"):
        packed(encoder, random_images(MIXED, encoder.spec.patch_size), MIXED)


def _source(folder: Path, name: str, resolution: ResolutionSection) -> Any:
    """A config's model section of an unpackable tower and a tiny decoder."""
    cfg, _, _ = UNPACKABLE[name]
    return find_source(
        None,
        ModelSection(
            encoder=EncoderSection(
                name=f"local-dir:{write_folder(folder / 'tower', cfg)}", pretrained="random", layer=1
            ),
            connector=ConnectorSection(name="mlp2x"),
            decoder=DecoderSection(name=str(tiny.write_decoder(folder / "decoder"))),
            resolution=resolution,
        ),
    )


@pytest.mark.parametrize("name", UNPACKABLE)
def test_a_tower_that_cannot_pack_is_refused_by_name_in_native_mode_and_fine_in_fixed(
    name: str, tmp_path: Path
) -> None:
    _, arguments, says = UNPACKABLE[name]
    with small(arguments):
        with pytest.raises(ConfigError, match=f"{says} cannot run images of different sizes") as error:
            build_light(_source(tmp_path, name, ResolutionSection(name="native")), seed=0)
        assert "use resolution fixed or anyres" in str(error.value)
        encoder, _ = build_light(_source(tmp_path, name, FIXED), seed=0)
    spec = encoder.spec
    square = torch.zeros(1, 3, spec.image_size, spec.image_size, dtype=torch.uint8)
    assert encoder(square).shape == ((spec.image_size // spec.patch_size) ** 2, spec.width)
    with pytest.raises(ConfigError, match=says):
        encoder(torch.zeros(4, 3, spec.patch_size, spec.patch_size, dtype=torch.uint8), [(2, 2)])


def test_one_dtype_in_bf16_with_features_near_those_in_fp32(towers: Maker) -> None:
    for name in SOME:
        encoder, _ = towers(name)
        images = random_images(MIXED, encoder.spec.patch_size)
        with torch.no_grad():
            exact = packed(encoder, images, MIXED)
            rough = packed(encoder.to(torch.bfloat16), images, MIXED)
        assert rough.dtype is torch.bfloat16
        assert gap(rough, exact) < 0.08


def test_a_frozen_tower_stays_in_eval_mode_when_the_model_trains(tmp_path: Path) -> None:
    """TRAPS D10: dropout and stochastic depth of a frozen tower are off also after `model.train()`."""
    encoder, _ = make(tmp_path / "tower", "timm ViT, class token")
    for block in tower_blocks(encoder.visual):
        holder: Any = block
        holder.mlp.drop1.p = 0.5
    images = random_images(MIXED, encoder.spec.patch_size)
    row: Any = _row_of(encoder, images)
    frozen = FrozenEncoder(encoder, device=torch.device("cpu"), dtype=torch.float32)
    llm = load_llm(str(tiny.write_decoder(tmp_path / "decoder")), dtype=torch.float32)
    connector = Connector(ConnectorSection(name="linear"), encoder_width=48, decoder_width=48)
    model = Mllm(connector=connector, decoder=Decoder(llm), encoder=None).train()
    assert model.training
    assert torch.equal(frozen(row), frozen(row))
    assert gap(packed(encoder.train(), images, MIXED), frozen(row)) > 1e-3


def _row_of(encoder: Encoder, images: list[Tensor]) -> Any:
    """What `encode` reads of a row."""
    plans = tuple(
        SimpleNamespace(grid=grid, pieces=1, packed=True, patches=grid[0] * grid[1]) for grid in MIXED
    )
    names = tuple(f"image {i}" for i in range(len(MIXED)))
    return SimpleNamespace(pixels=cut(images, encoder.spec.patch_size), plans=plans, image_names=names)


def _overflow_on_white(proj: nn.Module, inputs: tuple[Tensor, ...], embedded: Tensor) -> Tensor:
    """A forward hook of the patch embedding: infinity for a white patch, as a tower in fp16 may give."""
    white = (inputs[0] > 1.2).flatten(1).all(1)
    return embedded.masked_fill(white.view(-1, 1, 1, 1), torch.inf)


def test_non_finite_features_of_images_of_different_sizes_are_named_by_sample_and_image(
    towers: Maker,
) -> None:
    """TRAPS D7, in a packed row: a white image overflows in this tower."""
    encoder, _ = towers("SigLIP")
    visual: Any = encoder.visual
    visual.trunk.patch_embed.proj.register_forward_hook(_overflow_on_white)
    geometry = build_geometry(
        encoder.spec,
        ConnectorSection(name="mlp2x"),
        max_pixels=96 * 96,
        resolution=ResolutionSection(name="native"),
    )
    row, samples = tiny.random_row(4, geometry, (2, 0, 3))
    assert len({plan.grid for plan in row.plans}) >= 4
    frozen = FrozenEncoder(encoder, device=torch.device("cpu"), dtype=torch.float32)
    assert frozen(row).isfinite().all()
    samples[0].images[0][:] = 255
    samples[2].images[1][:] = 255
    with pytest.raises(DataError) as error:
        frozen(build_row(samples, geometry))
    assert "features for sample r4s0 image 0 (r4s0-0.png), sample r4s2 image 1 (r4s2-1.png);" in str(
        error.value
    )
