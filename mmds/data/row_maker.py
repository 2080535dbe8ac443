"""One row out of the numbers of its samples: read, decoded and packed, in whatever process it runs."""

from __future__ import annotations

import os
import traceback
from dataclasses import fields
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, get_worker_info

from mmds.data.handover import Handover, Ticket
from mmds.data.mixture import Mixture
from mmds.data.pieces import load_pieces
from mmds.data.rows import LoadedSample, Row, build_row
from mmds.data.timing import RowSeconds, StageClock
from mmds.data.watchdog import Board
from mmds.errors import DataError, StoreError
from mmds.geometry import Geometry

Samples = tuple[int, ...]
Arrival = tuple[dict[str, Any], RowSeconds] | str
"""The fields of a row, tensors as arrays, and what it took; or why there is none."""


class RowMaker(Dataset[Any]):
    """Builds a row from the numbers of its samples, in whatever process it runs."""

    def __init__(
        self,
        mixture: Mixture,
        geometry: Geometry,
        on_bad: str,
        board: Board,
        handover: Handover | None,
    ) -> None:
        self._mixture, self._geometry = mixture, geometry
        self._on_bad = on_bad
        self._board, self._handover = board, handover

    def __getitem__(self, samples: Samples) -> Arrival | Ticket:
        """A row made in a loader process, or in this one."""
        info = get_worker_info()
        worker = 0 if info is None else info.id
        self._board.begin_row(worker, os.getpid(), samples)
        try:
            made = self.build(samples, StageClock(partial(self._board.begin_stage, worker)))
            return made if info is None or self._handover is None else self._handover.leave(worker, made)
        finally:
            self._board.end_row(worker)

    def build(self, samples: Samples, clock: StageClock) -> Arrival:
        """The row of these samples, or why there is none (an exception would lose its message on the way)."""
        loaded, bad = [], []
        for i in samples:
            try:
                loaded.append(load_sample(self._mixture, i, self._geometry, clock))
            except StoreError as error:
                return str(error)
            except DataError as error:
                if self._on_bad == "raise":
                    return f'{error}. Mend the data, or set mmds.data.on_bad_sample to "skip"'
                bad.append((self._mixture.key(i), str(error)))
            except Exception:
                return f"sample {self._mixture.key(i)} cannot be loaded:\n{traceback.format_exc()}"
        clock.enter("collate")
        try:
            row = _fields(build_row(loaded, self._geometry, bad=bad))
        except Exception as error:
            names = ", ".join(sample.key for sample in loaded)
            return f"the row of samples {names} cannot be packed: {type(error).__name__}: {error}"
        return row, clock.finish()


def load_sample(
    mixture: Mixture,
    i: int,
    geometry: Geometry,
    clock: StageClock | None = None,
) -> LoadedSample:
    """Sample i of the mixture with its pictures decoded to their planned size.

    clock: is told when reading and each decoding begin. Raises DataError naming sample and image.
    """
    clock = clock or StageClock()
    clock.enter("read", i)
    stored = mixture.read(i)
    images = []
    for number, (data, size) in enumerate(zip(stored.image_bytes, stored.image_sizes, strict=True)):
        clock.enter("decode", i, number, stored.image_paths[number])
        plan = geometry.plan(*size)
        try:
            images.append(load_pieces(data, plan, geometry))
        except DataError as error:
            place = f"sample {stored.key} image {number} ({stored.image_paths[number]})"
            raise DataError(f"{place}: {error}") from error
    return LoadedSample(
        key=stored.key,
        ids=stored.ids,
        supervised=stored.supervised,
        images=tuple(images),
        image_sizes=stored.image_sizes,
        image_paths=stored.image_paths,
    )


def _fields(row: Row) -> dict[str, Any]:
    """The fields of a row, tensors as arrays."""
    values = {field.name: getattr(row, field.name) for field in fields(row)}
    return {name: value.numpy() if isinstance(value, Tensor) else value for name, value in values.items()}


def row_of(values: dict[str, Any], pin: bool) -> Row:
    """The row of these fields. pin: in page-locked memory, from which a CUDA device copies while it computes."""
    tensors = {
        name: torch.from_numpy(value) for name, value in values.items() if isinstance(value, np.ndarray)
    }
    if pin:
        tensors = {name: value.pin_memory() for name, value in tensors.items()}
    return Row(**{**values, **tensors})
