"""Which target gets a batch.

`round_robin` shares one counter between all workers: after any number of batches the counts per target differ by at
most 1. `least_loaded` looks at the queued tokens, so that depths stay equal too when batches differ in cost or targets in
speed. None of the policies changes the training order.

Two more exist to be compared with. `per_worker` gives each worker a counter of its own, so that counts per target differ by up
to the number of workers. `per_worker_skipping` is the historic fault (docs/incident.md): a worker's counter also advances for
items that the worker had drawn and then skipped. Here a batch ends trained or the run stops, so the skipped items are made up:
from the worker's number alone, and no batch is dropped. Each skip passes over a target at random, so the counts drift apart
without a bound, like the ends of random walks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from random import Random
from typing import Any, Literal

from dflash_core.pipeline.channel import Channel

Policy = Literal["round_robin", "least_loaded", "per_worker", "per_worker_skipping"]
Choice = Callable[[int], int]

# Policies whose counters are private: they dispatch as it comes, not in plan order.
PRIVATE: tuple[Policy, ...] = ("per_worker", "per_worker_skipping")
# Share of the items drawn by a worker that it skips: far more than the field has seen, so that hundreds of batches show what
# there took many thousands.
SKIPPED_SHARE = 2 / 3


class PrivateCounter:
    """The items that one worker has drawn so far.

    Args:
        worker: its number; decides which items it skips.
        skips: whether it skips any.
    """

    def __init__(self, worker: int, skips: bool) -> None:
        self._num_drawn = 0
        self._skips = Random(worker) if skips else None  # noqa: S311 - nothing secret is drawn

    def draw(self) -> int:
        """Number of the next item that is not skipped, counting all that were drawn, from 0."""
        while self._skips is not None and self._skips.random() < SKIPPED_SHARE:
            self._num_drawn += 1
        self._num_drawn += 1
        return self._num_drawn - 1


def make_dispatch(policy: Policy, queues: Sequence[Channel[Any]], num_workers: int) -> Choice:
    """A function from worker to target. Calls are serialised by the caller, who holds one lock for all workers.

    `least_loaded`: fewest queued tokens, then fewest batches so far, then lowest number.
    """
    num_targets = len(queues)
    if policy == "least_loaded":
        return lambda _worker: min(range(num_targets), key=lambda t: queues[t].pressure())  # of equal ones the first
    if policy in PRIVATE:
        counters = [PrivateCounter(worker, policy == "per_worker_skipping") for worker in range(num_workers)]
        return lambda worker: counters[worker].draw() % num_targets
    shared = count()
    return lambda _worker: next(shared) % num_targets
