"""Reading samples by index against streaming the same tars, side by side.

    python scripts/bench_shards.py --samples 4000

Every sample's files are read as bytes, nothing is decoded: by index in a shuffled order, as training does; by streaming with tarfile, member
after member; and by webdataset, where it is installed. The tars lie in the page cache, so that the work of reading is measured and not the
disk. The ways take turns; the best of --rounds counts.
"""

from __future__ import annotations

import argparse
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import numpy as np
from bench_images import machine
from bench_prepare import chat_tokenizer, write_set

from mmds.data.prepare import prepare
from mmds.data.shards import ShardSet
from mmds.sample_stream import SampleStream, Source


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--samples", type=int, default=4000)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args(arguments)
    print(machine(), end="\n\n")
    with tempfile.TemporaryDirectory() as folder:
        raw, _ = write_set(Path(folder), given.samples)
        words = chat_tokenizer()
        prepare([raw], None, words, Path(folder) / "out", shard_bytes=64 << 20)
        shards = ShardSet.open(Path(folder) / "out", words.fingerprint)
        stream = SampleStream([Source(name="all", count=len(shards))], seed=1)
        order, _ = stream.take(stream.start, len(shards))
        ways = {
            "by index, shuffled": lambda: by_index(shards, order),
            "tarfile, streaming": lambda: by_tarfile(shards),
        }
        if webdataset := _webdataset():
            ways["webdataset, streaming"] = lambda: webdataset(shards)
        report(ways, len(shards), given.rounds)


def report(ways: dict[str, Callable[[], int]], samples: int, rounds: int) -> None:
    """Samples a second of each way, and how many times slower than the first it is."""
    best = dict.fromkeys(ways, float("inf"))
    read: dict[str, int] = {}
    for _ in range(rounds):
        for name, way in ways.items():
            started = time.perf_counter()
            read[name] = way()
            best[name] = min(best[name], time.perf_counter() - started)
    first = next(iter(ways))
    assert len(set(read.values())) == 1, f"the ways read different bytes: {read}"
    for name, seconds in best.items():
        print(f"{name:<24}{samples / seconds:>10,.0f} samples/s   {seconds / best[first]:>6.2f} x")


def by_index(shards: ShardSet, order: np.ndarray) -> int:
    """Bytes of all pictures."""
    return sum(len(data) for i in order.tolist() for data in shards.read(i).image_bytes)


def by_tarfile(shards: ShardSet) -> int:
    """Bytes of all pictures, with the records read on the way, as whoever streams must."""
    total = 0
    for name in shards.index.manifest.shards:
        with tarfile.open(Path(shards.path) / name, "r|") as tar:
            for member in tar:
                file = tar.extractfile(member)
                data = file.read() if file is not None else b""
                total += 0 if member.name.endswith(".json") else len(data)
    return total


def _webdataset() -> Callable[[ShardSet], int] | None:
    """The same by webdataset; None where it is not installed."""
    try:
        import webdataset
    except ImportError:
        return None

    def read(shards: ShardSet) -> int:
        urls = [str(Path(shards.path) / name) for name in shards.index.manifest.shards]
        samples = webdataset.WebDataset(urls, shardshuffle=False, empty_check=False)
        return sum(
            len(data)
            for sample in samples
            for name, data in sample.items()
            if not name.startswith("__") and name != "json"
        )

    return read


if __name__ == "__main__":
    main()
