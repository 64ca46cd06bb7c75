"""The streams of a run's metrics, column by column (docs/design.md 4; the code that writes them is named with each)."""

from __future__ import annotations

from collections.abc import Mapping

from dflash_core.analysis.columns import (
    ONE,
    Column,
    Table,
    flag,
    integer,
    integers,
    moment,
    optional,
    real,
    reals,
    text,
    texts,
)

SHARE = "share"

_RUN: dict[str, Column] = {
    "run_id": text("The run."),
    "attempt": integer(ONE, "0 at first, one more at each resume. Readers keep the last attempt of a step."),
}
_STEP = integer("steps", "Optimizer step, from 0.")
_TIME = moment("When the row was made.")

_SIZES: dict[str, Column] = {
    "num_sequences": integer("sequences", "Sequences."),
    "num_tokens": integer("tokens", "Real tokens."),
    "num_padded_tokens": integer("tokens", "Tokens computed: sequences times the longest one, padding included."),
    "num_anchors": integer("anchors", "Anchors drawn (docs/field.md 1)."),
    "num_supervised": integer("slots", "Slots with a label."),
}

STEPS = Table(  # training/steps.py, training/loop.py
    "One optimizer step, over all cells. Times are the first cell's.",
    {
        **_RUN,
        "step": _STEP,
        "epoch": integer("epochs", "Epoch of the step, from 0."),
        "time": _TIME,
        "loss": real("nats", "Sum of the weighted losses of all slots of the step over the sum of their weights."),
        "grad_norm": real(ONE, "Norm of the gradient of the whole step, before clipping."),
        "clipped": flag("Whether the gradient was scaled down to `train.clip_norm`."),
        "lr": real(ONE, "Learning rate of the step."),
        "num_batches": integer("batches", "Batches, of all cells."),
        **_SIZES,
        "accuracy_by_position": reals(
            SHARE, "For slots 1, 2, ... of the block: labels that were the draft's first choice, of all labels of the slot."
        ),
        "expected_acceptance_length": real(
            "tokens", "Estimate of the acceptance length from these accuracies, +1 included (docs/field.md 1)."
        ),
        "bucket_counts": integers("batches", "Batches of each bucket in the step."),
        "mean_seq_len": real("tokens", "Real tokens per sequence."),
        "max_seq_len": integer("tokens", "Longest sequence."),
        "data_wait_s": real("s", "What targets waited for batches during the step, mean over the cell's targets."),
        "target_wait_s": real("s", "What the drafter waited for target states."),
        "forward_s": real("s", "Forward passes of the draft, loss included."),
        "backward_s": real("s", "Backward passes of the draft."),
        "optimizer_s": real("s", "Clipping and optimizer."),
        "step_s": real("s", "The whole step, from asking for its first batch; logging and checkpoints are outside it."),
        "prefetch_depths": integers("batches", "Batches waiting for each target when the step ended."),
        "ready_depth": integer("batches", "Batches with states, waiting for the drafter when the step ended."),
        "skipped": flag("Whether the update was left out because loss or norm was not finite."),
        **optional(
            {
                "reduce_s": real("s", "Joining the gradients of all cells, with waiting for the last one."),
                "optimizer_busy_s": real("s", "The part of `optimizer_s` in which the device itself worked."),
                "log_s": real("s", "What writing the metrics of the step before took."),
            }
        ),
    },
)

BATCHES = Table(  # training/loop.py: batch_rows
    "One trained batch.",
    {
        **_RUN,
        "seq_no": integer(ONE, "Number of the batch in the plan, from 0; with cells, over all of them."),
        "step": _STEP,
        "epoch": integer("epochs", "Epoch of the batch, from 0."),
        "time": _TIME,
        "cell": integer(ONE, "Cell that trained it."),
        "target": integer(ONE, "Target of the cell that made its states."),
        "bucket": integer(ONE, "Length bucket, from 0 for the shortest."),
        "num_sequences": _SIZES["num_sequences"],
        "mean_seq_len": real("tokens", "Real tokens per sequence."),
        "max_seq_len": integer("tokens", "Longest sequence."),
        "num_tokens": _SIZES["num_tokens"],
        "num_padded_tokens": _SIZES["num_padded_tokens"],
        "cost": integer("tokens", "What the planner takes the batch for: padded tokens, long ones counted for more."),
        "num_anchors": _SIZES["num_anchors"],
        "num_supervised": _SIZES["num_supervised"],
        "loss_sum": real("nats", "Sum of the weighted losses of the batch's slots."),
        "weight_sum": real(ONE, "Sum of the weights; `loss_sum / weight_sum` is the batch's mean loss."),
        "load_s": real("s", "Reading and collating, in a loading thread."),
        "queued_s": real("s", "From being given to a target until the target took it."),
        "target_forward_s": real("s", "The target's forward pass, by the clock."),
        **optional(
            {
                "target_busy_s": real("s", "Of the forward pass, the time in which the target's device itself worked."),
                "draft_busy_s": real("s", "Time in which the drafter's device worked on the batch, forward and backward."),
            }
        ),
    },
)

EVALS = Table(  # evaluation/acceptance.py, evaluation/walk.py, experiment_evaluation.py
    "One figure of a measurement on held-out prompts.",
    {
        **_RUN,
        "step": integer("steps", "Steps that the measured draft was trained."),
        "time": _TIME,
        "kind": text("`untrained`, `trained` (after training), or `training` (while it went on)."),
        "source": text("Source of the prompts, or `all`."),
        "position": integer(
            ONE, "Slot of the block, from 1; for `histogram` the number of draft tokens kept. Null for figures of whole answers."
        ),
        "metric": text("What `value` is; see below."),
        "value": real("see metric", "The figure; null where it could not be measured."),
    },
)

EVAL_METRICS: dict[str, tuple[str, str]] = {
    "acceptance_length": ("tokens", "tokens per target forward pass, +1 included"),
    "acceptance_length_low": ("tokens", "lower end of its 95 % interval (prompts resampled)"),
    "acceptance_length_high": ("tokens", "upper end"),
    "expected_acceptance_length": ("tokens", "estimate from the accuracy of each slot, +1 included"),
    "num_prompts": ("prompts", "prompts measured"),
    "num_tokens": ("tokens", "tokens of the answers"),
    "num_target_forwards": ("passes", "forward passes of the target, one per round"),
    "prefix_survival": (SHARE, "rounds in which all draft tokens up to the position were kept"),
    "conditional_acceptance": (SHARE, "the same, among rounds that kept the position before"),
    "accuracy": (SHARE, "labels of the slot that were the draft's first choice"),
    "histogram": ("rounds", "rounds that kept so many draft tokens"),
    "lossless": (ONE, "1 if every answer equals plain greedy decoding, else 0"),
    "target_forwards_saved": (ONE, "plain forward passes per pass of the draft-verify loop"),
    "single_plain_s_per_token": ("s", "plain decoding, one prompt at a time"),
    "single_speculative_s_per_token": ("s", "the draft-verify loop, one prompt at a time"),
    "single_speedup": (ONE, "the first over the second"),
    "batched_plain_s_per_token": ("s", "plain decoding of several prompts at once"),
    "batched_speculative_s_per_token": ("s", "the draft-verify loop, several prompts at once"),
    "batched_speedup": (ONE, "the first over the second"),
}

EVENT_KINDS: dict[str, str] = {
    "self_check": "what was looked at before the first step",
    "target_checked": "the states of a target's first batch were compared with the model itself",
    "checkpoint_begin": "a snapshot was taken, before `step`",
    "checkpoint_end": "it was written",
    "validation": "the draft was measured after `step` steps; figures by slot are in `evals`",
    "resume": "training went on from a checkpoint",
    "skip": "an update was left out",
    "signal": "the run was asked to stop",
    "out_of_memory": "a batch did not fit and went through a target in parts",
}

EVENTS = Table(
    "Something that happens now and then. Columns behind `kind` are there where an event of the table has them.",
    {
        **_RUN,
        "step": integer("steps", "Optimizer step before which it happened, or which it is about."),
        "time": _TIME,
        "kind": text("What happened; see below."),
        **optional(
            {
                "cell": integer(ONE, "Cell that wrote it."),
                "target": integer(ONE, "`target_checked`, `out_of_memory`: target of the cell."),
                "device": text("`target_checked`, `out_of_memory`: the target's device."),
                "seq_no": integer(ONE, "`target_checked`, `out_of_memory`: the batch."),
                "checks": texts("`self_check`: checks that were passed."),
                "check_s": reals("s", "`self_check`: the time of each."),
                "skipped_checks": texts("`self_check`: checks that were left out, and why."),
                "logit_scale": real(ONE, "`self_check`: the target's logits over head times last state."),
                "logit_difference": real("share of the norm", "`self_check`: what that factor leaves unexplained."),
                "tap_rms": reals(ONE, "`self_check`, `target_checked`: root mean square of each tap's states."),
                "tap_difference": real("share of the norm", "`self_check`: tapped states against the model's hidden states."),
                "batch_difference": real("share of the norm", "`self_check`: a sequence alone against beside a longer one."),
                "mask_sequences": integer("sequences", "`self_check`: sequences looked through for the mask token."),
                "leak_rerun_difference": real(ONE, "`self_check`: by how much the device's own repetition differs."),
                "packed_difference": real("share of the norm", "`self_check`: a document in a packed row against alone."),
                "reference_difference": real("share of the norm", "`self_check`: the draft against the plain reference."),
                "reference_layers": integer("layers", "`self_check`: layers compared so."),
                "num_tensors": integer("tensors", "`self_check`: tensors that an export will hold."),
                "dtype": text("`target_checked`: number format of the states."),
                "taps": integers(ONE, "`target_checked`: tapped layers, from 0."),
                "compared_taps": integers(ONE, "`target_checked`: those that could be compared."),
                "num_compared_tokens": integer("tokens", "`target_checked`: tokens compared."),
                "largest_difference": real("share of the norm", "`target_checked`: largest one over taps, mean over tokens."),
                "snapshot_s": real("s", "`checkpoint_begin`: copying the state, while training waits."),
                "wait_s": real("s", "`checkpoint_begin`: waiting before that for room in memory."),
                "write_s": real("s", "`checkpoint_end`: writing, beside training."),
                "num_bytes": integer("bytes", "`checkpoint_end`: size."),
                "folder": text("`checkpoint_end`: name of its folder."),
                "kept": integers("steps", "`checkpoint_end`: steps of the checkpoints that are kept."),
                "validation_s": real("s", "`validation`: how long it took."),
                "acceptance_length": real("tokens", "`validation`: over all prompts, +1 included."),
                "expected_acceptance_length": real("tokens", "`validation`: estimate from the accuracy of each slot."),
                "by_source": text("`validation`: acceptance length by source.", "JSON object, tokens"),
                "passed_over": texts("`resume`: newer checkpoints that were damaged."),
                "name": text("`signal`: the signal, or that another cell got one."),
                "batches": integers(ONE, "`skip`: the cell's batches of the step."),
                "not_finite": integers(ONE, "`skip`: those whose loss is not finite."),
                "grad_norm": real(ONE, "`skip`: gradient norm of the step."),
                "loss": real("nats", "`skip`: loss of the step."),
                "rows": integer("rows", "`out_of_memory`: rows of the piece that did not fit."),
                "sequences": integer("sequences", "`out_of_memory`: sequences in it."),
                "tokens": integer("tokens", "`out_of_memory`: tokens in it, padding included."),
                "parts": integer("parts", "`out_of_memory`: parts that it was split into."),
            }
        ),
    },
)

_QUEUES: Mapping[str, Column] = {
    "queue_put_wait_s": reals("s", "By target: what loaders waited for room in its queue so far."),
    "queue_get_wait_s": reals("s", "By target: what the target waited for batches so far."),
    "queue_tokens": integers("tokens", "By target: padded tokens waiting now."),
    "queue_bytes": integers("bytes", "By target: their reserved bytes."),
    "queue_mean_depths": reals("batches", "By target: mean depth so far, over time."),
    "queue_max_depths": integers("batches", "By target: greatest depth so far."),
    "queue_full_shares": reals(SHARE, "By target: time in which the queue was full."),
    "queue_empty_shares": reals(SHARE, "By target: time in which it was empty."),
}

STATS = Table(  # training/monitor.py, pipeline/batch_stats.py, pipeline/prefetcher.py
    "One snapshot of a cell's prefetcher, every `prefetch.stats_every_steps` steps. Counts and waits are those since the process "
    "began, of all batches dispatched so far (which are ahead of training).",
    {
        **_RUN,
        "step": integer("steps", "Optimizer step after which it was taken."),
        "time": _TIME,
        "prefetch_depths": integers("batches", "Batches waiting for each target now."),
        "ready_depth": integer("batches", "Batches with states, waiting for the drafter now."),
        **optional(
            {
                "cell": integer(ONE, "The cell."),
                "num_batches": integer("batches", "Batches dispatched."),
                "num_sequences": integer("sequences", "Their sequences."),
                "num_tokens": integer("tokens", "Their real tokens."),
                "num_padded_tokens": integer("tokens", "Their tokens with padding."),
                "bucket_counts": integers("batches", "Batches dispatched of each bucket."),
                "bucket_pct": reals("%", "The same as a percentage."),
                "avg_seq_len": real("tokens", "Real tokens per sequence."),
                "max_seq_len": integer("tokens", "Longest sequence."),
                "avg_batch_size": real("sequences", "Sequences per batch."),
                "padding_efficiency": real(SHARE, "Real tokens of all tokens computed."),
                "dispatched_per_target": integers("batches", "Batches given to each target."),
                "current_run": integer("batches", "Length of the bucket run that is going on."),
                "longest_run": integer("batches", "Longest bucket run."),
                "mean_run": real("batches", "Mean length of a bucket run."),
                **_QUEUES,
                "observed_s": real("s", "Time over which queues were observed."),
                "budget_wait_s": real("s", "What the feed waited for the byte budget."),
                "loader_idle_s": real("s", "What loaders waited for the feed, all together."),
                "reserved_bytes": integer("bytes", "Bytes of loaded batches and states in flight."),
                "max_reserved_bytes": integer("bytes", "Most of them so far."),
                "ready_mean_depth": real("batches", "Mean of `ready_depth` so far, over time."),
                "ready_max_depth": integer("batches", "Greatest so far."),
                "ready_get_wait_s": real("s", "What the drafter waited for states."),
                "ready_held_up_s": real("s", "The part of it in which later batches were ready and one straggler was not."),
                "ready_waiting_for": integer(ONE, "Position (in the cell's order) of the batch that the drafter waits for now."),
                "ready_longest_wait_s": real("s", "Longest single wait."),
                "ready_longest_wait_position": integer(ONE, "The position that it was for."),
            }
        ),
    },
)

STREAM_TABLES: dict[str, Table] = {"steps": STEPS, "batches": BATCHES, "evals": EVALS, "events": EVENTS, "stats": STATS}
