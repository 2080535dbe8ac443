"""A billion samples: the first step is planned at once, in little memory, from an index that stays on disk."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mmds.balance import Limits
from mmds.cost import CostModel, Terms
from mmds.data.shard_index import mapped
from mmds.data.shards import ShardSet
from mmds.geometry import Geometry
from mmds.planner import RunPlan
from mmds.sample_sizes import SampleSizes
from mmds.sample_stream import SampleStream, Source
from mmds.schemes import SCHEMES

COUNT = 10**9
COST = CostModel(encoder=Terms(patches=1.0), connector=Terms(), decoder=Terms(tokens=1.0))
GEOMETRY = Geometry(mode="fixed", image_size=28, patch_size=14)


class SparseShards(ShardSet):
    """Memory-mapped columns of a billion text-only samples; the files are holes, so every sample is as long as the marker of nothing."""

    def __init__(self, folder: Path) -> None:
        for name in ("starts", "image_start"):
            np.lib.format.open_memmap(folder / f"{name}.npy", mode="w+", dtype=np.int64, shape=(COUNT + 1,))
        self._starts = mapped(folder / "starts.npy")
        self._image_start = mapped(folder / "image_start.npy")
        np.lib.format.open_memmap(folder / "supervised.npy", mode="w+", dtype=np.int32, shape=(COUNT,))
        self.supervised = mapped(folder / "supervised.npy")

    @property
    def image_start(self) -> np.ndarray:
        return self._image_start

    @property
    def image_sizes(self) -> np.ndarray:
        return np.zeros((0, 2), dtype=np.int32)


def own_memory() -> float:
    """MB of this process that are no mapped file."""
    (line,) = [
        line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon")
    ]
    return int(line.split()[1]) / 1024


@pytest.mark.parametrize("name", sorted(SCHEMES))
def test_the_first_step_of_a_billion_samples_takes_no_second_and_no_memory(tmp_path: Path, name: str) -> None:
    shards = SparseShards(tmp_path)
    asked: list[np.ndarray] = []

    def measure(samples: np.ndarray) -> SampleSizes:
        asked.append(samples)
        sizes = shards.sizes(GEOMETRY, samples)
        return replace(sizes, tokens=sizes.tokens + 40)

    before, started = own_memory(), time.process_time()
    stream = SampleStream([Source(name="all", count=COUNT)], seed=1)
    scheme = SCHEMES[name](stream, measure, Limits(tokens=8192), rows=16, cost=COST)
    plan = RunPlan(scheme, steps=100_000)
    rows = scheme.steps(plan.state_at(0), 1, world=1)[0].rows
    seconds = time.process_time() - started
    grown = own_memory() - before
    samples = np.array([i for row in rows for i in row])
    assert len(rows) == 16 and len(samples) > 3000
    assert samples.max() > COUNT // 2 and len(set(samples.tolist())) == len(samples)
    assert sum(map(len, asked)) < 20_000, "only the lengths of samples that come are looked at"
    assert grown < 200 and seconds < 1.0, (grown, seconds)
