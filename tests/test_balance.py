"""Rows of a step that are equal in encoder and decoder cost: every sample once, every cap kept, nobody starved, one answer everywhere."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from mmds import exchange
from mmds.balance import Limits, Sizes, StepRows, balance, bound, even_rows, place, sync_cost, take

ROOT = Path(__file__).parents[1]
ROW, PATCHES, IMAGES = 1000, 4000, 6
LIMITS = Limits(tokens=ROW, patches=PATCHES, images=IMAGES)
LONG = Limits(tokens=4 * ROW, patches=4 * PATCHES, images=4 * IMAGES)  # rows of some 14 samples
GRID = [(world, micro) for world in range(1, 10) for micro in range(1, 5)]


def random_sizes(n: int, seed: int, pictures: float = 0.7) -> Sizes:
    """n samples that each fit into a row; encoder cost grows with the patches' square, decoder cost a little with the tokens'."""
    rng = np.random.default_rng([n, seed])
    images = np.where(rng.random(n) < pictures, rng.integers(1, 4, n), 0)
    patches = np.minimum(images * (rng.lognormal(5.5, 0.8, n).astype(np.int64) + 4), PATCHES)
    tokens = np.minimum(patches // 4 + rng.lognormal(3.5, 1.0, n).astype(np.int64) + 1, ROW)
    return Sizes(
        tokens=tokens,
        patches=patches,
        images=images,
        encoder=patches * 3e8 + 5e4 * patches.astype(float) ** 2,
        decoder=tokens * 1e10 + 1e6 * tokens.astype(float) ** 2,
    )


def uniform(n: int, **given: float) -> Sizes:
    """n equal samples."""
    one = {"tokens": 100, "patches": 100, "images": 1, "encoder": 1.0, "decoder": 1.0, **given}
    kinds = {"tokens": np.int64, "patches": np.int64, "images": np.int64}
    return Sizes(
        **{name: np.full(n, value, dtype=kinds.get(name, np.float64)) for name, value in one.items()}
    )


def check(step: StepRows, sizes: Sizes, limits: Limits, rows: int) -> None:
    """Every sample is in one row or left over, and no row is above a cap or needlessly empty."""
    assert len(step.rows) == rows
    assert sorted([*(i for row in step.rows for i in row), *step.leftovers]) == list(range(len(sizes)))
    for row in step.rows:
        chosen = sizes[np.array(row, dtype=np.int64)]
        assert chosen.tokens.sum() <= limits.tokens
        assert limits.patches is None or chosen.patches.sum() <= limits.patches
        assert limits.images is None or chosen.images.sum() <= limits.images
    assert sum(not row for row in step.rows) == max(0, rows - len(sizes))


def costs(
    rows: list[list[int]] | tuple[tuple[int, ...], ...], sizes: Sizes, world: int
) -> tuple[np.ndarray, np.ndarray]:
    """Encoder and decoder cost of the rows, [micro-steps, world] each, added up here and not by the planner."""
    sums = [[sum(float(of[i]) for i in row) for row in rows] for of in (sizes.encoder, sizes.decoder)]
    return np.array(sums[0]).reshape(-1, world), np.array(sums[1]).reshape(-1, world)


def random_packing(
    sizes: Sizes, limits: Limits, rows: int, rng: np.random.Generator
) -> list[list[int]] | None:
    """The same samples in random order, each in a random row with room; None where one finds none."""
    filled: list[list[int]] = [[] for _ in range(rows)]
    used = np.zeros((3, rows), dtype=np.int64)
    caps = np.array([limits.tokens, limits.patches, limits.images])[:, None]
    for i in rng.permutation(len(sizes)).tolist():
        need = np.array([sizes.tokens[i], sizes.patches[i], sizes.images[i]])[:, None]
        fits = np.flatnonzero((used + need <= caps).all(axis=0))
        if not len(fits):
            return None
        row = int(rng.choice(fits))
        filled[row].append(i)
        used[:, [row]] += need
    return filled


@pytest.mark.parametrize("world,micro", GRID)
@pytest.mark.parametrize("objective", ["zero3", "step"])
def test_every_sample_is_placed_once_or_left_over_and_every_cap_holds(
    world: int, micro: int, objective: str
) -> None:
    rows = world * micro
    for n in (0, 1, 2, rows - 1, rows, rows + 1, 3 * rows, 9 * rows):
        sizes = random_sizes(n, seed=world)
        step = balance(sizes, LIMITS, rows=rows, world=world, objective=objective)
        check(step, sizes, LIMITS, rows)


@pytest.mark.parametrize("world,micro", GRID)
def test_the_sync_cost_is_never_above_that_of_a_random_packing_of_the_same_samples(
    world: int, micro: int
) -> None:
    rows, rng, compared = world * micro, np.random.default_rng(world * 10 + micro), 0
    for seed in range(2):
        sizes = random_sizes(12 * rows, seed)
        sizes = sizes[
            : take(sizes, LIMITS, max(1, 3 * rows // 4))
        ]  # a full window has hardly a random packing
        step = balance(sizes, LIMITS, rows=rows, world=world)
        placed = sizes[np.setdiff1d(np.arange(len(sizes)), step.leftovers)]
        ours, mean = sync_cost(*costs(step.rows, sizes, world))
        for _ in range(5):
            other = random_packing(placed, LIMITS, rows, rng)
            if other is not None:
                compared += 1
                assert ours <= sync_cost(*costs(other, placed, world))[0] + 1e-9 * mean
    assert compared or rows == 1


def test_ranks_are_nearly_equal_where_rows_hold_many_samples() -> None:
    for world, micro, objective in (
        (8, 1, "zero3"),
        (4, 4, "zero3"),
        (8, 1, "step"),
        (4, 4, "step"),
        (32, 1, "zero3"),
    ):
        sizes = random_sizes(400 * world, seed=5)
        sizes = sizes[: take(sizes, LONG, world * micro)]
        step = balance(sizes, LONG, rows=world * micro, world=world, objective=objective)
        encoder, decoder = costs(step.rows, sizes, world)
        sync, mean = sync_cost(encoder, decoder)
        both = (encoder + decoder).sum(axis=0)
        assert sync / mean < 1.03 if objective == "zero3" else both.max() / both.mean() < 1.02


def test_a_window_fills_most_of_the_room_and_leaves_little_over() -> None:
    for rows in (4, 16, 64):
        sizes = random_sizes(60 * rows, seed=2)
        count = take(sizes, LONG, rows)
        step = balance(sizes[:count], LONG, rows=rows, world=rows)
        needed = [
            sizes.tokens[:count].sum() / LONG.tokens,
            sizes.patches[:count].sum() / (4 * PATCHES),
            sizes.images[:count].sum() / (4 * IMAGES),
        ]
        assert 0.9 < max(needed) / rows < 1.0
        assert len(step.leftovers) <= 0.05 * count


def test_take_asks_for_more_samples_than_there_are_by_taking_all() -> None:
    sizes = random_sizes(7, seed=1)
    assert take(sizes, LIMITS, 64) == 7
    assert take(uniform(50, tokens=ROW), LIMITS, 4) == 4  # one a row, though 97 % of the room is less
    assert take(uniform(50, tokens=ROW), LIMITS, 4, carried=9) == 9


@pytest.mark.parametrize("world,micro", [(1, 1), (2, 1), (3, 2), (8, 1)])
@pytest.mark.parametrize("large", [False, True])
def test_leftovers_come_first_and_none_waits_longer_than_those_before_it_allow(
    world: int, micro: int, large: bool
) -> None:
    rows, total = world * micro, 40 * world * micro
    sizes = random_sizes(total, seed=3)
    if large:  # rows hold one or two of them, so that many are left over
        rng = np.random.default_rng(4)
        sizes = Sizes(**{**vars(sizes), "tokens": rng.integers(ROW // 3, ROW, total)})
    left, place, waits, seen, longest = np.zeros(0, dtype=np.int64), 0, {}, [], 0
    for _ in range(10 * total):
        at_hand = np.concatenate([left, np.arange(place, total)])
        if not len(at_hand):
            break
        count = take(sizes[at_hand], LIMITS, rows, carried=len(left))
        window, place = at_hand[:count], place + count - len(left)
        step = balance(sizes[window], LIMITS, rows=rows, world=world, carried=len(left))
        check(step, sizes[window], LIMITS, rows)
        seen += [int(window[i]) for row in step.rows for i in row]
        for position, sample in enumerate(left.tolist()):
            waits[sample] = min(waits.get(sample, position), position)
        before, left = len(left), window[list(step.leftovers)]
        if before:
            assert window[0] not in left
        for sample in left.tolist():
            ahead = waits.pop(sample, None)
            assert ahead is None or ahead > 0
        longest = max(longest, len(left))
    assert sorted(seen) == list(range(total))
    assert not large or longest > 0


def test_the_answer_is_the_same_in_every_process() -> None:
    code = (
        "import sys, hashlib; sys.path[:0] = ['tests', '.']\n"
        "from test_balance import fingerprint; print(fingerprint())"
    )
    found = {fingerprint()}
    for seed, threads in (("1", "1"), ("77", "2")):
        environment = {
            **os.environ,
            "PYTHONHASHSEED": seed,
            "OMP_NUM_THREADS": threads,
            "OPENBLAS_NUM_THREADS": threads,
        }
        done = subprocess.run(
            [sys.executable, "-c", code],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
        found.add(done.stdout.strip())
    assert len(found) == 1


def fingerprint() -> str:
    """A hash of the rows of several windows."""
    digest = hashlib.sha256()
    for world, micro, objective in ((8, 1, "zero3"), (3, 4, "zero3"), (5, 2, "step"), (40, 1, "zero3")):
        sizes = random_sizes(12 * world * micro, seed=9)
        step = balance(sizes, LIMITS, rows=world * micro, world=world, objective=objective)
        digest.update(json.dumps([step.rows, step.leftovers]).encode())
    return digest.hexdigest()


@pytest.mark.parametrize(
    "world,micro,objective", [(8, 1, "zero3"), (2, 3, "zero3"), (20, 1, "zero3"), (4, 2, "step")]
)
def test_a_step_comes_out_the_same_whichever_steps_are_evened_out_with_it(
    world: int, micro: int, objective: str
) -> None:
    rows, steps = world * micro, []
    for seed, share in enumerate((0.7, 0.0, 1.0, 0.3, 0.9)):
        sizes = random_sizes((12 + 5 * seed) * rows, seed, pictures=share)
        limits = LONG if seed % 2 else LIMITS
        steps.append(sizes[: take(sizes, limits, rows)])
    steps.append(random_sizes(1, seed=1))
    placed = [place(sizes, LONG, rows=rows, objective=objective) for sizes in steps]
    together = even_rows(placed, LONG, rows=rows, world=world, objective=objective)
    alone = [balance(sizes, LONG, rows=rows, world=world, objective=objective) for sizes in steps]
    assert together == alone


def test_costs_in_other_units_give_the_same_rows() -> None:
    sizes = random_sizes(100, seed=6)
    scaled = Sizes(
        **{**vars(sizes), "encoder": sizes.encoder * 2.0**-40, "decoder": sizes.decoder * 2.0**-40}
    )
    assert balance(sizes, LIMITS, rows=8, world=8) == balance(scaled, LIMITS, rows=8, world=8)


@pytest.mark.parametrize(
    "sizes",
    [
        random_sizes(200, 1, pictures=0.0),
        random_sizes(60, 1, pictures=1.0),
        uniform(80),
        uniform(80, encoder=0.0),
        uniform(80, decoder=0.0),
        uniform(80, encoder=0.0, decoder=0.0),
        uniform(30, images=0, patches=0, encoder=0.0),
        uniform(5, tokens=ROW),
    ],
    ids=["text", "images", "equal", "no encoder", "no decoder", "no cost", "no patches", "one a row"],
)
@pytest.mark.parametrize("objective", ["zero3", "step"])
def test_samples_of_one_kind(sizes: Sizes, objective: str) -> None:
    step = balance(sizes, LIMITS, rows=8, world=4, objective=objective)
    check(step, sizes, LIMITS, 8)
    if len(set(sizes.tokens.tolist())) == 1 and len(sizes) == 80:
        assert {len(row) for row in step.rows} == ({6} if LIMITS.images == 6 and sizes.images[0] else {10})


def test_a_single_huge_sample_does_not_unbalance_the_rest() -> None:
    sizes = random_sizes(160, seed=8, pictures=0.5)
    encoder = sizes.encoder.copy()
    encoder[17] = encoder.sum() / 2  # four mean rows of eight
    sizes = Sizes(**{**vars(sizes), "encoder": encoder})
    count = take(sizes, LIMITS, 8)
    sizes = sizes[:count]
    step = balance(sizes, LIMITS, rows=8, world=8)
    check(step, sizes, LIMITS, 8)
    encoder_rows, decoder_rows = costs(step.rows, sizes, 8)
    limit = bound(sizes, world=8)
    assert limit.encoder == 17 and limit.encoder_share > 3 and limit.ratio > 1.1
    sync, mean = sync_cost(encoder_rows, decoder_rows)
    assert limit.ratio - 1e-9 <= sync / mean <= limit.ratio * 1.05
    assert decoder_rows.max() / decoder_rows.mean() < 1.05


@pytest.mark.parametrize("world,micro", [(2, 1), (4, 2), (7, 3)])
@pytest.mark.parametrize("objective", ["zero3", "step"])
def test_no_plan_beats_the_bound(world: int, micro: int, objective: str) -> None:
    for seed in range(5):
        sizes = random_sizes(5 * world * micro, seed)
        step = balance(sizes, LIMITS, rows=world * micro, world=world, objective=objective)
        placed = sizes[np.setdiff1d(np.arange(len(sizes)), step.leftovers)]
        encoder, decoder = costs(step.rows, sizes, world)
        sync, mean = sync_cost(encoder, decoder)
        both = (encoder + decoder).sum(axis=0)
        reached = sync / mean if objective == "zero3" else both.max() / both.mean()
        assert reached >= bound(placed, world=world, objective=objective).ratio * (1 - 1e-9)


def test_the_bound_is_the_largest_sample_over_a_mean_row() -> None:
    sizes = Sizes(
        tokens=np.array([1, 1, 1, 1]),
        patches=np.array([1, 1, 1, 1]),
        images=np.array([1, 1, 1, 1]),
        encoder=np.array([6.0, 1.0, 1.0, 0.0]),
        decoder=np.array([1.0, 1.0, 1.0, 1.0]),
    )
    found = bound(sizes, world=2)  # mean row: encoder 4, decoder 2
    assert (found.encoder, found.encoder_share, found.decoder_share) == (0, 1.5, 0.5)
    assert found.ratio == pytest.approx((6 + 2) / (4 + 2))
    assert bound(sizes, world=2, objective="step").ratio == pytest.approx(7 / 6)


@pytest.mark.parametrize("name,cap", [("tokens", ROW), ("patches", PATCHES), ("images", IMAGES)])
def test_a_sample_above_a_cap_alone_is_refused_by_number(name: str, cap: int) -> None:
    sizes = uniform(10)
    values = getattr(sizes, name).copy()
    values[7] = cap + 1
    with pytest.raises(ValueError, match=f"sample 7 alone has {cap + 1} {name}"):
        balance(Sizes(**{**vars(sizes), name: values}), LIMITS, rows=4, world=4)
    with pytest.raises(ValueError, match="sample 0 has no tokens"):
        balance(uniform(3, tokens=0), LIMITS, rows=2, world=2)


def test_micro_steps_hold_rows_that_are_alike() -> None:
    """Samples that fill a row each: those dear to the encoder share one micro-step, those dear to the decoder the other."""
    sizes = Sizes(
        tokens=np.full(4, ROW),
        patches=np.array([4000, 0, 4000, 0]),
        images=np.array([1, 0, 1, 0]),
        encoder=np.array([8.0, 0.0, 6.0, 0.0]),
        decoder=np.array([1.0, 7.0, 1.0, 6.0]),
    )
    step = balance(sizes, LIMITS, rows=4, world=2)
    assert sync_cost(*costs(step.rows, sizes, 2))[0] == (8 + 1) + (0 + 7)


def test_long_rows_of_tiny_samples_stay_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Candidates of an exchange are bounded however many samples a row holds."""
    widest = 0
    original = exchange._of_bundles

    def watch(values: np.ndarray, bundles: np.ndarray) -> np.ndarray:
        nonlocal widest
        widest = max(widest, bundles.shape[1])
        return original(values, bundles)

    monkeypatch.setattr(exchange, "_of_bundles", watch)
    sizes = random_sizes(4000, seed=1, pictures=0.0)
    sizes = Sizes(**{**vars(sizes), "tokens": np.minimum(sizes.tokens, 3)})
    step = balance(sizes, Limits(tokens=ROW), rows=8, world=8)
    assert max(len(row) for row in step.rows) > 200 and 0 < widest < 200
    check(step, sizes, Limits(tokens=ROW), 8)


def test_the_benchmark_runs_and_reaches_its_balance(capsys: pytest.CaptureFixture[str]) -> None:
    spec = importlib.util.spec_from_file_location("bench_planner", ROOT / "scripts" / "bench_planner.py")
    assert spec is not None and spec.loader is not None
    bench = importlib.util.module_from_spec(spec)
    sys.modules["bench_planner"] = bench
    spec.loader.exec_module(bench)
    bench.main(["--quick"])
    lines = capsys.readouterr().out.splitlines()
    verdicts = [line for line in lines[lines.index("verdict") :] if "<=" in line or ">=" in line]
    assert len(verdicts) == 24
    assert not [line for line in verdicts if line.endswith("MISSED") and "us a sample" not in line]
