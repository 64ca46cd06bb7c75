"""Which target gets a batch.

`round_robin` shares one counter between all workers: after any number of batches the counts per target differ by at
most 1. `least_loaded` looks at the queued tokens, so that depths stay equal too when batches differ in cost or targets in
speed. `per_worker` gives each worker a counter of its own, which is the historic fault; it exists to be compared with.
None of them changes the training order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

from dflash_core.pipeline.channel import Channel

Policy = Literal["round_robin", "least_loaded", "per_worker"]
Choice = Callable[[int], int]


def make_dispatch(policy: Policy, queues: Sequence[Channel[Any]], num_workers: int) -> Choice:
    """A function from worker to target. Calls are serialised by the caller, who holds one lock for all workers.

    `least_loaded`: fewest queued tokens, then fewest batches so far, then lowest number.
    """
    num_targets = len(queues)
    if policy == "least_loaded":
        return lambda _worker: min(range(num_targets), key=lambda t: queues[t].pressure())  # of equal ones the first
    counters = [0] * (num_workers if policy == "per_worker" else 1)

    def choose(worker: int) -> int:
        mine = worker if policy == "per_worker" else 0
        target = counters[mine] % num_targets
        counters[mine] += 1
        return target

    return choose
