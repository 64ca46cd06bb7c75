"""What the prefetcher has handed out so far: the numbers whose absence hid the historic fault."""

from __future__ import annotations

import threading
from typing import Any

from dflash_core.records import BatchShape


class BatchStats:
    """Counts batches as they are dispatched. Every snapshot is consistent: all sums agree with each other.

    With an ordered dispatch policy (all but `per_worker`) batches are recorded in plan order, so the bucket runs are
    those that training will meet.
    """

    def __init__(self, num_buckets: int, num_targets: int) -> None:
        self._lock = threading.Lock()
        self._buckets = [0] * num_buckets
        self._targets = [0] * num_targets
        self._sequences = self._tokens = self._padded = self._longest_sequence = 0
        self._current_bucket: int | None = None
        self._current_run = self._longest_run = self._num_runs = 0

    def record(self, shape: BatchShape, target: int) -> None:
        with self._lock:
            self._buckets[shape.bucket] += 1
            self._targets[target] += 1
            self._sequences += shape.num_sequences
            self._tokens += shape.num_tokens
            self._padded += shape.num_padded_tokens
            self._longest_sequence = max(self._longest_sequence, shape.max_seq_len)
            if shape.bucket != self._current_bucket:
                self._current_bucket, self._current_run = shape.bucket, 0
                self._num_runs += 1
            self._current_run += 1
            self._longest_run = max(self._longest_run, self._current_run)

    def snapshot(self) -> dict[str, Any]:
        """A plain dict; lengths in tokens, `bucket_pct` in percent, runs in batches."""
        with self._lock:
            batches = sum(self._buckets)
            return {
                "num_batches": batches,
                "num_sequences": self._sequences,
                "num_tokens": self._tokens,
                "num_padded_tokens": self._padded,
                "bucket_counts": list(self._buckets),
                "bucket_pct": [100.0 * n / batches if batches else 0.0 for n in self._buckets],
                "avg_seq_len": self._tokens / self._sequences if self._sequences else 0.0,
                "max_seq_len": self._longest_sequence,
                "avg_batch_size": self._sequences / batches if batches else 0.0,
                "padding_efficiency": self._tokens / self._padded if self._padded else 0.0,
                "dispatched_per_target": list(self._targets),
                "current_run": self._current_run,
                "longest_run": self._longest_run,
                "mean_run": batches / self._num_runs if self._num_runs else 0.0,
            }
