"""The sources of a run's mix as one space of samples, 0 to n - 1 in the order of the mix."""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from mmds.config import Config
from mmds.config_types import DataSection, MixEntry
from mmds.data.chat_tokenizer import ChatTokenizer
from mmds.data.holdout import hold_out
from mmds.data.prepare import ensure_prepared, prepared_folder
from mmds.data.shards import ShardSet, StoredSample
from mmds.errors import ConfigError, DataError
from mmds.geometry import Geometry
from mmds.planner import RunPlan, too_few, too_long
from mmds.sample_stream import SampleStream, Source

IntArray = NDArray[np.int64]

SCANNED = (
    20_000_000  # samples up to which all lengths are looked at before a run; beyond, each when its turn comes
)


class Mixture:
    """Prepared folders one after the other. Samples are named "source:key": unique across sources."""

    def __init__(self, names: Sequence[str], sets: Sequence[ShardSet]) -> None:
        """names: one a set, all different."""
        assert len(names) == len(sets) > 0
        if len(set(names)) < len(names):
            raise ConfigError(f"names in mmds.data.mix must be unique, got {', '.join(names)}")
        self.names, self.sets = tuple(names), tuple(sets)
        # First sample of each set, and the number of all samples.
        self.starts = [0, *accumulate(len(shards) for shards in sets)]

    def __len__(self) -> int:
        return self.starts[-1]

    @property
    def fingerprint(self) -> str:
        """Hash of what the sources hold: their content and token ids."""
        parts = [(name, *shards.identity) for name, shards in zip(self.names, self.sets, strict=True)]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    def lengths(self, geometry: Geometry, samples: IntArray | None = None) -> IntArray:
        """int64 [k], tokens of these samples (None: of all, in order) with their slots expanded. Opens no picture."""
        if samples is None:
            return np.concatenate([shards.row_lengths(geometry) for shards in self.sets])
        lengths = np.empty(len(samples), dtype=np.int64)
        sources = np.searchsorted(self.starts, samples, side="right") - 1
        for source in np.unique(sources):
            mine = sources == source
            lengths[mine] = self.sets[source].row_lengths(geometry, samples[mine] - self.starts[source])
        return lengths

    def held_out(self, share: float, *, seed: int) -> list[IntArray]:
        """Numbers within each source of the samples kept out of training, ascending; share: of all samples, 0 to 1."""
        starts = [shards.image_start for shards in self.sets]
        return hold_out(starts, [shards.index.image_digests for shards in self.sets], share=share, seed=seed)

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
        source = bisect_right(self.starts, i) - 1
        return source, i - self.starts[source]


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


def text_only_share(data: DataSection, mixture: Mixture) -> float:
    """Samples without an image as a share of the samples that training sees, 0 to 1, with weights and epochs."""
    seen = _seen(data.mix, [len(shards) for shards in mixture.sets])
    shares = [shards.index.manifest.text_only / len(shards) for shards in mixture.sets]
    return sum(count * share for count, share in zip(seen, shares, strict=True)) / sum(seen)


def plan_run(config: Config, mixture: Mixture, geometry: Geometry, *, rows: int) -> RunPlan:
    """Which samples make which row of which rank, for the whole run. rows: of one step, over all ranks.

    Raises ConfigError when the mixture holds fewer samples than one step needs, DataError for a sample longer than a row where
    `on_long_sample` is "raise".
    """
    data = config.data
    sources = [
        Source(
            name=entry.name,
            count=len(shards),
            held_out=held_out,
            weight=entry.weight,
            epochs=None if entry.weight is not None else entry.epochs or 1.0,
            block=shards.block,
        )
        for entry, shards, held_out in zip(
            data.mix, mixture.sets, mixture.held_out(data.holdout, seed=config.seed), strict=True
        )
    ]
    stream = SampleStream(sources, seed=config.seed)
    _check_lengths(mixture, geometry, sources, config, rows)
    inputs = {
        "data": mixture.fingerprint,
        "geometry": vars(geometry),
        "mix": [(entry.weight, entry.epochs) for entry in data.mix],
        "holdout": data.holdout,
        "row_tokens": data.row_tokens,
        "on_long": data.on_long_sample,
        "rows": rows,
        "seed": config.seed,
        "schedule": (config.schedule.epochs, config.schedule.steps),
    }
    return RunPlan(
        stream,
        partial(mixture.lengths, geometry),
        row_tokens=data.row_tokens,
        rows_per_step=rows,
        epochs=config.schedule.epochs,
        steps=config.schedule.steps,
        on_long=data.on_long_sample,
        names=mixture.key,
        fingerprint=hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest(),
    )


def _check_lengths(
    mixture: Mixture, geometry: Geometry, sources: Sequence[Source], config: Config, rows: int
) -> None:
    """Look at all lengths before the run where that takes no time: too long a sample, or too few, should not show hours later."""
    if len(mixture) > SCANNED:
        return
    lengths = mixture.lengths(geometry)
    for source, start in zip(sources, mixture.starts, strict=False):
        lengths[start + source.held_out] = 0
    long = np.flatnonzero(lengths > config.data.row_tokens)
    if len(long) and config.data.on_long_sample == "raise":
        raise DataError(too_long(long, lengths[long], config.data.row_tokens, mixture.key))
    usable = int((lengths > 0).sum()) - len(long)
    if usable < rows and config.data.mix[0].weight is None:  # with weights the samples come again and again
        raise ConfigError(too_few(usable, len(long), config.data.row_tokens, rows))


def _seen(mix: Sequence[MixEntry], counts: Sequence[int]) -> list[float]:
    """How many samples of each entry training sees, relative to each other."""
    return [
        entry.weight if entry.weight is not None else count * (entry.epochs or 1.0)
        for entry, count in zip(mix, counts, strict=True)
    ]
