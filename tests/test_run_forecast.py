"""What a run is said to cost beforehand, against the rows that it then gets."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from mmds import dry_run
from mmds.cost import row_sums
from mmds.data.rows import Row
from mmds.run_data import RunData, open_run_data
from mmds.run_forecast import duration, forecast, plan_facts, sums_of
from tests.data.sample_run import write_run


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> RunData:
    return open_run_data(write_run(tmp_path_factory.mktemp("forecast")), world=2)


def built(data: RunData, steps: int) -> list[list[Row]]:
    """The rows that training gets, by step; row `micro * world + rank`."""
    ranks = [list(data.loader(rank=rank, stop_step=steps)) for rank in range(2)]
    return [[ranks[rank][s].rows[micro] for micro in range(2) for rank in range(2)] for s in range(steps)]


def sums_of_row(row: Row, data: RunData):
    return row_sums(
        patches=[plan.patches for plan in row.plans],
        segments=row.cu_seqlens.diff().tolist() if any(row.sample_keys) else [],
        supervised=row.supervised,
        dummy_patches=data.geometry.dummy.patches,
    )


def test_the_sums_of_planned_rows_are_those_of_the_rows_that_are_built(data: RunData) -> None:
    text_only = 0
    for step, rows in enumerate(built(data, 12)):
        planned = sums_of(data, data.plan.step_rows(step, world=2))
        for at, row in enumerate(rows):
            real = sums_of_row(row, data)
            text_only += not row.plans
            for name, value in vars(real).items():
                assert float(getattr(planned, name)[at]) == float(value), (name, step, at)
    assert text_only


def test_the_forecast_is_that_of_its_rows(data: RunData) -> None:
    known = forecast(data, first=3)
    steps = range(3, data.plan.total_steps)
    assert known.steps == len(steps)
    rows = [row for step in steps for row in data.plan.step_rows(step, world=2)]
    model = data.outline.flops(data.config)
    flops = [
        model.flops(sums_of_row(row, data)) for step in built(data, data.plan.total_steps)[3:] for row in step
    ]
    assert known.flops == pytest.approx(sum(float(f.total) for f in flops) / len(steps))
    share = sum(float(f.vision) for f in flops) / sum(float(f.total) for f in flops)
    assert known.encoder_share == pytest.approx(share)
    peaks = [float(data.outline.activations(data.config, sums_of(data, [row]))[0]) for row in rows]
    assert known.heaviest == rows[int(np.argmax(peaks))] and known.memory.activations == int(max(peaks))
    assert 1 <= known.bound <= known.imbalance + 1e-9


def test_the_dry_run_says_memory_balance_and_time(
    data: RunData, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    facts = plan_facts(data)
    total, states, activations = (float(x) for x in re.findall(r"([\d.]+) GB", facts["memory a rank"])[:3])
    assert total == pytest.approx(states + activations, abs=0.11)
    assert "predicted 1." in facts["balance"] and "no plan below" in facts["balance"]
    assert "on 2 A100 at 40% of 312 TFLOP/s" in facts["time"] and "H100" in facts["time"]
    config = data.config
    dry_run.dry_run(config, dry_run_source(data), 2)
    said = capsys.readouterr().out
    for name, text in facts.items():
        assert f"{name:<24}{text}" in said


def dry_run_source(data: RunData):
    from mmds.model.build import find_source

    return find_source(data.config.init_from, data.config.model)


def test_the_time_of_a_run_that_has_begun_is_by_its_own_pace(tmp_path: Path) -> None:
    data = open_run_data(write_run(tmp_path))
    (tmp_path / "run").mkdir()
    lines = [json.dumps({"step": step, "seconds": 120.0}) for step in range(30)]
    (tmp_path / "run/metrics.jsonl").write_text("\n".join(lines) + "\n")
    expected = duration(120.0 * data.plan.total_steps)
    assert plan_facts(data)["time"] == f"{expected} at the pace of the run so far"


@pytest.mark.parametrize(
    ("seconds", "said"), [(30, "30 s"), (150, "2.5 min"), (9000, "2.5 h"), (216000, "2.5 days")]
)
def test_durations_are_said_in_the_unit_that_fits(seconds: float, said: str) -> None:
    assert duration(seconds) == said
