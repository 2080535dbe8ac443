from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import pytest

from mmds.data.images import FORMATS
from mmds.errors import DataError

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

import fuzz_cases
import fuzz_data
from fuzz_data import PICTURES, RECORDS, Kind, fuzz


@pytest.mark.parametrize("kind", [PICTURES, RECORDS], ids=lambda kind: kind.name)
def test_a_thousand_accidents_give_nothing_but_refusals(kind: Kind) -> None:
    report = fuzz(kind, count=1000, seed=20)
    assert report.failures == []
    assert sum(report.outcomes.values()) == 1000
    # Enough of either, or the accidents would try nothing.
    good = sum(times for outcome, times in report.outcomes.items() if outcome in ("a size, loaded", "parsed"))
    assert 50 <= good <= 700


def test_accidents_start_from_valid_pictures_of_every_format_and_from_valid_records() -> None:
    pictures = fuzz_cases.pictures()
    assert {kind for kind, _ in pictures} == set(FORMATS)
    assert {fuzz_data.read_picture(data) for _, data in pictures} == {"a size, loaded"}
    lines = map(json.dumps, fuzz_cases.records())
    assert fuzz_data.read_lines("\n".join(lines).encode()) == "parsed"


def test_a_seed_gives_the_same_items_again_and_another_seed_others() -> None:
    for kind in (PICTURES, RECORDS):
        items = [kind.item(3, number) for number in range(30)]
        assert items == [kind.item(3, number) for number in range(30)]
        assert len(set(items)) > 25
        assert items != [kind.item(4, number) for number in range(30)]


def _number(chance: random.Random) -> bytes:
    return str(chance.random()).encode()


def _misbehave(data: bytes) -> str:
    """What a reader must not do, each for another eighth of the items."""
    share = int(8 * float(data))
    if share == 0:
        raise ValueError("not a DataError")
    if share == 1:
        os.kill(os.getpid(), signal.SIGSEGV)
    if share == 2:
        time.sleep(60)
    if share == 3:
        bytearray(1 << 29)
    return "fine"


def test_wrong_exceptions_crashes_hangs_and_memory_are_seen() -> None:
    kind = Kind(name="numbers", make=_number, read=_misbehave)
    shares = [int(8 * float(kind.item(37, number))) for number in range(12)]
    numbers = [shares.count(share) for share in range(4)]
    assert min(numbers) >= 1
    report = fuzz(kind, count=12, seed=37, seconds=5, memory=1 << 28)
    assert report.outcomes == {
        "fine": 12 - sum(numbers),
        "failed: ValueError: not a DataError": numbers[0],
        f"failed: ended the process (-{int(signal.SIGSEGV)})": numbers[1],
        "failed: took over 5 s": numbers[2],
        "failed: MemoryError: ": numbers[3],
    }
    assert [number for number, _ in report.failures] == [i for i, share in enumerate(shares) if share < 4]


def test_a_failure_is_printed_and_its_bytes_are_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kind = Kind(name="numbers", make=_number, read=_misbehave)
    report = fuzz_data.Report(failures=[(0, "failed: KeyError: 'x'")])
    monkeypatch.setattr(fuzz_data, "fuzz", lambda *_, **__: report)
    for name in ("PICTURES", "RECORDS"):
        monkeypatch.setattr(fuzz_data, name, kind)
    assert fuzz_data.main(["--count", "1", "--seed", "5", "--out", str(tmp_path)]) == 1
    assert (tmp_path / "numbers-5-0").read_bytes() == kind.item(5, 0)
    assert f"{tmp_path / 'numbers-5-0'}: failed: KeyError: 'x'" in capsys.readouterr().out


def test_records_refused_without_naming_their_file_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise DataError("something is wrong")

    monkeypatch.setattr(fuzz_data, "parse_record", refuse)
    with pytest.raises(AssertionError, match="names no file"):
        fuzz_data.read_lines(b'{"id": 1}')


def test_a_picture_that_is_good_at_one_size_only_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    true_load = fuzz_data.load_image

    def load(data: bytes, *, height: int, width: int) -> object:
        if height < 50:
            raise DataError("no")
        return true_load(data, height=height, width=width)

    monkeypatch.setattr(fuzz_data, "load_image", load)
    with pytest.raises(AssertionError, match="loads at"):
        fuzz_data.read_picture(fuzz_cases.pictures()[0][1])
