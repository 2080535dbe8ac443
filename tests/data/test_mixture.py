"""Several sources as one space of samples."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mmds.config_types import DataSection, MixEntry
from mmds.data.mixture import Mixture, ensure_mixture, open_mixture
from mmds.data.prepare import prepare
from mmds.errors import ConfigError, DataError
from tests.data.raw_sets import GEOMETRY, chat_tokenizer, prepared_set, write_set

TOKENIZER = chat_tokenizer()


def test_sources_follow_one_another_and_keep_their_names_apart(tmp_path: Path) -> None:
    sets = [
        prepared_set(tmp_path / name, pictures)
        for name, pictures in (("a", [1, 0]), ("b", [0]), ("c", [2, 0, 1]))
    ]
    mixture = Mixture(["a", "b", "c"], sets)
    assert len(mixture) == 6
    assert [mixture.key(i) for i in range(6)] == ["a:s0", "a:s1", "b:s0", "c:s0", "c:s1", "c:s2"]
    expected = [(shards, i) for shards in sets for i in range(len(shards))]
    for i, (shards, within) in enumerate(expected):
        sample, own = mixture.read(i), shards.read(within)
        assert sample.key == mixture.key(i)
        assert np.array_equal(sample.ids, own.ids) and sample.image_bytes == own.image_bytes
    assert mixture.lengths(GEOMETRY).tolist() == [n for shards in sets for n in shards.row_lengths(GEOMETRY)]
    assert mixture.text_only_share == pytest.approx(3 / 6)
    for outside in (-1, 6):
        with pytest.raises(IndexError):
            mixture.read(outside)


def test_two_sources_of_one_name_are_refused(tmp_path: Path) -> None:
    shards = prepared_set(tmp_path, [0])
    with pytest.raises(ConfigError, match="unique, got a, a"):
        Mixture(["a", "a"], [shards, shards])


def test_a_mix_of_a_raw_file_and_a_prepared_folder_opens_after_one_preparation(tmp_path: Path) -> None:
    raw, images = write_set(tmp_path / "set", [1, 0, 0]), tmp_path / "set"
    (tmp_path / "records").mkdir()
    moved = raw.rename(tmp_path / "records" / "raw.jsonl")
    prepare([write_set(tmp_path / "other", [1])], None, TOKENIZER, tmp_path / "prepared")
    data = DataSection(
        mix=(
            MixEntry(name="raw", path=str(moved), images=str(images)),
            MixEntry(name="ready", path=str(tmp_path / "prepared")),
        ),
        row_tokens=100,
    )
    with pytest.raises(DataError, match=r'mmds\.data\.mix "raw": .*not a prepared folder'):
        open_mixture(data, TOKENIZER.fingerprint)
    ensure_mixture(data, TOKENIZER)
    mixture = open_mixture(data, TOKENIZER.fingerprint)
    assert [mixture.key(i) for i in range(4)] == ["raw:s0", "raw:s1", "raw:s2", "ready:s0"]


def test_what_is_wrong_with_a_source_names_its_entry(tmp_path: Path) -> None:
    raw = write_set(tmp_path / "set", [1])
    (tmp_path / "set" / "p1.png").unlink()
    bad = DataSection(mix=(MixEntry(name="pets", path=str(raw)),), row_tokens=100)
    with pytest.raises(
        DataError, match=r'mmds\.data\.mix "pets": .*raw\.jsonl:1: sample s0: image 0 \(p1\.png\)'
    ):
        ensure_mixture(bad, TOKENIZER)
    absent = DataSection(mix=(MixEntry(name="gone", path=str(tmp_path / "gone")),), row_tokens=100)
    with pytest.raises(DataError, match=r'mmds\.data\.mix "gone": .*cannot be read'):
        ensure_mixture(absent, TOKENIZER)
    with pytest.raises(DataError, match=r'mmds\.data\.mix "gone": .*cannot be read'):
        open_mixture(absent, TOKENIZER.fingerprint)
