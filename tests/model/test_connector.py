from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import CLIPVisionConfig, InternVLConfig, LlamaConfig, LlavaConfig
from transformers.models.internvl.modeling_internvl import InternVLModel, InternVLMultiModalProjector
from transformers.models.llava.modeling_llava import LlavaMultiModalProjector
from transformers.models.qwen2_vl.modeling_qwen2_vl import PatchMerger

from mmds.config_types import ConnectorSection, ResolutionSection
from mmds.errors import ConfigError, SpliceError
from mmds.geometry import Geometry, Grid, ImagePlan, tile_grids
from mmds.model.connector import CONNECTORS, Connector, Kind, kind_of, merge_neighbours, queries_of
from mmds.model.recompute import non_reentrant
from tests.model.families import BY_DEEPSPEED, excite, gap, gradients, worst

GRIDS: list[Grid] = [(4, 4), (2, 8), (6, 2), (2, 2)]
PATCHES = sum(rows * columns for rows, columns in GRIDS)
MERGE = {"linear": 1, "mlp2x": 1, "merge_mlp": 2, "pixel_shuffle": 2, "resampler": 0}


def build(name: str, *, c: int = 8, d: int = 12, **section: Any) -> Connector:
    torch.manual_seed(0)
    return Connector(ConnectorSection(name=name, **section), encoder_width=c, decoder_width=d)  # type: ignore[arg-type]


def plans(name: str, grids: Sequence[Grid], **section: Any) -> list[ImagePlan]:
    """Plans of images with these grids of 14-pixel patches in resolution native."""
    connector = ConnectorSection(name=name, **section)  # type: ignore[arg-type]
    merge, queries = kind_of(connector).merge, queries_of(connector)
    geometry = Geometry(
        mode="native", image_size=28, patch_size=14, merge=merge, queries=queries, packed=True
    )
    made = [geometry.plan(14 * columns, 14 * rows) for rows, columns in grids]
    assert [plan.grid for plan in made] == list(grids)
    return made


def features(*, c: int = 8, seed: int = 0) -> Tensor:
    return torch.randn(PATCHES, c, generator=torch.Generator().manual_seed(seed))


def load(ours: Connector, theirs: nn.Module, names: dict[str, str]) -> None:
    """Their weights under our names, given without `.weight` and `.bias`."""
    given = theirs.state_dict()
    ours.load_state_dict(
        {f"{a}.{kind}": given[f"{b}.{kind}"] for a, b in names.items() for kind in ("weight", "bias")}
    )


def test_mlp2x_equals_llavas_projector() -> None:
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(hidden_size=12),
        text_config=LlamaConfig(hidden_size=20, num_attention_heads=2),
    )
    theirs = LlavaMultiModalProjector(config)
    excite(theirs)
    ours = build("mlp2x", c=12, d=20)
    load(ours, theirs, {"net.up": "linear_1", "net.down": "linear_2"})
    given = features(c=12)
    assert gap(ours(given, plans("mlp2x", GRIDS)), theirs(given)) < 1e-6


def qwen_pair(c: int, d: int) -> tuple[Connector, PatchMerger]:
    """Our merge_mlp and Qwen2-VL's merger with the same weights."""
    theirs = PatchMerger(dim=d, context_dim=c)
    excite(theirs)
    ours = build("merge_mlp", c=c, d=d)
    load(ours, theirs, {"net.norm": "ln_q", "net.up": "mlp.0", "net.down": "mlp.2"})
    return ours, theirs


def images_of(given: Tensor) -> list[Tensor]:
    """[rows, columns, c] of each of GRIDS."""
    parts = given.split([rows * columns for rows, columns in GRIDS])
    return [part.unflatten(0, grid) for part, grid in zip(parts, GRIDS, strict=True)]


def test_merge_mlp_equals_qwen2_vls_patch_merger_on_images_of_any_grid() -> None:
    """Qwen2-VL orders patches block by block, each 2 x 2 block in reading order; ours come in reading order of the image."""
    c, d = 10, 14
    ours, theirs = qwen_pair(c, d)
    given = features(c=c)
    blocks = [
        image[y + dy, x + dx]
        for image, (rows, columns) in zip(images_of(given), GRIDS, strict=True)
        for y in range(0, rows, 2)
        for x in range(0, columns, 2)
        for dy in (0, 1)
        for dx in (0, 1)
    ]
    got = ours(given, plans("merge_mlp", GRIDS))
    assert got.shape == (PATCHES // 4, d)
    assert gap(got, theirs(torch.stack(blocks))) < 1e-6


def test_pixel_shuffle_equals_internvls_on_images_of_any_grid() -> None:
    """InternVL's own shuffle by 0.5 and projector: its channels and its blocks come in the same order as ours, no permutation."""
    c, d = 8, 12
    config = InternVLConfig(
        vision_config={"hidden_size": c, "num_attention_heads": 2, "num_hidden_layers": 1},
        text_config={"model_type": "llama", "hidden_size": d, "num_attention_heads": 2},
        downsample_ratio=0.5,
    )
    theirs = InternVLMultiModalProjector(config)
    excite(theirs)
    ours = build("pixel_shuffle", c=c, d=d)
    load(ours, theirs, {"net.norm": "layer_norm", "net.up": "linear_1", "net.down": "linear_2"})
    given = features(c=c).requires_grad_()
    shuffled = [
        InternVLModel.pixel_shuffle(None, image[None], scale_factor=config.downsample_ratio)  # type: ignore[arg-type]
        for image in images_of(given)
    ]
    expected = theirs(torch.cat([x.flatten(0, 2) for x in shuffled]))
    got = ours(given, plans("pixel_shuffle", GRIDS))
    assert got.shape == (PATCHES // 4, d)
    assert gap(got, expected) < 1e-6
    weights = torch.randn(got.shape)
    mine, own = (torch.autograd.grad((x * weights).sum(), given)[0] for x in (got, expected))
    assert gap(mine, own) < 1e-5


def test_merging_joins_neighbours_and_keeps_images_apart() -> None:
    numbers = torch.arange(32.0)[:, None]
    merged = merge_neighbours(numbers, [(4, 4), (2, 8)], 2)
    assert merged[:4].tolist() == [[0, 1, 4, 5], [2, 3, 6, 7], [8, 9, 12, 13], [10, 11, 14, 15]]
    assert merged[4:].tolist() == [[16, 17, 24, 25], [18, 19, 26, 27], [20, 21, 28, 29], [22, 23, 30, 31]]


@pytest.mark.parametrize("name", CONNECTORS)
def test_visual_tokens_are_those_that_are_planned(name: str) -> None:
    section = {"queries": 5} if name == "resampler" else {}
    made = plans(name, GRIDS, **section)
    out = build(name, **section)(features(), made)
    expected = [5 if not MERGE[name] else rows * columns // MERGE[name] ** 2 for rows, columns in GRIDS]
    assert [plan.visual_tokens for plan in made] == expected
    assert out.shape == (sum(expected), 12)


@pytest.mark.parametrize("name", CONNECTORS)
def test_an_image_is_projected_alike_alone_and_among_others(name: str) -> None:
    connector, given, made = build(name), features(), plans(name, GRIDS)
    images = given.split([plan.patches for plan in made])
    alone = [connector(image, [plan]) for image, plan in zip(images, made, strict=True)]
    assert gap(torch.cat(alone), connector(given, made)) < 1e-5


@pytest.mark.parametrize("inputs_train", [True, False])
@pytest.mark.parametrize("name", CONNECTORS)
def test_gradients_are_equal_with_recomputation_also_of_frozen_inputs(name: str, inputs_train: bool) -> None:
    connector = build(name)
    excite(connector)
    results, passes = [], []
    count: list[int] = []
    next(m for m in connector.net.modules() if isinstance(m, nn.Linear)).register_forward_pre_hook(
        lambda *_: count.append(1)
    )
    plain = connector.net.forward
    for every, checkpoint in ((0, non_reentrant), (1, non_reentrant), (1, BY_DEEPSPEED)):
        connector.net.forward = plain
        connector.set_recompute(every, checkpoint)
        connector.zero_grad()
        count.clear()
        given = features().requires_grad_(inputs_train)
        connector(given, plans(name, GRIDS)).sin().sum().backward()
        results.append(gradients(connector))
        passes.append(len(count))
    assert all(bool(g.any()) for name, g in results[0].items() if not name.endswith(".k.bias"))
    assert worst(results[1], results[0]) == worst(results[2], results[0]) == []
    assert passes == [1, 2, 2]


def test_an_unknown_connector_is_refused_with_the_known_ones_named() -> None:
    unknown: Any = ConnectorSection(name="qformer")  # type: ignore[arg-type]
    known = "linear, mlp2x, merge_mlp, pixel_shuffle, resampler"
    with pytest.raises(ConfigError, match=f"'qformer' is none of {known}"):
        Connector(unknown, encoder_width=8, decoder_width=12)
    with pytest.raises(ConfigError, match="'qformer'"):
        kind_of(unknown)


def test_a_new_connector_is_one_class_and_one_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    class Mean(nn.Module):
        """Every piece becomes its mean."""

        def __init__(self, c: int, d: int) -> None:
            super().__init__()
            self.proj = nn.Linear(c, d)

        def forward(self, given: Tensor, grids: Sequence[Grid]) -> Tensor:
            parts = given.split([rows * columns for rows, columns in grids])
            return self.proj(torch.stack([part.mean(0) for part in parts]))

    monkeypatch.setitem(CONNECTORS, "mean", Kind(build=lambda c, d, _: Mean(c, d), fixed=True))
    made = plans("mean", GRIDS, queries=1)
    connector = build("mean", queries=1)
    out = connector(features(), made)
    assert out.shape == (len(GRIDS), 12)
    assert gap(out[1], connector.net.proj(images_of(features())[1].mean((0, 1)))) < 1e-5  # type: ignore[union-attr, operator]


@pytest.mark.parametrize("name", ["linear", "merge_mlp", "pixel_shuffle"])
def test_features_of_fewer_images_than_planned_are_refused_with_both_counts(name: str) -> None:
    made = plans(name, GRIDS)
    planned = sum(plan.visual_tokens for plan in made)
    connector = build(name)
    connector.net = nn.Module()
    connector.net.forward = lambda given, grids: given[: planned - 1]  # type: ignore[method-assign]
    with pytest.raises(
        SpliceError, match=f"made {planned - 1} visual tokens of 4 images, {planned} are planned"
    ):
        connector(features(), made)


def tiled(sizes: Sequence[tuple[int, int]]) -> list[ImagePlan]:
    """Plans of images (width, height) in resolution anyres with tiles of 2 x 2 patches."""
    assert ResolutionSection(name="anyres").max_tiles is None
    geometry = Geometry(mode="anyres", image_size=28, patch_size=14, grids=tile_grids(4))
    return [geometry.plan(*size) for size in sizes]


def test_tiles_are_joined_row_by_row_with_the_separator_after_each_row() -> None:
    """Token by token, by hand: an image of 56 x 28 pixels is two tiles side by side, each 2 x 2 tokens."""
    torch.manual_seed(0)
    connector = Connector(ConnectorSection(name="linear"), encoder_width=8, decoder_width=12, separator=True)
    made = tiled([(56, 28), (28, 56)])
    assert [plan.tiles for plan in made] == [(1, 2), (2, 1)]
    given = torch.randn(24, 8)
    net: Any = connector.net
    t, end = net.proj(given), connector.separator
    assert end is not None
    wide = [t[0:4], t[4:6], t[8:10], end[None], t[6:8], t[10:12], end[None]]
    high = [t[12:16], t[16:18], end[None], t[18:20], end[None], t[20:22], end[None], t[22:24], end[None]]
    assert gap(connector(given, made), torch.cat(wide + high)) < 1e-6


def test_a_row_without_tiles_gives_the_separator_a_gradient_of_zero() -> None:
    connector = Connector(ConnectorSection(name="linear"), encoder_width=8, decoder_width=12, separator=True)
    geometry = Geometry(mode="anyres", image_size=28, patch_size=14, grids=tile_grids(4))
    (connector(torch.randn(4, 8), [geometry.dummy]) * 0.0).sum().backward()
    assert connector.separator is not None
    assert connector.separator.grad is not None
    assert not connector.separator.grad.any()


def test_tiles_that_were_not_planned_are_refused_with_both_counts() -> None:
    connector = Connector(ConnectorSection(name="linear"), encoder_width=8, decoder_width=12, separator=True)
    with pytest.raises(SpliceError, match="13 patch features were given for 1 images whose plans have 12"):
        connector(torch.randn(13, 8), tiled([(56, 28)]))
    connector.net.register_forward_hook(lambda _, inputs, tokens: torch.cat([tokens, tokens[:1]]))
    with pytest.raises(SpliceError, match="13 tokens of the pieces of 1 images, 12 are planned"):
        connector(torch.randn(12, 8), tiled([(56, 28)]))
