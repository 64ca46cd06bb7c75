"""Sequence lengths as the other files of this package take them: checked once, and counted into a histogram."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dflash_core.errors import DataError

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]

# Most tokens of a sequence, and greatest number that a setting may be: what is computed with them fits into 64 bits.
LARGEST = 2**32


class Histogram(NamedTuple):
    """Distinct lengths in tokens, ascending, and the sequences of each; both arrays have one entry per length."""

    length: IntArray
    num_sequences: IntArray

    @property
    def num_tokens(self) -> int:
        return int(self.length @ self.num_sequences)


def check_lengths(lengths: ArrayLike) -> IntArray:
    """`lengths` as a one-dimensional int64 array.

    Raises:
        DataError: there are no sequences, lengths are not whole numbers, or a sequence is empty or longer than `LARGEST` (its
            index is named).
    """
    array = np.asarray(lengths)
    if array.ndim != 1:
        raise DataError(f"sequence lengths must form one row of numbers, not an array of shape {array.shape}")
    if array.size == 0:
        raise DataError("there are no sequences to put into buckets")
    if array.dtype.kind not in "iu":
        raise DataError(f"sequence lengths must be whole numbers, not {array.dtype}")
    longest = int(array.argmax())
    if int(array[longest]) > LARGEST:  # before the type changes: not every unsigned number fits into int64
        raise DataError(f"sequence {longest} has length {array[longest]}; no sequence may have more than {LARGEST} tokens")
    checked = array.astype(np.int64)
    shortest = int(checked.argmin())
    if checked[shortest] < 1:
        raise DataError(f"sequence {shortest} has length {checked[shortest]}; every sequence needs at least one token")
    return checked


def count_lengths(lengths: IntArray) -> Histogram:
    """The histogram of lengths that `check_lengths` has passed."""
    length, count = np.unique(lengths, return_counts=True)
    return Histogram(length, count.astype(np.int64))


def bucket_of(lengths: IntArray, edges: tuple[int, ...]) -> NDArray[np.int16]:
    """Bucket of every sequence: i where edges[i-1] < length <= edges[i].

    The narrow type is on purpose: numpy sorts 16-bit keys by radix, in linear time, which is what the planner does next.
    """
    return np.searchsorted(np.asarray(edges), lengths, side="left").astype(np.int16)
