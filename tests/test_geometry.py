"""Sizes, patches, visual tokens and their order, against transformers' own functions of Qwen2-VL and LLaVA-NeXT."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers.image_processing_utils import get_patch_output_size, select_best_resolution
from transformers.models.llava_next.modeling_llava_next import LlavaNextModel, unpad_image
from transformers.models.llava_next.processing_llava_next import LlavaNextProcessor
from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

from mmds.config_types import ConnectorSection, ResolutionSection
from mmds.errors import ConfigError, DataError
from mmds.geometry import (
    MAX_RATIO,
    Geometry,
    ImagePlan,
    arrangement,
    best_grid,
    fit_inside,
    native_size,
    tile_grids,
    unpadded,
)
from mmds.model.build import build_geometry
from mmds.model.connector import CONNECTORS
from mmds.model.encoder import EncoderSpec

SIZES = [(1, 1), (1, 10_000), (10_000, 1), (3, 5), (336, 336), (4000, 3000), (640, 480)]


def random_sizes(count: int, *, seed: int = 0, longest: int = 4000) -> Iterator[tuple[int, int]]:
    """Pairs of sides, as many small as large."""
    rng = np.random.default_rng(seed)
    for pair in np.exp(rng.uniform(0, np.log(longest), (count, 2))).astype(int).tolist():
        yield (pair[0], pair[1])


# fixed


@pytest.mark.parametrize(
    ("image_size", "patch_size", "merge", "patches", "tokens"),
    [(336, 14, 1, 576, 576), (336, 14, 2, 576, 144), (224, 32, 1, 49, 49), (28, 14, 2, 4, 1)],
)
def test_published_models_have_their_known_numbers_of_patches_and_tokens(
    image_size: int, patch_size: int, merge: int, patches: int, tokens: int
) -> None:
    geometry = Geometry(mode="fixed", image_size=image_size, patch_size=patch_size, merge=merge)
    plan = geometry.plan(640, 480)
    assert (plan.height, plan.width) == (image_size, image_size)
    assert (plan.patches, plan.visual_tokens, plan.pieces) == (patches, tokens, 1)
    assert plan.pixel_shape == (1, 3, image_size, image_size)


def test_every_source_size_gets_the_same_square_in_fixed_mode() -> None:
    geometry = Geometry(mode="fixed", image_size=336, patch_size=14)
    assert len({geometry.plan(width, height) for width, height in SIZES}) == 1


@pytest.mark.parametrize(("width", "height"), [(0, 5), (5, 0), (-1, 5)])
def test_an_empty_image_is_refused_with_its_size(width: int, height: int) -> None:
    with pytest.raises(DataError, match=f"{width} x {height}"):
        Geometry(mode="fixed", image_size=28, patch_size=14).plan(width, height)


def test_a_size_off_the_patch_grid_is_refused_because_border_pixels_would_be_lost() -> None:
    with pytest.raises(ConfigError, match="384 is not a multiple of its patch size 14"):
        Geometry(mode="fixed", image_size=384, patch_size=14)


def test_an_odd_grid_cannot_be_merged() -> None:
    with pytest.raises(ConfigError, match="224 px / 32 px = 7"):
        Geometry(mode="fixed", image_size=224, patch_size=32, merge=2)


def test_an_unknown_mode_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="'dynamic' is none of fixed, anyres, native"):
        Geometry(mode="dynamic", image_size=28, patch_size=14)


def test_the_pixel_cap_holds_to_the_pixel() -> None:
    geometry = Geometry(mode="fixed", image_size=336, patch_size=14)
    assert geometry.capped(None) == geometry.capped(336 * 336) == geometry
    with pytest.raises(ConfigError, match=r"max_pixels is 112895.*336 x 336 = 112896.*raise max_pixels"):
        geometry.capped(336 * 336 - 1)


# A model's geometry: sections of a config, with what an encoder says of itself.

SPEC = EncoderSpec(
    name="tower",
    model_cfg={},
    layer=1,
    norm=False,
    mean=(0.48145466, 0.4578275, 0.40821073),
    std=(0.3, 0.3, 0.3),
    interpolation="bilinear",
    image_size=336,
    patch_size=14,
    width=32,
)


def model_geometry(
    resolution: dict[str, Any],
    connector: str = "mlp2x",
    *,
    max_pixels: int | None = None,
    positions: str = "1d",
    queries: int | None = None,
) -> Geometry:
    return build_geometry(
        SPEC,
        ConnectorSection(name=connector, queries=queries),  # type: ignore[arg-type]
        max_pixels=max_pixels,
        resolution=ResolutionSection(**resolution),
        positions=positions,
    )


def test_a_forced_size_is_the_square_and_its_patches_travel_packed() -> None:
    plan = model_geometry({"name": "fixed", "size": 448}).plan(640, 480)
    assert (plan.height, plan.width, plan.patches, plan.visual_tokens) == (448, 448, 1024, 1024)
    assert plan.pixel_shape == (1024, 3, 14, 14)
    own = model_geometry({"name": "fixed", "size": 336})
    assert own == model_geometry({"name": "fixed"}) and not own.packed
    with pytest.raises(ConfigError, match="450 is not a multiple of its patch size 14"):
        model_geometry({"name": "fixed", "size": 450})
    with pytest.raises(ConfigError, match="448 x 448 = 200704"):
        model_geometry({"name": "fixed", "size": 448}, max_pixels=200_703)


def test_padding_is_with_the_towers_mean_colour_and_changes_no_count() -> None:
    pad, plain = model_geometry({"name": "fixed", "fit": "pad"}), model_geometry({"name": "fixed"})
    assert pad.pad and pad.fill == (122, 116, 104)  # LLaVA-1.5's colour
    assert not plain.pad
    assert pad.plan(5, 50) == plain.plan(5, 50)
    assert plain.interpolation == "bilinear"


def test_the_resampler_makes_its_number_of_tokens_of_any_image() -> None:
    for mode in ("fixed", "native"):
        geometry = model_geometry({"name": mode}, "resampler", queries=9)
        assert {geometry.plan(*size).visual_tokens for size in SIZES} == {9}
        assert model_geometry({"name": mode}, "resampler").plan(5, 5).visual_tokens == 64


# native

RULES = [  # factor, min_pixels, max_pixels
    (28, 56 * 56, 28 * 28 * 1280),
    (28, 28 * 28, 28 * 28 * 200),
    (14, 14 * 14 * 4, 14 * 14 * 16384),
    (32, 32 * 32 * 64, 32 * 32 * 2560),
    (16, 16 * 16 * 100, 16 * 16 * 1024),
]


@pytest.mark.parametrize(("factor", "least", "most"), RULES)
def test_native_sizes_equal_those_of_qwen2_vls_processor(factor: int, least: int, most: int) -> None:
    compared = kinds = 0
    for height, width in random_sizes(1300):
        if max(height, width) > 200 * min(height, width):
            continue
        expected = smart_resize(height, width, factor=factor, min_pixels=least, max_pixels=most)
        assert native_size(height, width, factor=factor, min_pixels=least, max_pixels=most) == expected
        compared += 1
        kinds |= 1 if height * width > most else 2 if height * width < least else 4
    assert compared >= 1000 and kinds == 7  # shrunk, grown and only rounded


@pytest.mark.parametrize("tokens", [1, 2, 3, 5, 7, 50])
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_sizes_that_qwen2_vl_leaves_open_follow_the_declared_rule(tokens: int, share: float) -> None:
    """TRAPS B11, B12: too long, too thin, or a range of pixels too narrow for the grid: never above max_pixels, never empty."""
    factor = 28
    most = tokens * factor**2
    for spare in (0, 1, factor, factor**2 - 1):
        rule = {"factor": factor, "min_pixels": int(share * most), "max_pixels": most + spare}
        corners = [(1, 1), (1, 10_000), (10_000, 1), (65_535, 1), (1, 65_535), (27, 29), (100, 21_000)]
        for height, width in [*corners, *random_sizes(200, seed=tokens, longest=65_535)]:
            rows, columns = native_size(height, width, **rule)
            assert rows % factor == columns % factor == 0 and min(rows, columns) >= factor
            assert rows * columns <= most + spare
            assert (rows - columns) * (height - width) >= 0
            if height != width:
                assert native_size(width, height, **rule) == (columns, rows)


def test_an_image_longer_than_the_largest_ratio_is_squeezed_to_it() -> None:
    rule = {"factor": 28, "min_pixels": 56 * 56, "max_pixels": 28 * 28 * 1280}
    for height, width in ((1, 10_000), (3, 65_535), (7, 1401)):
        squeezed = smart_resize(height, MAX_RATIO * height, **rule)
        assert native_size(height, width, **rule) == squeezed
        assert native_size(width, height, **rule) == squeezed[::-1]


def test_the_large_example_has_its_known_numbers() -> None:
    """1344 x 896 pixels, patch 14, merge 2."""
    geometry = model_geometry({"name": "native"}, "merge_mlp", max_pixels=1344 * 896)
    plan = geometry.plan(1344, 896)
    assert (plan.width, plan.height) == (1344, 896)
    assert (plan.patches, plan.visual_tokens) == (6144, 1536)
    assert (plan.grid, plan.tokens) == ((64, 96), (32, 48))
    assert plan.pixel_shape == (6144, 3, 14, 14)


def test_an_image_without_a_stated_least_has_four_visual_tokens_or_what_the_cap_leaves() -> None:
    assert model_geometry({"name": "native"}, "merge_mlp").plan(1, 1).visual_tokens == 4
    for tokens in (1, 2, 3):
        capped = model_geometry({"name": "native"}, "merge_mlp", max_pixels=tokens * 28 * 28)
        assert 1 <= capped.plan(1, 1).visual_tokens <= tokens
    asked = model_geometry({"name": "native", "min_pixels": 9 * 28 * 28}, "merge_mlp")
    assert asked.plan(1, 1).visual_tokens == 9


# anyres

GRID_SETS = {
    "LLaVA-NeXT": ((1, 2), (2, 1), (2, 2), (3, 1), (1, 3)),
    "all to 4": tile_grids(4),
    "all to 9": tile_grids(9),
    "one": ((2, 3),),
    "a single tile": ((1, 1), (2, 2)),
}
by_grids = pytest.mark.parametrize("grids", GRID_SETS.values(), ids=GRID_SETS)


def pinpoints(grids: tuple[tuple[int, int], ...], side: int) -> list[list[int]]:
    """The grids as LLaVA-NeXT writes them: heights and widths in pixels."""
    return [[rows * side, columns * side] for rows, columns in grids]


def tiled(grids: tuple[tuple[int, int], ...], *, merge: int = 1, side: int = 336) -> Geometry:
    return Geometry(mode="anyres", image_size=side, patch_size=14, merge=merge, grids=grids)


def shown_sizes(grids: tuple[tuple[int, int], ...], side: int, count: int = 300) -> list[tuple[int, int]]:
    """Heights and widths of which LLaVA-NeXT's rule leaves at least one row and one column of tokens of 14 pixels."""
    sizes = []
    for height, width in random_sizes(5 * count, seed=side):
        rows, columns = (n // 14 for n in select_best_resolution((height, width), pinpoints(grids, side)))
        if min(unpad_image(torch.zeros(1, rows, columns), (height, width)).shape) > 0:
            sizes.append((height, width))
    assert len(sizes) >= count
    return sizes[:count]


@by_grids
def test_tiles_and_sizes_equal_those_of_llava_nexts_processor(grids: tuple[tuple[int, int], ...]) -> None:
    chosen = set()
    for height, width in [*random_sizes(300), (1, 4000), (4000, 1), (336, 672), (672, 672)]:
        best = select_best_resolution((height, width), pinpoints(grids, 336))
        rows, columns = best_grid(height, width, grids, 336)
        assert (rows * 336, columns * 336) == tuple(best)
        size = get_patch_output_size(torch.empty(1).expand(3, height, width), best, "channels_first")
        assert fit_inside(height, width, *best) == size
        plan = tiled(grids).plan(width, height)
        assert (plan.tiles, plan.height, plan.width) == ((rows, columns), *size)
        assert plan.pieces == 1 + rows * columns and plan.patches == plan.pieces * 24 * 24
        assert plan.pixel_shape == (plan.pieces, 3, 336, 336)
        chosen.add((rows, columns))
    assert len(chosen) >= min(3, len(grids))


@by_grids
def test_what_is_left_without_padding_equals_llava_nexts_unpad_image(
    grids: tuple[tuple[int, int], ...],
) -> None:
    for height, width in shown_sizes(grids, 336):
        rows, columns = (24 * n for n in best_grid(height, width, grids, 336))
        numbers = torch.arange(rows * columns).reshape(1, rows, columns)
        top, left, shown_rows, shown_columns = unpadded(height, width, rows, columns)
        ours = numbers[:, top : top + shown_rows, left : left + shown_columns]
        assert torch.equal(ours, unpad_image(numbers, (height, width)))


@by_grids
def test_the_number_of_visual_tokens_equals_that_of_llava_nexts_processor(
    grids: tuple[tuple[int, int], ...],
) -> None:
    processor: Any = object.__new__(LlavaNextProcessor)
    processor.image_processor = SimpleNamespace(image_grid_pinpoints=pinpoints(grids, 336))
    processor.patch_size, processor.num_additional_image_tokens = 14, 0
    for height, width in shown_sizes(grids, 336):
        expected = processor._get_number_of_features(height, width, 336, 336)
        assert tiled(grids).plan(width, height).visual_tokens == expected


def llava_next_order(plan: ImagePlan, grids: tuple[tuple[int, int], ...], height: int, width: int) -> Any:
    """Where LLaVA-NeXT's model puts the tokens of the pieces, each token being its own number and the separator -1."""
    rows, columns = plan.tokens or (0, 0)
    vision = SimpleNamespace(image_size=rows * 14, patch_size=14)
    config = SimpleNamespace(vision_config=vision, image_grid_pinpoints=pinpoints(grids, rows * 14))
    numbers = torch.arange(plan.pieces * rows * columns).reshape(plan.pieces, rows * columns, 1)
    stand_in: Any = SimpleNamespace(config=config)
    packed, _ = LlavaNextModel.pack_image_features(
        stand_in, [numbers], [(height, width)], "full", image_newline=torch.tensor([-1])
    )
    return packed[0][:, 0].numpy()


@by_grids
@pytest.mark.parametrize("side", [28, 70])
def test_visual_tokens_stand_in_the_order_of_llava_nexts_model(
    grids: tuple[tuple[int, int], ...], side: int
) -> None:
    for height, width in shown_sizes(grids, side, 200):
        plan = tiled(grids, side=side).plan(width, height)
        order = arrangement(plan)
        assert len(order) == plan.visual_tokens
        assert np.array_equal(order, llava_next_order(plan, grids, height, width))


def test_merged_tokens_are_unpadded_and_ordered_like_a_tower_with_as_many_patches() -> None:
    """Merging 2 x 2 patches of 14 pixels leaves the token grid of a tower with half as many patches a side."""
    grids = GRID_SETS["LLaVA-NeXT"]
    for height, width in shown_sizes(grids, 56, 200):
        merged = tiled(grids, merge=2, side=112).plan(width, height)
        assert merged.tokens == (4, 4) and merged.patches == merged.pieces * 64
        # The choice of tiles depends on the pixels of a tile, so only images with the same choice compare.
        if merged.tiles == best_grid(height, width, grids, 56):
            assert np.array_equal(arrangement(merged), llava_next_order(merged, grids, height, width))


@pytest.mark.parametrize(("width", "height"), [(1, 10_000), (10_000, 1), (1, 65_535), (65_535, 1), (1, 1)])
def test_the_thinnest_image_keeps_a_row_and_a_column_of_its_tiles(width: int, height: int) -> None:
    plan = tiled(GRID_SETS["LLaVA-NeXT"]).plan(width, height)
    assert plan.kept is not None
    top, left, rows, columns = plan.kept
    assert min(rows, columns) >= 1 and min(plan.height, plan.width) >= 1
    assert plan.visual_tokens == 576 + rows * (columns + 1) == len(arrangement(plan))
    assert plan.tiles is not None
    assert top + rows <= 24 * plan.tiles[0] and left + columns <= 24 * plan.tiles[1]


def test_grids_are_all_of_two_to_max_tiles_tiles_without_doubles() -> None:
    for most in (2, 4, 9):
        grids = tile_grids(most)
        products = {(r, c) for r in range(1, most + 1) for c in range(1, most + 1) if 2 <= r * c <= most}
        assert set(grids) == products and len(grids) == len(products)
        assert [r * c for r, c in grids] == sorted(r * c for r, c in grids)
    with pytest.raises(ConfigError, match=r"mmds\.model\.resolution\.max_tiles is 1: .*use resolution fixed"):
        tile_grids(1)


def test_the_cap_takes_grids_away_the_overview_counted() -> None:
    square = 336 * 336
    every = model_geometry({"name": "anyres", "max_tiles": 4})
    assert every.grids == tile_grids(4)
    assert model_geometry({"name": "anyres"}).grids == tile_grids(4)
    assert model_geometry({"name": "anyres"}, max_pixels=5 * square).grids == tile_grids(4)
    assert model_geometry({"name": "anyres"}, max_pixels=5 * square - 1).grids == tile_grids(3)
    asked = model_geometry({"name": "anyres", "grids": ("2x2", "1x2")}, max_pixels=3 * square)
    assert asked.grids == ((1, 2),)


# The cap holds everywhere (TRAPS B34).

MODES = [
    ({"name": "fixed"}, 112_896),
    ({"name": "fixed", "size": 448, "fit": "pad"}, 200_704),
    ({"name": "anyres"}, 3 * 112_896),
    ({"name": "anyres"}, 4 * 112_896 + 5000),
    ({"name": "anyres", "size": 224, "max_tiles": 9}, 500_000),
    ({"name": "native"}, 784),
    ({"name": "native"}, 5_000),
    ({"name": "native"}, 112_896),
    ({"name": "native"}, 1_003_520),
    ({"name": "native", "min_pixels": 100_000}, 100_001),
]


@pytest.mark.parametrize(
    ("resolution", "cap"), MODES, ids=[f"{mode['name']}-{cap}-{i}" for i, (mode, cap) in enumerate(MODES)]
)
def test_planned_pixels_are_never_above_the_cap_tiles_included(resolution: dict[str, Any], cap: int) -> None:
    kinds = [name for name in CONNECTORS if (resolution["name"], name) != ("anyres", "resampler")]
    geometries = [model_geometry(resolution, name, max_pixels=cap) for name in kinds]
    corners = [(1, 1), (1, 10_000), (10_000, 1), (65_535, 1), (1, 65_535), (8000, 8000)]
    sweep = [*corners, *random_sizes(1000, longest=8000), *random_sizes(4000, seed=1, longest=1500)]
    for number, (width, height) in enumerate(sweep):
        geometry = geometries[number % len(geometries)]
        plan = geometry.plan(width, height)
        assert 0 < plan.patches * plan.cell**2 <= cap
        assert np.prod(plan.pixel_shape) == 3 * plan.patches * plan.cell**2
        assert plan.patches == plan.pieces * plan.grid[0] * plan.grid[1]
        assert plan.visual_tokens >= 1
        if number % 20 == 0:
            assert plan.visual_tokens == len(arrangement(plan))
    for geometry in geometries:
        assert 0 < geometry.dummy.patches * geometry.dummy.cell**2 <= cap


# What is refused, with the key and the way out.


@pytest.mark.parametrize(
    ("asked", "key", "way_out"),
    [
        (
            {"resolution": {"name": "anyres"}, "max_pixels": 3 * 336 * 336 - 1},
            r"mmds\.data\.max_pixels is 338687, .* 3 x 112896 = 338688 pixels",
            "raise it, or use resolution fixed",
        ),
        (
            {"resolution": {"name": "anyres"}, "positions": "mrope"},
            r"mmds\.model\.positions: mrope",
            'use "1d", or resolution fixed or native',
        ),
        (
            {"resolution": {"name": "native"}, "connector": "resampler", "positions": "mrope"},
            r"mmds\.model\.positions: mrope",
            'use "1d", or .* another connector',
        ),
        (
            {"resolution": {"name": "anyres"}, "connector": "resampler"},
            r"mmds\.model\.connector: the resampler",
            "use 'mlp2x', or resolution fixed or native",
        ),
        (
            {"resolution": {"name": "native"}, "connector": "merge_mlp", "max_pixels": 783},
            r"mmds\.data\.max_pixels is 783, but one visual token takes 28 x 28 = 784 pixels",
            "raise it",
        ),
        (
            {"resolution": {"name": "native", "min_pixels": 50_000}, "max_pixels": 49_999},
            r"mmds\.model\.resolution\.min_pixels is 50000, .* 49999 \(mmds\.data\.max_pixels",
            "lower it",
        ),
        (
            {"resolution": {"name": "fixed", "size": 350}, "connector": "merge_mlp"},
            r"mmds\.model\.connector: merging 2x2 .* 350 px / 14 px = 25",
            "use 'mlp2x' or another image size",
        ),
    ],
)
def test_what_does_not_fit_together_is_refused_with_the_key_and_the_way_out(
    asked: dict[str, Any], key: str, way_out: str
) -> None:
    with pytest.raises(ConfigError, match=f"(?s){key}.*{way_out}"):
        model_geometry(**asked)


def test_tiles_without_a_grid_and_native_images_that_do_not_run_packed_are_refused() -> None:
    with pytest.raises(ConfigError, match="anyres needs at least one grid"):
        Geometry(mode="anyres", image_size=28, patch_size=14)
    with pytest.raises(ConfigError, match="one packed call"):
        Geometry(mode="native", image_size=28, patch_size=14)
