"""The order of an epoch's batches. Each function returns a permutation of the batches; ties and shuffles are seeded.

Two things make a good order. No long runs of one bucket: with n_max of N batches in the largest bucket, some run is at
least R* = ceil(n_max / (N - n_max + 1)) long, and R* can always be reached. And every part of the epoch looks like the
whole: after t batches each bucket i has had about t * n_i / N. `diverse` does both.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import numpy as np
from numpy.random import Generator
from numpy.typing import ArrayLike

from dflash_core.bucketing.lengths import FloatArray, IntArray


def shortest_possible_longest_run(counts: ArrayLike) -> int:
    """R*: the longest bucket run that no order of these batch counts can avoid; 0 without batches (docs/field.md 2)."""
    batches = np.asarray(counts, dtype=np.int64)
    total = int(batches.sum())
    if total == 0:
        return 0
    largest = int(batches.max())
    return -(-largest // (total - largest + 1))


def diverse(bucket: IntArray, rng: Generator) -> IntArray:
    """Mixed as evenly as possible, with the longest bucket run equal to R*.

    The sequence of buckets is `diverse_buckets`; the batches of a bucket take its places in random order. Half of the
    time the sequence is turned round, which changes neither runs nor deviation: otherwise every epoch would begin with
    the largest bucket.
    """
    buckets, inverse = np.unique(bucket, return_inverse=True)
    sequence = np.array(diverse_buckets(np.bincount(inverse, minlength=len(buckets)).tolist(), rng), dtype=np.int64)
    if rng.random() < 0.5:
        sequence = sequence[::-1]
    shuffled = rng.permutation(len(bucket))
    order = np.empty(len(bucket), dtype=np.int64)
    order[np.argsort(sequence, kind="stable")] = shuffled[np.argsort(inverse[shuffled], kind="stable")]
    return order


def diverse_buckets(counts: Sequence[int], rng: Generator) -> list[int]:
    """A sequence in which bucket i occurs `counts[i]` times (each positive): earliest deadline first under the cap R*.

    The j-th batch of bucket i (from 1) belongs between the places (j-1) N / n_i and j N / n_i; inside these windows every
    prefix holds the floor or the ceiling of its quota. `pressing_bucket` goes before deadlines, and a bucket whose run is
    full has to wait, so that the longest run is R* by construction.
    """
    total, cap = sum(counts), shortest_possible_longest_run(counts)
    left = list(counts)
    release = [1] * len(counts)  # first place of the bucket's next batch
    ties = iter(rng.random(total + len(counts)).tolist())
    deadline = [-(-total // n) + next(ties) for n in counts]  # last place of it, and a fraction that decides ties
    active = list(range(len(counts)))
    sequence: list[int] = []
    last, run = -1, 0
    for place in range(1, total + 1):
        chosen = pressing_bucket(left, total - place + 1, cap)
        if chosen < 0:
            earliest = inf
            for i in active:
                due = deadline[i] if release[i] <= place else deadline[i] + total  # after all that may come now
                if due < earliest and not (i == last and run == cap):
                    chosen, earliest = i, due
        run = run + 1 if chosen == last else 1
        last = chosen
        sequence.append(chosen)
        left[chosen] -= 1
        if left[chosen] == 0:
            active.remove(chosen)
        done = counts[chosen] - left[chosen]
        release[chosen] = done * total // counts[chosen] + 1
        deadline[chosen] = -(-(done + 1) * total // counts[chosen]) + next(ties)
    return sequence


def pressing_bucket(left: Sequence[int], num_left: int, cap: int) -> int:
    """The bucket that must come now if runs of more than `cap` are to be avoided, or -1.

    With c_i of C batches left, an order with runs of at most R exists iff c_i <= R (C - c_i) + R for every i, where the
    bucket of the current run takes off the run's length on the right (docs/field.md 2). If that holds now, a move to
    another bucket than i breaks it only where (R + 1) c_i > R C, which is true of one bucket at most, the largest; and
    nothing else breaks it but a move to the bucket whose run is full.
    """
    most = max(left)
    return left.index(most) if (cap + 1) * most > cap * num_left else -1


def shuffle(num_batches: int, rng: Generator) -> IntArray:
    """Plain random order: the longest run of a majority bucket grows with the logarithm of the epoch."""
    return rng.permutation(num_batches)


def grouped(bucket: IntArray, batches_per_step: int, rng: Generator) -> IntArray:
    """One bucket per step as far as counts allow, the steps in random order.

    What does not fill a step of its own bucket is put together, bucket by bucket, into mixed steps. A partial step comes
    last, as the step numbers require.
    """
    pure: list[IntArray] = []
    rests: list[IntArray] = []
    for i in rng.permutation(np.unique(bucket)):
        batches = rng.permutation(np.flatnonzero(bucket == i))
        num_pure = len(batches) // batches_per_step * batches_per_step
        pure.append(batches[:num_pure])
        rests.append(batches[num_pure:])
    flat = np.concatenate(pure + rests)
    num_full = len(flat) // batches_per_step
    steps = flat[: num_full * batches_per_step].reshape(num_full, batches_per_step)
    return np.concatenate((steps[rng.permutation(num_full)].ravel(), flat[num_full * batches_per_step :]))


def by_length(mean_length: FloatArray) -> IntArray:
    """Shortest batches first, and with them bucket by bucket."""
    return np.argsort(mean_length, kind="stable")
