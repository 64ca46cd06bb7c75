"""Orders of an epoch's batches to compare `diverse` with. Each function returns a permutation of the batches."""

from __future__ import annotations

import numpy as np
from numpy.random import Generator

from dflash_core.bucketing.lengths import FloatArray, IntArray

# Batches of a stretch in `clustered`: as long as the runs that shuffling gives a majority bucket, and most are longer.
STRETCH = 8


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


def clustered(bucket: IntArray, rng: Generator) -> IntArray:
    """Stretches of `STRETCH` batches of one bucket, as far as counts allow, in random order, whatever the size of a step.

    With one batch in a step `grouped` is a plain shuffle; here steps that follow each other then share their bucket.
    """
    return grouped(bucket, STRETCH, rng)


def by_length(mean_length: FloatArray) -> IntArray:
    """Shortest batches first, and with them bucket by bucket."""
    return np.argsort(mean_length, kind="stable")
