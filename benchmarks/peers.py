"""Samplers of other libraries, run at the request of planning.py, which starts this with the peers' own interpreter.

    .venv-peers/bin/python benchmarks/peers.py lengths.npy

One JSON object a line comes in (`peer`, its `options`, `sequences`, `epoch`, and `save`: a file for the batches, or
null), one goes out: seconds as `wall` and `cpu`, or `error`. Only the sampler's iteration is timed; what it is built
from is made before and kept. The first line out tells the versions.
"""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterable
from functools import cache
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]
PACKAGES = ("speculators", "lhotse", "transformers", "torch", "numpy")


class Peer:
    """A sampler: `iterate` is what a training process does for one epoch, `batches` turns the result into index arrays."""

    def iterate(self, epoch: int) -> Any:
        raise NotImplementedError

    def batches(self, result: Any) -> Iterable[IntArray]:
        raise NotImplementedError


class Multipack(Peer):
    """speculators: whole sequences fill batches of at most `budget` tokens. Every rank computes all ranks' batches."""

    def __init__(self, lengths: IntArray, budget: int, replicas: int) -> None:
        from speculators.train.distributed_batch_sampler import MultipackDistributedBatchSamplerV2

        self._samplers = [MultipackDistributedBatchSamplerV2(budget, lengths, replicas, rank) for rank in range(replicas)]

    def iterate(self, epoch: int) -> list[IntArray]:
        self._samplers[0].set_epoch(epoch)
        return list(self._samplers[0])

    def batches(self, result: list[IntArray]) -> Iterable[IntArray]:
        epoch = self._samplers[0].epoch
        ranks = [result]
        for sampler in self._samplers[1:]:
            sampler.set_epoch(epoch)
            ranks.append(list(sampler))
        return chain.from_iterable(zip(*ranks, strict=True))  # the ranks train side by side


class LengthGrouped(Peer):
    """Hugging Face's `group_by_length`: batches of a fixed number of sequences, alike in length."""

    def __init__(self, lengths: IntArray, batch_size: int) -> None:
        import torch
        from transformers.trainer_pt_utils import LengthGroupedSampler

        self._batch_size = batch_size
        self._generator = torch.Generator()
        # A list is what it is fast with.
        self._sampler = LengthGroupedSampler(batch_size, lengths=lengths.tolist(), generator=self._generator)

    def iterate(self, epoch: int) -> list[int]:
        self._generator.manual_seed(epoch)
        return list(self._sampler)

    def batches(self, result: list[int]) -> Iterable[IntArray]:
        return (np.asarray(result[i : i + self._batch_size]) for i in range(0, len(result), self._batch_size))


class DynamicBucketing(Peer):
    """lhotse: buckets of equal duration, which it estimates itself; a cut's duration is its length in tokens."""

    def __init__(self, lengths: IntArray, budget: int, num_buckets: int) -> None:
        from lhotse.cut import MonoCut
        from lhotse.dataset.sampling.dynamic_bucketing import DynamicBucketingSampler

        cuts = [MonoCut(str(i), start=0.0, duration=float(n), channel=0) for i, n in enumerate(lengths.tolist())]
        self._sampler = DynamicBucketingSampler(cuts, max_duration=float(budget), num_buckets=num_buckets, shuffle=True)

    def iterate(self, epoch: int) -> list[Any]:
        self._sampler.set_epoch(epoch)
        return list(self._sampler)

    def batches(self, result: list[Any]) -> Iterable[IntArray]:
        return (np.array([int(cut.id) for cut in batch]) for batch in result)


KINDS: dict[str, Callable[..., Peer]] = {
    "multipack": Multipack,
    "length_grouped": LengthGrouped,
    "dynamic_bucketing": DynamicBucketing,
}


def answer(request: dict[str, Any], build: Callable[[str, int, tuple[tuple[str, int], ...]], Peer]) -> dict[str, Any]:
    peer = build(request["peer"], request["sequences"], tuple(sorted(request["options"].items())))
    wall, cpu = time.perf_counter(), time.process_time()
    result = peer.iterate(request["epoch"])
    spent = {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}
    if request["save"] is not None:
        batches = list(peer.batches(result))
        offsets = np.cumsum([0, *(len(batch) for batch in batches)])
        np.savez(request["save"], sample_index=np.concatenate(batches), offsets=offsets)
    return spent


def serve(lengths: IntArray, requests: TextIO, replies: TextIO) -> None:
    @cache
    def build(kind: str, sequences: int, options: tuple[tuple[str, int], ...]) -> Peer:
        return KINDS[kind](lengths[:sequences], **dict(options))

    print(json.dumps({"versions": {name: version(name) for name in PACKAGES}}), file=replies, flush=True)
    for line in requests:
        try:
            reply = answer(json.loads(line), build)
        except Exception as error:  # noqa: BLE001  whatever a peer throws leaves its row out of the table, not the table
            reply = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(reply), file=replies, flush=True)


def main() -> None:
    warnings.simplefilter("ignore")
    # What libraries print must not get between the replies.
    with os.fdopen(os.dup(1), "w") as replies:
        os.dup2(2, 1)
        serve(np.load(Path(sys.argv[1])), sys.stdin, replies)


if __name__ == "__main__":
    main()
