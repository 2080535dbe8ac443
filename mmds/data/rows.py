"""Rows: samples packed back to back, and the one place where image markers become slots.

Shape letters: T tokens of the row, S samples (segments), I images, V slots (visual tokens), N pieces of images (or
patches, where they travel packed), H and W pixels after resize.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mmds.data.positions import mrope_positions, text_positions
from mmds.errors import DataError
from mmds.geometry import Geometry, ImagePlan

IGNORE = -100
"""Label of a position that is not supervised."""

IMAGE_MARKER = -200
"""Stands for one image in stored token ids; it is never a vocabulary row and never reaches a model."""


@dataclass(frozen=True, kw_only=True)
class LoadedSample:
    """One sample with its pictures decoded, ready to be packed.

    ids: int32 [T'] with one IMAGE_MARKER per image; supervised: bool [T'], False on markers.
    images: one uint8 array per image, of the `pixel_shape` of its plan; image_sizes: (width, height) of the
    upright *source* in pixels, which the geometry plans from; image_paths: as the raw data wrote them.
    """

    key: str
    ids: npt.NDArray[np.int32]
    supervised: npt.NDArray[np.bool_]
    images: tuple[npt.NDArray[np.uint8], ...] = ()
    image_sizes: tuple[tuple[int, int], ...] = ()
    image_paths: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Row:
    """One micro-batch of one rank: samples back to back, none split.

    input_ids: int64 [T], slots hold 0. labels: int64 [T], unshifted: labels[t] is the token AT t if
    supervised, else IGNORE. position_ids: int64 [T], or [3, T] with mrope, restart at 0 at each sample. cu_seqlens:
    int32 [S+1], segment boundaries, first 0 and last T. slots: int64 [V], row positions of the visual tokens in
    image order. slot_counts: int64 [I], slots of each image. pixels: uint8 [N, 3, H, W], upright RGB, not
    normalised, the pieces (or patches) of all images in order. plans: I entries, what each image became. dummy: the
    smallest encoder input, for a row without images. image_names: I entries, "sample KEY image 0 (path)".
    sample_keys: S entries, "" for filler. bad: (sample key, reason) of samples skipped. padded: tokens of no sample.
    """

    input_ids: Tensor
    labels: Tensor
    position_ids: Tensor
    cu_seqlens: Tensor
    slots: Tensor
    slot_counts: Tensor
    pixels: Tensor
    plans: tuple[ImagePlan, ...]
    dummy: ImagePlan
    image_names: tuple[str, ...]
    sample_keys: tuple[str, ...]
    bad: tuple[tuple[str, str], ...] = ()
    padded: int = 0

    @property
    def real_tokens(self) -> int:
        """Tokens that belong to a sample, slots included."""
        return self.input_ids.numel() - self.padded

    @property
    def visual_tokens(self) -> int:
        """Slots of the row."""
        return self.slots.numel()

    @property
    def supervised(self) -> int:
        """Targets that count: supervised tokens that some token of the same segment predicts."""
        return int(self.supervised_counts.sum())

    @property
    def supervised_counts(self) -> Tensor:
        """Targets that count, by segment: int64 [S]."""
        targets = self.labels != IGNORE
        targets[self.cu_seqlens[:-1].long()] = False
        segments = torch.bucketize(targets.nonzero().squeeze(1), self.cu_seqlens[1:].long(), right=True)
        return torch.bincount(segments, minlength=self.cu_seqlens.numel() - 1)


@dataclass(frozen=True, kw_only=True)
class _Expanded:
    """One sample after expansion: ids and labels [T], positions [T] or [3, T], slots (from its start), its images' plans."""

    ids: npt.NDArray[np.int64]
    labels: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    slots: npt.NDArray[np.int64]
    plans: tuple[ImagePlan, ...]


def build_row(
    samples: Sequence[LoadedSample], geometry: Geometry, *, bad: Sequence[tuple[str, str]] = ()
) -> Row:
    """Pack samples into one row, every image marker expanded into its slots; nothing is cut or padded.

    samples: in row order; none gives the filler row. geometry: plans the slots of an image from its source
    size. bad: (sample key, reason) of samples that were planned here and skipped; carried along.
    Raises DataError naming sample and image when ids, markers, images, sizes or pixels disagree.
    """
    if not samples:
        return filler_row(geometry, bad=bad)
    parts = [_expand(sample, geometry) for sample in samples]
    lengths = [len(part.ids) for part in parts]
    bounds = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    plans = tuple(plan for part in parts for plan in part.plans)
    return Row(
        input_ids=torch.from_numpy(np.concatenate([part.ids for part in parts])),
        labels=torch.from_numpy(np.concatenate([part.labels for part in parts])),
        position_ids=torch.from_numpy(np.concatenate([part.positions for part in parts], axis=-1)),
        cu_seqlens=torch.from_numpy(bounds.astype(np.int32)),
        slots=torch.from_numpy(
            np.concatenate([part.slots + start for part, start in zip(parts, bounds[:-1], strict=True)])
        ),
        slot_counts=torch.tensor([plan.visual_tokens for plan in plans], dtype=torch.int64),
        pixels=_join_pixels(samples, geometry),
        plans=plans,
        dummy=geometry.dummy,
        image_names=tuple(_image_name(sample, k) for sample in samples for k in range(len(sample.images))),
        sample_keys=tuple(sample.key for sample in samples),
        bad=tuple(bad),
        padded=0,
    )


def filler_row(geometry: Geometry, *, bad: Sequence[tuple[str, str]] = ()) -> Row:
    """The row of a rank that has no usable sample: one token, one segment, no label, no image."""
    return Row(
        input_ids=torch.zeros(1, dtype=torch.int64),
        labels=torch.full((1,), IGNORE, dtype=torch.int64),
        position_ids=torch.zeros((3, 1) if geometry.positions == "mrope" else 1, dtype=torch.int64),
        cu_seqlens=torch.tensor([0, 1], dtype=torch.int32),
        slots=torch.zeros(0, dtype=torch.int64),
        slot_counts=torch.zeros(0, dtype=torch.int64),
        pixels=_no_pixels(geometry),
        plans=(),
        dummy=geometry.dummy,
        image_names=(),
        sample_keys=("",),
        bad=tuple(bad),
        padded=1,
    )


def _expand(sample: LoadedSample, geometry: Geometry) -> _Expanded:
    """Replace each marker by the slots that the geometry plans for its image."""
    plans = _checked_plans(sample, geometry)
    ids = sample.ids.astype(np.int64)
    is_marker = ids == IMAGE_MARKER
    repeats = np.ones(len(ids), dtype=np.int64)
    repeats[is_marker] = [plan.visual_tokens for plan in plans]
    is_slot = np.repeat(is_marker, repeats)
    labels = np.where(sample.supervised, ids, IGNORE)
    return _Expanded(
        ids=np.where(is_slot, 0, np.repeat(ids, repeats)),
        labels=np.repeat(labels, repeats),
        positions=_positions(is_slot, plans, geometry),
        slots=np.flatnonzero(is_slot).astype(np.int64),
        plans=plans,
    )


def _positions(
    is_slot: npt.NDArray[np.bool_], plans: Sequence[ImagePlan], geometry: Geometry
) -> npt.NDArray[np.int64]:
    if geometry.positions != "mrope":
        return text_positions(len(is_slot))
    return mrope_positions(is_slot, [plan.tokens for plan in plans if plan.tokens is not None])


def _checked_plans(sample: LoadedSample, geometry: Geometry) -> tuple[ImagePlan, ...]:
    """What each image becomes; raises DataError unless the parts of the sample belong together."""
    ids, supervised = sample.ids, sample.supervised
    if ids.ndim != 1 or len(ids) == 0 or supervised.shape != ids.shape:
        raise DataError(
            f"sample {sample.key}: ids {ids.shape} and supervised {supervised.shape} must have one length, "
            "above 0"
        )
    is_marker = ids == IMAGE_MARKER
    if np.any((ids < 0) & ~is_marker):
        raise DataError(f"sample {sample.key}: negative token id {int(ids[(ids < 0) & ~is_marker][0])}")
    markers, images = int(is_marker.sum()), len(sample.images)
    if not markers == images == len(sample.image_sizes) == len(sample.image_paths):
        raise DataError(
            f"sample {sample.key}: {markers} image markers, {images} images, {len(sample.image_sizes)} sizes "
            f"and {len(sample.image_paths)} paths; they must be equal"
        )
    if np.any(is_marker & supervised):
        raise DataError(f"sample {sample.key}: an image marker is supervised; prepare the data again")
    plans = []
    for k, ((width, height), pixels) in enumerate(zip(sample.image_sizes, sample.images, strict=True)):
        try:
            plan = geometry.plan(width, height)
        except DataError as error:
            raise DataError(f"{_image_name(sample, k)}: {error}") from error
        if pixels.dtype != np.uint8 or pixels.shape != plan.pixel_shape:
            raise DataError(
                f"{_image_name(sample, k)}: pixels are {pixels.dtype} {pixels.shape}, "
                f"planned uint8 {plan.pixel_shape} from a source of {width} x {height}"
            )
        plans.append(plan)
    return tuple(plans)


def _join_pixels(samples: Sequence[LoadedSample], geometry: Geometry) -> Tensor:
    """uint8 [N, 3, H, W] of all images in row order."""
    images = [pixels for sample in samples for pixels in sample.images]
    if not images:
        return _no_pixels(geometry)
    return torch.from_numpy(np.concatenate(images))


def _no_pixels(geometry: Geometry) -> Tensor:
    return torch.zeros((0, *geometry.dummy.pixel_shape[1:]), dtype=torch.uint8)


def _image_name(sample: LoadedSample, index: int) -> str:
    return f"sample {sample.key} image {index} ({sample.image_paths[index]})"


def to_device(row: Row, device: torch.device) -> Row:
    """The same row with its tensors on `device`; pixels stay uint8."""
    moved: dict[str, Any] = {
        field.name: value.to(device, non_blocking=True)
        for field in fields(row)
        if isinstance(value := getattr(row, field.name), Tensor)
    }
    return replace(row, **moved)
