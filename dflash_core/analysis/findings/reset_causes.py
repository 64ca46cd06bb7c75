"""What resets may coincide with, and whether they do so more often than chance.

Events at single steps (checkpoints, epoch starts, resumes, changes of the learning rate) are held against resets in the steps
from the event to two behind it. Were resets independent of them, the number of hits would be binomial: each reset hits with the
share of steps that lie behind an event. (Shifting the resets in time would not do here: checkpoints are periodic, and a
shift by a period changes nothing.) Bucket runs are no points; for them the range is that of shifted resets.

A cause is named when it has more hits than chance allows and at least half of all resets. Of several that do, the one whose
events and resets match best counts, in both directions: the share of resets that it explains and the share of its events that
have one. Epoch starts thus go before checkpoints when only the checkpoints at epoch starts have resets. Causes that match
equally well, with the same resets, cannot be told apart.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dflash_core.analysis.findings.curve_tools import (
    CONFIDENCE,
    Curves,
    IntArray,
    binomial_range,
    binomial_tail,
    bucket_name,
    shifted_overlaps,
)
from dflash_core.analysis.findings.spikes import Runs, bucket_runs
from dflash_core.analysis.reader import numbers
from dflash_core.analysis.runs import Run
from dflash_core.analysis.series import BoolArray, FloatArray

BEHIND_EVENT = 2
MAX_TAIL, MAX_TAIL_OF_ONE = 0.002, 0.01
MIN_EXPLAINED = 0.5
MAX_SHARE_IN_RUNS = 0.5
LR_KINK = 0.01
SAME_MATCH = 0.1

NAMES = {
    "checkpoints": "checkpoints",
    "epoch_starts": "epoch starts",
    "resumes": "resumes",
    "lr_changes": "learning-rate changes",
    "bucket_runs": "bucket runs",
}


@dataclass(frozen=True)
class Candidate:
    """A possible cause held against the resets.

    Attributes:
        key: one of `NAMES`.
        name: in words.
        num_events: how often it happened (for bucket runs: how many there are).
        hits: resets within two steps behind an event, or in a bucket run; as flags, one per reset.
        expected, low, high: hits by chance, mean and 95 % range.
        tail: probability of as many hits by chance.
        match: harmonic mean of the explained share of resets and the share of events with a reset.
    """

    key: str
    name: str
    num_events: int
    hits: BoolArray
    expected: float
    low: float
    high: float
    tail: float
    match: float

    @property
    def num_hits(self) -> int:
        return int(self.hits.sum())

    @property
    def fits(self) -> bool:
        limit = MAX_TAIL if len(self.hits) > 1 else MAX_TAIL_OF_ONE
        return self.tail <= limit and self.num_hits >= MIN_EXPLAINED * len(self.hits) and self.num_hits > self.high

    def sentence(self) -> str:
        """`2 of 14 within 2 steps behind one, 1.8 expected by chance (0 to 4)`."""
        where = "in one" if self.key == "bucket_runs" else f"within {BEHIND_EVENT} steps behind one"
        chance = f"{self.expected:.2g} expected by chance, 95 % range {self.low:.0f} to {self.high:.0f}"
        return f"{self.num_hits} of {len(self.hits)} {where}, {chance}"

    def as_dict(self) -> dict[str, Any]:
        """For the finding's evidence."""
        return {
            "num_events": self.num_events,
            "hits": self.num_hits,
            "resets": len(self.hits),
            "expected": self.expected,
            "expected_low": self.low,
            "expected_high": self.high,
            "chance_of_as_many": self.tail,
        }


def candidates(run: Run, curves: Curves, resets: IntArray) -> list[Candidate]:
    """Every cause that happened in the run, against resets at these indices of steps."""
    found = [_of_points(key, events, resets, len(curves)) for key, events in point_events(run, curves).items() if len(events)]
    return found + _of_bucket_runs(run, resets)


def point_events(run: Run, curves: Curves) -> dict[str, IntArray]:
    """Indices of the steps at which things happened. A checkpoint or resume of step s is right before step s."""
    attempt = numbers(run.steps, "attempt", missing=0)
    resumed = np.flatnonzero(np.diff(attempt)) + 1
    return {
        "checkpoints": _event_steps(run, curves, ("checkpoint_begin", "checkpoint_end")),
        "epoch_starts": np.flatnonzero(np.diff(curves.epoch)) + 1,
        "resumes": np.union1d(resumed, _event_steps(run, curves, ("resume",))),
        "lr_changes": lr_changes(curves.lr),
    }


def _event_steps(run: Run, curves: Curves, kinds: tuple[str, ...]) -> IntArray:
    if "kind" not in run.events.column_names or not len(run.events):
        return np.zeros(0, dtype=np.int64)
    kind = np.array(run.events["kind"].to_pylist(), dtype=object)
    steps = np.unique(numbers(run.events, "step")[np.isin(kind, kinds)])
    at = np.searchsorted(curves.step, steps[np.isfinite(steps)])
    return np.asarray(at[(at > 0) & (at < len(curves))])


def lr_changes(lr: FloatArray) -> IntArray:
    """Where the learning rate jumps or its slope breaks, as at the end of a warm-up: by more than 1 % of its peak in a step."""
    known = np.flatnonzero(np.isfinite(lr))
    if len(known) < 4:
        return np.zeros(0, dtype=np.int64)
    values = lr[known]
    peak = float(values.max())
    if not peak > 0:
        return np.zeros(0, dtype=np.int64)
    kinks = np.flatnonzero(np.abs(np.diff(values, 2)) > LR_KINK * peak) + 1
    # A jump bends the slope twice; the second bend is at the first step with the new rate or behind it.
    starts = kinks[np.diff(kinks, prepend=-9) > 1]
    jumps = np.abs(values[np.minimum(starts + 1, len(values) - 1)] - values[starts]) > np.abs(values[starts] - values[starts - 1])
    return np.asarray(known[np.minimum(starts + jumps, len(values) - 1)])


def _of_points(key: str, events: IntArray, resets: IntArray, num_steps: int) -> Candidate:
    flags = np.zeros(num_steps, dtype=bool)
    for offset in range(BEHIND_EVENT + 1):
        flags[np.minimum(events + offset, num_steps - 1)] = True
    hits = flags[resets]
    share = float(flags.mean())
    distance = resets[:, None] - events[None, :] if len(resets) * len(events) <= 1_000_000 else np.zeros((0, len(events)))
    used = ((distance >= 0) & (distance <= BEHIND_EVENT)).any(axis=0).mean() if len(distance) else 0.0
    tail = binomial_tail(int(hits.sum()), len(resets), share)
    return _candidate(key, len(events), hits, len(resets) * share, binomial_range(len(resets), share), tail, used)


def _of_bucket_runs(run: Run, resets: IntArray) -> list[Candidate]:
    """The bucket and kind of run that fits best, its probability times the number that was tried."""
    tried = [runs for runs in bucket_runs(run) if 0 < runs.members.mean() <= MAX_SHARE_IN_RUNS]
    found = [(_of_runs(runs, resets, len(tried)), runs) for runs in tried]
    if not found:
        return []
    (best, by_shift), runs = min(found, key=lambda one: (one[0][0].tail, -one[0][0].num_hits))
    low, high = (float(end) for end in np.quantile(by_shift, CONFIDENCE))
    what = "steps that lean to" if runs.level == "step" else "flat runs of"
    return [replace(best, name=f"bucket runs ({what} {bucket_name(run, runs.bucket)})", low=low, high=high)]


def _of_runs(runs: Runs, resets: IntArray, num_tried: int) -> tuple[Candidate, FloatArray]:
    """The candidate, its range left open, and the hits by shift."""
    marks = np.zeros(len(runs.members), dtype=bool)
    marks[resets] = True
    counts = shifted_overlaps(marks, [runs.members])[0]
    hits, share = runs.members[resets], float(runs.members.mean())
    tail = max(binomial_tail(int(hits.sum()), len(resets), share), float((counts[1:] >= hits.sum()).mean()))
    starts = np.flatnonzero(np.diff(runs.members.astype(np.int8), prepend=0) == 1)
    used = len(np.unique(np.searchsorted(starts, resets[hits], side="right"))) / max(1, len(starts))
    tail = min(1.0, num_tried * tail)
    return _candidate("bucket_runs", len(starts), hits, float(counts.mean()), (0.0, 0.0), tail, used), counts


def _candidate(
    key: str,
    num_events: int,
    hits: BoolArray,
    expected: float,
    chance: tuple[float, float],
    tail: float,
    used: float,
) -> Candidate:
    explained = float(hits.mean())
    match = 2 * explained * used / (explained + used) if explained + used > 0 else 0.0
    return Candidate(key, NAMES[key], num_events, hits, expected, float(chance[0]), float(chance[1]), tail, float(match))


def named_causes(found: list[Candidate]) -> list[Candidate]:
    """The cause, the best match first; several where they cannot be told apart, none where none fits."""
    fitting = sorted((one for one in found if one.fits), key=lambda one: -one.match)
    if not fitting:
        return []
    best = fitting[0]
    return [best] + [
        one for one in fitting[1:] if best.match - one.match <= SAME_MATCH and (one.hits == best.hits).mean() >= 1 - SAME_MATCH
    ]
