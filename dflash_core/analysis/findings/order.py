"""Buckets that come in longer runs than they need to, in the order in which batches were trained."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from math import ceil, floor, sqrt

import numpy as np

from dflash_core.analysis.findings.curve_tools import steps_with_batches
from dflash_core.analysis.findings.finding import Context, Finding, Strength
from dflash_core.analysis.findings.pipeline_rows import column, plain
from dflash_core.analysis.order import MIXED, leaning_bucket, step_counts
from dflash_core.analysis.runs import Run
from dflash_core.bucketing import OrderStatistics, order_statistics, run_lengths

# Below this an epoch says nothing about its order: its own bucket counts are as random as the order.
MIN_BATCHES = 20
# docs/field.md 2: alarm on clustering only.
RUNS_Z = -3.0
LAG1_CORRELATION = 0.1
# In short epochs the correlation of a random order exceeds that by chance; its standard deviation is 1 / sqrt(n).
LAG1_DEVIATIONS = 3.0
# Of several shuffled epochs one may exceed the alarm; this none does.
LAG1_SHUFFLED = 0.3
# Scatter of the bucket's share over steps, beyond what whole batches need, from which on the finding is called so.
MODERATE_SCATTER, STRONG_SCATTER = 0.05, 0.15
# Where a step is one batch: times R*.
STRONG_RUN = 4
MOST_MARKS = 300
LONGEST_RUN = "longest run of one bucket in an epoch"


@dataclass(frozen=True)
class Epoch:
    """One epoch's consumed batches from `begin` to `end` (rows of the batches table), and the numbers of their order."""

    begin: int
    end: int
    found: OrderStatistics

    def clusters(self, bound: int) -> bool:
        """Whether one of the three alarms of docs/field.md 2 goes off. One bucket alone cannot cluster."""
        if self.found.runs_z is None:
            return False
        lag1 = self.found.lag1_correlation or 0.0
        correlated = max(LAG1_CORRELATION, LAG1_DEVIATIONS / sqrt(self.end - self.begin))
        return self.found.longest_run > bound + 1 or self.found.runs_z < RUNS_Z or lag1 > correlated


def find_batch_order(run: Run, context: Context) -> list[Finding]:
    """`batch_order`: an epoch whose longest run of one bucket is above R* + 1, whose runs z is below -3, or whose batches' mean
    lengths correlate from one to the next (docs/field.md 2). Epochs are judged on their own, so runs that join where two meet
    do not count. Nothing for epochs of fewer than 20 batches.
    """
    epochs = _epochs(run)
    if not epochs:
        return []
    # Epochs of a run hold the same sequences; one that was cut short has bucket counts that are off by a few batches.
    bound = max(epoch.found.shortest_possible_longest_run for epoch in epochs)
    bad = [epoch for epoch in epochs if epoch.clusters(bound)]
    if not bad:
        return []
    worst = max(
        bad, key=lambda epoch: (epoch.found.longest_run, -(epoch.found.runs_z or 0.0), epoch.found.lag1_correlation or 0.0)
    )
    return [_finding(run, epochs, bad, worst, bound)]


def _epochs(run: Run) -> list[Epoch]:
    bucket, step = run.buckets(), column(run.batches, "step")
    lengths = np.nan_to_num(column(run.batches, "mean_seq_len"))
    borders = np.flatnonzero(np.diff(column(run.batches, "epoch", 0.0))) + 1
    num_buckets = run.num_buckets
    return [
        Epoch(
            begin,
            end,
            order_statistics(bucket[begin:end], step=step[begin:end], mean_length=lengths[begin:end], num_buckets=num_buckets),
        )
        for begin, end in pairwise([0, *borders.tolist(), len(bucket)])
        if end - begin >= MIN_BATCHES
    ]


@dataclass(frozen=True)
class Steps:
    """How uneven the steps of an epoch are: deviation of the largest bucket's share, the least that whole batches allow, and the
    share of steps that lean to one bucket."""

    batches: int
    share_sd: float | None
    least_sd: float
    leaning: float

    @property
    def needless(self) -> float:
        """Scatter beyond what whole batches need: variances add up, so it is the root of the difference of the squares."""
        return sqrt(max(0.0, (self.share_sd or 0.0) ** 2 - self.least_sd**2))


def _steps(run: Run, epoch: Epoch) -> Steps:
    """Of the steps of one epoch; the one in which two epochs meet counts to both."""
    step = column(run.batches, "step")
    trained = steps_with_batches(run)
    own = (trained >= step[epoch.begin]) & (trained <= step[epoch.end - 1])
    counts, leaning = step_counts(run)[own], leaning_bucket(run)[own]
    size = int(counts.sum(axis=1).max())
    quota = size * float(counts.sum(axis=0).max()) / float(counts.sum())
    rest = quota - floor(quota)
    return Steps(size, epoch.found.step_share_sd, sqrt(rest * (1 - rest)) / size, float((leaning != MIXED).mean()))


def shuffled_longest(counts: np.ndarray, quantile: float) -> int:
    """A quantile of the longest run when these batches are shuffled.

    Runs of at least r batches of a bucket with share p start about n (1 - p) p^r times in n batches, nearly independently, so no
    run is longer than r with the chance exp(-sum n (1 - p) p^(r + 1)), as for runs of heads (Erdos and Renyi).
    """
    n = int(counts.sum())
    share = counts[counts > 0] / n
    for longest in range(1, n):
        if np.exp(-np.sum(n * (1 - share) * share ** (longest + 1))) >= quantile:
            return longest
    return n


def _strength(longest: int, bound: int, steps: Steps) -> Strength:
    """By what is left of the runs in the steps, which is what the optimizer sees: their composition, or, with one batch a step,
    the runs themselves. How long a run was by luck says little about that."""
    if steps.batches == 1:
        return "strong" if longest >= STRONG_RUN * bound else "moderate"
    return "strong" if steps.needless >= STRONG_SCATTER else "moderate" if steps.needless >= MODERATE_SCATTER else "weak"


def _finding(run: Run, epochs: list[Epoch], bad: list[Epoch], worst: Epoch, bound: int) -> Finding:
    bucket = run.buckets()
    part = bucket[worst.begin : worst.end]
    counts = np.bincount(part, minlength=run.num_buckets)
    low, high = shuffled_longest(counts, 0.025), shuffled_longest(counts, 0.975)
    longest, z = worst.found.longest_run, min(epoch.found.runs_z or 0.0 for epoch in bad)
    lag1 = max(epoch.found.lag1_correlation or 0.0 for epoch in bad)
    is_shuffled = z >= RUNS_Z and lag1 <= LAG1_SHUFFLED and longest <= ceil(1.5 * high)
    steps = _steps(run, worst)
    strength = _strength(longest, bound, steps)
    of_run, lengths = run_lengths(part)
    at = int(lengths.argmax())
    first = worst.begin + int(lengths[:at].sum())
    last = first + int(lengths[at]) - 1
    title, measure, value, unit, threshold = _alarm(longest, bound, z, lag1)
    if measure != LONGEST_RUN:
        first, last = worst.begin, worst.end - 1
    seq_no, step = column(run.batches, "seq_no"), column(run.batches, "step")
    shares = _shares(run, worst, int(of_run[at]))
    batches = "1 batch" if longest == 1 else f"{longest} batches"
    text = (
        f"{_which(run, epochs, worst)}the longest run is {batches} of bucket {int(of_run[at])}, which holds {shares[0]:.0%} of "
        f"its batches and {shares[1]:.0%} of its tokens; {bound} is the shortest longest run that these buckets allow. "
        f"{_comparison(longest, low, high, z, lag1, is_shuffled)} {_steps_text(steps, bound, strength)}"
    )
    return Finding(
        kind="batch_order",
        run_id=run.run_id,
        strength=strength,
        title=title,
        text=text,
        advice=_advice(run),
        measure=measure,
        value=value,
        unit=unit,
        low=None,
        high=None,
        threshold=threshold,
        table="batches",
        rows=f"seq_no BETWEEN {int(seq_no[first])} AND {int(seq_no[last])}",
        evidence=plain(
            {
                "shortest_possible_longest_run": bound,
                "shuffled_longest_run": [low, high],
                "runs_z": z,
                "lag1_correlation": lag1,
                "epochs_with_alarm": len(bad),
                "epochs": len(epochs),
                "bucket": int(of_run[at]),
                "batch_share": shares[0],
                "token_share": shares[1],
                "step_share_sd": steps.share_sd,
                "least_step_share_sd": steps.least_sd,
                "needless_step_share_sd": steps.needless,
                "leaning_steps": steps.leaning,
                "looks_like": "shuffle" if is_shuffled else "clustered",
            }
        ),
        at_steps=() if measure != LONGEST_RUN else tuple(np.unique(step[first : last + 1]).astype(int).tolist()[:MOST_MARKS]),
    )


def _which(run: Run, epochs: list[Epoch], worst: Epoch) -> str:
    """The epoch that the figures are of."""
    if len(epochs) == 1:
        return "In the one epoch, "
    return f"In epoch {int(column(run.batches, 'epoch', 0.0)[worst.begin])}, the worst of {len(epochs)}, "


def _alarm(longest: int, bound: int, z: float, lag1: float) -> tuple[str, str, float, str, float]:
    """The first of the three alarms that goes off: title, measure, value, unit, and the value from which on it does."""
    if longest > bound + 1:
        title = f"Batches come in runs of up to {longest} of one bucket; {bound} would be enough"
        return title, LONGEST_RUN, float(longest), "batches", float(bound + 2)
    if z < RUNS_Z:
        title = f"Batches of one bucket cluster more than in a random order (runs test z = {z:.1f})"
        return title, "runs test, z below that of a random order", -z, "standard deviations", -RUNS_Z
    title = f"Neighbouring batches are alike in length (correlation {lag1:.2f})"
    return title, "lag-1 correlation of the batches' mean length", lag1, "correlation", LAG1_CORRELATION


def _comparison(longest: int, low: int, high: int, z: float, lag1: float, is_shuffled: bool) -> str:
    """What a random order of the epoch's batches would have had."""
    random = f"In a random order one epoch of them has {f'{low} to {high}' if low < high else low}"
    if is_shuffled:
        return f"{random}: this is what plain shuffling does."
    if z < RUNS_Z:
        return f"{random}; here batches cluster more than in a random order (runs test z = {z:.1f})."
    if longest > high:
        return f"{random}."
    return f"{random}, but here neighbouring batches are alike in length (correlation {lag1:.2f}; about 0 in a random order)."


def _shares(run: Run, epoch: Epoch, bucket: int) -> tuple[float, float]:
    """The bucket's shares of the epoch's batches and tokens."""
    part = slice(epoch.begin, epoch.end)
    own = run.buckets()[part] == bucket
    tokens = np.nan_to_num(column(run.batches, "num_tokens"))[part]
    return float(own.mean()), float(tokens[own].sum() / tokens.sum()) if tokens.sum() else 0.0


def _steps_text(steps: Steps, bound: int, strength: Strength) -> str:
    """What of it the steps feel, and that it decides the strength."""
    if steps.batches == 1:
        return (
            "A step is one batch, so a run of one bucket is as many steps in a row with gradients of one length only: "
            f"{strength}, as it is {'' if strength == 'strong' else 'not '}beyond {STRONG_RUN} times {bound}."
        )
    if steps.share_sd is None:
        return f"{steps.leaning:.0%} of its steps lean to one bucket."
    return (
        f"In its steps of {steps.batches} batches, {steps.leaning:.0%} lean to one bucket and the largest bucket's share of a "
        f"step scatters by {100 * steps.share_sd:.0f} points (standard deviation; whole batches need "
        f"{100 * steps.least_sd:.0f}). The needless part, {100 * steps.needless:.0f} points, is why this is called {strength} "
        f"(moderate from {100 * MODERATE_SCATTER:.0f}, strong from {100 * STRONG_SCATTER:.0f} on). What it does to loss and "
        "gradient is measured by itself (loss_composition, spikes_in_bucket_runs)."
    )


def _advice(run: Run) -> str:
    order = run.setting("bucketing.order")
    if order == "diverse":
        return "bucketing.order is diverse, which never does that: these batches were not trained in the order of the plan."
    now = f" instead of {order}" if isinstance(order, str) else ""
    return f"Set bucketing.order: diverse{now}; it keeps runs at the shortest possible and gives every step its share."
