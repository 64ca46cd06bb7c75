"""Moments at which the loss jumps up or the accuracy drops and comes back, and what they coincide with.

Both curves are looked at: the loss, and the acceptance length that the accuracy of the slots lets expect. A rough mix of buckets
makes such moments too, so they are looked for again with the effect of the mix taken out of both curves (`composition`). Where
that makes most of them vanish, the mix is the cause, and no event needs to be asked.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from dflash_core.analysis.findings.curve_tools import Curves, IntArray, curves_of, listed, steps_condition
from dflash_core.analysis.findings.finding import Context, Finding, Strength
from dflash_core.analysis.findings.jumps import Jump, merged, recurrent_jumps, upward_jumps
from dflash_core.analysis.findings.loss_parts import fit_composition, fit_loss, step_shares, without_mix
from dflash_core.analysis.findings.reset_causes import MAX_TAIL, NAMES, Candidate, candidates, named_causes, point_events
from dflash_core.analysis.runs import Run
from dflash_core.analysis.series import FloatArray

# One alone must be larger than several need to be.
SINGLE_SDS, SINGLE_DEPTH = 10.0, 0.1
REMOVED_BY_MIX = 2 / 3
# The mix is asked when it explains at least this much of a curve's variance around the trend.
MIN_MIX = 0.05
MIX_MATTERS = 0.2
# Of the shares of the steps before and behind, for the mix to be another one; and how many of all resets may be there.
MIX_STEPS, CHANGED_MIX, MOST_AT_CHANGES = 11, 0.6, 0.5
DEEP = 0.2
MOST_NAMED = 8

ADVICE = {
    "checkpoints": (
        "Compare weights and optimizer state before and after a checkpoint; train.checkpoint_every moves the resets if it "
        "is the cause."
    ),
    "epoch_starts": (
        "Look at what starts anew with an epoch: the order of the data (bucketing.order), what is drawn anew, and repeats."
    ),
    "resumes": (
        "Check that a resume restores the optimizer, the data position and the learning rate: compare a resumed run with "
        "an unbroken one."
    ),
    "lr_changes": "Make the change smaller or slower: train.lr, train.warmup_fraction.",
    "bucket_runs": "Mix the buckets of a step: bucketing.order: diverse, or a larger bucketing.batches_per_step.",
    "bucket_mix": (
        "Judge training by the composition-adjusted loss; to mix steps alike, set bucketing.order: diverse or raise "
        "bucketing.batches_per_step."
    ),
    "none": "Look at the batches of these steps (table batches) and at what else happened then on the machine and in the data.",
}

WHERE_ONCE = {
    "checkpoints": "right behind a checkpoint",
    "epoch_starts": "at the start of an epoch",
    "resumes": "right behind a resume",
    "lr_changes": "at a change of the learning rate",
    "bucket_runs": "in a bucket run",
}


@dataclass(frozen=True)
class Resets:
    """Jumps up of the loss and drops of the accuracy, and the moments of both, as indices into the steps."""

    loss: list[Jump]
    accuracy: list[Jump]
    at: IntArray

    def only_clear(self) -> Resets:
        """Those that need no cause to be believed."""
        return _told([one for one in self.loss if one.is_clear], [one for one in self.accuracy if one.is_clear])


def resets_of(loss: FloatArray, acceptance: FloatArray, events: list[IntArray]) -> Resets:
    """The moments of both curves, the doubtful ones with them."""
    return _told(_jumps(loss, 0.0, events), _jumps(-acceptance, -1.0, events))


def _told(up: list[Jump], drops: list[Jump]) -> Resets:
    """The moments; none where there is a single one that is not large."""
    at = merged([one.at for one in up], [one.at for one in drops])
    large = [
        one.sds >= SINGLE_SDS and one.depth >= SINGLE_DEPTH * abs(one.level - floor) for one, floor in _with_floor(up, drops)
    ]
    return Resets([], [], at[:0]) if len(at) == 1 and not any(large) else Resets(up, drops, at)


def _jumps(values: FloatArray, floor: float, events: list[IntArray]) -> list[Jump]:
    """What stands out by itself, or, where a kind of events has more of them behind it, what recurs there."""
    found = upward_jumps(values, floor)
    return max([found, *(recurrent_jumps(values, at, floor) for at in events)], key=len)


def _with_floor(up: list[Jump], drops: list[Jump]) -> list[tuple[Jump, float]]:
    return [(one, 0.0) for one in up] + [(one, -1.0) for one in drops]


def find_resets(run: Run, context: Context) -> list[Finding]:
    """`resets`, with the cause that they coincide with, or that none does."""
    curves = curves_of(run)
    events = list(point_events(run, curves).values())
    found = resets_of(curves.loss, curves.acceptance, events)
    adjusted, mix = _without_mix(run, curves, bool(len(found.at)))
    if adjusted is not None:
        calm = resets_of(*adjusted, events)
        clear, left = found.only_clear(), calm.only_clear().at
        remain = sum(bool(len(left)) and int(np.abs(left - at).min()) <= 2 for at in clear.at)
        if len(clear.at) >= 2 and max(remain, len(left)) <= (1 - REMOVED_BY_MIX) * len(clear.at):
            return [_finding(run, curves, clear, candidates(run, curves, clear.at), [], remain)]
        # With the mix taken out the noise is smaller: what is left is seen better there.
        found = calm if mix >= MIX_MATTERS else found
    for one in (found, found.only_clear()):
        asked = candidates(run, curves, one.at) if len(one.at) else []
        causes = named_causes(asked)
        if causes:
            return [_finding(run, curves, one, asked, causes, None)]
    if len(one.at) and np.isin(one.at, mix_changes(run, one.at)).mean() >= MOST_AT_CHANGES:
        return []
    return [_finding(run, curves, one, asked, [], None)] if len(one.at) else []


def mix_changes(run: Run, at: IntArray) -> IntArray:
    """Those of the moments at which one mix of buckets follows another for good, as in a sorted order: what the loss does there
    is what the buckets do, and no fit can tell that apart from anything else."""
    shares = np.nan_to_num(step_shares(run))
    changes = []
    for one in at.tolist():
        near = range(max(0, one - 2), min(len(shares), one + 3))
        apart = [
            np.abs(shares[max(0, i - MIX_STEPS) : i].mean(axis=0) - shares[i : i + MIX_STEPS].mean(axis=0)).sum()
            for i in near
            if i
        ]
        if max(apart, default=0.0) / 2 >= CHANGED_MIX:
            changes.append(one)
    return np.array(changes, dtype=np.int64)


def _without_mix(run: Run, curves: Curves, is_asked: bool) -> tuple[tuple[FloatArray, FloatArray] | None, float]:
    """Both curves without the effect of the bucket mix, and how much of the loss it explains; None where that is too little to
    bring out resets that are not seen with it, or, where there are some (`is_asked`), to be their cause."""
    of_loss = fit_loss(run)
    mix = 0.0 if of_loss is None else of_loss.explained
    if not is_asked and mix < MIX_MATTERS:
        return None, mix
    of_acceptance = fit_composition(run, curves.acceptance)
    if max(mix, 0.0 if of_acceptance is None else of_acceptance.explained) < MIN_MIX:
        return None, mix
    return (without_mix(curves.loss, of_loss), without_mix(curves.acceptance, of_acceptance)), mix


def _finding(
    run: Run, curves: Curves, found: Resets, asked: list[Candidate], causes: list[Candidate], remain_without_mix: int | None
) -> Finding:
    """One finding; `remain_without_mix` is given where the bucket mix is the cause."""
    by_mix = remain_without_mix is not None
    key = "bucket_mix" if by_mix else causes[0].key if causes else "none"
    steps = curves.step[found.at]
    what, depth = _measures(found)
    advice = " ".join(ADVICE[one.key] for one in causes) if causes else ADVICE[key]
    evidence: dict[str, Any] = {
        "cause": key if len(causes) < 2 else " or ".join(one.key for one in causes),
        "candidates": {one.key: one.as_dict() for one in asked},
        "num_resets": len(steps),
        "num_in_loss": len(found.loss),
        "num_in_accuracy": len(found.accuracy),
        "median_steps_until_back": float(np.median([one.back_after for one in found.loss + found.accuracy])),
        "remain_without_bucket_mix": remain_without_mix,
    }
    low, high = (causes[0].low, causes[0].high) if causes else (None, None)
    if causes:
        evidence |= {"hits": causes[0].num_hits, "hits_by_chance_low": low, "hits_by_chance_high": high}
    return Finding(
        kind="resets",
        run_id=run.run_id,
        strength=_strength(len(steps), depth, causes, by_mix),
        title=_title(what, len(steps), causes, by_mix),
        text=" ".join([_moments(what, steps, found), *_verdict(asked, causes, len(steps), remain_without_mix)]),
        advice=advice,
        measure="moments at which the loss jumps up or the accuracy drops and comes back",
        value=float(len(steps)),
        unit="resets",
        low=None,
        high=None,
        threshold=1.0,
        table="steps",
        rows=steps_condition(steps, around=3),
        evidence=evidence,
        at_steps=tuple(int(step) for step in steps[:300]),
    )


def _measures(found: Resets) -> tuple[str, float]:
    """Which curve it is about, and the median depth as a share of the level."""
    depths = [one.depth / abs(one.level - floor) for one, floor in _with_floor(found.loss, found.accuracy)]
    both = "loss and accuracy" if found.loss and found.accuracy else "loss" if found.loss else "accuracy"
    return both, float(np.median(depths))


def _strength(num: int, depth: float, causes: list[Candidate], by_mix: bool) -> Strength:
    if causes and causes[0].num_hits >= 0.8 * num and num >= 2:
        return "strong" if depth >= DEEP / 2 else "moderate"
    return "moderate" if depth >= DEEP or causes or by_mix else "weak"


def _title(what: str, num: int, causes: list[Candidate], by_mix: bool) -> str:
    verb = "fall" if " and " in what else "falls"
    times = "once" if num == 1 else f"{num} times"
    if by_mix:
        return f"The {what} {verb} back {times}, because of the bucket mix of these steps"
    if not causes:
        return f"The {what} {verb} back {times}, and none of the known causes fits"
    hits = causes[0].num_hits
    if num == 1:
        return f"The {what} {verb} back once, {' or '.join(WHERE_ONCE[one.key] for one in causes)}"
    name = " or ".join(NAMES[one.key] for one in causes) + (", which coincide" if len(causes) > 1 else "")
    return f"The {what} {verb} back {times}, {'each time' if hits == num else f'{hits} of them'} at {name}"


def _moments(what: str, steps: IntArray, found: Resets) -> str:
    """How often, where, how far, how long."""
    named = listed([str(step) for step in steps[:MOST_NAMED]]) + (" and later" if len(steps) > MOST_NAMED else "")
    parts = []
    if found.loss:
        parts.append(f"the loss rises by {np.median([one.depth for one in found.loss]):.2g} nats")
    if found.accuracy:
        drop = np.median([one.depth for one in found.accuracy])
        parts.append(f"the expected acceptance length (+1 included) drops by {drop:.2g}")
    back = max(1, round(float(np.median([one.back_after for one in found.loss + found.accuracy]))))
    typical = "" if len(steps) == 1 else "typically "
    return (
        f"At step{'s' if len(steps) > 1 else ''} {named}, {typical}{' and '.join(parts)}; half of it is made up for after {back} "
        f"step{'s' if back > 1 else ''}."
    )


def _verdict(asked: list[Candidate], causes: list[Candidate], num: int, remain_without_mix: int | None) -> list[str]:
    """What it comes with, and what is cleared, with figures for each."""
    lines = []
    if remain_without_mix is not None:
        lines.append(f"With the effect of the bucket mix taken out of the curves, {remain_without_mix} of {num} are left.")
    if causes:
        lines.append(f"They come with {causes[0].name}: {causes[0].sentence()}.")
    if len(causes) > 1:
        others = listed([NAMES[one.key] for one in causes[1:]])
        lines.append(f"The same moments are also {others}: from this run alone they cannot be told apart.")
    if not causes and remain_without_mix is None and asked:
        lines.append("None of these fits better than chance and explains most of them.")
    cleared = [_cleared(one, bool(causes)) for one in asked if one not in causes]
    absent = [name for key, name in NAMES.items() if key not in {one.key for one in asked}]
    if cleared:
        lines.append(f"{cleared[0][0].upper()}{'; '.join(cleared)[1:]}.")
    if absent:
        lines.append(f"There were no {listed(absent, 'or')} in the run.")
    return lines


def _cleared(one: Candidate, is_named: bool) -> str:
    """That it is not this one; or, where it does better than chance, why another one is named nevertheless."""
    if one.fits and is_named:
        return f"{one.name} fit less well: most of the {one.num_events} had none"
    if one.tail <= MAX_TAIL:
        return f"only in part {one.name}: {one.sentence()}"
    return f"not {one.name}: {one.sentence()}"
