"""Steps of samples whose images are about as large: what trainers with buckets by resolution do, made for packed rows."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from mmds.packing import IntArray, Packer, Samples
from mmds.plan_state import PlannedStep, PlanState
from mmds.sample_sizes import SampleSizes
from mmds.schemes.scheme import CHUNK, Scheme


class ResolutionBucket(Scheme):
    """A bucket holds samples with 2^k to 2^(k+1) patches, bucket 0 those without images; a row, and but for an epoch's last ones a step,
    holds samples of one bucket. Ranks are about equally busy, and steps are not: each is of one kind of image."""

    def steps(self, state: PlanState, most: int, *, world: int) -> list[PlannedStep]:
        """One step: of the bucket that has one first; once the epoch has ended, the rest by bucket."""
        packers = self._packers(state.open)
        ready, stream, ended, dropped = list(state.ready), state.stream, state.ended, state.dropped
        unfinished, repeated = state.unfinished, state.repeated
        fresh = not state.ready and not state.open
        chosen = self._whole(ready)
        while not ended and chosen is None:
            taken = self._next_samples(stream, CHUNK)
            stream, ended, dropped = taken.end, taken.ended, dropped + taken.dropped
            buckets = bucket_of(taken.sizes)
            for bucket in np.unique(buckets).tolist():
                mine = buckets == bucket
                ready += packers[bucket].add(taken.numbers[mine], taken.sizes.tokens[mine])
            if ended:
                ready += [row for bucket in sorted(packers) for row in packers[bucket].close()]
                if fresh:
                    self._check_enough(sum(map(len, ready)), dropped - state.dropped)
            else:
                self._check_any(len(ready) + sum(not packer.empty for packer in packers.values()), dropped)
            chosen = self._whole(ready)
        if chosen is None:
            ready = self._by_bucket(ready)
            if len(ready) % self.rows:
                ready, out, again = self._finish(ready, state.stream.epoch)
                unfinished, repeated = unfinished + out, repeated + again
            chosen = list(range(self.rows))
        rows = [ready[at] for at in chosen]
        ready = [row for at, row in enumerate(ready) if at not in set(chosen)]
        if ended and not ready:
            stream, ended = self.stream.next_epoch(stream), False
        after = PlanState(
            step=state.step + 1,
            stream=stream,
            open=tuple(row for bucket in sorted(packers) for row in packers[bucket].open),
            ready=tuple(ready),
            dropped=dropped,
            unfinished=unfinished,
            repeated=repeated,
            ended=ended,
        )
        return [PlannedStep(rows=tuple(rows), after=after)]

    def _packers(self, rows: tuple[Samples, ...]) -> defaultdict[int, Packer]:
        """A packer a bucket, with these open rows."""
        by_bucket: defaultdict[int, list[Samples]] = defaultdict(list)
        for row, bucket in zip(rows, self._buckets(rows), strict=True):
            by_bucket[bucket].append(row)
        packers: defaultdict[int, Packer] = defaultdict(lambda: Packer((), self._tokens, self.limits.tokens))
        for bucket, mine in by_bucket.items():
            packers[bucket] = Packer(tuple(mine), self._tokens, self.limits.tokens)
        return packers

    def _whole(self, ready: list[Samples]) -> list[int] | None:
        """Places of the oldest rows of the lowest bucket that has enough for a step."""
        places: defaultdict[int, list[int]] = defaultdict(list)
        for at, bucket in enumerate(self._buckets(tuple(ready))):
            places[bucket].append(at)
        enough = [bucket for bucket in sorted(places) if len(places[bucket]) >= self.rows]
        return places[enough[0]][: self.rows] if enough else None

    def _by_bucket(self, rows: list[Samples]) -> list[Samples]:
        buckets = self._buckets(tuple(rows))
        return [rows[at] for at in np.argsort(buckets, kind="stable").tolist()]

    def _buckets(self, rows: tuple[Samples, ...]) -> list[int]:
        """Bucket of each row: that of its first sample, 0 for an empty one."""
        firsts = [row[0] for row in rows if row]
        found = iter(bucket_of(self.sizes(firsts)).tolist() if firsts else [])
        return [next(found) if row else 0 for row in rows]

    def _tokens(self, samples: IntArray) -> IntArray:
        return self.sizes(samples).tokens if len(samples) else np.zeros(0, dtype=np.int64)


def bucket_of(sizes: SampleSizes) -> IntArray:
    """int64 [n]: 0 without images, else 1 + k for 2^k to 2^(k+1) - 1 patches."""
    return np.frexp(sizes.patches.astype(np.float64))[1].astype(np.int64)
