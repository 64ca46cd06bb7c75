"""What the suspects of periodic trouble do to the loss: checkpoints, epoch starts, resumes, changes of the learning rate.

Nobody sees in a rough curve that checkpoints do nothing to it. So for each kind of event the loss behind it is held against
the loss before it, and that difference against the same one at other places of the run: what is left is the event's. This is
told of every run, also where nothing is found; a reset that an event does cause shows here as a difference that excludes 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

import numpy as np

from dflash_core.analysis.findings.curve_tools import IntArray, curves_of
from dflash_core.analysis.findings.reset_causes import BEHIND_EVENT, NAMES, point_events
from dflash_core.analysis.run_tables import SETTLED_AFTER_FRACTION
from dflash_core.analysis.runs import Run
from dflash_core.analysis.series import FloatArray

# The steps of a reset: from the event to two behind it (`reset_causes`), against as many before it.
STEPS = BEHIND_EVENT + 1
MIN_EVENTS, MIN_OTHERS = 3, 20


@dataclass(frozen=True)
class Cleared:
    """One kind of event of a run.

    Args:
        key: `checkpoints`, `epoch_starts`, `resumes` or `lr_changes`.
        num_events: those behind the first tenth of the steps, with three finite losses on either side.
        difference: by how many nats the loss rises at them more than elsewhere; the bucket mix of the steps is taken out.
        low, high: 95 % interval (Welch's t over events and other places).
        is_clear: the interval holds 0.
    """

    key: str
    num_events: int
    difference: float
    low: float
    high: float

    @property
    def is_clear(self) -> bool:
        return self.low <= 0 <= self.high

    def sentence(self) -> str:
        """`Checkpoints: the loss of the 3 steps behind one does not measurably differ from what ....`"""
        name = NAMES[self.key]
        how = "does not measurably differ from" if self.is_clear else "is above" if self.difference > 0 else "is below"
        return (
            f"{name[0].upper()}{name[1:]}: the loss of the {STEPS} steps behind one {how} what other steps let expect "
            f"({self.difference:+.2g} nats, 95 % interval {self.low:+.2g} to {self.high:+.2g}; n = {self.num_events})."
        )


def cleared(run: Run, loss: FloatArray) -> list[Cleared]:
    """Each kind of event of which a run has at least three; nothing for a run too short to say.

    Args:
        loss: of each of `run.steps`, the effect of the bucket mix taken out (`loss_parts.without_mix`).
    """
    curves = curves_of(run)
    rises = _rises(loss)
    first = round(SETTLED_AFTER_FRACTION * len(loss))
    found = []
    for key, events in point_events(run, curves).items():
        one = _held_against_others(key, rises, events, first)
        if one is not None:
            found.append(one)
    return found


def _rises(loss: FloatArray) -> FloatArray:
    """Of each step the mean loss of the `STEPS` from it on less that of those before it; NaN where one of them is not known."""
    rises = np.full(len(loss), np.nan)
    if len(loss) >= 2 * STEPS:
        means = np.lib.stride_tricks.sliding_window_view(loss, STEPS).mean(axis=1)
        rises[STEPS : len(loss) - STEPS + 1] = means[STEPS:] - means[:-STEPS]
    return rises


def _held_against_others(key: str, rises: FloatArray, events: IntArray, first: int) -> Cleared | None:
    """Events against places that share no step with one, taken `2 * STEPS` apart so that they share none with each other."""
    away = np.ones(len(rises), dtype=bool)
    away[:first] = False
    for offset in range(1 - 2 * STEPS, 2 * STEPS):
        at = events + offset
        away[at[(at >= 0) & (at < len(rises))]] = False
    own = rises[events[events >= first]]
    others = rises[away]
    own, others = own[np.isfinite(own)], others[np.isfinite(others)]
    if len(own) < MIN_EVENTS or len(others) < MIN_OTHERS:
        return None
    independent = max(2.0, len(others) / (2 * STEPS))
    parts = (float(own.var(ddof=1)) / len(own), float(others.var(ddof=1)) / independent)
    if not sum(parts) > 0:
        return None
    from scipy.special import stdtrit  # slow to import

    # A few events may lie close to each other by luck; then the scatter of all places says more than theirs.
    own_part = max(parts[0], float(others.var(ddof=1)) / len(own))
    free = (own_part + parts[1]) ** 2 / (own_part**2 / (len(own) - 1) + parts[1] ** 2 / (independent - 1))
    free = free if own_part == parts[0] else max(free, independent - 1)
    difference = float(own.mean() - others.mean())
    half = float(stdtrit(free, 0.975)) * sqrt(own_part + parts[1])
    return Cleared(key, len(own), difference, difference - half, difference + half)
