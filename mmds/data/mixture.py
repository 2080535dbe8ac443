"""The sources of a run's mix as one space of samples, 0 to n - 1 in the order of the mix."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from mmds.config import Config
from mmds.config_types import DataSection
from mmds.data.chat_tokenizer import ChatTokenizer
from mmds.data.prepare import ensure_prepared, prepared_folder
from mmds.data.shards import ShardSet, StoredSample
from mmds.errors import ConfigError, DataError
from mmds.geometry import Geometry
from mmds.planner import RunPlan


class Mixture:
    """Prepared folders one after the other. Samples are named "source:key": unique across sources."""

    def __init__(self, names: Sequence[str], sets: Sequence[ShardSet]) -> None:
        """names: one a set, all different."""
        assert len(names) == len(sets) > 0
        if len(set(names)) < len(names):
            raise ConfigError(f"names in mmds.data.mix must be unique, got {', '.join(names)}")
        self.names, self.sets = tuple(names), tuple(sets)
        self._starts = [0, *accumulate(len(shards) for shards in sets)]

    def __len__(self) -> int:
        return self._starts[-1]

    @property
    def text_only_share(self) -> float:
        """Samples without an image as a share of all samples, 0 to 1."""
        return sum(shards.index.manifest.text_only for shards in self.sets) / len(self)

    def lengths(self, geometry: Geometry) -> NDArray[np.int64]:
        """int64 [n], tokens of each sample with its slots expanded. Opens no picture."""
        return np.concatenate([shards.row_lengths(geometry) for shards in self.sets])

    def key(self, i: int) -> str:
        """The name of sample i, "source:key"."""
        source, within = self._locate(i)
        return f"{self.names[source]}:{self.sets[source].key(within)}"

    def read(self, i: int) -> StoredSample:
        """Sample i under its name in the mixture. Raises DataError when its shard cannot give it."""
        source, within = self._locate(i)
        return replace(self.sets[source].read(within), key=self.key(i))

    def _locate(self, i: int) -> tuple[int, int]:
        """(source, sample within it)."""
        if not 0 <= i < len(self):
            raise IndexError(f"sample {i} of a mixture of {len(self)}")
        source = bisect_right(self._starts, i) - 1
        return source, i - self._starts[source]


def ensure_mixture(data: DataSection, tokenizer: ChatTokenizer, *, progress: bool = False) -> None:
    """Prepare every raw file of the mix that is not prepared yet; best by one process, before others open it.

    Raises DataError naming the entry of the mix.
    """
    for entry in data.mix:
        try:
            ensure_prepared(
                entry.path, tokenizer, images=entry.images, on_bad=data.on_bad_sample, progress=progress
            )
        except DataError as error:
            raise DataError(f'mmds.data.mix "{entry.name}": {error}') from error


def open_mixture(data: DataSection, fingerprint: str) -> Mixture:
    """Open every source of the mix with the ids of the tokenizer `fingerprint`; prepares nothing.

    Raises DataError naming the entry of the mix.
    """
    sets = []
    for entry in data.mix:
        try:
            sets.append(ShardSet.open(prepared_folder(entry.path, entry.images), fingerprint))
        except DataError as error:
            raise DataError(f'mmds.data.mix "{entry.name}": {error}') from error
    return Mixture([entry.name for entry in data.mix], sets)


def plan_run(config: Config, mixture: Mixture, geometry: Geometry, *, rows: int) -> RunPlan:
    """Which samples make which row of which rank, for the whole run. rows: of one step, over all ranks.

    Raises ConfigError when the mixture holds fewer samples than one step needs.
    """
    return RunPlan(
        mixture.lengths(geometry),
        row_tokens=config.data.row_tokens,
        rows_per_step=rows,
        seed=config.seed,
        epochs=config.schedule.epochs,
        steps=config.schedule.steps,
        on_long=config.data.on_long_sample,
        names=mixture.key,
    )
