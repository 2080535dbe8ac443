"""`scripts/plan.py`: its numbers against arithmetic sample by sample, its caps against the samples that they are for."""

from __future__ import annotations

import io
import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mmds import plan_report as module
from mmds.balance import bound
from mmds.cost import row_sums
from mmds.plan_report import Cards, PlanReport, cap_without_bound, plan_of, plan_report, worst_step
from mmds.run_data import RunData, open_run_data
from tests.data.raw_sets import record, write_jsonl
from tests.data.sample_run import write_run
from tests.spawn import ROOT

sys.path.insert(0, str(ROOT / "scripts"))

import plan as script


def write_varied(folder: Path, pictures: int = 90) -> Path:
    """A run in native resolution over pictures of 30 to 500 px a side, one of which is far larger than the rest."""
    config = write_run(folder, max_pixels=448 * 448)
    rng, records = np.random.default_rng(0), []
    for i in range(pictures):
        width, height = (448, 448) if i == 7 else rng.integers(30, 120, 2).tolist()
        file = io.BytesIO()
        Image.new("RGB", (width, height), (i, 0, 200)).save(file, "PNG")
        (folder / f"p{i}.png").write_bytes(file.getvalue())
        records.append(record(f"s{i}", [f"p{i}.png"] if i % 5 else []))
    write_jsonl(folder / "varied.jsonl", records)
    run = json.loads(config.read_text())
    run["mmds"]["data"] |= {
        "mix": [{"name": "varied", "path": str(folder / "varied.jsonl")}],
        "row_tokens": 1200,
    }
    run["mmds"]["model"] |= {"resolution": "native"}
    run["mmds"]["schedule"] = {"epochs": 1, "warmup_steps": 0}
    run["mmds"]["stage"] = "pretrain"
    config.write_text(json.dumps(run))
    return config


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_varied(tmp_path_factory.mktemp("plan"))


@pytest.fixture(scope="module")
def data(file: Path) -> RunData:
    return open_run_data(file)


@pytest.fixture(scope="module")
def report(data: RunData) -> PlanReport:
    return plan_report(data, [2, 4], Cards(count=4, tflops=100.0, mfu=0.5, price=3.0, memory=24.0))


def test_work_is_the_sum_over_the_samples_one_by_one(data: RunData, report: PlanReport) -> None:
    model = data.outline.flops(data.config)
    for i in range(len(data.mixture)):
        stored = data.mixture.read(i)
        plans = [data.geometry.plan(*size) for size in stored.image_sizes]
        tokens = len(stored.ids) + sum(plan.visual_tokens - 1 for plan in plans)
        sums = row_sums(
            patches=[plan.patches for plan in plans],
            segments=[tokens],
            supervised=int(stored.supervised.sum()),
        )
        flops = model.flops(sums)
        assert report.flops[i] == pytest.approx(float(flops.total))
    assert 0 < report.vision_share < 1


def test_time_and_money_are_those_of_the_formula(data: RunData, report: PlanReport) -> None:
    (mine,) = [b for b in report.balances if b.scheme == "cost" and b.ranks == 4]
    hours = report.forecast.flops * data.plan.total_steps * mine.ratio / (4 * 100e12 * 0.5) / 3600
    assert report.hours == pytest.approx(hours)


def test_every_scheme_is_looked_at_on_every_number_of_ranks_with_the_configs_rows(report: PlanReport) -> None:
    assert {(b.scheme, b.ranks) for b in report.balances} == {
        (scheme, ranks) for scheme in ("cost", "token_budget", "resolution_bucket") for ranks in (2, 4)
    }
    assert all(b.rows == 4 for b in report.balances)  # train_batch_size
    for b in report.balances:
        assert 1 <= b.bound <= b.ratio + 1e-9 and 0 <= b.idle < 1 and 0 < b.fill <= 1


def test_the_pixel_cap_that_is_named_removes_the_bound_and_the_next_larger_one_does_not(
    data: RunData,
) -> None:
    assert data.config.objective == "zero3"
    cap = cap_without_bound(data, 4)
    unit = data.geometry.factor**2
    assert cap is not None and cap % unit == 0 and cap < data.config.max_pixels
    plan = plan_of(data, "cost", 4)
    assert plan is not None
    samples = worst_step(plan, 4, "zero3")
    assert 7 in samples  # the large picture

    def ratio(pixels: int) -> float:
        capped = data.mixture.sizes(data.geometry.capped(pixels), samples)
        return bound(module._costs(data, capped), world=4).ratio

    assert ratio(data.config.max_pixels) > 1.01
    assert ratio(cap) <= 1.0 < ratio(cap + unit)


def test_ranks_for_which_the_data_has_too_few_samples_are_left_out_and_said(file: Path) -> None:
    data = open_run_data(file, ["train_batch_size=null", "gradient_accumulation_steps=1"])
    report = plan_report(data, [2, 500], Cards())
    assert {b.ranks for b in report.balances} == {2}
    assert any("fewer samples than a step has rows on 500 ranks" in warning for warning in report.warnings)


def test_warnings_are_given_for_what_they_are_of(data: RunData, report: PlanReport, file: Path) -> None:
    said = " | ".join(report.warnings)
    assert "one sample costs more than a rank's share" in said and "--set mmds.data.max_pixels=" in said
    assert "cards" not in said and "does not" not in said.lower().replace("do not show", "")
    small = plan_report(data, [2], Cards(memory=1e-6))
    assert any("a card has 1e-06" in warning for warning in small.warnings)
    wide = open_run_data(file, ["mmds.data.max_pixels=4000000"])
    assert any("far below the cap" in warning for warning in plan_report(wide, [2], Cards()).warnings)


def call(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", ["plan.py", *map(str, arguments)])
    script.main()


def test_the_script_prints_the_report_and_writes_a_page_that_needs_nothing_else(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    call(monkeypatch, "--config", file, "--ranks", "2,4", "-o", tmp_path / "report.html")
    said = capsys.readouterr().out
    for title in (
        "Images",
        "Samples",
        "Work",
        "Balance",
        "Memory",
        "Time and money",
        "To look at",
        "Afterwards",
    ):
        assert re.search(rf"^{title}\n-+$", said, re.MULTILINE)
    assert "exports to its model folder alone" in said
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "http://" not in page and "https://" not in page and "<script" not in page
    assert page.count('src="data:image/png;base64,') == 4
    pictures = sorted(tmp_path.glob("report-*.png"))
    assert [picture.name for picture in pictures] == [
        f"report-{n}.png" for n in ("balance", "data", "memory", "sizes")
    ]
    for picture in pictures:
        with Image.open(picture) as image:
            assert image.width > 800 and len(set(image.convert("L").resize((64, 64)).tobytes())) > 10


def test_the_script_says_what_fits_and_shows_the_example(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    call(monkeypatch, "--config", file, "--ranks", "2", "--fit", "2.6")
    said = capsys.readouterr().out
    assert "cards of 2.6 GB, 2 ranks" in said and "--set 'mmds.data.row_tokens=" in said
    call(monkeypatch, "--example")
    assert "1.53e+12" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        call(monkeypatch, "--ranks", "2")


def test_without_matplotlib_it_says_how_to_get_it(
    report: PlanReport, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mmds.errors import ConfigError
    from mmds.plan_plots import plots

    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=r"pip install 'mmds\[planning\]'"):
        plots(report)
