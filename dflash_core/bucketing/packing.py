"""Packed rows: whole sequences, one after the other, up to the budget, without padding.

Best fit, longest first, inside windows of random sequences. A window is packed one sequence at a time, but all
windows together: step j places the j-th longest sequence of every window, so that the work is numpy's.
"""

from __future__ import annotations

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from dflash_core.bucketing.forming import Formed
from dflash_core.bucketing.lengths import IntArray
from dflash_core.bucketing.limits import Limits
from dflash_core.bucketing.windows import count_windows, grouped, sorted_windows

# Windows that are packed together. More of them cost fewer numpy calls, fewer keep the room that is left in the cache.
WINDOWS_AT_ONCE = 1024
# Sequences of a window, unless that were less than `FEWEST_ROWS` rows: the numpy calls of packing are one per sequence.
MOST_SEQUENCES = 8192
FEWEST_ROWS = 16


def form_packed(lengths: IntArray, limits: Limits, pack_window: int, rng: Generator) -> Formed:
    """Rows of whole sequences from all buckets.

    A random order of the sequences is cut into windows of about `pack_window` rows (fewer where a row holds very many
    sequences). Rows are filled from the longest sequence to the shortest; inside a row the sequences then stand in the
    random order again, so that no place in a row belongs to long ones.
    """
    shuffled = rng.permutation(len(lengths))
    shares = limits.share_of(lengths[shuffled])
    num_rows = limits.fewest_batches(shares)
    rows_per_window = min(pack_window, max(FEWEST_ROWS, MOST_SEQUENCES * num_rows // len(lengths)))
    windows = sorted_windows(shares, count_windows(num_rows, rows_per_window))
    in_order = np.where(windows.present, shares[windows.position()], 0)
    row = np.concatenate([best_fit(part, limits) for part in np.array_split(in_order, -(-len(in_order) // WINDOWS_AT_ONCE))])
    order, starts = grouped(windows, row)
    return Formed(shuffled[order], starts)


def best_fit(shares: IntArray, limits: Limits) -> IntArray:
    """The row that each sequence goes to: the fullest which has room for it, else a new one.

    Args:
        shares: what each sequence takes of the budget, in the order of placing, [num_windows, num]; 0 for no sequence,
            whose row then means nothing.
        limits: the budget, and the most sequences of a row.

    Returns:
        Row within the window, counted from 0 without gaps, [num_windows, num].
    """
    num_windows, num = shares.shape
    # No two rows that are not full of sequences are half empty, or the later one's first would have gone to the other.
    most_rows = 2 * int(shares.sum(axis=1).max()) // limits.token_budget + 2
    if limits.max_sequences is not None:
        most_rows += num // limits.max_sequences
    most_rows = min(num, most_rows)
    # One number per row and window holds the room left and, in its low bits, the row, so that a least number is a best fit
    # and says which row it is. Without sign, room that is not enough becomes a huge number.
    bits = most_rows.bit_length()
    number = np.uint32 if limits.token_budget.bit_length() + bits < 32 else np.uint64
    needed = np.ascontiguousarray((shares << bits).T, dtype=number)
    room = ((limits.token_budget << bits) + np.arange(most_rows)[:, None] + np.zeros(num_windows, dtype=np.int64)).astype(number)
    held = None if limits.max_sequences is None else np.zeros(room.shape, dtype=np.int64)
    row = np.empty((num, num_windows), dtype=np.int64)
    window, scratch = np.arange(num_windows), np.empty_like(room)
    used = 1  # rows in use, and an empty one
    for j in range(num):
        np.subtract(room[:used], needed[j], out=scratch[:used])
        left = scratch[:used].min(axis=0)
        row[j] = left & ((1 << bits) - 1)
        room[row[j], window] = left
        used = min(most_rows, max(used, int(row[j].max()) + 2))
        if held is not None:
            _close_full(room, held, row[j], limits)
    return row.T


def _close_full(room: NDArray[np.unsignedinteger], held: IntArray, chosen: IntArray, limits: Limits) -> None:
    """Leave no room in rows that have as many sequences as a row may hold."""
    window = np.arange(len(chosen))
    held[chosen, window] += 1
    full = held[chosen, window] == limits.max_sequences
    room[chosen[full], window[full]] = chosen[full]
