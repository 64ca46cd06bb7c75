"""The names under which a chart server shows a run: which field becomes which panel, with unit and meaning.

A name space (`train`, `batch`, `queue`, `time`, `eval`) has its own step axis, `<space>/step`. Streams are logged by several
threads, and the server's own step would make it drop the rows that come late. A panel takes one stream, whose rows come in
order. `PANELS` and `EVAL_METRICS` are the only lists of names; the table in docs/metrics.md is made from them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

NAME_SPACES = ("train", "batch", "queue", "time", "eval")


@dataclass(frozen=True, slots=True)
class Panel:
    """One chart, or one chart per element of a list (`{}` in the name is then its index).

    `source` is the field of the stream's row, or a function of the row that returns None where there is nothing to show.
    """

    name: str
    stream: str
    source: str | Callable[[Mapping[str, Any]], Any]
    unit: str
    meaning: str


def _ratio(above: str, below: str) -> Callable[[Mapping[str, Any]], float | None]:
    def ratio(row: Mapping[str, Any]) -> float | None:
        return row[above] / row[below] if row.get(above) is not None and row.get(below) else None

    return ratio


def _shares(row: Mapping[str, Any]) -> list[float] | None:
    counts = row.get("bucket_counts")
    total = sum(counts) if counts else 0
    return [count / total for count in counts] if counts and total else None


def _validation_s(row: Mapping[str, Any]) -> float | None:
    return row.get("validation_s") if row.get("kind") == "validation" else None


PANELS: tuple[Panel, ...] = (
    Panel("train/loss", "steps", "loss", "nats", "loss of the step, as `train.loss` defines it, per unit of weight"),
    Panel("train/grad_norm", "steps", "grad_norm", "1", "gradient norm before clipping"),
    Panel("train/clipped", "steps", "clipped", "0 or 1", "the gradient was scaled down"),
    Panel("train/skipped", "steps", "skipped", "0 or 1", "the non-finite guard left the step out"),
    Panel("train/lr", "steps", "lr", "1", "learning rate"),
    Panel("train/epoch", "steps", "epoch", "epochs", "epoch, from 0"),
    Panel(
        "train/expected_acceptance_length",
        "steps",
        "expected_acceptance_length",
        "tokens",
        "tokens per target forward that the slot accuracies promise, +1 included",
    ),
    Panel("train/accuracy/slot_{}", "steps", "accuracy_by_position", "share", "training accuracy of a slot; index 0 is slot 1"),
    Panel("batch/bucket_share/{}", "steps", _shares, "share", "batches of the step that came from the bucket"),
    Panel("batch/mean_seq_len", "steps", "mean_seq_len", "tokens", "mean sequence length of the step"),
    Panel("batch/max_seq_len", "steps", "max_seq_len", "tokens", "longest sequence of the step"),
    Panel(
        "batch/sequences_per_batch", "steps", _ratio("num_sequences", "num_batches"), "sequences", "mean batch size of the step"
    ),
    Panel(
        "batch/padding_efficiency", "steps", _ratio("num_tokens", "num_padded_tokens"), "share", "real tokens among computed ones"
    ),
    Panel("batch/current_run", "stats", "current_run", "batches", "length of the bucket run under way"),
    Panel("batch/longest_run", "stats", "longest_run", "batches", "longest bucket run so far"),
    Panel("batch/mean_run", "stats", "mean_run", "batches", "mean bucket run so far"),
    Panel("batch/total_bucket_pct/{}", "stats", "bucket_pct", "%", "batches so far that came from the bucket"),
    Panel("batch/total_padding_efficiency", "stats", "padding_efficiency", "share", "real tokens among computed ones so far"),
    Panel("queue/depth/target_{}", "stats", "prefetch_depths", "batches", "batches that wait for the target"),
    Panel("queue/mean_depth/target_{}", "stats", "queue_mean_depths", "batches", "mean of that so far"),
    Panel("queue/full_share/target_{}", "stats", "queue_full_shares", "share", "of the time so far, no room for the next batch"),
    Panel("queue/empty_share/target_{}", "stats", "queue_empty_shares", "share", "of the time so far, no batch for the target"),
    Panel("queue/put_wait_s/target_{}", "stats", "queue_put_wait_s", "s", "loaders waited so far for room in the target's queue"),
    Panel("queue/get_wait_s/target_{}", "stats", "queue_get_wait_s", "s", "the target waited so far for a batch"),
    Panel("queue/tokens/target_{}", "stats", "queue_tokens", "tokens", "padded tokens that wait for the target"),
    Panel("queue/dispatched/target_{}", "stats", "dispatched_per_target", "batches", "batches given to the target so far"),
    Panel("queue/ready_depth", "stats", "ready_depth", "batches", "batches that wait for the drafter"),
    Panel("queue/ready_get_wait_s", "stats", "ready_get_wait_s", "s", "the drafter waited so far for target states"),
    Panel("queue/budget_wait_s", "stats", "budget_wait_s", "s", "loading waited so far for room in the byte budget"),
    Panel("queue/loader_idle_s", "stats", "loader_idle_s", "s", "loading threads had nothing to load so far, all added up"),
    Panel("queue/reserved_bytes", "stats", "reserved_bytes", "bytes", "bytes of the batches in flight"),
    Panel("queue/data_wait_s", "steps", "data_wait_s", "s", "targets waited for loaded batches in the step, mean over targets"),
    Panel("queue/target_wait_s", "steps", "target_wait_s", "s", "the drafter waited for target states in the step"),
    Panel("time/target_wait_s", "steps", "target_wait_s", "s", "the drafter waited for target states: its part of `step_s`"),
    Panel("time/forward_s", "steps", "forward_s", "s", "draft forward; on a GPU what it took to queue the work"),
    Panel("time/backward_s", "steps", "backward_s", "s", "draft backward; on a GPU what it took to queue the work"),
    Panel("time/reduce_s", "steps", "reduce_s", "s", "join of the cells, with waiting for them and for the device"),
    Panel("time/optimizer_s", "steps", "optimizer_s", "s", "norm, clipping and optimizer"),
    Panel("time/log_s", "steps", "log_s", "s", "logging of the step before"),
    Panel("time/step_s", "steps", "step_s", "s", "whole step without its logging"),
    Panel("time/tokens_per_s", "steps", _ratio("num_tokens", "step_s"), "tokens/s", "real tokens trained on"),
    Panel(
        "time/anchors_per_s",
        "steps",
        _ratio("num_anchors", "step_s"),
        "anchors/s",
        "anchors trained on; the measure of throughput",
    ),
    Panel("eval/validation_s", "events", _validation_s, "s", "what measuring on held-out prompts took the training"),
)

# Rows of `evals` become `eval/<kind>/<source>/<metric>`, and `/slot_<position>` behind it where there is a position. Metric: unit
# and meaning.
EVAL_METRICS: dict[str, tuple[str, str]] = {
    "acceptance_length": ("tokens", "tokens per target forward, +1 included"),
    "acceptance_length_low": ("tokens", "lower end of its 95 % interval over prompts"),
    "acceptance_length_high": ("tokens", "upper end of its 95 % interval over prompts"),
    "expected_acceptance_length": ("tokens", "the estimate from the accuracy of each slot, +1 included"),
    "accuracy": ("share", "proposals of the slot that hit, at every anchor of the answers"),
    "prefix_survival": ("share", "rounds in which this slot and all before it were kept"),
    "conditional_acceptance": ("share", "rounds in which the slot was kept, of those in which all before it were"),
    "histogram": ("rounds", "rounds that kept as many draft tokens as the position says"),
    "num_prompts": ("prompts", "prompts measured on"),
    "num_tokens": ("tokens", "tokens of the answers"),
    "num_target_forwards": ("rounds", "target forwards that gave them"),
    "lossless": ("0 or 1", "the text was that of plain greedy decoding"),
    "target_forwards_saved": ("times", "target forwards without the draft over those with it"),
    "single_plain_s_per_token": ("s", "time per token without the draft, one prompt at a time"),
    "single_speculative_s_per_token": ("s", "time per token with the draft, one prompt at a time"),
    "single_speedup": ("times", "the one over the other"),
    "batched_plain_s_per_token": ("s", "time per token without the draft, several prompts at once"),
    "batched_speculative_s_per_token": ("s", "time per token with the draft, several prompts at once"),
    "batched_speedup": ("times", "the one over the other"),
}


def panel_table() -> str:
    """All names as a table in Markdown, for the documentation."""
    rows = [("name", "stream, field", "unit", "meaning"), ("---",) * 4]
    for panel in PANELS:
        field = f", {panel.source}" if isinstance(panel.source, str) else ""
        rows.append((f"`{panel.name}`", f"{panel.stream}{field}", panel.unit, panel.meaning))
    for metric, (unit, meaning) in EVAL_METRICS.items():
        rows.append((f"`eval/{{kind}}/{{source}}/{metric}`", "evals", unit, meaning))
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def panel_values(stream: str, row: Mapping[str, Any]) -> dict[str, float]:
    """The charted values of one row by full name, with the step axes that they need.

    Streams without panels, and rows without a step, give an empty dict: one chart point needs its step. NaN and infinities
    pass; missing fields do not appear.
    """
    step = row.get("step")
    if step is None:
        return {}
    values = _eval_values(row) if stream == "evals" else _listed_values(stream, row)
    for space in {name.split("/", 1)[0] for name in values}:
        values[f"{space}/step"] = step
    return values


def _listed_values(stream: str, row: Mapping[str, Any]) -> dict[str, float]:
    values: dict[str, float] = {}
    for panel in PANELS:
        if panel.stream != stream:
            continue
        value = row.get(panel.source) if isinstance(panel.source, str) else panel.source(row)
        if value is None:
            continue
        if "{}" in panel.name:
            values.update({panel.name.format(i): float(item) for i, item in enumerate(value) if item is not None})
        else:
            values[panel.name] = float(value)
    return values


def _eval_values(row: Mapping[str, Any]) -> dict[str, float]:
    """`eval/<kind>/<source>/<metric>`, and `/slot_<position>` behind it for a value of one slot."""
    if row.get("value") is None:
        return {}
    # A name that ends in a star would be taken for a pattern, and a source is called what its user calls it.
    name = f"eval/{row.get('kind')}/{row.get('source')}/{row.get('metric')}".replace("*", "_")
    if row.get("position") is not None:
        name += f"/slot_{row['position']}"
    return {name: float(row["value"])}
