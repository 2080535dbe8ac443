"""The benchmark of the loader: its numbers against known delays, its advice against known speeds."""

from __future__ import annotations

import json
import re
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from mmds.data import bench
from mmds.data import row_maker as row_maker_module
from mmds.data.bench import Speed, advice, measure, need_of_gpu, need_of_run
from mmds.data.loader import StepLoader
from mmds.data.mixture import Mixture
from mmds.data.timing import RowSeconds, StageClock
from mmds.errors import DataError
from mmds.planner import plan_lengths
from tests.data.raw_sets import GEOMETRY, prepared_set
from tests.data.sample_run import write_run

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

import bench_loader


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Mixture:
    """30 samples with one picture each."""
    return Mixture(["m"], [prepared_set(tmp_path_factory.mktemp("bench"), [1] * 30)])


def loader_of(mixture: Mixture, workers: int) -> StepLoader:
    """A row a sample."""
    lengths = mixture.sizes(GEOMETRY).tokens
    plan = plan_lengths(lengths, row_tokens=int(lengths.max()), rows_per_step=5, seed=0, epochs=1)
    return StepLoader(mixture, plan, GEOMETRY, rank=0, world=1, accumulation=5, workers=workers)


def sleep_before(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, seconds: float) -> None:
    whole = getattr(owner, name)

    def slow(*arguments: Any, **options: Any) -> Any:
        time.sleep(seconds)
        return whole(*arguments, **options)

    monkeypatch.setattr(owner, name, slow)


@pytest.mark.parametrize("workers", [0, 2])
def test_speed_and_stages_are_those_of_the_work(
    mixture: Mixture, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    sleep_before(monkeypatch, Mixture, "read", 0.02)
    sleep_before(monkeypatch, row_maker_module, "load_pieces", 0.06)
    sleep_before(monkeypatch, row_maker_module, "build_row", 0.04)
    speed = measure(loader_of(mixture, workers), workers=workers, rows=14)
    fastest = max(workers, 1) / 0.12
    assert 0.2 * fastest < speed.rows < 1.1 * fastest
    assert speed.images == pytest.approx(speed.rows)
    lengths = mixture.sizes(GEOMETRY).tokens
    assert lengths.min() <= speed.tokens / speed.rows <= lengths.max()
    assert 0.02 <= speed.stages.read < speed.stages.collate < speed.stages.decode
    assert speed.stages.collate >= 0.04 and speed.stages.decode >= 0.06


def test_the_start_of_the_workers_is_not_measured(mixture: Mixture, monkeypatch: pytest.MonkeyPatch) -> None:
    first: list[int] = []

    def slow_start() -> None:
        if not first:
            first.append(1)
            time.sleep(1)

    whole = row_maker_module.build_row
    monkeypatch.setattr(row_maker_module, "build_row", lambda *a, **o: (slow_start(), whole(*a, **o))[1])
    assert (
        measure(loader_of(mixture, 1), workers=1, rows=10).rows > 10
    )  # 10 a second at most, were it counted


def test_a_run_that_is_too_short_to_measure_is_refused(mixture: Mixture) -> None:
    with pytest.raises(DataError, match="too few rows"):
        measure(loader_of(mixture, 0), workers=40, rows=3)


def speeds(*pairs: tuple[int, float]) -> list[Speed]:
    return [
        Speed(workers=workers, rows=rows, images=0, tokens=0, stages=RowSeconds()) for workers, rows in pairs
    ]


@pytest.mark.parametrize(
    ("need", "said"),
    [
        (0.9, r"mmds\.data\.workers = 1 suffices: 2\.00 of 1\.35 rows/s \(1\.5 x the need of 0\.90\)"),
        (2.0, r"mmds\.data\.workers = 2 suffices"),  # 1.5 x 2 = 3
        (2.7, r"mmds\.data\.workers = 4 suffices"),
        (6.0, r"none of these counts .* the best, 4, gives 6\.00.* \(here are 3\), about 6 would"),
    ],
)
def test_the_smallest_count_with_a_margin_is_advised(need: float, said: str) -> None:
    """Loading in the training process never counts: it makes training wait."""
    assert re.match(said, advice(speeds((4, 6.0), (0, 9.0), (1, 2.0), (2, 4.0)), need, cores=3))


def test_without_workers_nothing_is_advised() -> None:
    assert "measure at least one worker" in advice(speeds((0, 9.0)), 1.0, cores=2)


def write_metrics(folder: Path, seconds: list[float], *, ranks: int, rows: int) -> None:
    folder.mkdir()
    steps = [json.dumps({"step": i, "seconds": value}) + "\n" for i, value in enumerate(seconds)]
    (folder / "metrics.jsonl").write_text("".join(steps) + '{"step": 99, "sec')  # being written
    starts = [{"ranks": 1}, {"ranks": ranks}]
    (folder / "starts.jsonl").write_text("".join(json.dumps(start) + "\n" for start in starts))
    (folder / "plan.json").write_text(json.dumps({"rows_per_step": rows}))


def test_the_need_is_that_of_one_rank_in_the_last_steps(tmp_path: Path) -> None:
    assert need_of_run(tmp_path) is None
    write_metrics(tmp_path / "run", [100.0] * 30 + [4.0] * 15 + [400.0] * 5, ranks=8, rows=64)
    assert need_of_run(tmp_path / "run") == (2.0, bench.RECENT)
    write_metrics(tmp_path / "new", [], ranks=8, rows=64)
    assert need_of_run(tmp_path / "new") is None


def test_a_clock_adds_up_each_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter([10, 13, 20, 24, 30, 50])
    monkeypatch.setattr(time, "monotonic_ns", lambda: next(ticks) * 10**9)
    told: list[Any] = []
    clock = StageClock(lambda *what: told.append(what))
    clock.enter("read", 4)
    clock.enter("decode", 4, 0, "a.png")
    clock.enter("decode", 4, 1, "b.png")
    clock.enter("read", 5)
    clock.enter("collate")
    assert clock.finish() == RowSeconds(read=3 + 6, decode=7 + 4, collate=20)
    assert told[1] == ("decode", 4, 0, "a.png", 13 * 10**9) and told[4][:2] == ("collate", -1)


def test_the_script_prints_a_table_and_an_advice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_run(tmp_path)
    command = ["bench_loader.py", "--config", str(config), "--workers", "0,1,2", "--rows", "6"]
    monkeypatch.setattr(sys, "argv", command)
    bench_loader.main()
    lines = capsys.readouterr().out.splitlines()
    table = [line.split() for line in lines if re.match(r"\s*\d", line)]
    assert [int(line[0]) for line in table] == [0, 1, 2]
    assert all(len(line) == 7 and all(float(word.replace(",", "")) >= 0 for word in line) for line in table)
    assert all(float(line[1]) > 0 and float(line[5]) > 0 for line in table)
    assert "no need is known: give --tflops of a GPU, or --need" in lines[-1]

    write_metrics(tmp_path / "run", [1e-9], ranks=2, rows=4)
    monkeypatch.setattr(sys, "argv", [*command[:4], "1", "--rows", "3"])
    bench_loader.main()
    lines = capsys.readouterr().out.splitlines()
    assert "rows/s a rank, median of the last 1 steps" in lines[-2] and lines[-1].startswith("none of these")
    monkeypatch.setattr(sys, "argv", [*command[:4], "1", "--rows", "3", "--need", "0.001"])
    bench_loader.main()
    assert capsys.readouterr().out.splitlines()[-1].startswith("mmds.data.workers = 1 suffices")
    monkeypatch.setattr(sys, "argv", [*command[:4], "1", "--rows", "3", "--gpus", "8", "--tflops", "989"])
    bench_loader.main()
    lines = capsys.readouterr().out.splitlines()
    rows, each, flops = re.match(
        r"need: ([\d.,]+) rows/s on 8 GPUs, ([\d.,]+) a rank: ([\d.e+]+) FLOPs a row at 40% of 989 TFLOP/s",
        lines[-2],
    ).groups()  # type: ignore[union-attr]
    assert float(rows) == pytest.approx(8 * float(each), rel=1e-3)
    assert float(each) == pytest.approx(0.4 * 989e12 / float(flops), rel=1e-2)
    assert lines[-1].startswith("none of these counts gives")


def test_what_a_gpu_needs_is_its_speed_over_the_work_of_a_row() -> None:
    assert need_of_gpu(4e14, tflops=1000, mfu=0.4) == pytest.approx(1.0)
