"""Random, but sorted in small parts: a row of numbers cut into windows, each sorted by itself."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dflash_core.bucketing.lengths import IntArray

LAST = np.iinfo(np.int64).max


@dataclass(frozen=True, eq=False)
class Windows:
    """A row of numbers cut into windows of even width: some are one shorter than the widest.

    Attributes:
        starts: where each window begins in the row, [num_windows, 1].
        column: place of each number within its window, in the window's new order, [num_windows, width].
        present: False at the last place of a window that is one shorter; its column then means nothing.
    """

    starts: IntArray
    column: IntArray
    present: NDArray[np.bool_]

    def position(self) -> IntArray:
        """Index into the row, [num_windows, width]; that of some number where none is present."""
        return np.where(self.present, self.starts + self.column, self.starts)


def count_windows(num_batches: int, batches_per_window: int) -> int:
    """Windows of about `batches_per_window` batches each; at most one per batch.

    At least two where there are two batches: a single window would hold the same sequences, and so give the same batches,
    in every epoch.
    """
    return min(max(2, round(num_batches / batches_per_window)), max(1, num_batches))


def sorted_windows(size: IntArray, num_windows: int) -> Windows:
    """Cut a row of positive numbers into windows and sort each, largest first; equal numbers keep their order."""
    bounds = np.arange(num_windows + 1) * len(size) // num_windows
    starts, width = bounds[:-1, None], -(-len(size) // num_windows)
    present = np.ones((num_windows, width), dtype=np.bool_)
    present[:, -1] = np.diff(bounds) == width
    # What is taken where none is present belongs to the next window, or is the very last number.
    size_at = size[np.minimum(starts + np.arange(width), len(size) - 1)]
    return Windows(starts, _sorted_columns(-size_at, present)[1], present)


def grouped(windows: Windows, group: IntArray) -> tuple[IntArray, IntArray]:
    """Bring the members of each group together, window by window; those of one group stand in their order in the row.

    Args:
        windows: windows of a row.
        group: number of each member's group within its window, [num_windows, width].

    Returns:
        order: indices into the row, group by group, [num].
        starts: where each group begins in `order`.
    """
    found, column = _sorted_columns(group, windows.present, windows.column)
    first = np.ones(windows.present.shape, dtype=np.bool_)
    first[:, 1:] = found[:, 1:] != found[:, :-1]
    return (windows.starts + column)[windows.present], np.flatnonzero(first[windows.present])


def _sorted_columns(key: IntArray, present: NDArray[np.bool_], column: IntArray | None = None) -> tuple[IntArray, IntArray]:
    """Keys and columns of each window, sorted by key, then by column; what is not present comes last.

    One number holds both: sorting plain numbers is several times faster than sorting indices by a key.
    """
    bits = key.shape[1].bit_length()
    both = key << bits
    both |= np.arange(key.shape[1]) if column is None else column
    both[~present[:, -1], -1] = LAST
    both.sort(axis=1)
    column = both & ((1 << bits) - 1)
    both >>= bits
    return both, column
