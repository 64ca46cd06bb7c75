"""Padded batches: the sequences of a bucket, drawn at random and cut by the limits of a batch."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.random import Generator

from dflash_core.bucketing.lengths import IntArray, bucket_of
from dflash_core.bucketing.limits import Limits
from dflash_core.bucketing.windows import count_windows, sorted_windows


class Formed(NamedTuple):
    """Batches in no particular order.

    Attributes:
        sample_index: sequence indices, batch by batch, [num_sequences].
        starts: where each batch begins in `sample_index`, [num_batches].
    """

    sample_index: IntArray
    starts: IntArray


def form_padded(lengths: IntArray, edges: tuple[int, ...], limits: Limits, sort_window: int, rng: Generator) -> Formed:
    """Batches of sequences of one bucket each.

    Without `sort_window` a batch is a random draw from its bucket, and the sizes in a bucket are as even as whole numbers
    allow. With it, a random order of the bucket is cut into windows of about `sort_window` batches, and each window is
    sorted by length before it is cut into batches. Padding nearly vanishes, and which sequences meet is still
    drawn: a sequence meets the nearest in length among those of its window, which is another draw every epoch.
    """
    shuffled = rng.permutation(len(lengths))
    bucket = bucket_of(lengths, edges)
    sample_index = shuffled[np.argsort(bucket[shuffled], kind="stable")]
    in_order = lengths[sample_index]
    starts: list[IntArray] = []
    begin = 0
    for count in np.bincount(bucket, minlength=len(edges)).tolist():
        part = slice(begin, begin + count)
        if count and sort_window:
            order, cuts = _cut_sorted(in_order[part], limits, sort_window)
            sample_index[part] = sample_index[part][order]
        else:
            cuts = _cut_evenly(count, int(in_order[part].max(initial=1)), limits)
        starts.append(begin + cuts)
        begin += count
    return Formed(sample_index, np.concatenate(starts))


def _cut_evenly(count: int, longest: int, limits: Limits) -> IntArray:
    sizes = batch_sizes(count, int(limits.most_sequences(np.array([longest]))[0]))
    return np.cumsum(sizes) - sizes


def batch_sizes(num_sequences: int, most: int) -> IntArray:
    """Sizes of the batches of one bucket: as few as `most` sequences allow, and as even as whole numbers allow.

    The number depends only on the bucket's content, so every epoch has the same number of batches and steps. The one
    larger size is spread evenly over the batches.
    """
    num_batches = -(-num_sequences // most)
    return np.diff(np.arange(num_batches + 1) * num_sequences // max(num_batches, 1))


def _cut_sorted(lengths: IntArray, limits: Limits, sort_window: int) -> tuple[IntArray, IntArray]:
    """A new order of a bucket's sequences, and where batches begin in it.

    A window is cut from its longest sequence down, because the first of a batch is then its longest and says how many
    it holds. Every round below cuts one batch off all windows at once.
    """
    num_batches = limits.fewest_batches(limits.share_of(lengths))
    windows = sorted_windows(lengths, count_windows(num_batches, sort_window))
    position, present = windows.position(), windows.present
    most = limits.most_sequences(lengths[position])
    begins = np.zeros(present.shape, dtype=np.bool_)
    size = present.sum(axis=1)
    window, column = np.arange(len(size)), np.zeros(len(size), dtype=np.int64)
    while len(window):
        begins[window, column] = True
        column = column + most[window, column]
        inside = column < size[window]
        window, column = window[inside], column[inside]
    return position[present], np.flatnonzero(begins[present])
