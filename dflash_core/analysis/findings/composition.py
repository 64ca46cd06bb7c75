"""Whether a loss is rough because of the bucket mix of its steps; the model is in `loss_parts`."""

from __future__ import annotations

import numpy as np

from dflash_core.analysis.findings.curve_tools import bucket_name, curves_of
from dflash_core.analysis.findings.finding import Context, Finding, Strength
from dflash_core.analysis.findings.loss_parts import Fit, LossParts, fit_loss, parts_of
from dflash_core.analysis.reader import numbers
from dflash_core.analysis.runs import Run

# From when on it is worth a word: as a share of the roughness, sure of at least a part of it, far outside of what permuted
# steps give (in their standard deviations: ten, because the explained share of few buckets is skewed, and in short runs the
# filter does not take out all autocorrelation), and not below a hundredth of the loss.
MIN_SHARE, MIN_SHARE_LOW, MIN_CHANCE_SDS, MIN_OF_LOSS = 0.2, 0.03, 10.0, 0.01
# And a multiple of what chance explains, which is much where the mix and the rest change slowly.
MIN_BIASES = 3.0
MODERATE_SHARE, STRONG_SHARE = 0.35, 0.6
NOISIER_STEPS = 1.3


def find_composition(run: Run, context: Context) -> list[Finding]:
    """`loss_composition`: printed from a fifth of the variance around the trend on."""
    curves = curves_of(run)
    fit = fit_loss(run)
    if fit is None or not fit.explained >= max(MIN_SHARE, MIN_BIASES * fit.bias):
        return []
    parts = parts_of(fit, context.rng)
    level = float(np.median(np.abs(curves.loss[fit.used])))
    if parts.of_fluff_low < MIN_SHARE_LOW or parts.chance_sds < MIN_CHANCE_SDS or parts.sd_composition < MIN_OF_LOSS * level:
        return []
    strength: Strength = (
        "strong" if parts.of_fluff >= STRONG_SHARE else "moderate" if parts.of_fluff >= MODERATE_SHARE else "weak"
    )
    order, size = run.setting("bucketing.order"), run.setting("bucketing.batches_per_step")
    mend = "set bucketing.order: diverse and " if order != "diverse" else ""
    noise = _noise_of_small_steps(run, fit)
    return [
        Finding(
            kind="loss_composition",
            run_id=run.run_id,
            strength=strength,
            title=f"{parts.of_fluff:.0%} of the loss curve's roughness is the bucket mix of the steps, not training",
            text=(
                "Behind the first tenth of the steps the loss scatters around its trend with a standard deviation of "
                f"{parts.sd_fluff:.2g} nats; the bucket mix of the step explains {parts.of_fluff:.0%} of that variance "
                f"(95 % interval {parts.of_fluff_low:.0%} to {parts.of_fluff_high:.0%}; steps permuted at random: at "
                f"most {parts.by_chance:.0%}). {_extremes(run, parts)} "
                f"With the mix taken out the scatter is {parts.sd_rest:.2g} nats.{_noise_text(noise)}"
            ),
            advice=(
                "Judge training by the composition-adjusted loss. To smooth the curve itself, "
                f"{mend}raise bucketing.batches_per_step{f' (now {size})' if size else ''}, so that steps are mixed alike."
            ),
            measure="share of the loss's variance around its trend that the bucket mix explains",
            value=parts.of_fluff,
            unit="share",
            low=parts.of_fluff_low,
            high=parts.of_fluff_high,
            threshold=MIN_SHARE,
            table="batches",
            rows=f"bucket IN ({', '.join(str(bucket) for bucket in _outer(parts))})",
            evidence={
                "share_composition": parts.share_composition,
                "share_trend": parts.share_trend,
                "share_rest": parts.share_rest,
                "sd_fluff_nats": parts.sd_fluff,
                "sd_composition_nats": parts.sd_composition,
                "sd_rest_nats": parts.sd_rest,
                "by_chance_p95": parts.by_chance,
                "chance_sds": min(parts.chance_sds, 1e9),
                "offset_nats_by_bucket": {str(bucket): offset for bucket, offset in parts.offsets.items()},
                "num_steps": parts.num_steps,
                "rest_sd_few_labels_over_many": noise,
            },
        )
    ]


def _outer(parts: LossParts) -> tuple[int, int]:
    """The buckets with the lowest and the highest offset."""
    return min(parts.offsets, key=parts.offsets.__getitem__), max(parts.offsets, key=parts.offsets.__getitem__)


def _extremes(run: Run, parts: LossParts) -> str:
    low, high = _outer(parts)
    return (
        f"At the end of training a step of {bucket_name(run, high)} alone would lose "
        f"{parts.offsets[high] - parts.offsets[low]:.2g} "
        f"nats more than one of {bucket_name(run, low)}."
    )


def _noise_of_small_steps(run: Run, fit: Fit) -> float | None:
    """The rest's scatter in the third of the steps with the fewest labels, as a multiple of that in the third with the most."""
    labels = numbers(run.steps, "num_supervised")[fit.used]
    if not np.isfinite(labels).all():
        return None
    low, high = np.quantile(labels, [1 / 3, 2 / 3])
    few, many = fit.rest[labels <= low], fit.rest[labels >= high]
    return float(few.std() / many.std()) if len(few) and len(many) and low < high and many.std() > 0 else None


def _noise_text(ratio: float | None) -> str:
    if ratio is None or ratio < NOISIER_STEPS:
        return ""
    return (
        f" Part of that is the noise of small steps: the third with the fewest labels scatters {ratio:.1f} times as much as "
        "the third with the most."
    )
