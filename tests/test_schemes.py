"""Every scheme: each sample of an epoch once, equal counts on all ranks, caps kept, one answer everywhere, on any number of ranks."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest

from mmds.balance import Limits
from mmds.cost import CostModel, Terms
from mmds.errors import ConfigError, DataError
from mmds.plan_state import PlanState
from mmds.planner import RunPlan
from mmds.sample_sizes import SampleSizes
from mmds.sample_stream import SampleStream, Source
from mmds.schemes import SCHEMES, Scheme

ROW = 1000
PATCHES = 4000
COST = CostModel(
    encoder=Terms(patches=3.0, patch_squares=0.002),
    connector=Terms(patches=0.1),
    decoder=Terms(tokens=40.0, squares=0.01),
)
NAMES = sorted(SCHEMES)


def random_sizes(n: int, seed: int, *, longest: int = ROW, most: int = PATCHES) -> SampleSizes:
    """Mostly short, a few near the row length; some text-only, some with several images, patches of all sizes."""
    rng = np.random.default_rng([n, seed])
    tokens = np.minimum(rng.lognormal(5, 1.1, n).astype(np.int64) + 1, longest)
    images = rng.choice([0, 1, 1, 1, 3], n)
    patches = np.minimum(images * rng.lognormal(5, 1, n).astype(np.int64), most)
    images[patches == 0] = 0
    return SampleSizes(
        tokens=tokens, supervised=tokens // 3, images=images, pieces=images, patches=patches,
        patch_squares=patches**2 // np.maximum(images, 1),
    )  # fmt: skip


def scheme_of(
    name: str, sizes: SampleSizes, rows: int, *, seed: int = 7, sources: int = 1, **options
) -> Scheme:
    ends = np.linspace(0, len(sizes), sources + 1).astype(int).tolist()
    stream = SampleStream(
        [Source(name=f"s{i}", count=b - a) for i, (a, b) in enumerate(zip(ends, ends[1:], strict=False))],
        seed=seed,
    )
    limits = Limits(tokens=ROW, patches=PATCHES, images=12) if name == "cost" else Limits(tokens=ROW)
    options = {"limits": limits, "cost": COST, **options}
    return SCHEMES[name](stream, lambda numbers: sizes[numbers], options.pop("limits"), rows=rows, **options)


def epoch(
    scheme: Scheme, state: PlanState | None = None, *, world: int = 1, most: int = 3
) -> Iterator[tuple]:
    """(rows, place after) of every step until the epoch of the place has ended."""
    state = state or scheme.start
    last = state.stream.epoch
    while state.stream.epoch == last:
        for step in scheme.steps(state, most, world=world):
            state = step.after
            yield step.rows, step.after
            if state.stream.epoch != last:
                return


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("world", range(1, 10))
def test_every_sample_is_once_in_an_epoch_and_no_cap_is_broken(name: str, world: int) -> None:
    rng = np.random.default_rng(world)
    for accumulation in (1, 2, 3, 4):
        rows = world * accumulation
        for n in sorted({rows, rows + 1, 2 * rows + 1, *rng.integers(rows, 20 * rows, 1).tolist()}):
            sizes = random_sizes(n, seed=accumulation)
            scheme = scheme_of(name, sizes, rows, sources=int(rng.integers(1, 4)))
            seen: Counter[int] = Counter()
            for planned, _ in epoch(scheme, world=world):
                assert len(planned) == rows
                for row in planned:
                    for cap, need in scheme.limits.capped(sizes[np.array(row, dtype=np.int64)]).values():
                        assert need.sum() <= cap
                    seen.update(row)
            assert seen == Counter(range(n))


@pytest.mark.parametrize("name", NAMES)
def test_steps_are_the_same_however_many_are_planned_at_a_time_and_from_wherever_one_goes_on(
    name: str,
) -> None:
    sizes = random_sizes(3000, seed=1)
    whole = list(epoch(scheme_of(name, sizes, 4), world=2, most=1))
    assert len(whole) > 60
    assert list(epoch(scheme_of(name, sizes, 4), world=2, most=50)) == whole
    for at in (0, 1, 7, len(whole) // 2, len(whole) - 2):
        place = PlanState.from_json(json.loads(json.dumps(whole[at][1].to_json())))
        assert list(epoch(scheme_of(name, sizes, 4), place, world=2)) == whole[at + 1 :]
    scheme, place = scheme_of(name, sizes, 4), scheme_of(name, sizes, 4).start
    for _, after in whole:
        place = scheme.skip(place)
        assert place == after


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("rows,later", [(8, 6), (6, 8), (24, 24), (3, 7)])
def test_a_plan_that_stopped_on_some_ranks_goes_on_on_others_with_every_sample_once(
    name: str, rows: int, later: int
) -> None:
    """8 ranks, then 6: with as many micro-steps the rows of a step change, with as many rows the micro-steps do."""
    sizes = random_sizes(900, seed=2)
    before = list(epoch(scheme_of(name, sizes, rows), world=rows))
    for stop in (1, len(before) // 2, len(before) - 1):
        first = RunPlan(scheme_of(name, sizes, rows), epochs=2)
        used = Counter(i for step in range(stop) for row in first.step_rows(step, world=rows) for i in row)
        plan = RunPlan(scheme_of(name, sizes, later), epochs=2)
        plan.go_on(PlanState.from_json(json.loads(json.dumps(before[stop - 1][1].to_json()))))
        world = 6 if later % 6 == 0 else 1
        for step in range(stop, plan.total_steps):
            used.update(i for row in plan.step_rows(step, world=world) for i in row)
        assert used == Counter({i: 2 for i in range(900)})
        with pytest.raises(IndexError, match=f"planned from step {stop} on"):
            plan.step_rows(stop - 1)


@pytest.mark.parametrize("name", NAMES)
def test_the_same_samples_make_a_step_on_any_number_of_ranks(name: str) -> None:
    sizes = random_sizes(1500, seed=5)
    by_world = [list(epoch(scheme_of(name, sizes, 12), world=world)) for world in (1, 2, 3, 4, 6, 12)]
    for steps in zip(*by_world, strict=True):
        assert len({tuple(sorted(i for row in rows for i in row)) for rows, _ in steps}) == 1
        assert len({json.dumps(after.to_json()) for _, after in steps}) == 1


PRINT_DIGEST = """
import sys
from tests.test_schemes import RunPlan, random_sizes, scheme_of
print(RunPlan(scheme_of(sys.argv[1], random_sizes(4000, seed=3), 8), epochs=2).preview(10**6).digest)
"""


@pytest.mark.parametrize("name", NAMES)
def test_another_process_plans_the_same(name: str) -> None:
    other = subprocess.run(
        [sys.executable, "-c", PRINT_DIGEST, name], capture_output=True, text=True, check=True
    )
    plan = RunPlan(scheme_of(name, random_sizes(4000, seed=3), 8), epochs=2)
    assert other.stdout.split()[-1] == plan.preview(10**6).digest
    assert (
        plan.preview(10**6).digest
        != RunPlan(scheme_of(name, random_sizes(4000, seed=3), 8, seed=8), epochs=2).preview(10**6).digest
    )


@pytest.mark.parametrize("name", NAMES)
def test_the_end_of_an_epoch_is_shared_out_left_out_or_filled_up_and_counted(name: str) -> None:
    sizes = random_sizes(731, seed=4, longest=ROW // 2)
    by_policy = {}
    for policy in ("share", "drop", "repeat"):
        scheme = scheme_of(name, sizes, 8, last_step=policy)
        steps = list(epoch(scheme))
        seen = Counter(i for rows, _ in steps for row in rows for i in row)
        by_policy[policy] = seen
        end = steps[-1][1]
        assert sum(end.stream.taken) == 0 and end.stream.epoch == 1
        missing, twice = set(range(731)) - set(seen), sum(count - 1 for count in seen.values())
        assert (len(missing), twice) == (end.unfinished, end.repeated)
        fills = [sum(sizes.tokens[list(row)].sum() for row in rows) / (8 * ROW) for rows, _ in steps]
        if policy != "share" and name != "resolution_bucket":
            assert min(fills) > 0.75, (policy, fills)
        again = list(epoch(scheme, end))
        assert again[0][1].stream.epoch == 1 and again[0][0] != steps[0][0]
    assert by_policy["share"] == Counter(range(731))
    assert sum(by_policy["drop"].values()) < 731 < sum(by_policy["repeat"].values())
    assert max(by_policy["drop"].values()) == 1 and min(by_policy["repeat"].values()) == 1


def test_the_last_two_steps_of_an_epoch_are_alike_in_the_scheme_of_costs() -> None:
    for n in range(560, 760, 7):
        sizes = random_sizes(n, seed=1, longest=ROW // 2)
        fills = [
            sum(sizes.tokens[list(row)].sum() for row in rows)
            for rows, _ in epoch(scheme_of("cost", sizes, 8))
        ]
        assert min(fills) > 0.35 * max(fills), fills


@pytest.mark.parametrize("name", NAMES)
def test_samples_above_a_cap_are_left_out_and_counted_or_named(name: str) -> None:
    sizes = random_sizes(300, seed=8, longest=ROW // 2)
    for field, value, kind in (
        ("tokens", ROW + 1, "tokens"),
        ("patches", PATCHES + 1, "patches"),
        ("images", 13, "images"),
    ):
        if kind != "tokens" and name != "cost":
            continue
        changed = {key: values.copy() for key, values in vars(sizes).items()}
        changed[field][[17, 250]] = value
        hard = SampleSizes(**changed)
        steps = list(epoch(scheme_of(name, hard, 4)))
        seen = Counter(i for rows, _ in steps for row in rows for i in row)
        assert seen == Counter(set(range(300)) - {17, 250}) and steps[-1][1].dropped == 2
        with pytest.raises(DataError, match=rf"key-(17|250) \({value:,} {kind}\)"):
            list(epoch(scheme_of(name, hard, 4, on_long="raise", names="key-{}".format)))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("n", [0, 1, 3])
def test_fewer_samples_than_rows_are_refused_with_both_counts(name: str, n: int) -> None:
    with pytest.raises(ConfigError, match=f"needs 4 rows .* only {n} usable"):
        RunPlan(scheme_of(name, random_sizes(n, seed=0), 4), epochs=1)


@pytest.mark.parametrize("name", NAMES)
def test_an_endless_mix_goes_on_and_ends_where_nothing_fits(name: str) -> None:
    sizes = random_sizes(50, seed=0)
    stream = SampleStream([Source(name="a", count=50, weight=1.0, epochs=None)], seed=1)
    scheme = SCHEMES[name](stream, lambda numbers: sizes[numbers], Limits(tokens=ROW), rows=4, cost=COST)
    plan = RunPlan(scheme, steps=60)
    seen = Counter(i for step in range(60) for row in plan.step_rows(step) for i in row)
    if name != "resolution_bucket":  # there a bucket of few samples waits until they make a step
        ahead = 3 if name == "cost" else 12  # rows in hand
        assert len(seen) == 50 and max(seen.values()) - min(seen.values()) <= ahead
    nothing = SCHEMES[name](stream, lambda numbers: sizes[numbers], Limits(tokens=1), rows=4, cost=COST)
    with pytest.raises(ConfigError, match="only 0 usable"):
        RunPlan(nothing, steps=3).step_rows(0)


def test_a_step_of_the_bucket_scheme_holds_images_of_like_size() -> None:
    sizes = random_sizes(4000, seed=6)
    steps = [rows for rows, _ in epoch(scheme_of("resolution_bucket", sizes, 4))]
    whole = 0
    for rows in steps:
        patches = sizes.patches[[i for row in rows for i in row]]
        whole += bool(patches.max() == 0 or patches.min() > patches.max() / 2)
    assert whole > 0.9 * len(steps)


def test_rows_of_the_scheme_of_costs_are_more_equal_than_those_of_tokens_and_of_buckets() -> None:
    sizes = random_sizes(6000, seed=9, longest=120, most=500)
    ratio = {}
    for name in NAMES:
        plan = RunPlan(scheme_of(name, sizes, 16), epochs=1)
        steps = [plan.balance_of(step, world=8, objective="zero3") for step in range(plan.total_steps - 2)]
        ratio[name] = sum(step.cost for step in steps if step) / sum(step.mean for step in steps if step)
        by_hand = plan.balance_of(3, world=8, objective="zero3")
        rows = plan.step_rows(3, world=8)
        encoder = [sum(3.1 * sizes.patches[i] + 0.002 * sizes.patch_squares[i] for i in row) for row in rows]
        decoder = [sum(40.0 * sizes.tokens[i] + 0.01 * sizes.tokens[i] ** 2 for i in row) for row in rows]
        most = sum(max(part[at : at + 8]) for part in (encoder, decoder) for at in (0, 8))
        assert by_hand is not None and by_hand.cost == pytest.approx(most)
        assert by_hand.mean == pytest.approx(sum(encoder + decoder) / 8)
    assert ratio["cost"] < 1.01 < 1.03 < min(ratio["token_budget"], ratio["resolution_bucket"]), ratio
