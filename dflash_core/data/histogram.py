"""Length histograms of a dataset: fine bins, the chosen buckets, both by source, and bars for the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from dflash_core.data.dataset import Dataset
from dflash_core.data.store import LENGTH_BINS, LENGTH_HISTOGRAM, LENGTH_HISTOGRAM_BY_SOURCE
from dflash_core.errors import DataError
from dflash_core.provenance import write_atomically

MAX_LENGTH_BINS = 512
# By-source tables stay small: further sources are counted together as `other`.
LARGEST_SOURCES = 100
BAR_PIECES = " ▏▎▍▌▋▊▉█"


def write_length_bins(dataset: Dataset, folder: Path, max_length: int) -> None:
    """Write `length_bins.parquet`: counts by length bin (lower, upper] and source, without empty ones.

    Bins are equally wide, at most 512 of them up to `max_length`. The 100 largest sources keep their names.
    """
    width = -(-max_length // MAX_LENGTH_BINS)
    codes, names = dataset.source_codes(LARGEST_SOURCES)
    bins = (dataset.lengths - 1) // width
    cells, sums = _sums(dataset, bins * np.int32(len(names)) + codes, int(bins.max() + 1) * len(names))
    found = np.flatnonzero(cells)
    lower, source = found // len(names) * width, found % len(names)
    order = sorted(range(len(found)), key=lambda i: (int(lower[i]), names[source[i]]))
    table = pa.table(
        {
            "lower": pa.array(lower[order], pa.int64()),
            "upper": pa.array(lower[order] + width, pa.int64()),
            "source": pa.array([names[code] for code in source[order]], pa.string()),
            "num_sequences": pa.array(cells[found][order]),
            "num_tokens": pa.array(sums[0][found][order]),
            "num_supervised": pa.array(sums[1][found][order]),
        }
    )
    pq.write_table(table, folder / LENGTH_BINS)


def _sums(
    dataset: Dataset, cell: NDArray[np.int32], num_cells: int
) -> tuple[NDArray[np.int64], tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Sequences, and (tokens, supervised tokens), in each cell; `cell` int [N] says which one a sequence is in."""

    def sums(weights: NDArray[np.int32] | None) -> NDArray[np.int64]:
        # Float64 sums are exact below 2^53 tokens.
        return np.bincount(cell, weights, minlength=num_cells).astype(np.int64)

    return sums(None), (sums(dataset.lengths), sums(dataset.num_supervised))


def write_length_histogram(folder: Path, edges: Sequence[int]) -> None:
    """Write `length_histogram.parquet` of a dataset, one row per bucket, also for empty ones, and the same by source.

    Bucket i holds lengths in (edges[i-1], edges[i]], the first from 0; `pct_*` are percentages of the whole dataset.
    `length_histogram_by_source.parquet` has a row for each bucket and source; the 100 largest sources keep their names.

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
    bucket = np.searchsorted(uppers, dataset.lengths, side="left").astype(np.int32)
    _write(folder / LENGTH_HISTOGRAM, _bucket_table(dataset, bucket, uppers))
    codes, names = dataset.source_codes(LARGEST_SOURCES)
    by_source = _bucket_table(dataset, codes * np.int32(len(uppers)) + bucket, np.tile(uppers, len(names)), len(uppers))
    sources = pa.array([name for name in names for _ in uppers], pa.string())
    _write(folder / LENGTH_HISTOGRAM_BY_SOURCE, by_source.append_column("source", sources))


def _bucket_table(
    dataset: Dataset, cell: NDArray[np.int32], uppers: NDArray[np.int64], num_buckets: int | None = None
) -> pa.Table:
    """A row for each cell, `num_buckets` cells in turn being the buckets of one source; `uppers` int64 [cells]."""
    buckets = np.arange(len(uppers)) % (num_buckets or len(uppers))
    num_sequences, (num_tokens, num_supervised) = _sums(dataset, cell, len(uppers))
    return pa.table(
        {
            "bucket": pa.array(buckets),
            "lower": pa.array(np.where(buckets == 0, 0, np.roll(uppers, 1))),
            "upper": pa.array(uppers),
            "num_sequences": pa.array(num_sequences),
            "num_tokens": pa.array(num_tokens),
            "num_supervised": pa.array(num_supervised),
            "pct_sequences": pa.array(100.0 * num_sequences / num_sequences.sum()),
            "pct_tokens": pa.array(100.0 * num_tokens / num_tokens.sum()),
        }
    )


def _write(path: Path, table: pa.Table) -> None:
    buffer = pa.BufferOutputStream()
    pq.write_table(table, buffer)
    write_atomically(path, buffer.getvalue().to_pybytes())


def draw_histogram(histogram: Path | pa.Table, width: int = 100) -> list[str]:
    """The chosen buckets as lines of text, with bars for the shares of sequences and of tokens.

    Args:
        histogram: a dataset folder with a `length_histogram.parquet`, or that table.
        width: characters in a line; the bars get what the numbers leave, at least 4 each.

    Raises:
        DataError: the folder has no histogram, or a damaged one.
    """
    table = _read(histogram / LENGTH_HISTOGRAM) if isinstance(histogram, Path) else histogram
    rows = table.to_pylist()
    ranges = [f"{row['lower'] + 1}-{row['upper']}" for row in rows]
    room = max(len("tokens"), *(len(text) for text in ranges))
    numbers = room + len("  sequences  100.0 %  tokens  100.0 %  supervised") - len("sequences") - len("tokens")
    bar = max(4, (width - numbers) // 2)
    most = max(max(row["pct_sequences"], row["pct_tokens"]) for row in rows)
    lines = [f"{'length':>{room}}  {'sequences':<{bar + 9}}  {'tokens':<{bar + 9}}  supervised"]
    for text, row in zip(ranges, rows, strict=True):
        shares = [f"{_bar(row[key] / most, bar)} {row[key]:5.1f} % " for key in ("pct_sequences", "pct_tokens")]
        supervised = f"{100 * row['num_supervised'] / row['num_tokens']:.1f} %" if row["num_tokens"] else "-"
        lines.append(f"{text:>{room}}  {shares[0]}  {shares[1]}  {supervised:>10}")
    return lines


def _bar(share: float, width: int) -> str:
    eighths = round(share * width * 8)
    if share > 0:
        eighths = max(eighths, 1)
    text = "█" * (eighths // 8) + (BAR_PIECES[eighths % 8] if eighths % 8 else "")
    return text.ljust(width)


def _read(path: Path) -> pa.Table:
    try:
        # Without threads of Arrow's: a command that ends while they start is aborted now and then (registry/lineage.py).
        return pq.ParquetFile(path, pre_buffer=False).read(use_threads=False)
    except FileNotFoundError as error:
        raise DataError(f"{path}: no such file") from error
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{path}: damaged ({' '.join(str(error).split())})") from error
