"""Positions of three axes against transformers' Qwen2-VL, and what they may not do to the segments of a row."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLModel

from mmds.data.positions import mrope_positions, text_positions
from mmds.data.rows import build_row, filler_row
from mmds.geometry import Geometry
from mmds.model.decoder import Decoder
from tests import tiny
from tests.model.families import gap, stock_model

MERGE = 2
GEOMETRY = Geometry(
    mode="native",
    image_size=0,
    patch_size=14,
    merge=MERGE,
    min_pixels=784,
    max_pixels=20 * 784,
    packed=True,
    positions="mrope",
)
Layout = list[int | tuple[int, int]]
"""A sample: a number of text tokens, or rows and columns of an image's visual tokens."""


def slots_of(layout: Layout) -> tuple[np.ndarray, list[tuple[int, int]]]:
    """bool [T] of the sample, and the grids of its images."""
    is_slot = [
        part
        for item in layout
        for part in ([False] * item if isinstance(item, int) else [True] * (item[0] * item[1]))
    ]
    return np.array(is_slot, dtype=np.bool_), [item for item in layout if isinstance(item, tuple)]


def qwen_positions(layout: Layout) -> Tensor:
    """int64 [3, T] of Qwen2-VL's own function, which is given patches before merging and the kind of each token."""
    is_slot, grids = slots_of(layout)
    model: Any = object.__new__(Qwen2VLModel)
    torch.nn.Module.__init__(model)
    model.config = SimpleNamespace(vision_config=SimpleNamespace(spatial_merge_size=MERGE))
    kinds = torch.from_numpy(is_slot.astype(np.int64))[None]
    patches = torch.tensor([[1, MERGE * rows, MERGE * columns] for rows, columns in grids])
    positions, _ = model.get_rope_index(torch.ones_like(kinds), kinds, patches if grids else None)
    return positions[:, 0]


LAYOUTS: dict[str, Layout] = {
    "text only": [9],
    "one token": [1],
    "one image": [4, (2, 3), 5],
    "a tall image": [4, (5, 1), 5],
    "a wide image": [1, (1, 6), 2],
    "one visual token": [3, (1, 1), 3],
    "image first": [(3, 2), 4],
    "image last": [4, (2, 4)],
    "image alone": [(4, 3)],
    "several images": [2, (2, 3), 1, (4, 1), 7, (1, 5), 3],
    "several images first and last": [(2, 2), 1, (1, 3), 2, (3, 1)],
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_positions_equal_those_of_qwen2_vl(layout: Layout) -> None:
    ours = mrope_positions(*slots_of(layout))
    assert ours.dtype == np.int64
    assert np.array_equal(ours, qwen_positions(layout).numpy())


def test_positions_of_random_samples_equal_those_of_qwen2_vl() -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        layout: Layout = []
        for _ in range(int(rng.integers(2, 5))):
            layout += [int(rng.integers(1, 9)), (int(rng.integers(1, 7)), int(rng.integers(1, 7)))]
        layout = layout[int(rng.integers(0, 2)) : len(layout) - int(rng.integers(0, 2))]
        assert np.array_equal(mrope_positions(*slots_of(layout)), qwen_positions(layout).numpy()), layout


@pytest.mark.parametrize("layout", [[3, (2, 3), (2, 3), 2], [(1, 4), (3, 1), (2, 2)], [1, (5, 2), (1, 1)]])
def test_images_side_by_side_count_as_with_a_token_between_that_is_taken_out(layout: Layout) -> None:
    """Qwen2-VL always writes a token between two images; without it, all that follows is one nearer."""
    spaced: Layout = []
    dropped = []
    for item, following in zip(layout, [*layout[1:], 0], strict=True):
        spaced.append(item)
        if isinstance(item, tuple) and isinstance(following, tuple):
            dropped.append(len(slots_of(spaced)[0]))
            spaced.append(1)
    expected = qwen_positions(spaced)
    for column in reversed(dropped):
        nearer = expected[:, column + 1 :] - 1
        expected = torch.cat([expected[:, :column], nearer], dim=1)
    assert dropped and np.array_equal(mrope_positions(*slots_of(layout)), expected.numpy())


def test_text_has_its_one_axis_on_all_three() -> None:
    assert text_positions(5).tolist() == [0, 1, 2, 3, 4]
    assert np.array_equal(mrope_positions(*slots_of([5])), np.tile(text_positions(5), (3, 1)))


def test_positions_of_a_row_restart_at_each_sample() -> None:
    row, samples = tiny.random_row(3, GEOMETRY, (2, 0, 1, 3))
    assert row.position_ids.shape == (3, row.input_ids.numel())
    for sample, start, end in zip(
        samples, row.cu_seqlens.tolist(), row.cu_seqlens.tolist()[1:], strict=False
    ):
        layout: Layout = []
        grids = iter(GEOMETRY.plan(*size).tokens or (0, 0) for size in sample.image_sizes)
        for token in sample.ids.tolist():
            layout.append(next(grids) if token < 0 else 1)
        own = row.position_ids[:, start:end].numpy()
        assert (own[:, 0] == 0).all()
        assert np.array_equal(own, mrope_positions(*slots_of(layout)))
        assert np.array_equal(own, build_row([sample], GEOMETRY).position_ids.numpy())
    assert filler_row(GEOMETRY).position_ids.tolist() == [[0], [0], [0]]


# TRAPS C10: positions neither make nor hide segments. Only cu_seqlens does.

LENGTHS = (7, 5, 6)


def packed(positions: list[Tensor], lengths: tuple[int, ...], embeddings: Tensor) -> Tensor:
    """Logits [T, V] of a decoder with mrope at all positions of a row of these segments."""
    llm = stock_model("llama")
    bounds = torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32)
    with torch.no_grad():
        return Decoder(llm, "mrope")(
            inputs_embeds=embeddings,
            position_ids=torch.cat(positions, dim=1),
            cu_seqlens=bounds,
            keep=torch.arange(len(embeddings)),
        )


@pytest.fixture(scope="module")
def embeddings() -> Tensor:
    return torch.randn(sum(LENGTHS), 32, generator=torch.Generator().manual_seed(1))


def axes(length: int, seed: int) -> Tensor:
    """Positions as of a sample with an image: axes that differ, repeat and jump."""
    image = [2, (length - 3, 1), 1] if seed % 2 else [1, (1, length - 2), 1]
    return torch.from_numpy(mrope_positions(*slots_of(image)))  # type: ignore[arg-type]


def test_the_positions_of_a_sample_move_no_other_sample(embeddings: Tensor) -> None:
    a, b, c = (axes(length, seed) for seed, length in enumerate(LENGTHS))
    before = packed([a, b, c], LENGTHS, embeddings)
    for other in (b + 1000, b * 0, b.flip(1), b - 3, a[:, -1:] + 1 + torch.arange(LENGTHS[1])):
        after = packed([a, other, c], LENGTHS, embeddings)
        assert torch.equal(after[:7], before[:7]) and torch.equal(after[12:], before[12:])
        if not torch.equal(other, b):
            shift = other - b  # a shift of a whole sample alone changes nothing in it, as it should
            assert (gap(after[7:12], before[7:12]) > 1e-3) == bool((shift != shift[0, 0]).any())


def test_a_restart_inside_a_sample_hides_nothing_from_it(embeddings: Tensor) -> None:
    """Two segments are not one whose positions restart, and one is not two whose positions run on."""
    a, b, c = (axes(length, seed) for seed, length in enumerate(LENGTHS))
    two = packed([a, b, c], LENGTHS, embeddings)
    one = packed([a, b, c], (12, 6), embeddings)
    assert gap(one[:7], two[:7]) < 1e-5 and gap(one[7:12], two[7:12]) > 1e-3
    changed = embeddings.clone()
    changed[:7] += 1
    assert gap(packed([a, b, c], (12, 6), changed)[7:12], one[7:12]) > 1e-3
    assert torch.equal(packed([a, b, c], LENGTHS, changed)[7:], two[7:])


@pytest.mark.parametrize("filler", [1, 4])
def test_a_filler_behind_a_sample_moves_nothing_whatever_its_positions(
    embeddings: Tensor, filler: int
) -> None:
    """C9: tokens that belong to no sample are a segment of their own."""
    a, b, _ = (axes(length, seed) for seed, length in enumerate(LENGTHS))
    alone = packed([a, b], LENGTHS[:2], embeddings[:12])
    for positions in (
        torch.zeros(3, filler, dtype=torch.int64),
        b[:, -1:] + 1 + torch.arange(filler),
        -torch.ones(3, filler, dtype=torch.int64),
    ):
        longer = packed([a, b, positions], (*LENGTHS[:2], filler), embeddings[: 12 + filler])
        assert torch.equal(longer[:12], alone)
        assert bool(longer.isfinite().all())


def test_each_sample_of_a_row_has_the_logits_it_has_alone(embeddings: Tensor) -> None:
    a, b, c = (axes(length, seed) for seed, length in enumerate(LENGTHS))
    whole = packed([a, b, c], LENGTHS, embeddings)
    parts = zip((a, b, c), embeddings.split(LENGTHS), LENGTHS, strict=True)
    alone = [packed([positions], (length,), part) for positions, part, length in parts]
    assert gap(whole, torch.cat(alone)) < 1e-5
