"""Which rows have the id of an earlier row, in bounded memory for any number of rows.

Ids are compared by 16-byte digests, whose chance of a false match is that of the fingerprint. Each pass looks at one
range of digests only, so that it holds about a million of them; the range is chosen by the first 8 bytes.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

PASS_ROWS = 2**20
BLOCK_ROWS = 2**18

Words = NDArray[np.uint64]


def find_duplicates(digests: NDArray[np.uint8], pass_rows: int = PASS_ROWS, block_rows: int = BLOCK_ROWS) -> NDArray[np.bool_]:
    """Mark every row whose digest has come before.

    Args:
        digests: uint8 [N, 16]; may be a mapped file, which is read in blocks, once for each pass.
        pass_rows: rows that one pass holds, if digests are spread evenly; more passes read more.
        block_rows: rows that are read at once.

    Returns:
        bool [N].
    """
    words = digests.reshape(-1).view("<u8").reshape(-1, 2)
    duplicate = np.zeros(len(words), dtype=np.bool_)
    num_passes = max(1, -(-len(words) // pass_rows))
    for number in range(num_passes):
        seen: tuple[Words, Words] = (np.empty(0, np.uint64), np.empty(0, np.uint64))
        waiting: list[tuple[Words, Words, NDArray[np.int64]]] = []
        num_waiting = 0
        for start in range(0, len(words), block_rows):
            block = words[start : start + block_rows]
            inside = np.flatnonzero((block[:, 0] >> np.uint64(32)) * np.uint64(num_passes) >> np.uint64(32) == number)
            waiting.append((block[inside, 0], block[inside, 1], inside + start))
            num_waiting += len(inside)
            if num_waiting >= block_rows:
                seen = _merge(seen, waiting, duplicate)
                waiting, num_waiting = [], 0
        _merge(seen, waiting, duplicate)
    return duplicate


def _merge(
    seen: tuple[Words, Words], waiting: list[tuple[Words, Words, NDArray[np.int64]]], duplicate: NDArray[np.bool_]
) -> tuple[Words, Words]:
    """Add rows to the digests seen before, mark the duplicates among them, and return all different digests."""
    high = np.concatenate([seen[0], *(item[0] for item in waiting)])
    low = np.concatenate([seen[1], *(item[1] for item in waiting)])
    position = np.concatenate([np.full(len(seen[0]), -1), *(item[2] for item in waiting)])
    order = np.argsort(high, kind="stable")
    same = high[order[1:]] == high[order[:-1]]
    if (same & (low[order[1:]] != low[order[:-1]])).any():  # 8 bytes are equal by chance; nearly never
        order = np.lexsort((low, high))
        same = (high[order[1:]] == high[order[:-1]]) & (low[order[1:]] == low[order[:-1]])
    # Both sorts are stable: of equal digests the first is the one seen before, or the first row.
    repeated = order[1:][same]
    duplicate[position[repeated]] = True
    first = order[np.concatenate([[True], ~same])] if len(order) else order
    return high[first], low[first]
