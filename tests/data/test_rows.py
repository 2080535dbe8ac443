from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from mmds.data.rows import IGNORE, IMAGE_MARKER, LoadedSample, Row, build_row, filler_row
from mmds.errors import DataError
from mmds.geometry import Geometry
from tests import tiny

GEOMETRY = Geometry(mode="fixed", image_size=28, patch_size=14, merge=1)  # 4 visual tokens an image
SLOTS = 4


def _sample(
    key: str, ids: Sequence[int], supervised: Sequence[int] = (), values: Sequence[int] = (), size: int = 28
) -> LoadedSample:
    """A sample; supervised: positions; values: one per image, whose pixels all have it."""
    mask = np.zeros(len(ids), dtype=np.bool_)
    mask[list(supervised)] = True
    return LoadedSample(
        key=key,
        ids=np.array(ids, dtype=np.int32),
        supervised=mask,
        images=tuple(np.full((1, 3, size, size), value, dtype=np.uint8) for value in values),
        image_sizes=tuple((40 + value, 30) for value in values),
        image_paths=tuple(f"{value}.png" for value in values),
    )


def test_a_marker_becomes_its_slots_and_labels_stay_on_their_tokens() -> None:
    row = build_row([_sample("a", [5, IMAGE_MARKER, 6, 7], supervised=[2, 3], values=[9])], GEOMETRY)
    assert row.input_ids.tolist() == [5, 0, 0, 0, 0, 6, 7]
    assert row.labels.tolist() == [IGNORE] * 5 + [6, 7]
    assert row.position_ids.tolist() == list(range(7))
    assert row.slots.tolist() == [1, 2, 3, 4]
    assert row.slot_counts.tolist() == [4]
    assert row.cu_seqlens.tolist() == [0, 7]
    assert row.image_names == ("sample a image 0 (9.png)",)
    assert (row.real_tokens, row.visual_tokens, row.supervised, row.padded) == (7, 4, 2, 0)


def test_dtypes_and_shapes_are_the_declared_ones() -> None:
    row = build_row([_sample("a", [1, IMAGE_MARKER], values=[1]), _sample("b", [2, 3], [1])], GEOMETRY)
    for tensor in (row.input_ids, row.labels, row.position_ids, row.slots, row.slot_counts):
        assert tensor.dtype == torch.int64
    assert row.cu_seqlens.dtype == torch.int32
    assert row.pixels.dtype == torch.uint8
    assert row.pixels.shape == (1, 3, 28, 28)


def test_neighbouring_markers_keep_apart() -> None:
    row = build_row([_sample("a", [IMAGE_MARKER, IMAGE_MARKER, 8], [2], values=[1, 2])], GEOMETRY)
    assert row.slots.tolist() == list(range(8))
    assert row.slot_counts.tolist() == [4, 4]
    assert row.pixels[:, 0, 0, 0].tolist() == [1, 2]
    assert row.image_names == ("sample a image 0 (1.png)", "sample a image 1 (2.png)")


def test_positions_restart_and_segments_end_at_each_sample() -> None:
    row = build_row([_sample("a", [1, 2, 3], [2]), _sample("b", [4, 5, 6, 7], [1, 3])], GEOMETRY)
    assert row.position_ids.tolist() == [0, 1, 2, 0, 1, 2, 3]
    assert row.cu_seqlens.tolist() == [0, 3, 7]
    assert row.sample_keys == ("a", "b")


def test_targets_of_packed_samples_never_cross_a_border() -> None:
    everything = [_sample("a", [1, 2, 3], [0, 1, 2]), _sample("b", [4, 5, 6, 7], [0, 1, 2, 3])]
    row = build_row(everything, GEOMETRY)
    assert row.supervised == 5  # lengths 3 + 4: nothing predicts a first token
    assert row.supervised == sum(build_row([sample], GEOMETRY).supervised for sample in everything)
    assert (row.labels != IGNORE).sum() == 7  # counting changes no label


def test_each_image_keeps_its_own_sample_s_slots_under_any_packing_order() -> None:
    """Image k has pixels k and stands after token 100 + k: wherever it is packed, its slots follow that
    token.
    """
    samples, value = [], 0
    for s, images in enumerate([0, 2, 1, 0, 3, 1]):
        ids: list[int] = [7]
        values = []
        for _ in range(images):
            value += 1
            ids += [100 + value, IMAGE_MARKER]
            values.append(value)
        samples.append(_sample(f"s{s}", [*ids, 9], [len(ids)], values))
    rng = np.random.default_rng(0)
    for _ in range(20):
        order = rng.permutation(len(samples))
        cuts = sorted(rng.choice(np.arange(1, len(samples)), size=2, replace=False).tolist())
        seen: list[int] = []
        for part in np.split(order, cuts):
            row = build_row([samples[i] for i in part], GEOMETRY)
            assert row.sample_keys == tuple(f"s{i}" for i in part)
            assert row.slot_counts.sum() == row.slots.numel()
            for slots, pixels, name in zip(
                row.slots.split(row.slot_counts.tolist()), row.pixels, row.image_names, strict=True
            ):
                tag = int(pixels.unique())
                assert slots.tolist() == list(range(int(slots[0]), int(slots[0]) + SLOTS))
                assert row.input_ids[slots[0] - 1] == 100 + tag
                assert name.endswith(f"({tag}.png)")
                seen.append(tag)
        assert sorted(seen) == list(range(1, value + 1))


def test_slots_follow_the_geometry_of_the_connector() -> None:
    merged = Geometry(mode="fixed", image_size=28, patch_size=14, merge=2)
    row = build_row([_sample("a", [1, IMAGE_MARKER, 2], [2], values=[3])], merged)
    assert row.input_ids.tolist() == [1, 0, 2]
    assert row.visual_tokens == 1


def test_a_row_without_usable_samples_is_the_filler_row() -> None:
    row = build_row([], GEOMETRY, bad=[("x", "broken")])
    for tensor, expected in ((row.input_ids, [0]), (row.labels, [IGNORE]), (row.cu_seqlens, [0, 1])):
        assert tensor.tolist() == expected
    assert row.sample_keys == ("",)
    assert row.bad == (("x", "broken"),)
    assert (row.padded, row.real_tokens, row.supervised, row.visual_tokens) == (1, 0, 0, 0)
    assert row.pixels.shape == (0, 3, 28, 28)
    assert filler_row(GEOMETRY).bad == ()


def test_text_only_samples_bring_no_pixels() -> None:
    row = build_row([_sample("a", [1, 2], [1])], GEOMETRY)
    assert row.pixels.shape == (0, 3, 28, 28)
    assert row.visual_tokens == 0


def test_skipped_samples_travel_with_the_row() -> None:
    assert build_row([_sample("a", [1, 2], [1])], GEOMETRY, bad=[("b", "why")]).bad == (("b", "why"),)


def _changed(sample: LoadedSample, **changes: object) -> LoadedSample:
    fields = {name: getattr(sample, name) for name in sample.__dataclass_fields__}
    return LoadedSample(**(fields | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"images": ()}, "1 image markers, 0 images"),
        ({"ids": np.array([1, 2, 3], np.int32)}, "0 image markers, 1 images"),
        ({"ids": np.array([1, IMAGE_MARKER, IMAGE_MARKER], np.int32)}, "2 image markers, 1 images"),
        ({"image_sizes": ()}, "0 sizes"),
        ({"image_paths": ("a", "b")}, "2 paths"),
        ({"supervised": np.array([False, True, False])}, "marker is supervised"),
        ({"supervised": np.array([False])}, "one length"),
        ({"ids": np.array([1, IMAGE_MARKER, -100], np.int32)}, "negative token id -100"),
        (
            {"images": (np.zeros((1, 3, 28, 14), np.uint8),)},
            "image 0 \\(9.png\\).*planned uint8 \\(1, 3, 28, 28\\)",
        ),
        ({"images": (np.zeros((3, 28, 28), np.uint8),)}, "image 0"),
        ({"images": (np.zeros((1, 3, 28, 28), np.float32),)}, "float32"),
        ({"image_sizes": ((0, 5),)}, "no content"),
    ],
)
def test_parts_that_do_not_belong_together_are_refused_by_name(
    changes: dict[str, object], message: str
) -> None:
    good = _sample("k1", [1, IMAGE_MARKER, 2], [2], values=[9])
    assert build_row([good], GEOMETRY).visual_tokens == SLOTS
    with pytest.raises(DataError, match=message) as caught:
        build_row([_sample("fine", [1, 2], [1]), _changed(good, **changes)], GEOMETRY)
    assert "sample k1" in str(caught.value)


def test_an_empty_sample_is_refused() -> None:
    with pytest.raises(DataError, match="sample e"):
        build_row([_sample("e", [])], GEOMETRY)


def test_building_a_row_changes_no_sample() -> None:
    sample = _sample("a", [5, IMAGE_MARKER, 6], [2], values=[1])
    row = build_row([sample, sample], GEOMETRY)
    row.pixels.fill_(99)
    row.input_ids.fill_(99)
    assert sample.ids.tolist() == [5, IMAGE_MARKER, 6]
    assert int(sample.images[0].max()) == 1
    assert isinstance(row, Row)


# Other modes: a geometry decides what an image becomes, and the row follows it.

ANYRES = Geometry(mode="anyres", image_size=28, patch_size=14, grids=((1, 2), (2, 1), (2, 2)))
NATIVE = Geometry(
    mode="native", image_size=0, patch_size=14, merge=2, min_pixels=784, max_pixels=12 * 784, packed=True
)
MROPE = replace(NATIVE, positions="mrope")
by_mode = pytest.mark.parametrize("geometry", [ANYRES, NATIVE, MROPE], ids=["anyres", "native", "mrope"])


@by_mode
def test_slots_plans_and_pixels_follow_each_image_s_own_size(geometry: Geometry) -> None:
    """The row against a walk through its samples, marker by marker."""
    row, samples = tiny.random_row(5, geometry, (2, 0, 1, 3))
    ids, slots, counts, plans, pixels, names = [], [], [], [], [], []
    for sample in samples:
        image = 0
        for token in sample.ids.tolist():
            if token != IMAGE_MARKER:
                ids.append(token)
                continue
            plan = geometry.plan(*sample.image_sizes[image])
            slots += range(len(ids), len(ids) + plan.visual_tokens)
            ids += [0] * plan.visual_tokens
            counts.append(plan.visual_tokens)
            plans.append(plan)
            pixels += list(sample.images[image])
            names.append(f"sample {sample.key} image {image} ({sample.image_paths[image]})")
            image += 1
        assert image == len(sample.images)
    assert row.input_ids.tolist() == ids
    assert row.slots.tolist() == slots and row.slot_counts.tolist() == counts
    assert row.plans == tuple(plans) and len(set(counts)) > 2
    assert np.array_equal(row.pixels.numpy(), np.stack(pixels))
    assert row.image_names == tuple(names)
    assert row.visual_tokens == sum(counts)
    assert row.real_tokens == len(ids) == int(row.cu_seqlens[-1])
    assert (row.labels[row.slots] == IGNORE).all()
    assert sum(np.prod(plan.pixel_shape) for plan in row.plans) == row.pixels.numel()


@by_mode
def test_rows_without_images_and_the_filler_hold_the_smallest_input_as_dummy(geometry: Geometry) -> None:
    text = build_row([_sample("a", [1, 2, 3], [1])], geometry)
    for row, tokens in ((text, 3), (filler_row(geometry), 1), (build_row([], geometry), 1)):
        assert row.plans == () and row.slots.numel() == row.visual_tokens == 0
        assert row.dummy == geometry.dummy
        assert row.pixels.shape == (0, *row.dummy.pixel_shape[1:])
        assert row.position_ids.shape == ((3, tokens) if geometry.positions == "mrope" else (tokens,))
    assert row.padded == 1 and row.labels.tolist() == [IGNORE]
    smallest = {"anyres": (1, 3, 28, 28), "native": (4, 3, 14, 14)}[geometry.mode]
    assert text.dummy.pixel_shape == smallest


@pytest.mark.parametrize(
    ("geometry", "size", "planned"),
    [
        (ANYRES, (50, 20), (3, 3, 28, 28)),
        (NATIVE, (57, 29), (8, 3, 14, 14)),
        (MROPE, (57, 29), (8, 3, 14, 14)),
    ],
)
def test_pixels_of_another_plan_are_refused_with_the_planned_shape(
    geometry: Geometry, size: tuple[int, int], planned: tuple[int, ...]
) -> None:
    """Such as those of the same image on its side, or of one piece of it."""
    good = _sample("k", [1, IMAGE_MARKER, 2], [2], values=[9])
    good = _changed(good, image_sizes=(size,), images=(np.zeros(planned, np.uint8),))
    assert build_row([good], geometry).plans[0].pixel_shape == planned
    for wrong in ((1, *planned[1:]), (planned[0] + 1, *planned[1:]), (1, 3, 28, 56), planned[1:]):
        with pytest.raises(DataError, match=r"sample k image 0 \(9\.png\): pixels are uint8") as caught:
            build_row([_changed(good, images=(np.zeros(wrong, np.uint8),))], geometry)
        assert f"planned uint8 {planned} from a source of {size[0]} x {size[1]}" in str(caught.value)


def test_positions_have_three_axes_only_with_mrope() -> None:
    (row, _), (same, _) = (tiny.random_row(5, geometry, (2, 0, 1, 3)) for geometry in (NATIVE, MROPE))
    lengths = np.diff(row.cu_seqlens.numpy())
    assert row.position_ids.tolist() == [t for length in lengths.tolist() for t in range(length)]
    assert same.position_ids.shape == (3, row.input_ids.numel())
    # Text that no image came before counts on all axes like one axis.
    first = int(same.slots[0])
    assert same.position_ids[:, :first].tolist() == [list(range(first))] * 3
    assert len({tuple(axis) for axis in same.position_ids.tolist()}) == 3
