"""Whether decoding accepts what training promises (docs/field.md 3: "good validation, nothing accepted in serving").

Training promises an acceptance length: 1 + sum of the products of the slots' accuracies. The draft-verify loop measures one. They
are not equal in a sound run either: prompts are held out, greedy decoding visits other anchors than those drawn in training,
and the estimate takes the slots' hits for independent. So what is compared is what the draft adds, the tokens beyond the
target's own, and only a difference by a factor of two counts, between the near ends of both intervals.

Where the same draft was also walked over held-out answers while it trained (`evals` of kind `training`), that tells where the gap
is: the walk agrees with training, then decoding or export differs; it agrees with decoding, then the training data are
too easy or leak.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow.compute as pc
from numpy.random import Generator

from dflash_core.analysis.findings.curve_tools import curves_of
from dflash_core.analysis.findings.finding import Context, Finding, Strength
from dflash_core.analysis.run_tables import last_part
from dflash_core.analysis.runs import Run
from dflash_core.analysis.series import resampled_means

MIN_STEPS = 40
# What decoding adds as a share of what training promises: below the first it is a loss, above the second a surprise.
MIN_RATIO, MAX_RATIO = 0.5, 3.0
STRONG_RATIO, MODERATE_RATIO = 0.2, 0.35
MIN_PROMISE, MIN_DIFFERENCE = 0.5, 0.4
# Of fewer prompts the interval over prompts is much too narrow, and of two that are alike it is a point.
MIN_PROMPTS = 8
# Where evaluation gave no interval, or training too few independent steps for one.
UNKNOWN_SPREAD = 0.2


@dataclass(frozen=True)
class Length:
    """An acceptance length, +1 included, with its 95 % interval."""

    value: float
    low: float
    high: float


def find_train_serve_gap(run: Run, context: Context) -> list[Finding]:
    """`train_serve_gap`, for runs that were evaluated; nothing where that was on fewer than 8 prompts."""
    promised, measured = _promised(run, context.rng), _measured(run)
    if promised is None or measured is None:
        return []
    serves_less = (
        measured.high - 1 < MIN_RATIO * (promised.low - 1)
        and promised.value - 1 >= MIN_PROMISE
        and promised.low - measured.high >= MIN_DIFFERENCE
    )
    serves_more = measured.low - 1 > MAX_RATIO * max(promised.high - 1, 1e-9) and measured.low - promised.high >= MIN_DIFFERENCE
    if not serves_less and not serves_more:
        return []
    return [_finding(run, promised, measured, serves_less)]


def _promised(run: Run, rng: Generator) -> Length | None:
    """What the last tenth of the steps lets expect."""
    curves = curves_of(run)
    if len(curves) < MIN_STEPS:
        return None
    last = last_part(curves.acceptance)
    if not len(last):
        return None
    value = float(last.mean())
    drawn = resampled_means(last, rng, 300)
    if drawn is None:
        half = UNKNOWN_SPREAD * (value - 1)
        return Length(value, value - half, value + half)
    low, high = np.quantile(drawn, (0.025, 0.975))
    return Length(value, float(low), float(high))


def _measured(run: Run) -> Length | None:
    """What evaluation measured over all sources."""
    prompts = _last(run, "trained", "num_prompts")
    if prompts is not None and prompts < MIN_PROMPTS:
        return None
    value = _last(run, "trained", "acceptance_length")
    value = run.manifest.get("acceptance_length") if value is None else value
    if not isinstance(value, int | float) or not np.isfinite(value):
        return None
    ends = [_last(run, "trained", f"acceptance_length_{end}") for end in ("low", "high")]
    if ends[0] is None or ends[1] is None:
        half = UNKNOWN_SPREAD * (value - 1)
        return Length(value, value - half, value + half)
    return Length(value, ends[0], ends[1])


def _last(run: Run, kind: str, metric: str) -> float | None:
    """The value of the last step over all sources, and of one measured again the later one; None where there is no finite one."""
    wanted = pc.and_(pc.equal(run.evals["kind"], kind), pc.equal(run.evals["metric"], metric))
    rows = run.evals.select(["step", "source", "position", "value"]).filter(wanted).to_pylist()
    rows = [row for row in rows if row["source"] == "all" and row["position"] is None and row["value"] is not None]
    rows = [row for row in rows if np.isfinite(row["value"])]
    return float(max(reversed(rows), key=lambda row: row["step"] or 0)["value"]) if rows else None


def _finding(run: Run, promised: Length, measured: Length, serves_less: bool) -> Finding:
    ratio = (measured.value - 1) / max(promised.value - 1, 1e-9)
    walked = _last(run, "training", "acceptance_length")
    strength: Strength = "weak"
    if serves_less:
        strength = "strong" if ratio <= STRONG_RATIO else "moderate" if ratio <= MODERATE_RATIO else "weak"
    ends = ((measured.low - 1) / max(promised.high - 1, 1e-9), (measured.high - 1) / max(promised.low - 1, 1e-9))
    return Finding(
        kind="train_serve_gap",
        run_id=run.run_id,
        strength=strength,
        title=f"Training promises an acceptance length of {promised.value:.2f}, decoding measures {measured.value:.2f}",
        text=(
            f"The accuracy of the slots in the last tenth of the steps lets expect an acceptance length (+1 included) of "
            f"{promised.value:.2f} ({promised.low:.2f} to {promised.high:.2f}); decoding held-out prompts gave "
            f"{measured.value:.2f} "
            f"({measured.low:.2f} to {measured.high:.2f}). Beyond the target's own token that is {ratio:.0%} of what "
            "was promised; other "
            f"prompts and greedy anchors explain some difference, not a factor of {'two' if serves_less else 'three'}."
            f"{_where(walked, promised, measured)}"
        ),
        advice=_advice(serves_less, walked, promised, measured),
        measure="tokens that the draft adds in decoding over those that training promises",
        value=ratio,
        unit="share",
        low=ends[0],
        high=ends[1],
        threshold=MIN_RATIO if serves_less else MAX_RATIO,
        table="evals",
        rows="kind = 'trained' AND source = 'all' AND metric LIKE 'acceptance_length%'",
        evidence={
            "promised": promised.value,
            "promised_low": promised.low,
            "promised_high": promised.high,
            "measured": measured.value,
            "measured_low": measured.low,
            "measured_high": measured.high,
            "walked_while_training": walked,
            "direction": "decoding gives less" if serves_less else "decoding gives more",
        },
    )


def _agrees_with_training(walked: float, promised: Length, measured: Length) -> bool:
    return abs(walked - promised.value) < abs(walked - measured.value)


def _where(walked: float | None, promised: Length, measured: Length) -> str:
    if walked is None:
        return ""
    near = "training" if _agrees_with_training(walked, promised, measured) else "decoding"
    return f" A walk over held-out answers during training gave {walked:.2f}, which is nearer to what {near} says."


def _advice(serves_less: bool, walked: float | None, promised: Length, measured: Length) -> str:
    if not serves_less:
        return (
            "No fault of the draft: the training data are harder than the evaluation's prompts, or greedy answers "
            "repeat themselves. "
            "Look at evaluate.max_new_tokens and at the prompts of data.held_out."
        )
    if walked is not None and _agrees_with_training(walked, promised, measured):
        return (
            "Held-out answers are drafted well, so look at decoding: the exported weights, draft.target_layer_ids in "
            "the export, the chat "
            "template and thinking mode of the evaluation's prompts."
        )
    return (
        "Look for a leak (train.self_checks), taps that differ between training and decoding (draft.target_layer_ids), "
        "thinking mode or "
        "chat template that differ between data and prompts, answers that the target would not give itself, and "
        "overfitting (train.num_epochs)."
    )
