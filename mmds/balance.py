"""The rows of one step, equal in encoder and in decoder cost: a pure function of the sizes of the samples at hand.

    n  samples of the window    R  rows of the step    world  ranks; R = micro-steps x world

Under ZeRO-3 ranks meet inside every layer, so that a micro-step costs the largest encoder cost plus the largest decoder cost of its
rows: the *sync cost*. Rows that are equal in the sum alone still wait for one another; here both are balanced. The window is one step:
the caller hands over the next samples of its order, those left over from before first, and `take` says how many make a step.

What is left over follows from `place` alone, so that a caller may place many steps one after the other and even them out together.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from mmds.exchange import UNIT, Packing, even_out, relieve

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]
Samples = tuple[int, ...]

FILL = 0.97  # share of a step's room that a window is to fill: above it rows get hard to equal
CLOSE = {"zero3": 3e-3, "step": 1e-3}  # excess over the mean, by objective, at which a step is good enough
LEAST = 1e-6  # of a mean row: cost of a sample that has none, so that empty rows are filled first


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What each sample needs and costs: int64 [n] tokens (at least 1), patches, images; float64 [n] FLOPs (or seconds) of encoder, decoder."""

    tokens: IntArray
    patches: IntArray
    images: IntArray
    encoder: FloatArray
    decoder: FloatArray

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, samples: IntArray | slice) -> Sizes:
        """The sizes of some samples, in that order."""
        return Sizes(**{name: values[samples] for name, values in vars(self).items()})


class Needs(Protocol):
    """What samples need of a row, int64 [n] each."""

    @property
    def tokens(self) -> IntArray: ...
    @property
    def patches(self) -> IntArray: ...
    @property
    def images(self) -> IntArray: ...


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Most tokens, patches and images of a row; None: any number."""

    tokens: int
    patches: int | None = None
    images: int | None = None

    def capped(self, sizes: Needs) -> dict[str, tuple[int, IntArray]]:
        """Name -> (cap, what each sample needs, int64 [n]) of every kind that has a cap."""
        caps = {"tokens": self.tokens, "patches": self.patches, "images": self.images}
        return {name: (cap, getattr(sizes, name)) for name, cap in caps.items() if cap is not None}


@dataclass(frozen=True, kw_only=True)
class Placed:
    """A window whose leftovers are settled and whose rows are not equal yet. cost: int64 [2, n]. row_of: int64 [n], -1 for leftovers."""

    sizes: Sizes
    cost: IntArray
    row_of: IntArray
    leftovers: Samples


@dataclass(frozen=True, kw_only=True)
class StepRows:
    """rows: samples (0..n-1) of each of R rows; row `micro * world + rank` is that rank's in that micro-step. leftovers: the others, ascending."""

    rows: tuple[Samples, ...]
    leftovers: Samples


@dataclass(frozen=True, kw_only=True)
class Bound:
    """What no plan of a step can beat: sync cost (or cost of the step) over its mean is at least `ratio`.

    ratio > 1 comes from one sample that costs more than a rank's share: samples `encoder`, `decoder` (0..n-1) are the largest in either
    cost, `encoder_share` and `decoder_share` what they cost over a rank's mean share of the step. A pixel cap that brings
    `encoder_share` to 1 removes the encoder's part.
    """

    ratio: float
    encoder: int
    decoder: int
    encoder_share: float
    decoder_share: float


def take(sizes: Sizes, limits: Limits, rows: int, *, carried: int = 0) -> int:
    """How many of the leading samples make a window of `rows` rows; `len(sizes)` may mean that more would fit: hand over more.

    As many as come nearest to FILL of the room in the scarcest of what has a cap, but at least one a row, and at least the `carried`.
    """
    enough = len(sizes)
    for cap, need in limits.capped(sizes).values():
        total, aim = np.cumsum(need), FILL * cap * rows
        reach = int(np.searchsorted(total, aim))  # the first that passes the aim
        if reach < len(sizes):
            before = int(total[reach - 1]) if reach else 0
            enough = min(enough, reach + (int(total[reach]) - aim <= aim - before))
    return min(len(sizes), max(enough, rows, carried))


def place(sizes: Sizes, limits: Limits, *, rows: int, objective: str = "zero3", carried: int = 0) -> Placed:
    """A first row for each sample of a window, which decides what is left over; `even_rows` then makes the rows equal.

    carried: the first so many samples are left over from before; they are placed first and in order, the first of all always, so
    that a sample with k before it waits at most k steps. A row stays empty only when there are fewer samples than rows. Raises
    ValueError for a sample that is above a cap alone or needs no tokens.
    """
    assert rows > 0 and objective in CLOSE and 0 <= carried <= len(sizes)
    _check(sizes, limits)
    cost = whole_costs(sizes, rows, objective)
    row_of = _place(sizes, limits, cost, rows, carried)
    return Placed(sizes=sizes, cost=cost, row_of=row_of, leftovers=tuple(np.flatnonzero(row_of < 0).tolist()))


def even_rows(
    steps: Sequence[Placed], limits: Limits, *, rows: int, world: int, objective: str = "zero3"
) -> list[StepRows]:
    """The final rows of placed steps, `rows` each, in micro-steps of `world` ranks; many steps at a time cost less per sample.

    A step's rows are the same whichever steps it comes with, in every process and on every machine. limits, rows, objective: those of
    `place`. objective: "zero3" makes the micro-steps' sync costs small, "step" the largest rank's sum of both costs over the step
    (ZeRO-0 to 2).
    """
    assert rows % world == 0 and objective in CLOSE
    chosen = [np.flatnonzero(step.row_of >= 0) for step in steps]
    sizes = [step.sizes[samples] for step, samples in zip(steps, chosen, strict=True)]
    capped = [limits.capped(some) for some in sizes]
    packing = Packing(
        room=np.array([cap for cap, _ in capped[0].values()], dtype=np.int64),
        need=np.hstack([np.array([need for _, need in some.values()]) for some in capped]),
        cost=np.hstack([step.cost[:, samples] for step, samples in zip(steps, chosen, strict=True)]),
        row_of=np.concatenate([k * rows + steps[k].row_of[chosen[k]] for k in range(len(steps))]),
        group_of=np.arange(len(steps) * rows),
    )
    by_step = np.arange(len(steps) * rows).reshape(-1, rows)
    even_out(packing, by_step)
    costs = packing.row_costs()[:, by_step]
    arrange = _by_micro_step if objective == "zero3" else _by_rank
    order = np.array([k * rows + arrange(costs[:, k], world) for k in range(len(steps))])
    if objective == "zero3":
        relieve(packing, order.reshape(-1, world), CLOSE[objective])
    else:
        rank_of = np.empty(order.size, dtype=np.int64)
        rank_of[order] = np.arange(rows) % world + np.arange(len(steps))[:, None] * world
        packing.regroup(rank_of)
        relieve(packing, np.arange(len(steps) * world).reshape(-1, world), CLOSE[objective])
    filled = packing.rows()
    starts = np.cumsum([0, *(len(samples) for samples in chosen)])
    return [
        StepRows(
            rows=tuple(tuple(chosen[k][filled[row] - starts[k]].tolist()) for row in order[k]),
            leftovers=step.leftovers,
        )
        for k, step in enumerate(steps)
    ]


def balance(
    sizes: Sizes, limits: Limits, *, rows: int, world: int, objective: str = "zero3", carried: int = 0
) -> StepRows:
    """The rows of one step at once: `place`, then `even_rows`."""
    placed = place(sizes, limits, rows=rows, objective=objective, carried=carried)
    return even_rows([placed], limits, rows=rows, world=world, objective=objective)[0]


def sync_cost(encoder: FloatArray, decoder: FloatArray) -> tuple[float, float]:
    """Costs of the rows of a step, float64 [micro-steps, world] -> (sync cost, what it would be if all ranks were equal)."""
    mean = encoder.mean(axis=1).sum() + decoder.mean(axis=1).sum()
    return float(encoder.max(axis=1).sum() + decoder.max(axis=1).sum()), float(mean)


def bound(sizes: Sizes, *, world: int, objective: str = "zero3") -> Bound:
    """The lower bound of a step that holds these samples, at least one. Costs of which there are none have share 0."""
    share = {}
    for name in ("encoder", "decoder"):
        costs = getattr(sizes, name)
        total = float(costs.sum())
        share[name] = float(costs.max()) * world / total if total else 0.0
    e, d = float(sizes.encoder.sum()), float(sizes.decoder.sum())
    both = (sizes.encoder + sizes.decoder).max() * world / (e + d) if e + d else 1.0
    apart = (max(share["encoder"], 1.0) * e + max(share["decoder"], 1.0) * d) / (e + d) if e + d else 1.0
    return Bound(
        ratio=max(apart, 1.0) if objective == "zero3" else max(float(both), 1.0),
        encoder=int(sizes.encoder.argmax()),
        decoder=int(sizes.decoder.argmax()),
        encoder_share=share["encoder"],
        decoder_share=share["decoder"],
    )


def whole_costs(sizes: Sizes, rows: int, objective: str) -> IntArray:
    """Costs as whole numbers with the mean row's at UNIT, int64 [2, n]: encoder and decoder, or for "step" none and their sum."""
    cost = np.stack([sizes.encoder, sizes.decoder]).astype(np.float64)
    if objective == "step":
        cost = np.stack([np.zeros(len(sizes)), cost[0] + cost[1]])
    # added up one after the other: another order, as sum() may choose on another processor, might round differently
    total = cost.cumsum(axis=1)[:, -1].sum() if len(sizes) else 0.0
    return np.rint(cost * (UNIT * rows / total if total else 0.0)).astype(np.int64)


def _check(sizes: Sizes, limits: Limits) -> None:
    """Raise ValueError naming the first sample that no row can hold."""
    for name, (cap, need) in limits.capped(sizes).items():
        if (need > cap).any():
            sample = int((need > cap).argmax())
            raise ValueError(f"sample {sample} alone has {need[sample]} {name}, above a row's cap of {cap}")
    if (sizes.tokens < 1).any():
        raise ValueError(f"sample {int((sizes.tokens < 1).argmax())} has no tokens")


def _place(sizes: Sizes, limits: Limits, cost: IntArray, rows: int, carried: int) -> IntArray:
    """Row of each sample, int64 [n], -1 for one that fits nowhere: the largest first, each where its costs meet the least of their kind."""
    mean = np.maximum(cost.sum(axis=1, keepdims=True) / rows, 1.0)
    weight = np.maximum(cost / mean, LEAST)  # [2, n] of a mean row
    capped = list(limits.capped(sizes).values())
    largest = weight.max(axis=0)
    for cap, need in capped:
        largest = np.maximum(largest, need / cap)
    order = np.concatenate([np.arange(carried), carried + np.argsort(-largest[carried:], kind="stable")])
    room = np.array([[cap] * rows for cap, _ in capped], dtype=np.int64)
    needs = np.array([need for _, need in capped]).T
    rooms, needed = room.tolist(), needs.tolist()  # plain numbers too: they are quicker to read one at a time
    load_e, load_d, score, other = np.zeros((4, rows))
    encoder, decoder = weight.tolist()
    row_of = [-1] * len(sizes)
    for sample in order.tolist():
        np.multiply(load_e, encoder[sample], out=score)
        np.multiply(load_d, decoder[sample], out=other)
        np.add(score, other, out=score)
        row = int(score.argmin())
        if any(free[row] < amount for free, amount in zip(rooms, needed[sample], strict=True)):
            score[(room < needs[sample][:, None]).any(axis=0)] = np.inf
            row = int(score.argmin())
            if score[row] == np.inf:
                continue
        row_of[sample] = row
        for kind, amount in enumerate(needed[sample]):
            rooms[kind][row] = room[kind, row] = rooms[kind][row] - amount
        load_e[row] += encoder[sample]
        load_d[row] += decoder[sample]
    return np.array(row_of, dtype=np.int64)


def _by_micro_step(costs: IntArray, world: int) -> IntArray:
    """Rows in an order in which each `world` of them are alike, int64 [R]: by encoder, decoder or both, what gives the least sync cost."""
    orders = [np.argsort(-key, kind="stable") for key in (costs[0], costs[1], costs[0] + costs[1])]
    sums = [int(costs[:, order].reshape(2, -1, world).max(axis=2).sum()) for order in orders]
    return orders[sums.index(min(sums))]


def _by_rank(costs: IntArray, world: int) -> IntArray:
    """Rows in an order that gives every rank equally many and nearly the same sum of both costs, int64 [R]: the costliest to the least busy."""
    total = costs.sum(axis=0)
    ranks: list[list[int]] = [[] for _ in range(world)]
    heap = [(0, rank) for rank in range(world)]
    for row in np.argsort(-total, kind="stable").tolist():
        busy, rank = heapq.heappop(heap)
        ranks[rank].append(row)
        if len(ranks[rank]) < len(total) // world:
            heapq.heappush(heap, (busy + int(total[row]), rank))
    return np.array(ranks, dtype=np.int64).T.reshape(-1)
