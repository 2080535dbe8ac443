"""Rows of one rank, step by step: read, decoded and packed in worker processes, in the plan's order."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from mmds.data.images import load_image
from mmds.data.mixture import Mixture
from mmds.data.rows import LoadedSample, Row, build_row
from mmds.errors import ConfigError, DataError
from mmds.geometry import Geometry
from mmds.planner import RunPlan

ROWS_AHEAD = 2  # rows that each worker prepares ahead
TIMEOUT = 600.0  # seconds without a row after which the workers are given up
MAX_BAD_SHARE = 0.05  # of the samples read so far; more than that is not a few bad samples
FEW_BAD = 20  # bad samples that are always tolerated under "skip", whatever their share

Samples = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Step:
    """What one rank runs in one optimizer step. index: step of the run; rows: one a micro-step."""

    index: int
    rows: list[Row]


class StepLoader:
    """Iterates the steps `start_step` to `stop_step` of a plan for one rank.

    Rows do not depend on `workers`, nor on where iteration starts. Every iteration starts workers of its
    own, which end with it.
    """

    def __init__(
        self,
        mixture: Mixture,
        plan: RunPlan,
        geometry: Geometry,
        *,
        rank: int,
        world: int,
        accumulation: int,
        workers: int,
        on_bad: Literal["raise", "skip"] = "raise",
        start_step: int = 0,
        stop_step: int | None = None,
        interpolation: str = "bicubic",
        max_bad_share: float = MAX_BAD_SHARE,
        timeout: float = TIMEOUT,
    ) -> None:
        """Nothing is read before iteration.

        accumulation: rows of this rank in a step. workers: processes, 0 = load in this one. stop_step: None
        = all. on_bad: a sample that cannot be decoded is an error ("raise"), or is left out of its row and
        listed in `Row.bad` ("skip"), up to max_bad_share of the samples read so far. timeout: seconds
        without a row from the workers. Raises ConfigError when world x accumulation is not the plan's number
        of rows a step.
        """
        if world * accumulation != plan.rows_per_step:
            raise ConfigError(
                f"{world} ranks x {accumulation} micro-steps are not the plan's {plan.rows_per_step} rows"
            )
        self._plan, self._rank, self._world, self._accumulation = plan, rank, world, accumulation
        self._builder = _RowBuilder(mixture, geometry, on_bad, interpolation)
        self._workers, self._timeout, self._max_bad_share = workers, timeout, max_bad_share
        self._steps = range(start_step, plan.total_steps if stop_step is None else stop_step)

    def __len__(self) -> int:
        return len(self._steps)

    def __iter__(self) -> Iterator[Step]:
        """Raises DataError naming the sample, whatever is wrong with it; never waits beyond the timeout."""
        order = _RowOrder(self._plan, self._steps, self._rank, self._world, self._accumulation)
        seen = bad = 0
        rows = iter(self._loader(order))
        try:
            for step in self._steps:
                taken = []
                for micro in range(self._accumulation):
                    samples = order.row(step, micro)
                    arrived = _next(rows)
                    if isinstance(arrived, _Lost):
                        names = ", ".join(map(self._builder.mixture.key, samples))
                        raise DataError(f"{arrived.reason} while it loaded the row of samples {names}")
                    if isinstance(arrived, str):
                        raise DataError(arrived)
                    taken.append(arrived)
                    seen, bad = seen + len(samples), bad + len(arrived.bad)
                    self._check_share(bad, seen, arrived)
                yield Step(index=step, rows=taken)
        finally:
            del rows  # the last reference: the workers end here

    def _loader(self, order: _RowOrder) -> DataLoader[Any]:
        return DataLoader(
            self._builder,
            batch_size=None,
            sampler=order,
            num_workers=self._workers,
            prefetch_factor=ROWS_AHEAD if self._workers else None,
            timeout=self._timeout if self._workers else 0,
            collate_fn=_unchanged,
            generator=torch.Generator(),  # else every iteration would draw from the run's own random stream
        )

    def _check_share(self, bad: int, seen: int, row: Row) -> None:
        if bad > max(FEW_BAD, self._max_bad_share * seen):
            reason = row.bad[-1][1]
            raise DataError(
                f"{bad} of {seen} samples read so far are bad, above {self._max_bad_share:.0%}; the last: "
                f"{reason}. Mend the data; scripts/prepare.py --check lists what is wrong"
            )


class _RowOrder(Sampler[Samples]):
    """The samples of each of one rank's rows, in order. Evaluated in the main process only."""

    def __init__(self, plan: RunPlan, steps: range, rank: int, world: int, accumulation: int) -> None:
        self._plan, self._steps, self._accumulation = plan, steps, accumulation
        self._rank, self._world = rank, world

    def row(self, step: int, micro: int) -> Samples:
        return tuple(self._plan.rows_for(step, micro, self._rank, world=self._world).tolist())

    def __iter__(self) -> Iterator[Samples]:
        return (self.row(step, micro) for step in self._steps for micro in range(self._accumulation))

    def __len__(self) -> int:
        return len(self._steps) * self._accumulation


class _RowBuilder(Dataset[Any]):
    """Builds a row from the numbers of its samples, in whatever process it runs."""

    def __init__(self, mixture: Mixture, geometry: Geometry, on_bad: str, interpolation: str) -> None:
        self.mixture = mixture
        self._geometry, self._on_bad, self._interpolation = geometry, on_bad, interpolation

    def __getitem__(self, samples: Samples) -> dict[str, Any] | str:
        """The fields of a row, or why there is none (an exception would lose its message on the way)."""
        loaded, bad = [], []
        for i in samples:
            try:
                loaded.append(load_sample(self.mixture, i, self._geometry, self._interpolation))
            except DataError as error:
                if self._on_bad == "raise":
                    return f'{error}. Mend the data, or set mmds.data.on_bad_sample to "skip"'
                bad.append((self.mixture.key(i), str(error)))
            except Exception:
                return f"sample {self.mixture.key(i)} cannot be loaded:\n{traceback.format_exc()}"
        try:
            return _pack(build_row(loaded, self._geometry, bad=bad))
        except Exception as error:
            names = ", ".join(sample.key for sample in loaded)
            return f"the row of samples {names} cannot be packed: {type(error).__name__}: {error}"


def load_sample(mixture: Mixture, i: int, geometry: Geometry, interpolation: str = "bicubic") -> LoadedSample:
    """Sample i of the mixture with its pictures decoded to their planned size.

    Raises DataError naming sample and image.
    """
    stored = mixture.read(i)
    images = []
    for number, (data, size) in enumerate(zip(stored.image_bytes, stored.image_sizes, strict=True)):
        plan = geometry.plan(*size)
        try:
            images.append(load_image(data, height=plan.height, width=plan.width, interpolation=interpolation))
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


@dataclass(frozen=True, kw_only=True)
class _Lost:
    """A row that never arrived."""

    reason: str


def _next(rows: Iterator[Any]) -> Row | str | _Lost:
    """The next row, or why there is none."""
    try:
        arrived: dict[str, Any] | str = next(rows)
        return arrived if isinstance(arrived, str) else _unpack(arrived)
    except (RuntimeError, OSError) as error:  # torch's own: a worker was killed, or the timeout has passed
        return _Lost(reason=f"a loader process was lost ({error})")


def _pack(row: Row) -> dict[str, Any]:
    """A row as it travels between processes: only pixels stay a tensor.

    Every tensor that travels holds a file open and a piece of /dev/shm until it is freed; arrays are copied
    instead.
    """
    values = {field.name: getattr(row, field.name) for field in fields(row)}
    return {
        name: value.numpy() if isinstance(value, Tensor) and name != "pixels" else value
        for name, value in values.items()
    }


def _unpack(values: dict[str, Any]) -> Row:
    """The row that was packed, in memory of its own."""
    tensors = {
        name: torch.from_numpy(value) for name, value in values.items() if isinstance(value, np.ndarray)
    }
    pixels = values["pixels"]
    return Row(**{**values, **tensors, "pixels": pixels.clone() if pixels.is_shared() else pixels})


def _unchanged(item: Any) -> Any:
    return item
