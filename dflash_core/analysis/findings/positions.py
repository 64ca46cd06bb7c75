"""Slots of the block that learn nothing although their neighbours do.

Accuracy falls from slot to slot even in a good draft, so a low one says little. A slot is dead when at the end of training it is
about zero, surely (upper end of its interval), and a small part of what the last living slot before it reaches: neighbours of a
healthy block differ by a tenth or a quarter, not by a factor of four.
"""

from __future__ import annotations

import numpy as np

from dflash_core.analysis.findings.curve_tools import curves_of, listed, wilson_interval
from dflash_core.analysis.findings.finding import Context, Finding
from dflash_core.analysis.reader import matrix, numbers
from dflash_core.analysis.runs import Run
from dflash_core.analysis.series import FloatArray

MIN_STEPS = 20
LAST_SHARE = 0.1
# About zero; a slot that always names the most frequent token is above one percent in text.
DEAD_ACCURACY = 0.03
OF_NEIGHBOUR = 0.25
# What the neighbour must have reached, or the draft has not begun to learn.
ALIVE_ACCURACY = 0.15
MIN_LABELS = 300
Z_SURE = 3.0


def find_dead_positions(run: Run, context: Context) -> list[Finding]:
    """`dead_positions`, over the last tenth of the steps and at least `MIN_STEPS` of them."""
    accuracy = matrix(run.steps, "accuracy_by_position")
    if len(accuracy) < MIN_STEPS or accuracy.shape[1] < 2:
        return []
    last = slice(-max(MIN_STEPS, round(LAST_SHARE * len(accuracy))), None)
    curves = curves_of(run)
    learning = np.isfinite(curves.loss[last]) & ~curves.skipped[last]
    labels = np.nan_to_num(numbers(run.steps, "num_supervised")[last]) * learning
    slots = accuracy[last]
    known = np.isfinite(slots)
    # Runs of labels are unbroken, so no slot has more than the mean; it stands for each of them.
    each = labels[:, None] * known / accuracy.shape[1]
    count = each.sum(axis=0)
    mean = np.divide((np.nan_to_num(slots) * each).sum(axis=0), count, out=np.full(len(count), np.nan), where=count > 0)
    dead, reference = dead_slots(mean, count)
    if not dead:
        return []
    first = curves.step[last][0]
    return [_finding(run, dead, reference, mean, count, int(first))]


def dead_slots(accuracy: FloatArray, count: FloatArray) -> tuple[list[int], int]:
    """The dead slots (from 1), and the living one that they are held against: the last before the first dead one, or, where the
    block begins with it, the best of all."""
    alive = [k for k, value in enumerate(accuracy) if value >= ALIVE_ACCURACY]
    dead, reference = [], -1
    for k, (value, labels) in enumerate(zip(accuracy, count, strict=True)):
        before = [j for j in alive if j < k]
        if not alive or labels < MIN_LABELS or k in alive:
            continue
        neighbour = before[-1] if before else int(np.nanargmax(accuracy))
        upper = wilson_interval(float(value * labels), float(labels), Z_SURE)[1]
        skipped = [j for j in range(neighbour + 1, k) if j not in dead]
        # A block that fades out slot by slot is not dead where it is faint.
        if upper <= min(DEAD_ACCURACY, OF_NEIGHBOUR * accuracy[neighbour]) and not (before and skipped):
            dead.append(k)
            reference = neighbour if reference < 0 else reference
    return [k + 1 for k in dead], reference + 1


def _finding(run: Run, dead: list[int], reference: int, mean: FloatArray, count: FloatArray, first: int) -> Finding:
    names = listed([str(slot) for slot in dead])
    worst = max(dead, key=lambda slot: mean[slot - 1])
    value, labels = float(mean[worst - 1]), float(count[worst - 1])
    low, high = wilson_interval(value * labels, labels)
    several = len(dead) > 1
    return Finding(
        kind="dead_positions",
        run_id=run.run_id,
        strength="strong",
        title=f"Slot{'s' if several else ''} {names} of the block {'learn' if several else 'learns'} nothing",
        text=(
            f"From step {first} to the end slot{'s' if several else ''} {names} {'predict' if several else 'predicts'} "
            "a share of "
            f"{'at most ' if several else ''}{value:.2g} of the tokens right (95 % interval {low:.2g} to {high:.2g}, "
            f"about {labels:,.0f} labels "
            f"a slot), slot {reference} {mean[reference - 1]:.2g}. A healthy block loses accuracy slot by slot, not at once."
        ),
        advice=(
            "Check that these slots have labels and a weight: train.loss_gamma (a small one gives late slots next to "
            "none), draft.block_size against "
            "the answers' length, and the mask and positions of the block. A serving engine should propose no more "
            "tokens than slots that work."
        ),
        measure="accuracy of the best of the dead slots at the end of training",
        value=value,
        unit="share",
        low=low,
        high=high,
        threshold=float(min(DEAD_ACCURACY, OF_NEIGHBOUR * mean[reference - 1])),
        table="steps",
        rows=f"step >= {first}",
        evidence={
            "slots": dead,
            "reference_slot": reference,
            "accuracy_by_slot": [None if np.isnan(one) else float(one) for one in mean],
            "labels_by_slot": [float(one) for one in count],
        },
    )
