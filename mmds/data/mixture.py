"""The sources of a run's mix as one space of samples, 0 to n - 1 in the order of the mix."""

from __future__ import annotations

import hashlib
import json
import logging
import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mmds.balance import Limits
from mmds.config import Config
from mmds.config_types import DataSection, MixEntry
from mmds.cost import CostModel
from mmds.data.chat_tokenizer import ChatTokenizer
from mmds.data.holdout import hold_out
from mmds.data.prepare import ensure_prepared, prepared_folder
from mmds.data.shards import ShardSet, StoredSample
from mmds.errors import ConfigError, DataError
from mmds.geometry import Geometry
from mmds.planner import RunPlan
from mmds.sample_sizes import SampleSizes
from mmds.sample_stream import SampleStream, Source
from mmds.schemes import SCHEMES, too_few, too_large

IntArray = NDArray[np.int64]

SCANNED = (
    20_000_000  # samples up to which all sizes are looked at before a run; beyond, each when its turn comes
)
PATCH_CAP = 1.25  # of the mean patches of a full row: room for balancing, and an end to what a row can cost

log = logging.getLogger("mmds")


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

    def sizes(self, geometry: Geometry, samples: IntArray | None = None) -> SampleSizes:
        """Sizes of these samples (None: of all, in order) with their slots expanded. Opens no picture."""
        if samples is None:
            return SampleSizes.joined([shards.sizes(geometry) for shards in self.sets])
        sources = np.searchsorted(self.starts, samples, side="right") - 1
        order = np.argsort(sources, kind="stable")
        parts = []
        for source in np.unique(sources):
            mine = order[
                np.searchsorted(sources[order], source) : np.searchsorted(
                    sources[order], source, side="right"
                )
            ]
            parts.append(self.sets[source].sizes(geometry, samples[mine] - self.starts[source]))
        back = np.empty_like(order)
        back[order] = np.arange(len(order))
        return SampleSizes.joined(parts)[back]

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


def plan_run(
    config: Config, mixture: Mixture, geometry: Geometry, *, rows: int, cost: CostModel | None = None
) -> RunPlan:
    """Which samples make which row of which rank, for the whole run. rows: of one step, over all ranks.

    cost: of samples; the scheme "cost" needs it, with the others it only tells how equal their rows are. Raises ConfigError when the
    mixture holds fewer samples than one step needs, DataError for a sample larger than a row where `on_long_sample` is "raise".
    """
    data, planner = config.data, config.planner
    held_out = mixture.held_out(data.holdout, seed=config.seed)
    sources = [
        Source(
            name=entry.name,
            count=len(shards),
            held_out=out,
            weight=entry.weight,
            epochs=None if entry.weight is not None else entry.epochs or 1.0,
            block=shards.block,
        )
        for entry, shards, out in zip(data.mix, mixture.sets, held_out, strict=True)
    ]
    limits = Limits(tokens=data.row_tokens, images=planner.row_images)
    if planner.scheme == "cost":
        limits = replace(
            limits, patches=planner.row_patches or usual_patches(config, mixture, geometry, held_out)
        )
    _check_samples(mixture, geometry, held_out, limits, config, rows)
    inputs = {
        "data": mixture.fingerprint,
        "geometry": vars(geometry),
        "mix": [(entry.weight, entry.epochs) for entry in data.mix],
        "holdout": data.holdout,
        "row": vars(limits),
        "on_long": data.on_long_sample,
        "scheme": (planner.scheme, planner.last_step),
        "rows": rows,
        "seed": config.seed,
        "schedule": (config.schedule.epochs, config.schedule.steps),
    }
    options: dict[str, Any] = {
        "rows": rows,
        "on_long": data.on_long_sample,
        "last_step": planner.last_step,
        "names": mixture.key,
        "cost": cost,
    }
    if planner.scheme == "cost":
        assert cost is not None
        inputs |= {"objective": config.objective, "cost": asdict(cost)}
        options["objective"] = config.objective
    scheme = SCHEMES[planner.scheme](
        SampleStream(sources, seed=config.seed), partial(mixture.sizes, geometry), limits, **options
    )
    return RunPlan(
        scheme,
        epochs=config.schedule.epochs,
        steps=config.schedule.steps,
        fingerprint=hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest(),
    )


def usual_patches(
    config: Config, mixture: Mixture, geometry: Geometry, held_out: Sequence[IntArray]
) -> int | None:
    """The patch cap of a row that the config leaves open: PATCH_CAP times the mean of a row full of tokens, and at least the largest
    sample's. None without images."""
    tokens = patches = 0.0
    largest = 0
    seen = _seen(config.data.mix, [len(shards) for shards in mixture.sets])
    for shards, out, share in zip(mixture.sets, held_out, seen, strict=True):
        each = max(1, -(-len(shards) * len(mixture) // (SCANNED * len(shards))))
        sizes = shards.sizes(geometry, np.setdiff1d(np.arange(0, len(shards), each), out, assume_unique=True))
        sizes = sizes[sizes.tokens <= config.data.row_tokens]
        if len(sizes):
            tokens += share * float(sizes.tokens.mean())
            patches += share * float(sizes.patches.mean())
            largest = max(largest, int(sizes.patches.max()))
    return max(largest, math.ceil(PATCH_CAP * patches * config.data.row_tokens / tokens)) if patches else None


def _check_samples(
    mixture: Mixture,
    geometry: Geometry,
    held_out: Sequence[IntArray],
    limits: Limits,
    config: Config,
    rows: int,
) -> None:
    """Look at all sizes before the run where that takes no time: too large a sample, or too few, should not show hours later."""
    if len(mixture) > SCANNED:
        return
    sizes = mixture.sizes(geometry)
    comes = np.ones(len(sizes), dtype=bool)
    for out, start in zip(held_out, mixture.starts, strict=False):
        comes[start + out] = False
    over = np.zeros(len(sizes), dtype=bool)
    for cap, need in limits.capped(sizes).values():
        over |= comes & (need > cap)
    if over.any():
        said = too_large(np.flatnonzero(over), sizes[over], limits, mixture.key)
        if config.data.on_long_sample == "raise":
            raise DataError(said)
        log.warning("left out, as mmds.data.on_long_sample says: %s", said)
    usable = int((comes & ~over).sum())
    if usable < rows and config.data.mix[0].weight is None:  # with weights the samples come again and again
        raise ConfigError(too_few(usable, int(over.sum()), limits, rows))


def _seen(mix: Sequence[MixEntry], counts: Sequence[int]) -> list[float]:
    """How many samples of each entry training sees, relative to each other."""
    return [
        entry.weight if entry.weight is not None else count * (entry.epochs or 1.0)
        for entry, count in zip(mix, counts, strict=True)
    ]
