"""The length histogram of the chosen buckets, for the report."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from dflash_core.data.dataset import Dataset
from dflash_core.data.store import LENGTH_HISTOGRAM
from dflash_core.errors import DataError
from dflash_core.provenance import write_atomically


def write_length_histogram(folder: Path, edges: Sequence[int]) -> None:
    """Write `length_histogram.parquet` of a dataset: one row per bucket, also for empty ones.

    Bucket i holds lengths in (edges[i-1], edges[i]], the first from 0; `pct_*` are percentages of the whole dataset.

    Args:
        edges: upper edges in tokens, ascending, the last at least the longest sequence.

    Raises:
        DataError: the dataset cannot be opened, or the edges do not ascend or do not cover it.
    """
    dataset = Dataset.open(folder)
    uppers = np.asarray(edges, dtype=np.int64)
    if len(uppers) == 0 or uppers[0] <= 0 or (np.diff(uppers) <= 0).any():
        raise DataError(f"{folder}: bucket edges {list(edges)} do not ascend from above 0")
    longest = int(dataset.lengths.max())
    if uppers[-1] < longest:
        raise DataError(f"{folder}: bucket edges end at {uppers[-1]}, the longest sequence has {longest} tokens")
    bucket = np.searchsorted(uppers, dataset.lengths, side="left")

    def sums(weights: np.ndarray | None) -> np.ndarray:
        # Float64 sums are exact below 2^53 tokens.
        return np.bincount(bucket, weights, minlength=len(uppers)).astype(np.int64)

    num_sequences, num_tokens, num_supervised = sums(None), sums(dataset.lengths), sums(dataset.num_supervised)
    table = pa.table(
        {
            "bucket": pa.array(np.arange(len(uppers))),
            "lower": pa.array(np.concatenate([[0], uppers[:-1]])),
            "upper": pa.array(uppers),
            "num_sequences": pa.array(num_sequences),
            "num_tokens": pa.array(num_tokens),
            "num_supervised": pa.array(num_supervised),
            "pct_sequences": pa.array(100.0 * num_sequences / num_sequences.sum()),
            "pct_tokens": pa.array(100.0 * num_tokens / num_tokens.sum()),
        }
    )
    buffer = pa.BufferOutputStream()
    pq.write_table(table, buffer)
    write_atomically(folder / LENGTH_HISTOGRAM, buffer.getvalue().to_pybytes())
