"""Rows that exchange samples until none is much costlier than the others.

    R  rows    G  groups of rows whose costs add up    n  samples    C  kinds of room    H  rows that give    P  partners of each
    Q  bundles of a row: what it may hand over in one exchange    S  sets: groups are evened out only within their set

Several sets go through together because an array operation on few rows costs nearly as much as on many. They do not touch
one another: each comes out as it would alone.

A row has two costs, encoder and decoder, and each is compared apart. Two rows that exchange samples keep their sum, so what an exchange
decides is the half of their difference: `half` = (b - a) / 2 before, |half + given - taken| after, in either cost. The larger of
the two rows then costs the middle plus that. All bundles of many pairs of rows are tried in one array operation.

Costs are whole numbers and all sums of them are exact. Only products and sums of two numbers are rounded, never a reduction, and ties go
to the smaller number, so that the answer is the same on every processor.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]
RoughArray = NDArray[np.float32]
BoolArray = NDArray[np.bool_]

UNIT = 1 << 30  # of the mean row's cost in its set: the grain of whole-number costs
LEAST_GAIN = UNIT // 1000000  # what an exchange must save
# Directions in the plane of both costs, along which heavy groups meet light ones.
DIRECTIONS = ((1, 0), (0, 1), (1, 1), (1, -1), (2, 1), (1, 2), (2, -1), (1, -2))
EVEN_ROUNDS = 4
SHAVE_ROUNDS = 12  # in which an eighth of the groups is relieved at a time
RELIEF_ROUNDS = 20  # in which the costliest group alone is
PATIENCE = 4  # such rounds without a gain, for every row of a group, that end the search
MOST_PARTNERS = 16  # rows with which a row tries single samples, the lightest
PARTNERS = 2  # rows with which a row tries bundles of two samples
WITHIN_REACH = {1: 32, 2: 10}  # samples of a row that may be handed over alone, and two at once
SPARE = 2  # slots free behind the longest row: most samples that a row hands over at once


class Packing:
    """Samples in rows, what they need and what they cost. Exchanges keep every row within its room, and none becomes empty.

    room: int64 [C], of a row. need: int64 [C, n], the first kind at least 1 each. cost: int64 [2, n]. row_of: int64 [n], 0..R-1.
    group_of: int64 [R], 0..G-1, equally many rows each.
    """

    def __init__(
        self, room: IntArray, need: IntArray, cost: IntArray, row_of: IntArray, group_of: IntArray
    ) -> None:
        self.room = room[:, None]
        self.need = np.pad(need, ((0, 0), (0, 1)))  # the last sample is "nothing"
        self.cost = np.pad(cost, ((0, 0), (0, 1)))
        self._rough = self.cost.astype(np.float32)
        self.nothing, rows = len(row_of), len(group_of)
        order, counts = np.argsort(row_of, kind="stable"), np.bincount(row_of, minlength=rows)
        within = np.arange(len(order)) - (np.cumsum(counts) - counts)[row_of[order]]
        self.slots = np.full((rows, counts.max() + SPARE), self.nothing, dtype=np.int64)
        self.slots[row_of[order], within] = order
        self.count = counts
        self.used = self.need[:, self.slots].sum(axis=2)
        self.regroup(group_of)

    def regroup(self, group_of: IntArray) -> None:
        """Add up the rows' costs by other groups, int64 [R]."""
        self.group_of = group_of
        self.members = np.argsort(group_of, kind="stable").reshape(int(group_of.max()) + 1, -1)
        self.load = self.row_costs()[:, self.members].sum(axis=2)

    def row_costs(self) -> IntArray:
        """int64 [2, R]."""
        costs: IntArray = self.cost[:, self.slots].sum(axis=2)
        return costs

    def rows(self) -> list[IntArray]:
        """Samples of each row, ascending."""
        return [np.sort(row[row < self.nothing]) for row in self.slots]

    def exchange(self, a: IntArray, b: IntArray, floor: FloatArray, *, most: int = 1) -> BoolArray:
        """Let each row a[h], int64 [H], exchange with that of rows b[h], int64 [H, P], which leaves both groups the least sum of maxima.

        The rows are all different, and so are the groups of a and those of b. floor: float64 [2, H], costs below which nothing is
        gained. most: samples that a row may hand over, 1 to SPARE. Returns which rows of a did exchange, bool [H].
        """
        slots, partners = self.slots.shape[1], b.shape[1]
        give, take = (_bundles(int(self.count[rows].max()), slots, most) for rows in (a, b))
        floors = floor.repeat(partners, axis=1)
        score, choice = self._best(a.repeat(partners), b.reshape(-1), floors, give, take)
        partner = score.reshape(b.shape).argmin(axis=1) + np.arange(0, b.size, partners)
        gains: BoolArray = score[partner] < np.inf
        if gains.any():
            given, taken = np.divmod(choice[partner[gains]], take.shape[1])
            self._hand_over(a[gains], b.reshape(-1)[partner[gains]], give[:, given], take[:, taken])
        return gains

    def _best(
        self, a: IntArray, b: IntArray, floor: FloatArray, give: IntArray, take: IntArray
    ) -> tuple[RoughArray, IntArray]:
        """Pairs of rows -> least sum of both costs' maxima, float32 [pairs], infinite without a gain; index in [Qa, Qb]."""
        load_a, load_b = self.load[:, self.group_of[a]], self.load[:, self.group_of[b]]
        half = ((load_b - load_a) * 0.5).astype(np.float32)
        middle = (load_a + load_b) * 0.5
        least = (floor - middle).astype(np.float32)
        in_a, in_b = self.slots[a], self.slots[b]
        given = _of_bundles(self._rough[:, in_a], give) + half[:, :, None]
        taken = _of_bundles(self._rough[:, in_b], take)
        after = taken[:, :, None, :] - given[:, :, :, None]  # [2, pairs, Qa, Qb]
        np.abs(after, out=after)
        np.maximum(after, least[:, :, None, None], out=after)
        every, score = np.arange(len(a)), np.add(after[0], after[1], out=after[0]).reshape(len(a), -1)
        before = np.maximum(np.abs(half), least)
        enough = before[0] + before[1] - np.float32(LEAST_GAIN)
        choice = score.argmin(axis=1)
        best = score[every, choice]
        best[best >= enough] = np.inf
        tried = np.flatnonzero(best < np.inf)
        if len(tried):
            need_a = _of_bundles(self.need[:, in_a[tried]], give)
            need_b = _of_bundles(self.need[:, in_b[tried]], take)
            low, high = self._margins(a[tried], b[tried])
            u, v = np.divmod(choice[tried], take.shape[1])
            change = need_b[:, every[: len(tried)], v] - need_a[:, every[: len(tried)], u]
            bad = ((change < low) | (change > high)).any(axis=0)
            best[tried[bad]] = np.inf
            if len(give) == 1 and bad.any():  # the best of what fits, for single samples
                again, low, high = tried[bad], low[:, bad, None, None], high[:, bad, None, None]
                change = need_b[:, bad, None, :] - need_a[:, bad, :, None]
                fits = ((change >= low) & (change <= high)).all(axis=0).reshape(len(again), -1)
                allowed = np.where(fits, score[again], np.float32(np.inf))
                choice[again] = allowed.argmin(axis=1)
                best[again] = allowed[every[: len(again)], choice[again]]
                best[again[best[again] >= enough[again]]] = np.inf
        return best + (middle[0] + middle[1]).astype(np.float32), choice

    def _margins(self, a: IntArray, b: IntArray) -> tuple[IntArray, IntArray]:
        """Least and most that a row of a may need more after an exchange, int64 [C, pairs] each: room in both, and neither empty."""
        used_a, used_b = self.used[:, a], self.used[:, b]
        low, high = used_b - self.room, self.room - used_a
        np.maximum(low[0], 1 - used_a[0], out=low[0])
        np.minimum(high[0], used_b[0] - 1, out=high[0])
        return low, high

    def _hand_over(self, a: IntArray, b: IntArray, slots_a: IntArray, slots_b: IntArray) -> None:
        """Rows a and b, int64 [k], hand over what is in slots_a, int64 [up to SPARE, k], and slots_b."""
        gone, come = self.slots[a, slots_a], self.slots[b, slots_b]
        for of_row, slot, other in ((a, slots_a, come), (b, slots_b, gone)):
            self.slots[of_row, slot] = self.nothing
            free = self.count[of_row] + np.arange(len(other))[:, None]
            self.slots[of_row, free] = other
        need = self.need[:, come].sum(axis=1) - self.need[:, gone].sum(axis=1)
        cost = self.cost[:, come].sum(axis=1) - self.cost[:, gone].sum(axis=1)
        self.used[:, a] += need
        self.used[:, b] -= need
        self.load[:, self.group_of[a]] += cost
        self.load[:, self.group_of[b]] -= cost
        self._close_up()

    def _close_up(self) -> None:
        """Samples to the front of their row, and SPARE slots free behind the longest."""
        self.slots.sort(axis=1)
        self.count = (self.slots < self.nothing).sum(axis=1)
        wanted = int(self.count.max()) + SPARE
        if wanted < self.slots.shape[1]:
            self.slots = self.slots[:, :wanted].copy()
        elif wanted > self.slots.shape[1]:
            more = ((0, 0), (0, wanted - self.slots.shape[1]))
            self.slots = np.pad(self.slots, more, constant_values=self.nothing)


def even_out(packing: Packing, sets: IntArray) -> None:
    """Halve all differences within sets of groups, int64 [S, G]: along changing directions the heaviest meets the lightest, and so on."""
    half, rows = sets.shape[1] // 2, packing.members.shape[1]
    for k in range(EVEN_ROUNDS if half else 0):
        x, y = DIRECTIONS[k % len(DIRECTIONS)]
        load = packing.load[:, sets]
        mean = load.sum(axis=2) / sets.shape[1]
        off = load - mean[:, :, None]
        order = np.argsort(x * off[0] + y * off[1], axis=1, kind="stable")
        heavy, light = (
            np.take_along_axis(sets, part, axis=1) for part in (order[:, : -half - 1 : -1], order[:, :half])
        )
        a, b = packing.members[heavy, k % rows], packing.members[light, k // 2 % rows]
        packing.exchange(a.reshape(-1), b.reshape(-1, 1), mean.repeat(half, axis=1))


def relieve(packing: Packing, sets: IntArray, close: float) -> None:
    """Bring down the sum of both costs' maxima over each set of groups, int64 [S, G], to within `close` of the mean, or until nothing helps.

    First the eighth of the groups with most of one cost, then of the other, each with partners of its own; then the costliest group
    alone, with the lightest others, every second time handing over two samples at once.
    """
    groups = sets.shape[1]
    if groups >= 16:
        _relieve(packing, sets, close, groups // 8, SHAVE_ROUNDS)
    if groups > 1:
        _relieve(packing, sets, close, 1, RELIEF_ROUNDS)


def _relieve(packing: Packing, sets: IntArray, close: float, heavy: int, rounds: int) -> None:
    groups, rows = sets.shape[1], packing.members.shape[1]
    partners = min((groups - heavy) // heavy, MOST_PARTNERS)
    idle = np.zeros(len(sets), dtype=np.int64)  # rounds without a gain
    for k in range(rounds):
        load = packing.load[:, sets]  # [2, S, G]
        mean = load.sum(axis=2) / groups
        over = load.max(axis=2) - mean
        busy = (idle < PATIENCE * rows) & (over[0] + over[1] > close * (mean[0] + mean[1]))
        if not busy.any():
            return
        sets, idle, load, mean, over = sets[busy], idle[busy], load[:, busy], mean[:, busy], over[:, busy]
        every = np.arange(len(sets))
        kind = ((over[1] > over[0]) + idle) % 2 if heavy == 1 else k % 2
        order = np.argsort(-load[kind, every], axis=1, kind="stable")
        second = np.take_along_axis(load, order[None, :, heavy:], axis=2).max(axis=2)
        ordered = np.take_along_axis(sets, order, axis=1)
        own = packing.members[ordered[:, :heavy], k // 2 % rows]
        others = ordered[:, ::-1][:, : heavy * partners]  # lightest first
        others = packing.members[others.reshape(-1, partners, heavy).transpose(0, 2, 1), k // 3 % rows]
        double = heavy == 1 and k % 2
        if double:
            others = others[:, :, :PARTNERS]
        floor = ((mean + second) * 0.5).repeat(heavy, axis=1)
        gains = packing.exchange(
            own.reshape(-1), others.reshape(own.size, -1), floor, most=2 if double else 1
        )
        idle = np.where(gains.reshape(own.shape).any(axis=1), 0, idle + 1)


@lru_cache(maxsize=256)
def _bundles(samples: int, slots: int, most: int) -> IntArray:
    """What rows of at most so many samples may hand over: up to `most` of them, the last slots standing for none. Slots, int64 [most, Q].

    Of rows with more than WITHIN_REACH samples the first so many come into question: they are as good as any, and time stays linear.
    """
    choice = [*range(min(samples, WITHIN_REACH[most])), *range(slots - most, slots)]
    return np.array(list(combinations(choice, most)), dtype=np.int64).T


def _of_bundles(values: NDArray, bundles: IntArray) -> NDArray:
    """Sums over bundles, [.., .., Q], of what stands in the slots, [.., .., slots]."""
    total = values[:, :, bundles[0]]
    for slot in bundles[1:]:
        total = total + values[:, :, slot]
    return total
