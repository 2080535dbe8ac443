"""A hostile raw set: what is sound comes out exact, what is broken is listed with its reason, nothing is replaced, and it trains."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from mmds.data.chat_tokenizer import ChatTokenizer
from mmds.data.mixture import Mixture
from mmds.data.prepare import prepare
from mmds.data.row_maker import load_sample
from mmds.data.shard_format import SKIPPED
from mmds.data.shards import ShardSet
from mmds.geometry import Geometry
from mmds.model.decoder import load_tokenizer
from tests.data.hostile import SIDE, Case, build
from tests.runs import Runs, lines, metrics

GEOMETRY = Geometry(mode="fixed", image_size=SIDE, patch_size=14)


class Prepared:
    """The set, prepared with what is broken left out."""

    def __init__(self, folder: Path, decoder: Path) -> None:
        self.folder = folder
        self.cases = build(folder / "raw")
        self.tokenizer = ChatTokenizer(load_tokenizer(str(decoder)))
        self.out = folder / "shards"
        prepare([folder / "raw/raw.jsonl"], None, self.tokenizer, self.out, on_bad="skip", max_bad_share=0.9)
        self.shards = ShardSet.open(self.out, self.tokenizer.fingerprint)

    @property
    def sound(self) -> list[Case]:
        return [case for case in self.cases if case.reason is None]


@pytest.fixture(scope="module")
def prepared(runs: Runs) -> Prepared:
    return Prepared(runs.work / "hostile", runs.work / "decoder")


def test_there_are_three_hundred_and_about_half_are_sound(prepared: Prepared) -> None:
    assert len(prepared.cases) == 300
    assert 120 <= len(prepared.sound) <= 180
    assert sum(sum(case.exact) for case in prepared.sound) > 30


def test_every_sound_sample_is_there_with_its_own_text_and_its_own_pixels(prepared: Prepared) -> None:
    mixture = Mixture(["m"], [prepared.shards])
    assert [prepared.shards.key(i) for i in range(len(mixture))] == [case.key for case in prepared.sound]
    for i, case in enumerate(prepared.sound):
        sample = load_sample(mixture, i, GEOMETRY)
        assert len(sample.images) == len(case.pixels), case.key
        for ours, theirs, exact in zip(sample.images, case.pixels, case.exact, strict=True):
            gap = int(np.abs(ours.astype(int) - theirs.astype(int)).max())
            # Two passes, each rounded to a whole number, as Pillow's.
            assert gap <= (0 if exact else 2), (case.key, gap, case.line[:200])
        spoken = prepared.tokenizer.decode(sample.ids[sample.supervised].tolist())
        assert spoken == "".join(f"{answer}<|im_end|>" for answer in case.answers), case.key


def test_every_broken_sample_is_listed_once_with_its_line_and_reason(prepared: Prepared) -> None:
    listed = lines(prepared.out / SKIPPED)
    broken = [case for case in prepared.cases if case.reason is not None]
    assert len(listed) == len(broken)
    numbers = [
        n
        for n, line in enumerate((prepared.folder / "raw/raw.jsonl").read_bytes().split(b"\n"), 1)
        if line.strip()
    ]
    place = {id(case): number for case, number in zip(prepared.cases, numbers, strict=True)}
    for entry, case in zip(listed, broken, strict=True):
        assert entry["where"] == f"{prepared.folder}/raw/raw.jsonl:{place[id(case)]}"
        assert re.search(case.reason or "", entry["reason"]), (case.reason, entry)
        if case.key:
            assert entry["key"] == case.key


def test_two_ranks_train_over_it_without_a_stall(prepared: Prepared, runs: Runs) -> None:
    data = {"mix": [{"name": "hostile", "path": str(prepared.out)}], "row_tokens": 160, "workers": 1}
    runs.forks.run(runs.config("hostile-run", data=data, steps=4), timeout=120)
    report = metrics(runs.work / "hostile-run")
    assert [line["step"] for line in report] == [1, 2, 3, 4]
    assert all(np.isfinite(line["loss"]) and line["bad_samples"] == 0 for line in report)
    assert json.loads((runs.work / "hostile-run/plan.json").read_text())["samples"] == len(prepared.sound)
