"""How equal the rows of several packing schemes are, over one made-up mix of pictures and text, and what planning costs.

    python scripts/bench_planner.py            about five minutes on one core
    python scripts/bench_planner.py --quick    8 ranks, few steps

Costs are simulated in FLOPs; a micro-step costs the largest encoder cost plus the largest decoder cost of its rows, as under ZeRO-3.
Every scheme packs the same stream of samples; `bound` is what no scheme could beat for the steps that it chose: the largest single sample
against a mean row. Times are CPU seconds of this process, the best of --rounds.
"""

from __future__ import annotations

import argparse
import heapq
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from mmds.balance import IntArray, Limits, Sizes, bound, even_rows, place, sync_cost, take
from mmds.geometry import Geometry
from mmds.packing import Packer

ROW_TOKENS = 8192
TOGETHER = 512  # rows that are evened out in one go
PATCH_CAP = 1.25  # of the mean patches of a full row
HIGH = 1000  # visual tokens from which on a picture counts as high-resolution
GEOMETRY = Geometry(
    mode="native", image_size=0, patch_size=14, merge=2, packed=True, max_pixels=1280 * 28 * 28
)
# share of samples, median of the text's tokens
KINDS = {
    "photograph": (0.34, 130),
    "small photograph": (0.12, 110),
    "cover": (0.09, 110),
    "chart": (0.10, 200),
    "document": (0.10, 350),
    "tall": (0.04, 300),
    "megapixels": (0.05, 150),
    "several": (0.03, 250),
    "text": (0.13, 450),
}


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Decoder of n parameters, l layers of width d; encoder passes: 1 frozen, 3 trained. What to reach at 8, 64, 512 ranks, and for "step"."""

    n: float
    l: int  # noqa: E741
    d: int
    passes: int
    reach: tuple[float, float, float]
    reach_step: float


SETTINGS = {
    "7B, frozen ViT-L": Setting(n=7e9, l=32, d=4096, passes=1, reach=(1.004, 1.004, 1.004), reach_step=1.002),
    "7B, trained ViT-L": Setting(
        n=7e9, l=32, d=4096, passes=3, reach=(1.006, 1.006, 1.010), reach_step=1.002
    ),
    "1.5B, trained ViT-L": Setting(
        n=1.5e9, l=28, d=1536, passes=3, reach=(1.012, 1.018, 1.040), reach_step=1.010
    ),
}
RANKS = (8, 64, 512)


@dataclass(frozen=True, kw_only=True)
class Stream:
    """Samples in the order of a permutation: int64 [n] tokens, patches, images, sums of each image's patches squared; bool [n] high-resolution."""

    tokens: IntArray
    patches: IntArray
    images: IntArray
    squares: IntArray
    high: np.ndarray

    def sizes(self, setting: Setting) -> Sizes:
        """With their costs: FLOPs by PaLM, appendix B (arXiv 2204.02311): 2 N a token forward for the parameters, and 4 L d a token
        and key for attention, of which the causal half counts in the decoder; three passes where it trains, one where it is frozen."""
        decoder = 2 * setting.n * self.tokens + 4 * setting.l * setting.d * self.tokens**2 / 2
        encoder = 2 * 304e6 * self.patches + 4 * 24 * 1024 * self.squares
        return Sizes(
            tokens=self.tokens,
            patches=self.patches,
            images=self.images,
            encoder=encoder * setting.passes,
            decoder=decoder * 3,
        )

    def limits(self) -> Limits:
        """The row, and the patch cap at PATCH_CAP of the mean of a full row."""
        full = self.patches.mean() * ROW_TOKENS / self.tokens.mean()
        return Limits(tokens=ROW_TOKENS, patches=int(PATCH_CAP * full))


def draw(count: int, seed: int = 0) -> Stream:
    """That many samples of the mix; text is lognormal (0.7), cut to 8 to 4096 tokens, since medians and spread alone are given."""
    rng = np.random.default_rng(seed)
    names, shares = list(KINDS), [share for share, _ in KINDS.values()]
    columns = np.zeros((4, count), dtype=np.int64)
    high = np.zeros(count, dtype=bool)
    for i, kind in enumerate(rng.choice(len(names), size=count, p=shares).tolist()):
        text = int(np.clip(rng.lognormal(np.log(KINDS[names[kind]][1]), 0.7), 8, 4096))
        plans = [GEOMETRY.plan(*size) for size in _pictures(names[kind], rng)]
        columns[:, i] = (
            text + sum(plan.visual_tokens for plan in plans),
            sum(plan.patches for plan in plans),
            len(plans),
            sum(plan.patches**2 for plan in plans),
        )
        high[i] = any(plan.visual_tokens >= HIGH for plan in plans)
    return Stream(tokens=columns[0], patches=columns[1], images=columns[2], squares=columns[3], high=high)


def _pictures(kind: str, rng: np.random.Generator) -> list[tuple[int, int]]:
    """Width and height of a sample's pictures."""

    def near(width: float, height: float, wide: float, tall: float) -> list[tuple[int, int]]:
        return [(int(width * rng.lognormal(0, wide)), int(height * rng.lognormal(0, tall)))]

    if kind == "photograph":
        return near(640, 480, 0.05, 0.05) if rng.random() < 0.7 else near(480, 640, 0.05, 0.05)
    if kind == "small photograph":
        return [(500, 375)]
    if kind == "cover":
        return near(330, 500, 0.05, 0.0)
    if kind == "chart":
        return near(850, 620, 0.35, 0.35)
    if kind == "document":
        return near(1700, 2200, 0.2, 0.2)
    if kind == "tall":
        return near(900, 2600, 0.25, 0.5)
    if kind == "megapixels":
        pixels = rng.uniform(2e6, 24e6)
        return [(int((pixels * 4 / 3) ** 0.5), int((pixels * 3 / 4) ** 0.5))]
    if kind == "several":
        return [(640, 480)] * int(rng.integers(2, 9))
    return []


Step = list[IntArray]  # samples of each row
Scheme = Callable[[Sizes, Limits, int, int], list[Step]]  # sizes, limits, rows of a step, steps
# sizes of a window, limits, rows, samples carried over -> samples of each row, samples left over
Pack = Callable[[Sizes, Limits, int, int], tuple[list[list[int]], list[int]]]


def windows(pack: Pack) -> Scheme:
    """A scheme that packs a window of one step after the other and carries what is left over: the same windows for all such schemes."""

    def plan(sizes: Sizes, limits: Limits, rows: int, steps: int) -> list[Step]:
        place, left, planned = 0, np.zeros(0, dtype=np.int64), []
        for _ in range(steps):
            at_hand = np.concatenate([left, np.arange(place, min(len(sizes), place + 14 * rows + 64))])
            count = take(sizes[at_hand], limits, rows, carried=len(left))
            window = at_hand[:count]
            place += count - len(left)
            filled, over = pack(sizes[window], limits, rows, len(left))
            planned.append([window[np.array(row, dtype=np.int64)] for row in filled])
            left = window[np.array(over, dtype=np.int64)]
        return planned

    return plan


def planner(objective: str) -> Scheme:
    """Ours: steps are placed one after the other, and evened out so many together that they have about TOGETHER rows."""

    def plan(sizes: Sizes, limits: Limits, rows: int, steps: int) -> list[Step]:
        start, left, planned = 0, np.zeros(0, dtype=np.int64), []
        together = max(1, TOGETHER // rows)
        for first in range(0, steps, together):
            windows_, placed = [], []
            for _ in range(first, min(steps, first + together)):
                at_hand = np.concatenate([left, np.arange(start, min(len(sizes), start + 14 * rows + 64))])
                count = take(sizes[at_hand], limits, rows, carried=len(left))
                window, start = at_hand[:count], start + count - len(left)
                step = place(sizes[window], limits, rows=rows, objective=objective, carried=len(left))
                left = window[np.array(step.leftovers, dtype=np.int64)]
                windows_.append(window)
                placed.append(step)
            done = even_rows(placed, limits, rows=rows, world=rows, objective=objective)
            for window, step_rows in zip(windows_, done, strict=True):
                planned.append([window[np.array(row, dtype=np.int64)] for row in step_rows.rows])
        return planned

    return plan


def in_turn(order: IntArray, sizes: Sizes, limits: Limits, rows: int, steps: int) -> list[Step]:
    """One row after the other, closed when the next sample does not fit."""
    filled: list[list[int]] = [[]]
    tokens = patches = 0
    for i in order.tolist():
        t, p = int(sizes.tokens[i]), int(sizes.patches[i])
        if filled[-1] and (tokens + t > limits.tokens or patches + p > (limits.patches or p)):
            if len(filled) == rows * steps:
                break
            filled.append([])
            tokens = patches = 0
        filled[-1].append(i)
        tokens, patches = tokens + t, patches + p
    return [[np.array(row) for row in filled[s * rows : (s + 1) * rows]] for s in range(steps)]


def random_rows(sizes: Sizes, limits: Limits, rows: int, steps: int) -> list[Step]:
    """The stream's own order."""
    return in_turn(np.arange(len(sizes)), sizes, limits, rows, steps)


def length_grouped(sizes: Sizes, limits: Limits, rows: int, steps: int) -> list[Step]:
    """All samples of the steps by length; a step holds neighbours."""
    enough = int(np.searchsorted(np.cumsum(sizes.tokens), rows * steps * limits.tokens))
    order = np.argsort(-sizes.tokens[:enough], kind="stable")
    return in_turn(order, sizes, limits, rows, steps)


def token_budget(sizes: Sizes, limits: Limits, rows: int, steps: int) -> list[Step]:
    """First-fit over open rows by tokens alone (mmds/packing.py)."""
    packer = Packer((), lambda samples: sizes.tokens[samples], limits.tokens)
    filled: list[tuple[int, ...]] = []
    for first in range(0, len(sizes), 256):
        samples = np.arange(first, min(len(sizes), first + 256))
        filled += packer.add(samples, sizes.tokens[samples])
        if len(filled) >= rows * steps:
            break
    return [[np.array(row) for row in filled[s * rows : (s + 1) * rows]] for s in range(steps)]


def best_fit_decreasing(
    sizes: Sizes, limits: Limits, rows: int, carried: int
) -> tuple[list[list[int]], list[int]]:
    """The longest first, each in the fullest row that has room under both caps."""
    room_t, room_p = np.full(rows, limits.tokens), np.full(rows, limits.patches)
    filled: list[list[int]] = [[] for _ in range(rows)]
    left = []
    for i in np.argsort(-sizes.tokens, kind="stable").tolist():
        fits = (room_t >= sizes.tokens[i]) & (room_p >= sizes.patches[i])
        if not fits.any():
            left.append(i)
            continue
        row = int(np.where(fits, room_t, limits.tokens + 1).argmin())
        filled[row].append(i)
        room_t[row] -= sizes.tokens[i]
        room_p[row] -= sizes.patches[i]
    return filled, sorted(left)


def two_cap_random(reshuffles: int) -> Pack:
    """First-fit under both caps in that many random orders; the one with the least sync cost over its mean stays."""

    def pack(sizes: Sizes, limits: Limits, rows: int, carried: int) -> tuple[list[list[int]], list[int]]:
        rng, first = np.random.default_rng(len(sizes)), np.arange(carried)
        orders = [np.r_[first, carried + rng.permutation(len(sizes) - carried)] for _ in range(reshuffles)]
        excess = []
        every = _first_fit(np.array(orders), sizes, limits, rows)
        for row_of in every:
            placed = row_of >= 0
            costs = [
                np.bincount(row_of[placed], of[placed], minlength=rows)[None]
                for of in (sizes.encoder, sizes.decoder)
            ]
            cost, mean = sync_cost(*costs)
            excess.append(cost / mean)
        row_of = every[int(np.argmin(excess))]
        return [np.flatnonzero(row_of == row).tolist() for row in range(rows)], np.flatnonzero(
            row_of < 0
        ).tolist()

    return pack


def _first_fit(orders: IntArray, sizes: Sizes, limits: Limits, rows: int) -> IntArray:
    """Each sample into the first row that has room, in every one of the orders, int64 [k, n] -> its row or -1, int64 [k, n]."""
    assert limits.patches is not None
    count, every = len(orders), np.arange(len(orders))
    room_t, room_p = np.full((count, rows), limits.tokens), np.full((count, rows), limits.patches)
    row_of = np.full(orders.shape, -1)
    for samples in orders.T:
        tokens, patches = sizes.tokens[samples], sizes.patches[samples]
        fits = (room_t >= tokens[:, None]) & (room_p >= patches[:, None])
        row = fits.argmax(axis=1)
        good = fits[every, row]
        row_of[every[good], samples[good]] = row[good]
        room_t[every[good], row[good]] -= tokens[good]
        room_p[every[good], row[good]] -= patches[good]
    return row_of


class Part:
    """One part of a partial partition, as trainers' code has it: compared by sum, then by number of samples, then by the samples."""

    def __init__(self) -> None:
        self.sum = 0.0
        self.samples: list[tuple[int, float]] = []

    def add(self, sample: int, cost: float) -> None:
        self.samples.append((sample, cost))
        self.sum += cost

    def __lt__(self, other: Part) -> bool:
        if self.sum != other.sum:
            return self.sum < other.sum
        if len(self.samples) != len(other.samples):
            return len(self.samples) < len(other.samples)
        return self.samples < other.samples


def karmarkar_karp(
    sizes: Sizes, limits: Limits, rows: int, carried: int
) -> tuple[list[list[int]], list[int]]:
    """Largest differencing by decoder work (Karmarkar and Karp 1982) in the form in which trainers ship it (verl's seqlen_balancing):
    a heap of partial partitions of objects, the two most uneven merged in opposite order. It knows no caps."""
    heap = []
    for number, cost in enumerate(sizes.decoder.tolist()):
        parts = [Part() for _ in range(rows)]
        parts[0].add(number, cost)
        heap.append((-cost, number, parts))
    heapq.heapify(heap)
    number = len(heap)
    while len(heap) > 1:
        _, _, a = heapq.heappop(heap)
        _, _, b = heapq.heappop(heap)
        for part, other in zip(a, reversed(b), strict=True):
            for sample, cost in other.samples:
                part.add(sample, cost)
        a.sort(reverse=True)
        heapq.heappush(heap, (a[-1].sum - a[0].sum, number, a))
        number += 1
    return [[sample for sample, _ in part.samples] for part in heap[0][2]], []


def karmarkar_karp_lists(
    sizes: Sizes, limits: Limits, rows: int, carried: int
) -> tuple[list[list[int]], list[int]]:
    """The same with plain tuples and lists, as quick as Python gets."""
    heap = [
        (-cost, number, [(cost, [number])] + [(0.0, [])] * (rows - 1))
        for number, cost in enumerate(sizes.decoder.tolist())
    ]
    heapq.heapify(heap)
    number = len(heap)
    while len(heap) > 1:
        _, _, a = heapq.heappop(heap)
        _, _, b = heapq.heappop(heap)
        merged = [(x + y, p + q) for (x, p), (y, q) in zip(a, reversed(b), strict=True)]
        merged.sort(key=lambda part: part[0], reverse=True)
        heapq.heappush(heap, (merged[-1][0] - merged[0][0], number, merged))
        number += 1
    return [part for _, part in heap[0][2]], []


def schemes(reshuffles: int) -> dict[str, Scheme]:
    """Name -> scheme, ours first."""
    return {
        "planner": planner("zero3"),
        "random": random_rows,
        "length-grouped": length_grouped,
        "token budget": token_budget,
        "best-fit decreasing": windows(best_fit_decreasing),
        f"two-cap random, best of {reshuffles}": windows(two_cap_random(reshuffles)),
        "balanced on the sum only": planner("step"),
        "Karmarkar-Karp, decoder": windows(karmarkar_karp_lists),
        "Karmarkar-Karp, as shipped": windows(karmarkar_karp),
    }


@dataclass(frozen=True, kw_only=True)
class Result:
    """Means over the steps: sync cost and largest sum of both costs, each over its mean, its lower bound; worst excess over the mean
    excess; fill; rows above a cap; whether every sample stands once; high-resolution share's spread over that of the plain stream;
    CPU microseconds a sample."""

    sync: float
    worst: float
    total: float
    bound: float
    fill: float
    broken: int
    once: bool
    spread: float
    us: float


def measure(
    scheme: Scheme, sizes: Sizes, limits: Limits, high: np.ndarray, rows: int, steps: int, rounds: int
) -> Result:
    """Run a scheme and look at what it gave in `steps` steps.

    It is timed over at least TOGETHER rows, since the planner takes that many at a time in a run; the best of `rounds`.
    """
    planned, per_sample = scheme(sizes, limits, rows, steps), float("inf")
    for _ in range(rounds):
        started = time.process_time()
        timed = scheme(sizes, limits, rows, max(steps, TOGETHER // rows))
        seconds = time.process_time() - started
        per_sample = min(per_sample, seconds / sum(len(row) for step in timed for row in step))
    every = np.concatenate([row for step in planned for row in step])
    sync, total, bounds, counts = [], [], [], []
    for step in planned:
        whole = np.concatenate(step)
        most, excess = _step_cost(step, sizes)
        sync.append(excess)
        total.append(most)
        bounds.append(bound(sizes[whole], world=rows).ratio)
        counts.append(len(whole))
    filled = np.array(
        [[sizes.tokens[row].sum(), sizes.patches[row].sum()] for step in planned for row in step]
    )
    over = np.array(sync) - 1
    return Result(
        sync=float(np.mean(sync)),
        worst=float(over.max() / over.mean()),
        total=float(np.mean(total)),
        bound=float(np.mean(bounds)),
        fill=float(filled[:, 0].mean() / limits.tokens),
        broken=int(((filled[:, 0] > limits.tokens) | (filled[:, 1] > (limits.patches or 0))).sum()),
        once=len(np.unique(every)) == len(every),
        spread=_spread(planned, high, counts),
        us=per_sample * 1e6,
    )


def _step_cost(step: Step, sizes: Sizes) -> tuple[float, float]:
    """Largest sum of both costs, and sync cost, each over its mean, of a step of one micro-step."""
    encoder = np.array([[sizes.encoder[row].sum() for row in step]])
    decoder = np.array([[sizes.decoder[row].sum() for row in step]])
    cost, mean = sync_cost(encoder, decoder)
    both = encoder + decoder
    return float(both.max() / both.mean()), cost / mean


def _spread(planned: list[Step], high: np.ndarray, counts: list[int]) -> float:
    """Standard deviation of the steps' shares of high-resolution samples, over that of equally many samples in the stream's order."""
    shares = [high[np.concatenate(step)].mean() for step in planned]
    ends = np.cumsum([0, *counts])
    plain = [high[a:b].mean() for a, b in zip(ends, ends[1:], strict=False)]
    return float(np.std(shares) / np.std(plain))


def report(stream: Stream, ranks: Sequence[int], steps: int, reshuffles: int, rounds: int) -> bool:
    """Print all tables; whether everything was reached."""
    limits, found = stream.limits(), {}
    for name, setting in SETTINGS.items():
        sizes = stream.sizes(setting)
        share = sizes.encoder.sum() / (sizes.encoder.sum() + sizes.decoder.sum())
        print(f"\n{name}: encoder {share:.0%} of the cost")
        print(
            f"{'scheme':<28}{'ranks':>6}{'sync/mean':>11}{'bound':>8}{'worst':>7}{'sum/mean':>10}{'fill':>7}{'broken':>8}"
            f"{'once':>6}{'spread':>8}{'us/sample':>11}"
        )
        for title, scheme in schemes(reshuffles).items():
            for rows in ranks:
                if title == "Karmarkar-Karp, as shipped" and rows > 64:
                    continue  # minutes, for the partition of the line above
                again = rounds if title.startswith(("planner", "Karmarkar-Karp")) and rows < 512 else 1
                r = found[name, title, rows] = measure(scheme, sizes, limits, stream.high, rows, steps, again)
                print(
                    f"{title:<28}{rows:>6}{r.sync:>11.4f}{r.bound:>8.3f}{r.worst:>6.1f}x{r.total:>10.4f}{r.fill:>7.3f}{r.broken:>8}"
                    f"{'yes' if r.once else 'NO':>6}{r.spread:>7.2f}x{r.us:>11.1f}",
                    flush=True,
                )
    return verdict(found, ranks)


def verdict(found: dict[tuple[str, str, int], Result], ranks: Sequence[int]) -> bool:
    """Print what was to be reached and whether it was."""
    print("\nverdict")
    good = []

    def line(what: str, values: Sequence[float], limits: Sequence[float], at_least: bool = False) -> None:
        met = all(v >= m if at_least else v <= m for v, m in zip(values, limits, strict=True))
        good.append(met)
        sign = ">=" if at_least else "<="
        shown = " / ".join(f"{v:.4g}" for v in values)
        print(
            f"{what:<66}{shown:<32}{sign} {' / '.join(f'{m:g}' for m in limits):<26}{'reached' if met else 'MISSED'}"
        )

    for name, setting in SETTINGS.items():
        ours = [found[name, "planner", rows] for rows in ranks]
        step = [found[name, "balanced on the sum only", rows] for rows in ranks]
        reach = [setting.reach[RANKS.index(rows)] for rows in ranks]
        each = [1.0] * len(ranks)
        line(f"{name}: sync cost over mean", [r.sync for r in ours], reach)
        line(f"{name}: worst excess over mean excess", [r.worst for r in ours], [4 * x for x in each])
        line(
            f"{name}: objective step, max/mean",
            [r.total for r in step],
            [setting.reach_step * x for x in each],
        )
        both = ours + step
        line(f"{name}: least fill", [min(r.fill for r in both)], [0.96], at_least=True)
        line(f"{name}: rows above a cap", [sum(r.broken for r in both)], [0])
        line(f"{name}: runs with a sample twice", [sum(not r.once for r in both)], [0])
        line(f"{name}: high-resolution spread", [r.spread for r in ours], [1.25 * x for x in each])
        line(f"{name}: us a sample", [r.us for r in ours], [50 * x for x in each])
    for title in ("Karmarkar-Karp, as shipped", "Karmarkar-Karp, decoder") if 64 in ranks else ():
        for name in SETTINGS:
            ratio = found[name, title, 64].us / found[name, "planner", 64].us
            line(f"{name}: time of {title}, over ours", [ratio], [2], at_least=True)
    return all(good)


def growth(stream: Stream, counts: Sequence[int], rows: int) -> None:
    """Time a sample over epochs of growing size, of samples drawn again from the stream."""
    limits, setting = stream.limits(), SETTINGS["7B, trained ViT-L"]
    sizes = stream.sizes(setting)
    print(f"\ntime a sample at {rows} ranks, 7B, trained ViT-L")
    for count in counts:
        epoch = sizes[np.random.default_rng(1).integers(len(sizes), size=count)]
        steps = max(1, int(epoch.tokens.sum() / (rows * limits.tokens)) - 1)
        started = time.process_time()
        planned = planner("zero3")(epoch, limits, rows, steps)
        seconds = time.process_time() - started
        done = sum(len(row) for step in planned for row in step)
        print(f"{count:>10,} samples{seconds / done * 1e6:>10.1f} us a sample", flush=True)


def pace() -> str:
    """What this machine is worth just now: the time of one small numpy call, to judge the times beside it."""
    values, best = np.zeros(8), float("inf")
    for _ in range(50):
        started = time.process_time()
        for _ in range(1000):
            np.multiply(values, 2.0, out=values)
        best = min(best, time.process_time() - started)
    return f"one numpy call on 8 numbers takes {best * 1e3:.2f} us of CPU time now"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="8 ranks, 4 steps, 3 reshuffles, no growth")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--reshuffles", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    ranks, steps, reshuffles, rounds = RANKS, given.steps, given.reshuffles, given.rounds
    if given.quick:
        ranks, steps, reshuffles, rounds = RANKS[:1], 4, 3, 1
    stream = draw(int(max(ranks[-1] * steps, TOGETHER) * 11.5) + 256, given.seed)
    print(pace())
    print(
        f"{len(stream.tokens):,} samples, {stream.tokens.mean():.0f} tokens and {stream.patches.mean():.0f} patches each; "
        f"row {ROW_TOKENS} tokens, at most {stream.limits().patches} patches; {steps} steps"
    )
    reached = report(stream, ranks, steps, reshuffles, rounds)
    if not given.quick:
        growth(stream, (10_000, 100_000, 1_000_000), 64)
    print(pace())
    return 0 if reached else 1


if __name__ == "__main__":
    sys.exit(main())
