"""A mix whose prepared folder lies in an object store: same samples, neighbours together, every chunk read once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest

from mmds.config_types import DataSection, MixEntry
from mmds.data import shard_index, shards
from mmds.data.loader import StepLoader
from mmds.data.mixture import Mixture, ensure_mixture, open_mixture
from mmds.data.object_store import ObjectStore
from mmds.data.shards import ShardSet
from mmds.errors import DataError, StoreError
from mmds.planner import plan_lengths
from mmds.sample_stream import SampleStream, Source
from tests.data.raw_sets import GEOMETRY, chat_tokenizer, prepared_set

TOKENIZER = chat_tokenizer()
CHUNK = 8192


@pytest.fixture
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[ShardSet, str]:
    """A prepared folder of 200 samples, and the URL of its copy."""
    monkeypatch.setenv("MMDS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(shard_index, "CHUNK_BYTES", CHUNK)
    monkeypatch.setattr(shards, "CHUNK_BYTES", CHUNK)
    local = prepared_set(tmp_path / "set", [1] * 200, shard_bytes=100_000)
    url = f"memory://bucket/{tmp_path.name}"
    fsspec.filesystem("memory").put(str(local.path), url, recursive=True)
    return local, url


def data(url: str) -> DataSection:
    return DataSection(mix=(MixEntry(name="far", path=url),), row_tokens=100)


def test_a_url_in_the_mix_gives_the_samples_of_the_folder(stored: tuple[ShardSet, str]) -> None:
    local, url = stored
    ensure_mixture(data(url), TOKENIZER)
    far, near = open_mixture(data(url), TOKENIZER.fingerprint), Mixture(["far"], [local])
    assert len(far) == len(near) == 200
    assert np.array_equal(far.sizes(GEOMETRY).tokens, near.sizes(GEOMETRY).tokens)
    assert far.fingerprint == near.fingerprint
    for i in range(0, 200, 7):
        a, b = far.read(i), near.read(i)
        assert (a.key, a.image_bytes, a.image_sizes) == (b.key, b.image_bytes, b.image_sizes)
        assert np.array_equal(a.ids, b.ids) and np.array_equal(a.supervised, b.supervised)


def test_an_epoch_in_the_order_of_the_stream_reads_every_chunk_once(
    stored: tuple[ShardSet, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    local, url = stored
    asked: list[tuple[Any, ...]] = []
    get = ObjectStore.get

    def counted(self: ObjectStore, *where: Any) -> bytes:
        asked.append((where[0].name, *where[1:]))
        return get(self, *where)

    monkeypatch.setattr(ObjectStore, "get", counted)
    far = ShardSet.open(url, local.fingerprint)
    assert 1 < far.block < 200 and local.block == 0
    stream = SampleStream([Source(name="far", count=len(far), block=far.block)], seed=1)
    numbers, _ = stream.take(stream.start, 200)
    asked.clear()
    assert {far.read(int(i)).key for i in numbers} == {f"s{i}" for i in range(200)}
    manifest = far.index.manifest
    chunks = sum(-(-manifest.files[name] // CHUNK) for name in manifest.shards)
    assert len(asked) == len(set(asked)) <= chunks


def test_what_is_missing_in_the_store_is_named(stored: tuple[ShardSet, str], tmp_path: Path) -> None:
    local, url = stored
    with pytest.raises(DataError, match=rf'mmds\.data\.mix "far": {url} holds no token ids'):
        open_mixture(data(url), "0" * 16)
    shard = local.index.manifest.shards[0]
    store = fsspec.filesystem("memory")
    store.pipe_file(f"{url}/{shard}", store.cat_file(f"{url}/{shard}")[:5000])
    with pytest.raises(DataError, match=rf"{url}/{shard} is cut short"):
        far = ShardSet.open(url, local.fingerprint)
        for i in range(50):
            far.read(i)
    manifest = json.loads(store.cat_file(f"{url}/manifest.json"))
    manifest["format"] = "older"
    store.pipe_file(f"{url}/manifest.json", json.dumps(manifest).encode())
    with pytest.raises(DataError, match=rf"{url}/manifest\.json is not of format"):
        ShardSet.open(url, local.fingerprint)


def test_a_store_that_does_not_answer_ends_the_run_also_where_bad_samples_are_skipped(
    stored: tuple[ShardSet, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sample that cannot be fetched is not a bad one."""
    _, url = stored
    mixture = open_mixture(data(url), TOKENIZER.fingerprint)
    plan = plan_lengths(mixture.sizes(GEOMETRY).tokens, row_tokens=100, rows_per_step=2, seed=0, epochs=1)

    def silent(*_: Any) -> bytes:
        raise StoreError(f"cannot read {url}: 5 attempts failed")

    monkeypatch.setattr(ObjectStore, "get", silent)
    steps = StepLoader(mixture, plan, GEOMETRY, rank=0, world=1, accumulation=2, workers=0, on_bad="skip")
    with pytest.raises(DataError, match="5 attempts failed"):
        next(iter(steps))
