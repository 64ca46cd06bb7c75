"""The order to train with: mixed as evenly as possible, and still drawn.

Two things make a good order. No long runs of one bucket: with n_max of N batches in the largest bucket, some run is at
least R* = ceil(n_max / (N - n_max + 1)) long, and R* can always be reached. And every part of the epoch looks like the
whole: after t batches each bucket i has had its quota t * n_i / N, rounded down or up. `diverse` does both. The second
holds for every t, so for the ends of steps too, whatever their size.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from heapq import heapify, heappop, heappush, heappushpop

import numpy as np
from numpy.random import Generator
from numpy.typing import ArrayLike

from dflash_core.bucketing.lengths import IntArray

# Places that are filled with a look at the cap before each, before it is asked again whether such looks are needed.
CAREFUL_PLACES = 64


def shortest_possible_longest_run(counts: ArrayLike) -> int:
    """R*: the longest bucket run that no order of these batch counts can avoid; 0 without batches (docs/field.md 2)."""
    batches = np.asarray(counts, dtype=np.int64)
    total = int(batches.sum())
    if total == 0:
        return 0
    largest = int(batches.max())
    return -(-largest // (total - largest + 1))


def diverse(bucket: IntArray, rng: Generator) -> IntArray:
    """A permutation of the batches whose longest bucket run is R*, and whose prefixes hold every bucket's quota.

    The sequence of buckets is `diverse_buckets`; the batches of a bucket take its places in random order. Half of the
    time the sequence is turned round, which changes neither runs nor quotas: otherwise every epoch would begin with
    the largest bucket.
    """
    counts = np.bincount(bucket)
    found = np.flatnonzero(counts)
    sequence = found[diverse_buckets(counts[found], rng)].astype(np.int16)
    if rng.random() < 0.5:
        sequence = sequence[::-1]
    shuffled = rng.permutation(len(bucket))
    order = np.empty(len(bucket), dtype=np.int64)
    # Both sorts are of 16-bit numbers, which numpy sorts in linear time.
    order[np.argsort(sequence, kind="stable")] = shuffled[np.argsort(bucket[shuffled].astype(np.int16), kind="stable")]
    return order


def diverse_buckets(counts: ArrayLike, rng: Generator) -> IntArray:
    """A sequence in which bucket i occurs `counts[i]` times (each positive): earliest deadline first under the cap R*.

    The j-th batch of bucket i (from 0) belongs to the places from floor(j N / n_i) to ceil((j + 1) N / n_i) - 1. Filling
    every place with the batch that has the earliest deadline of those that may come meets all deadlines, because each
    place has one batch to spend on shares that sum to one; and then every prefix holds the floor or the ceiling of every
    quota. Deadlines at the same place are drawn. Two rules go before deadlines, so that the longest run is R* by
    construction: `pressing_bucket`, and that a bucket whose run is full has to wait. They are rarely needed, and where
    they are, the batch that is drawn forward stays within one of its quota (measured, not proved).
    """
    batches = np.asarray(counts, dtype=np.int64)
    if len(batches) == 1:
        return np.zeros(batches[0], dtype=np.int64)
    filling = _Filling(batches, rng)
    total, cap = int(batches.sum()), filling.cap
    left = batches.copy()
    while filling.num_filled < total:
        before = filling.num_filled
        num_left = total - before
        # What `pressing_bucket` asks is whether this is negative. One place takes `cap` off at most.
        slack = cap * num_left - (cap + 1) * left
        if slack.min() >= CAREFUL_PLACES * cap:
            filling.freely(min(num_left, int(slack.min()) // cap + 1))
        else:
            near = np.flatnonzero(slack < CAREFUL_PLACES * cap).tolist()
            filling.carefully(min(num_left, CAREFUL_PLACES), left.tolist(), near)
        left -= np.bincount(filling.sequence[before:], minlength=len(left))
    return np.array(filling.sequence, dtype=np.int64)


def pressing_bucket(left: Sequence[int], num_left: int, cap: int, among: Iterable[int]) -> int:
    """The bucket that must come now if runs of more than `cap` are to be avoided, or -1.

    With c_i of C batches left, an order with runs of at most R exists iff c_i <= R (C - c_i) + R for every i, where the
    bucket of the current run takes off the run's length on the right (docs/field.md 2). If that holds now, a move to
    another bucket than i breaks it only where (R + 1) c_i > R C, which is true of one bucket at most; and nothing else
    breaks it but a move to the bucket whose run is full. `among`: the buckets of which it may be true.
    """
    for bucket in among:
        if (cap + 1) * left[bucket] > cap * num_left:
            return bucket
    return -1


class _Filling:
    """A sequence of buckets that is filled place by place.

    A batch is known by its rank: all batches are sorted by deadline, and `owner[rank]` is its bucket. `to_come` holds
    the ranks by the place from which they may come, with -1 for those drawn forward; up to `num_known` of them lie, or
    have lain, in the heap `waiting`.
    """

    def __init__(self, counts: IntArray, rng: Generator) -> None:
        total = int(counts.sum())
        owner = np.repeat(np.arange(len(counts)), counts)
        number = np.arange(total) - np.repeat(np.cumsum(counts) - counts, counts)
        of_owner = counts[owner]
        release = number * total // of_owner
        deadline = -(-(number + 1) * total // of_owner)
        # Both are ascending runs, one per bucket, which a stable sort merges in linear time.
        by_deadline = np.argsort(deadline + rng.random(total), kind="stable")
        rank = np.empty(total, dtype=np.int64)
        rank[by_deadline] = np.arange(total)
        by_release = np.argsort(release, kind="stable")
        self.cap = shortest_possible_longest_run(counts)
        self.sequence: list[int] = []
        self._owner: list[int] = owner[by_deadline].tolist()
        self._to_come: list[int] = rank[by_release].tolist()
        self._known_at: list[int] = np.cumsum(np.bincount(release, minlength=total)).tolist()
        self._waiting: list[int] = []
        self._num_known = 0
        self._last, self._run = -1, 0

    @property
    def num_filled(self) -> int:
        return len(self.sequence)

    def freely(self, num: int) -> None:
        """Fill `num` places by deadline; the caller knows that no bucket is pressing before the last of them is filled.

        This is the loop that planning waits for: no attribute is looked up inside, and most places need one call.
        """
        owner, to_come, waiting, cap, append = self._owner, self._to_come, self._waiting, self.cap, self.sequence.append
        known, last, run = self._num_known, self._last, self._run
        for known_now in self._known_at[self.num_filled : self.num_filled + num]:
            new = known_now - known
            if new == 1:
                rank = heappushpop(waiting, to_come[known])
            elif new == 0:
                rank = heappop(waiting)
            else:
                for rank in to_come[known + 1 : known_now]:
                    heappush(waiting, rank)
                rank = heappushpop(waiting, to_come[known])
            known = known_now
            while rank < 0:
                rank = heappop(waiting)
            chosen = owner[rank]
            if chosen != last:
                last, run = chosen, 1
            elif run < cap:
                run += 1
            else:
                last, run = self._take(known, chosen, wanted=False), 1
                heappush(waiting, rank)
            append(last)
        self._num_known, self._last, self._run = known, last, run

    def carefully(self, num: int, left: list[int], near: list[int]) -> None:
        """Fill `num` places with a look at the cap before each.

        Args:
            num: places to fill.
            left: batches left of every bucket; is used up.
            near: buckets that may become pressing meanwhile.
        """
        num_left = sum(left)
        for _ in range(num):
            pressing = pressing_bucket(left, num_left, self.cap, near)
            if pressing < 0:
                self.freely(1)
            else:
                self._force(pressing)
            left[self.sequence[-1]] -= 1
            num_left -= 1

    def _force(self, bucket: int) -> None:
        known = self._known_at[self.num_filled]
        for rank in self._to_come[self._num_known : known]:
            heappush(self._waiting, rank)
        self._num_known = known
        self.sequence.append(self._take(known, bucket, wanted=True))
        self._run = self._run + 1 if self._last == bucket else 1
        self._last = bucket

    def _take(self, known: int, bucket: int, wanted: bool) -> int:
        """Take out the batch that is due first, of those waiting, else of those to come.

        Its bucket is `bucket` if that is wanted, else any other. Returns the bucket taken.
        """
        owner = self._owner
        fitting = [rank for rank in self._waiting if rank >= 0 and (owner[rank] == bucket) is wanted]
        if fitting:
            rank = min(fitting)
            self._waiting.remove(rank)
            heapify(self._waiting)
        else:
            to_come = self._to_come
            places = range(known, len(to_come))
            place = next(i for i in places if to_come[i] >= 0 and (owner[to_come[i]] == bucket) is wanted)
            rank, to_come[place] = to_come[place], -1
        return owner[rank]
