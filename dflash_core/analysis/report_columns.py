"""The tables of a report, column by column."""

from __future__ import annotations

from dflash_core.analysis.columns import ONE, Column, Table, flag, integer, integers, moment, real, text

SHARE = "share"
_RUN = text("The run.")
_LOW_HIGH = "end of its 95 % interval; null where there is none"


def _ends(unit: str, low: str, high: str) -> dict[str, Column]:
    return {low: real(unit, f"Lower {_LOW_HIGH}."), high: real(unit, f"Upper {_LOW_HIGH}.")}


_RUN_COLUMNS: dict[str, Column] = {
    "run_id": _RUN,
    "name": text("Name of the run; its id where several have one name."),
    "state": text("`created`, `running`, `completed`, `stopped` or `failed`."),
    "order": text("`bucketing.order`."),
    "seed": integer(ONE, "`train.seed`."),
    "num_steps": integer("steps", "Optimizer steps finished, skipped ones included."),
    "num_epochs": integer("epochs", "Epochs begun."),
    "num_attempts": integer(ONE, "1, and one more for each resume."),
    "num_skipped": integer("steps", "Steps whose update was left out because loss or norm was not finite."),
    "num_batches": integer("batches", "Trained batches."),
    "num_sequences": integer("sequences", "Sequences of all steps."),
    "num_tokens": integer("tokens", "Real tokens of all steps."),
    "num_anchors": integer("anchors", "Anchors of all steps."),
    "final_loss": real("nats", "Mean loss of the last tenth of the steps."),
    "loss_sd_detrended": real("nats", "Standard deviation of the loss around its running median, behind the first tenth."),
    "acceptance_length": real("tokens", "Measured after training, all sources, +1 included."),
    "acceptance_length_untrained": real("tokens", "The same before training."),
    "lossless": flag("Whether the drafted answers equal plain greedy decoding."),
    "longest_run": integer("batches", "Longest stretch of batches from one bucket, across epochs."),
    "longest_run_in_epoch": integer("batches", "The same inside an epoch; of the worst epoch."),
    "shortest_possible_longest_run": integer("batches", "R*: what that can be at least (docs/field.md 2); greatest over epochs."),
    "shuffled_longest_run_median": real("batches", "What `longest_run_in_epoch` becomes when epochs are shuffled: median."),
    "shuffled_longest_run_p05": real("batches", "5th percentile of the same."),
    "shuffled_longest_run_p95": real("batches", "95th percentile of the same."),
    "mean_run": real("batches", "Mean length of the bucket runs."),
    "runs_z": real(ONE, "z of the runs test for several buckets; below -3: clustered (docs/field.md 2)."),
    "lag1_correlation": real(ONE, "Autocorrelation of the batches' mean length from one batch to the next."),
    "prefix_deviation": real("batches", "Greatest deviation of a bucket's count so far from an even mix; of the worst epoch."),
    "step_share_sd": real(SHARE, "Standard deviation over full steps of the share of the bucket with most batches."),
    "padding_efficiency": real(SHARE, "Real tokens of all tokens computed."),
    "step_quota_deviation": real("batches", "As `prefix_deviation`, at the ends of steps."),
    "mean_buckets_per_step": real("buckets", "Different buckets in a step, mean."),
    "cell_cost_spread": real(SHARE, "(max - min) / mean of the cells' cost in an epoch; of the worst epoch."),
    "step_efficiency": real(SHARE, "Mean over max of the cells' cost in a step, mean over steps: what cells do not wait."),
    "grad_norm_median": real(ONE, "Median gradient norm, before clipping."),
    "grad_norm_p95": real(ONE, "95th percentile of the same."),
    "tokens_per_s": real("tokens/s", "Real tokens over the time of all steps."),
    "anchors_per_s": real("anchors/s", "Anchors over the time of all steps."),
    "data_wait_share": real(SHARE, "Of the time of all steps: targets waited for batches, mean over targets."),
    "target_wait_share": real(SHARE, "Of the time of all steps: the drafter waited for target states."),
    "draft_share": real(SHARE, "Of the time of all steps: the drafter computed, forward and backward."),
    "train_s": real("s", "Time of all steps."),
    "created": moment("When the run was made."),
    "finished": moment("When it ended."),
    "dataset": text("Dataset folder."),
    "dataset_fingerprint": text("Digest of its content."),
    "target": text("The target."),
    "git_commit": text("Commit of the code."),
    "checkpoint": text("The run's last checkpoint."),
    "num_checkpoints": integer("checkpoints", "Checkpoints finished."),
    "checkpoint_steps": integer("steps", "Steps that overlap the writing of one."),
    "checkpoint_slowdown": real(
        SHARE, "By how much these are longer than others of as many padded tokens, difference of medians: 0.02 is 2 %."
    ),
    **_ends(SHARE, "checkpoint_slowdown_low", "checkpoint_slowdown_high"),
    "checkpoint_slowdown_max": real(SHARE, "The largest of a step that overlaps a checkpoint."),
    "other_slowdown_max": real(SHARE, "The largest of a step that overlaps none."),
}

_COMPARED: dict[str, Column] = {
    "difference": real("see unit", "b minus a."),
    **_ends("see unit", "ci_low", "ci_high"),
    "effect_size": real(ONE, "How large the difference is, see `effect_kind`; null where neither makes sense."),
}

REPORT_TABLES: dict[str, Table] = {
    "runs": Table("One run.", _RUN_COLUMNS, ("run_id",)),
    "run_lengths": Table(
        "How many bucket runs of a length a run has, at three levels.",
        {
            "run_id": _RUN,
            "level": text(
                "`flat`: batches in the order of the plan; `cell`: batches of one cell, which is what one drafter sees, all "
                "cells counted together; `step`: optimizer steps that lean to the same bucket (more than one batch above its "
                "quota)."
            ),
            "bucket": integer(ONE, "The bucket; null for steps that lean to none."),
            "run_length": integer("batches or steps", "Length of the run; steps at level `step`."),
            "count": integer("runs", "Runs of this bucket and length."),
        },
        ("run_id", "level", "bucket", "run_length"),
    ),
    "bucket_stats": Table(
        "One bucket of a run.",
        {
            "run_id": _RUN,
            "bucket": integer(ONE, "Length bucket, from 0 for the shortest."),
            "num_batches": integer("batches", "Its batches."),
            "num_sequences": integer("sequences", "Their sequences."),
            "num_tokens": integer("tokens", "Their real tokens."),
            "num_padded_tokens": integer("tokens", "Their tokens with padding."),
            "num_anchors": integer("anchors", "Their anchors."),
            "batch_share": real(SHARE, "Of the batches of the run."),
            "token_share": real(SHARE, "Of the real tokens of the run."),
            "padding_efficiency": real(SHARE, "Real tokens of all tokens computed."),
            "mean_seq_len": real("tokens", "Real tokens per sequence."),
            "max_seq_len": integer("tokens", "Longest sequence."),
            "mean_loss": real("nats", "Sum of weighted losses over sum of weights, of batches where both are finite."),
        },
        ("run_id", "bucket"),
    ),
    "grad_norms": Table(
        "Gradient norms of a run, before clipping: all steps, and its thirds by share of the longest bucket.",
        {
            "run_id": _RUN,
            "group": text(
                "`all`, or `long_share_low`, `_mid`, `_high`: steps whose share of batches from the last bucket is at most the "
                "first tercile, between, or above the second."
            ),
            "long_share_low": real(SHARE, "Least share of the last bucket in the group."),
            "long_share_high": real(SHARE, "Greatest."),
            "num_steps": integer("steps", "Steps of the group."),
            "num_nonfinite": integer("steps", "Those whose norm is not finite; all other columns leave them out."),
            "mean": real(ONE, "Mean norm."),
            "sd": real(ONE, "Standard deviation."),
            "p05": real(ONE, "5th percentile."),
            "p25": real(ONE, "25th percentile."),
            "p50": real(ONE, "Median."),
            "p75": real(ONE, "75th percentile."),
            "p95": real(ONE, "95th percentile."),
            "p99": real(ONE, "99th percentile."),
            "max": real(ONE, "Greatest norm."),
            "mad": real(ONE, "Median absolute deviation from the running median, over all steps of the run."),
            "num_spikes": integer("steps", "Norms more than `analyze.spike_mad` of these above the running median."),
            "clip_share": real(SHARE, "Steps whose gradient was scaled down."),
        },
        ("run_id", "group"),
    ),
    "checkpoints": Table(
        "One finished checkpoint.",
        {
            "run_id": _RUN,
            "attempt": integer(ONE, "Attempt that made it."),
            "step": integer("steps", "Steps trained until then."),
            "snapshot_s": real("s", "Copying the state, while training waited."),
            "wait_s": real("s", "Waiting before that for room in memory."),
            "write_s": real("s", "Writing, beside training."),
            "num_bytes": integer("bytes", "Size."),
            "num_steps": integer("steps", "Steps that overlap it."),
            "slowdown": real(SHARE, "By how much these are longer than others of as many padded tokens, median."),
        },
        ("run_id", "step", "attempt"),
    ),
    "curves": Table(
        "One optimizer step of a run, last attempt.",
        {
            "run_id": _RUN,
            "step": integer("steps", "Optimizer step, from 0."),
            "num_anchors_seen": integer("anchors", "Anchors of this and all earlier steps."),
            "loss": real("nats", "Loss of the step."),
            "loss_adjusted": real("nats", "The same without what its bucket mix explains (see `loss_parts`)."),
            "grad_norm": real(ONE, "Gradient norm before clipping."),
            "expected_acceptance_length": real("tokens", "Estimate from the accuracy of each slot, +1 included."),
        },
        ("run_id", "step"),
    ),
    "loss_parts": Table(
        "What makes up the variance of a run's loss, behind the first tenth of the steps. No rows where steps are too few, or "
        "all alike, for the split.",
        {
            "run_id": _RUN,
            "part": text(
                "`composition`: which buckets a step holds; `trend`: the slow change that training makes, a running median; "
                "`rest`: neither."
            ),
            "share": real(SHARE, "Of the variance of the loss; the three sum to 1."),
            **_ends(SHARE, "low", "high"),
            "sd": real("nats", "Standard deviation of the part."),
        },
        ("run_id", "part"),
    ),
    "run_positions": Table(
        "Gradient norm and loss by position in a bucket run: what the 1st, 2nd, ... of a stretch from one bucket brings. The "
        "first tenth of the steps, and steps whose norm or loss is not finite, are left out.",
        {
            "run_id": _RUN,
            "level": text(
                "What the run consists of: `step`: steps that lean to one bucket, as in `run_lengths`; `batch`: batches of one "
                "bucket, only where every step is one batch."
            ),
            "position": integer("steps", "Position in the bucket run, from 1; at most 20."),
            "num_steps": integer("steps", "Steps at this position. Of fewer than 20 there are no intervals."),
            "grad_norm_mean": real(ONE, "Mean gradient norm, before clipping."),
            **_ends(ONE, "grad_norm_low", "grad_norm_high"),
            "loss_mean": real("nats", "Mean loss."),
            **_ends("nats", "loss_low", "loss_high"),
        },
        ("run_id", "level", "position"),
    ),
    "waits": Table(
        "Where the time of each stage of the pipeline went. A stage that was not recorded has no row.",
        {
            "run_id": _RUN,
            "cell": integer(ONE, "The cell; null where batches do not say theirs."),
            "stage": text(
                "`loader.load`: loading batches; `loader.idle`: nothing to load, the feed waits for bytes or for the plan; "
                "`feed.budget_wait`: the byte budget was full; `target.queued`: loaded batches in the queues; `target.forward`; "
                "`target.idle`: no batch in the queue; `ready.held_up`: the drafter waited while later batches were there, a "
                "part of `drafter.wait`; `drafter.wait`: for target states; `drafter.forward`, `.backward`, `.reduce` (joining "
                "the cells, waiting for others included), `.optimizer`, `.other`. The drafter's are of the first cell; of other "
                "cells only `drafter.wait`. On a GPU, `drafter.forward` and `.backward` are the time of the thread that launches."
            ),
            "seconds": real("s", "Summed over the threads of the stage; of `target.queued` over batches."),
            "share_of_time": real(
                SHARE,
                "Of the time that all threads of the stage had; null where it is no thread's time or their number is unknown.",
            ),
            "per_batch_s": real("s", "`seconds` per trained batch of the cell."),
        },
        ("run_id", "cell", "stage"),
    ),
    "progress": Table(
        "A run at points that are the same for all runs, the twentieths of the anchors that the shortest run has seen, and at "
        "its own end. Runs whose batches differ in size are compared here, not at equal steps.",
        {
            "run_id": _RUN,
            "num_anchors_seen": integer("anchors", "The point."),
            "step": integer("steps", "The last step up to it."),
            "loss": real(
                "nats",
                "Mean loss of the steps that end in the stretch before the point; the stretch is a tenth of the last point that "
                "all runs have.",
            ),
            **_ends("nats", "loss_low", "loss_high"),
            "loss_adjusted": real("nats", "The same of the loss without what its bucket mix explains."),
            "expected_acceptance_length": real("tokens", "Mean of the same steps, +1 included."),
            "acceptance_length": real("tokens", "The newest measured one up to there, +1 included; null before the first."),
        },
        ("run_id", "num_anchors_seen"),
    ),
    "groups": Table(
        "A metric over a group: runs whose configurations differ in nothing but seeds.",
        {
            "group": text("What tells the group from the others, or the name that its runs share."),
            "metric": text("As in `comparisons`."),
            "num_runs": integer("runs", "Runs that have the metric."),
            "mean": real("see unit", "Mean over runs."),
            "sd": real("see unit", "Standard deviation between runs (n - 1); null for one run."),
            **_ends("see unit", "low", "high"),
            "unit": text("Unit of the metric."),
        },
        ("metric", "group"),
    ),
    "group_comparisons": Table(
        "A metric of two groups: what another seed would change is in the interval.",
        {
            "metric": text("As in `comparisons`."),
            "group_a": text("As in `groups`."),
            "group_b": text("As in `groups`."),
            "num_a": integer("runs", "Runs of a that were compared."),
            "num_b": integer("runs", "Runs of b."),
            "paired": flag("Whether runs of the same seed were compared, one by one; if not, means of all (Welch)."),
            "value_a": real("see unit", "Mean over these runs of a."),
            "value_b": real("see unit", "Mean over these runs of b."),
            **_COMPARED,
            "effect_kind": text("`difference over pooled sd between runs`."),
            "unit": text("Unit of the metric."),
        },
        ("metric", "group_a", "group_b"),
    ),
    "findings": Table(
        "What the data of a run support, as sentences with their evidence.",
        {
            "run_id": _RUN,
            "kind": text("Which cause or fault."),
            "strength": text("`strong`, `moderate` or `weak`: the size of the harm, not how sure the cause is."),
            "title": text("One line."),
            "text": text("The evidence in words."),
            "advice": text("What to do about it."),
            "measure": text("What `value` measures."),
            "value": real("see unit", "The figure that it rests on."),
            "unit": text("Its unit."),
            **_ends("see unit", "low", "high"),
            "threshold": real("see unit", "The value from which on it is printed."),
            "table": text("Stream or table to look at."),
            "rows": text("The rows to look at: the condition of an SQL query over that table."),
            "evidence": text("Further figures.", "JSON object"),
            "at_steps": integers("steps", "Some steps at which it shows."),
        },
        ("run_id", "kind"),
    ),
    "comparisons": Table(
        "A metric of two runs. Up to 12 runs: every pair; of more, each with the first one.",
        {
            "metric": text("What is compared; see below."),
            "run_a": text("A run."),
            "run_b": text("A later one."),
            "value_a": real("see unit", "The metric of a."),
            "value_b": real("see unit", "The metric of b."),
            **_COMPARED,
            "effect_kind": text(
                "`standardised difference` (over the noise between the steps of both runs), or `log ratio` (natural logarithm of "
                "b over a)."
            ),
            "independent_steps": real(
                "steps",
                "How many independent steps would say as much as the autocorrelated ones of the run that has fewer; below 10 "
                "there is no interval. Null where the metric is one number per run, or a run has fewer than 20 steps for it.",
            ),
            "unit": text("Unit of the metric."),
        },
        ("metric", "run_a", "run_b"),
    ),
}

# What `metric` is in `comparisons`, `groups` and `group_comparisons`, where it is no column of `runs`.
METRICS: dict[str, tuple[str, str]] = {
    "grad_norm_mean": (ONE, "mean gradient norm behind the first tenth of the steps"),
    "grad_norm_sd_detrended": (ONE, "its standard deviation around the running median, there"),
    "grad_norm_spikes": ("spikes per 1000 steps", "`num_spikes` of `grad_norms`, per thousand steps"),
    "clip_share": ("share of steps", "steps whose gradient was scaled down"),
    "loss_at_equal_anchors": ("nats", "`loss` of `progress` at the last point that all runs have"),
    "expected_acceptance_at_equal_anchors": ("tokens", "`expected_acceptance_length` of `progress` there"),
    "loss_composition_share": (SHARE, "`share` of `loss_parts` for `composition`; of groups only"),
}
