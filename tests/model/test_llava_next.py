from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import LlavaNextImageProcessor

from mmds.config_types import RecomputeSection, ResolutionSection
from mmds.data.pieces import load_pieces
from mmds.data.rows import build_row
from mmds.engine.assemble import set_recompute
from mmds.model.recompute import non_reentrant
from tests import tiny
from tests.engine.reference import compare
from tests.model.families import gap, gradients
from tests.model.llava_next import (
    ANYRES,
    TILE,
    load,
    next_step,
    same_mllm,
    sample_of,
    stock_llava_next,
)

Sizes = tuple[tuple[int, int], ...]

# (width, height) of the pictures of each sample of a row
ROWS: dict[str, tuple[Sizes, ...]] = {
    "one": (((90, 60),),),
    "several in one sample": (((90, 60), (40, 130), (33, 33), (400, 100)),),
    "several samples": (((112, 56),), (), ((30, 200), (57, 55)), ((300, 50), (56, 56), (101, 97)), ()),
}


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("pictures", ROWS)
def test_a_packed_row_of_tiles_equals_transformers_own_llava_next_sample_by_sample(
    pictures: str, recompute: bool, tmp_path: Path
) -> None:
    """Logits, loss and the gradient of every parameter of every part, the separator's (image_newline) included, in fp32."""
    ours, geometry = same_mllm(tmp_path)
    theirs = stock_llava_next(geometry.grids)
    load(ours, theirs).train()
    if recompute:
        set_recompute(ours, RecomputeSection(), non_reentrant)
    rng = np.random.default_rng(5)
    samples = [sample_of(rng, geometry, sizes, key=f"s{i}") for i, sizes in enumerate(ROWS[pictures])]
    row = build_row(samples, geometry)
    logits, loss, grads = next_step(theirs, samples, geometry)
    own = ours(row)[0] / row.supervised
    own.backward()
    assert own.item() == pytest.approx(loss.item(), rel=1e-5)
    assert gap(ours.eval().logits(row, torch.arange(row.input_ids.numel())), logits) < 1e-5
    assert set(grads) == set(gradients(ours))
    assert bool(grads["connector.separator"].any())
    assert all(bool(g.any()) for name, g in grads.items() if not name.endswith("k_proj.bias"))
    assert compare(gradients(ours), grads) == []


def test_a_row_has_pictures_of_several_grids_with_and_without_padding(tmp_path: Path) -> None:
    """What the test above compares is not all alike."""
    _, geometry = same_mllm(tmp_path)
    plans = [geometry.plan(*size) for row in ROWS.values() for sizes in row for size in sizes]
    assert len({plan.tiles for plan in plans}) >= 5
    whole = [
        plan.kept == (0, 0, plan.tiles[0] * 4, plan.tiles[1] * 4)
        for plan in plans
        if plan.tiles and plan.kept
    ]
    assert any(whole) and not all(whole)


@pytest.mark.parametrize("grids", [("1x2", "2x1", "2x2", "3x1", "1x3"), ("2x2",)])
def test_chosen_grids_are_the_models_pinpoints(grids: tuple[str, ...], tmp_path: Path) -> None:
    ours, geometry = same_mllm(tmp_path, ResolutionSection(name="anyres", grids=grids))
    theirs = stock_llava_next(geometry.grids)
    load(ours, theirs)
    samples = [sample_of(np.random.default_rng(2), geometry, ((40, 130), (90, 60)), key="a")]
    row = build_row(samples, geometry)
    logits, _, _ = next_step(theirs, samples, geometry)
    with torch.no_grad():
        assert gap(ours.eval().logits(row, torch.arange(row.input_ids.numel())), logits) < 1e-5


@pytest.mark.parametrize("size", [(112, 112), (168, 112), (112, 100), (60, 168), (168, 56), (97, 56)])
def test_pieces_are_those_of_llava_nexts_own_processor(size: tuple[int, int], tmp_path: Path) -> None:
    """Sizes at which tiles need no resizing, only padding: overview, tiles and black border are the same pixels in the same order."""
    _, geometry = same_mllm(tmp_path, ANYRES)
    width, height = size
    pixels = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    plan = geometry.plan(width, height)
    assert (plan.height, plan.width) == (height, width)
    ours = load_pieces(file.getvalue(), plan, geometry)
    processor = LlavaNextImageProcessor(
        size={"height": TILE, "width": TILE},
        crop_size={"height": TILE, "width": TILE},
        image_grid_pinpoints=[[rows * TILE, columns * TILE] for rows, columns in geometry.grids],
        do_rescale=False,
        do_normalize=False,
    )
    theirs = processor(Image.fromarray(pixels), return_tensors="pt")["pixel_values"][0]
    assert ours.shape == tuple(theirs.shape)
    assert np.array_equal(ours[1:], theirs[1:].numpy().astype(np.uint8))
    assert float((torch.from_numpy(ours[0]).float() - theirs[0].float()).abs().max()) <= 1.0
    assert tiny.PREPROCESS["interpolation"] == geometry.interpolation == "bicubic"
