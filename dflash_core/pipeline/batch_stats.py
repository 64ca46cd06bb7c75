"""What the prefetcher has handed out so far: the numbers whose absence hid the historic fault."""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

from dflash_core.records import BatchShape


class _Counts(NamedTuple):
    """Everything counted up to one batch; never changed, only replaced."""

    buckets: tuple[int, ...]
    targets: tuple[int, ...]
    sequences: int = 0
    tokens: int = 0
    padded: int = 0
    longest_sequence: int = 0
    current_bucket: int | None = None
    current_run: int = 0
    longest_run: int = 0
    num_runs: int = 0


def _one_more(counts: tuple[int, ...], index: int) -> tuple[int, ...]:
    return (*counts[:index], counts[index] + 1, *counts[index + 1 :])


class BatchStats:
    """Counts batches as they are dispatched. Every snapshot is consistent: all sums agree with each other.

    Writers replace the counts as a whole, one after the other; so a reader takes them with one look, without a lock, and
    neither waits for writers nor makes them wait.

    With an ordered dispatch policy (all but those with private counters) batches are recorded in plan order, so the bucket
    runs are those that training will meet.
    """

    def __init__(self, num_buckets: int, num_targets: int) -> None:
        self._lock = threading.Lock()  # among writers
        self._counts = _Counts((0,) * num_buckets, (0,) * num_targets)

    def record(self, shape: BatchShape, target: int) -> None:
        """Count a batch that goes to `target`."""
        with self._lock:
            old = self._counts
            same = shape.bucket == old.current_bucket
            run = old.current_run + 1 if same else 1
            self._counts = _Counts(
                buckets=_one_more(old.buckets, shape.bucket),
                targets=_one_more(old.targets, target),
                sequences=old.sequences + shape.num_sequences,
                tokens=old.tokens + shape.num_tokens,
                padded=old.padded + shape.num_padded_tokens,
                longest_sequence=max(old.longest_sequence, shape.max_seq_len),
                current_bucket=shape.bucket,
                current_run=run,
                longest_run=max(old.longest_run, run),
                num_runs=old.num_runs + (0 if same else 1),
            )

    def snapshot(self) -> dict[str, Any]:
        """A plain dict; lengths in tokens, `bucket_pct` in percent, runs in batches."""
        now = self._counts
        batches = sum(now.buckets)
        return {
            "num_batches": batches,
            "num_sequences": now.sequences,
            "num_tokens": now.tokens,
            "num_padded_tokens": now.padded,
            "bucket_counts": list(now.buckets),
            "bucket_pct": [100.0 * n / batches if batches else 0.0 for n in now.buckets],
            "avg_seq_len": now.tokens / now.sequences if now.sequences else 0.0,
            "max_seq_len": now.longest_sequence,
            "avg_batch_size": now.sequences / batches if batches else 0.0,
            "padding_efficiency": now.tokens / now.padded if now.padded else 0.0,
            "dispatched_per_target": list(now.targets),
            "current_run": now.current_run,
            "longest_run": now.longest_run,
            "mean_run": batches / now.num_runs if now.num_runs else 0.0,
        }
