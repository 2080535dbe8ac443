"""A billion samples: the first step is planned at once, in little memory, from an index that stays on disk."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np

from mmds.data.shard_index import mapped
from mmds.data.shards import ShardSet
from mmds.geometry import Geometry
from mmds.planner import RunPlan
from mmds.sample_stream import SampleStream, Source

COUNT = 10**9
GEOMETRY = Geometry(mode="fixed", image_size=28, patch_size=14)


class SparseShards(ShardSet):
    """Memory-mapped columns of a billion text-only samples; the files are holes, so every sample is as long as the marker of nothing."""

    def __init__(self, folder: Path) -> None:
        for name in ("starts", "image_start"):
            np.lib.format.open_memmap(folder / f"{name}.npy", mode="w+", dtype=np.int64, shape=(COUNT + 1,))
        self._starts = mapped(folder / "starts.npy")
        self._image_start = mapped(folder / "image_start.npy")

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


def test_the_first_step_of_a_billion_samples_takes_no_second_and_no_memory(tmp_path: Path) -> None:
    shards = SparseShards(tmp_path)
    asked: list[np.ndarray] = []

    def lengths(samples: np.ndarray) -> np.ndarray:
        asked.append(samples)
        return shards.row_lengths(GEOMETRY, samples) + 40

    before, started = own_memory(), time.process_time()
    stream = SampleStream([Source(name="all", count=COUNT)], seed=1)
    plan = RunPlan(stream, lengths, row_tokens=8192, rows_per_step=16, steps=100_000)
    rows = plan.step_rows(0)
    seconds = time.process_time() - started
    grown = own_memory() - before
    samples = np.array([i for row in rows for i in row])
    assert len(rows) == 16 and len(samples) > 3000
    assert samples.max() > COUNT // 2 and len(set(samples.tolist())) == len(samples)
    assert sum(map(len, asked)) < 20_000, "only the lengths of samples that come are looked at"
    assert grown < 200 and seconds < 1.0, (grown, seconds)
