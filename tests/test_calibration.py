"""Calibration: the fit against rates that are known, the file, and rows whose FLOPs torch counts."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from mmds.calibration import COLUMNS, OVERHEADS, RATES, Calibration, choose_columns, fit, mape, work
from mmds.config import load_config
from mmds.cost import CostModel, Sums, Terms, row_sums
from mmds.errors import ConfigError
from mmds.measure_rows import build_bench, random_rows
from mmds.model.build import find_source
from tests.tiny import write_decoder, write_encoder

ROOT = Path(__file__).parents[1]
MODEL = CostModel(
    encoder=Terms(pieces=7e3, patches=2e6, patch_squares=3e3),
    connector=Terms(patches=4e5, pieces=11.0),
    decoder=Terms(tokens=5e6, squares=6e3, supervised=8e5),
)
CALIBRATION = Calibration(
    encoder=2e-11,
    encoder_attention=9e-11,
    connector=3e-11,
    decoder=4e-11,
    decoder_attention=7e-11,
    head=5e-11,
    row=3e-3,
    piece=1e-4,
    device="a machine",
    dtype="float32",
    torch="2",
    rows=36,
    error=0.02,
)
KNOWN = np.array([getattr(CALIBRATION, name) for name in COLUMNS])


def random_features(rows: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    features = rng.uniform(1e8, 1e10, (rows, len(COLUMNS)))
    features[:, -2:] = np.stack([np.ones(rows), rng.integers(0, 9, rows)], axis=1)
    return features


def test_exact_seconds_give_back_the_rates() -> None:
    features = random_features(30)
    np.testing.assert_allclose(fit(features, features @ KNOWN), KNOWN, rtol=1e-6)


def test_under_noise_no_rate_is_negative_and_the_relative_error_is_least() -> None:
    """Reference: a bounded quasi-Newton method on the sum of squared relative errors, written out."""
    features = random_features(14, seed=1)
    truth = KNOWN * np.array([1, 0, 1, 1, 0, 1, 1, 0])
    seconds = features @ truth * np.random.default_rng(2).lognormal(0, 0.2, 14)
    found = fit(features, seconds)
    assert (found >= 0).all() and (found == 0).any()

    def loss(scaled: np.ndarray) -> float:
        return float(np.sum(((features @ (scaled * KNOWN) - seconds) / seconds) ** 2))

    reference = minimize(
        loss, np.ones(len(KNOWN)), bounds=[(0, None)] * len(KNOWN), options={"ftol": 1e-15, "gtol": 1e-10}
    )
    assert loss(found / KNOWN) <= reference.fun * (1 + 1e-6)
    np.testing.assert_allclose(found / KNOWN, reference.x, atol=2e-3)


def test_a_short_row_counts_as_much_as_a_long_one() -> None:
    """One rate, seconds 1 x and 2 x of its FLOPs: the minimum of (r - 1)^2 + (r / 2 - 1)^2 is at 1.2, whatever the lengths."""
    features = np.array([[1.0], [1000.0]])
    assert fit(features, np.array([1.0, 2000.0]))[0] == pytest.approx(1.2)


def test_work_that_no_row_has_gets_no_rate() -> None:
    features = random_features(30)
    features[:, 1] = 0
    found = fit(features, features @ KNOWN)
    assert found[1] == 0
    np.testing.assert_allclose(np.delete(found, 1), np.delete(KNOWN, 1), rtol=1e-6)


@pytest.mark.parametrize("overheads", [(), ("row",), ("row", "piece")])
def test_overheads_are_fitted_where_rows_have_them(overheads: tuple[str, ...]) -> None:
    features = random_features(40)
    rates = np.array([KNOWN[i] if name in (*RATES, *overheads) else 0 for i, name in enumerate(COLUMNS)])
    rates[-2:] *= 100  # much of a row's time, so that noise cannot hide it
    seconds = features @ rates * np.random.default_rng(3).lognormal(0, 0.01, 40)
    assert {COLUMNS[i] for i in choose_columns(features, seconds)} == {*RATES, *overheads}
    assert set(OVERHEADS) >= set(overheads)


def test_the_mean_error_is_relative() -> None:
    assert mape(np.array([1.1, 90.0]), np.array([1.0, 100.0])) == pytest.approx(0.1)


def test_applied_it_gives_the_seconds_summed_by_hand() -> None:
    sums = row_sums(patches=[16, 36], segments=[30, 12], supervised=9)
    flops = CALIBRATION.apply(MODEL).flops(sums)
    squares = 16**2 + 36**2
    assert float(flops.encoder) == pytest.approx(
        2e-11 * (7e3 * 2 + 2e6 * 52) + 9e-11 * 3e3 * squares + 1e-4 * 2
    )
    assert float(flops.connector) == pytest.approx(3e-11 * (4e5 * 52 + 11 * 2))
    assert float(flops.decoder) == pytest.approx(
        4e-11 * 5e6 * 42 + 7e-11 * 6e3 * (30**2 + 12**2) + 5e-11 * 8e5 * 9
    )
    assert float(CALIBRATION.seconds(MODEL, sums)) == pytest.approx(float(flops.total) + 3e-3)


def test_what_is_fitted_is_what_is_applied() -> None:
    """The columns of the fit times the rates are the seconds of the applied model, for many rows at once."""
    rng = np.random.default_rng(4)
    sums = Sums(**{name: rng.integers(1, 500, 7).astype(float) for name in asdict(Terms())})
    np.testing.assert_allclose(work(MODEL, sums) @ KNOWN, CALIBRATION.seconds(MODEL, sums), rtol=1e-12)


def test_a_saved_file_loads(tmp_path: Path) -> None:
    CALIBRATION.save(tmp_path / "c.json")
    assert Calibration.load(tmp_path / "c.json") == CALIBRATION


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("decoder", None),
        ("head", -1e-12),
        ("encoder", float("nan")),
        ("row", float("inf")),
        ("piece", "fast"),
        ("connector", True),
        ("rows", -1),
        ("device", 7),
        ("segment", 0.0),
    ],
)
def test_a_file_with_a_wrong_value_is_refused_by_file_and_key(tmp_path: Path, key: str, value: Any) -> None:
    path = tmp_path / "c.json"
    data = {**asdict(CALIBRATION), key: value}
    if value is None:
        del data[key]
    path.write_text(json.dumps(data))
    with pytest.raises(ConfigError, match=rf"c\.json: {key} is "):
        Calibration.load(path)


@pytest.mark.parametrize("text", ["{", "[]", None, b"\xff\xfe"])
def test_a_file_that_is_none_is_refused(tmp_path: Path, text: str | bytes | None) -> None:
    path = tmp_path / "c.json"
    if text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError, match=r"c\.json.*scripts/calibrate\.py"):
        Calibration.load(path)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a tiny decoder that trains on a tiny encoder that is frozen, with images of their own size."""
    folder = tmp_path_factory.mktemp("calibrate")
    write_decoder(folder / "decoder", layers=3)
    write_encoder(folder / "tower", weights=False)
    config = {
        "train_batch_size": 1,
        "zero_optimization": {"stage": 0},
        "mmds": {
            "stage": "instruct",
            "output_dir": str(folder / "run"),
            "model": {
                "encoder": {"name": f"local-dir:{folder / 'tower'}", "pretrained": "random"},
                "connector": "mlp2x",
                "decoder": {"name": str(folder / "decoder"), "random": True},
                "resolution": "native",
            },
            "data": {
                "mix": [{"name": "none", "path": str(folder)}],
                "row_tokens": 200,
                "max_pixels": 84 * 84,
            },
            "schedule": {"epochs": 1, "warmup_ratio": 0.03},
        },
    }
    path = folder / "run.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    return path


@pytest.mark.parametrize("stage", ["align", "instruct", "pretrain"])
def test_the_rows_cost_what_torch_counts(run: Path, stage: str) -> None:
    config = load_config(run, [f"mmds.stage={stage}"])
    bench = build_bench(config, find_source(None, config.model), torch.device("cpu"), blocks=2)
    assert len(bench.model.decoder.llm.model.layers) == 2  # type: ignore[arg-type,union-attr]
    rows = random_rows(bench, 20, row_tokens=60, seed=1)
    pictured, plain = ([row for row in rows if bool(row.plans) == wanted] for wanted in (True, False))
    decoder = bench.cost.decoder  # counts the causal half, which math SDPA computes with the other one
    whole = replace(bench.cost, decoder=replace(decoder, squares=2 * decoder.squares))
    for row in (*pictured[:3], plain[0]):
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            loss, _ = bench.model(row, None if bench.frozen is None else bench.frozen(row))
            loss.backward()
        bench.model.zero_grad(set_to_none=True)
        assert float(whole.flops(bench.sums(row)).total) == pytest.approx(counter.get_total_flops(), rel=1e-3)


def test_rows_vary_in_every_sum_independently(run: Path) -> None:
    """Some rows have no image; the columns of the others are far from proportional to each other."""
    config = load_config(run)
    bench = build_bench(config, find_source(None, config.model), torch.device("cpu"))
    rows = random_rows(bench, 64, row_tokens=400, seed=0)
    assert 2 <= sum(not row.plans for row in rows) <= 24
    features = np.stack([work(bench.cost, bench.sums(row)) for row in rows if row.plans])
    rates = np.delete(features, RATES.index("connector"), axis=1)  # of patches, as the encoder's matrices
    scaled = rates / np.linalg.norm(rates, axis=0)
    assert np.linalg.cond(scaled) < 60
    assert max(row.input_ids.numel() for row in rows) <= 500


def test_the_script_writes_a_file_that_loads(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = load_script()
    out = tmp_path / "calibration.json"
    threads = torch.get_num_threads()
    script.main(["--config", str(run), "-o", str(out), "--rows", "22", "--repeats", "1", "--blocks", "1"])
    torch.set_num_threads(threads)
    found = Calibration.load(out)
    assert (found.rows, found.dtype, found.torch) == (16, "float32", torch.__version__)
    assert any(getattr(found, name) > 0 for name in RATES)
    said = capsys.readouterr().out
    assert f"{found.error:.2%}" in said and "tokens alone" in said and f"wrote {out}" in said


def test_too_few_rows_and_adapters_are_refused(run: Path) -> None:
    script = load_script()
    with pytest.raises(ConfigError, match="--rows 12"):
        script.main(["--config", str(run), "--rows", "12"])
    with pytest.raises(ConfigError, match="mmds.stage.lora"):
        script.main(["--config", str(run), "--set", "mmds.stage.lora={}"])


def load_script() -> Any:
    spec = importlib.util.spec_from_file_location("calibrate", ROOT / "scripts" / "calibrate.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
