"""What a report says in words and tables, before it is put on a page."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import exp, isinf, isnan
from typing import Any

from dflash_core.analysis.checkpoints import checkpoint_line
from dflash_core.analysis.compare import excludes_zero, find
from dflash_core.analysis.runs import RunFacts, config_differences

Row = Mapping[str, Any]

LABELS = {
    "final_loss": "final loss",
    "loss_sd_detrended": "loss scatter around its trend",
    "grad_norm_mean": "gradient norm, mean",
    "grad_norm_sd_detrended": "gradient norm scatter around its trend",
    "grad_norm_spikes": "gradient norm spikes",
    "clip_share": "clipped steps",
    "acceptance_length": "acceptance length",
    "longest_run": "longest bucket run, across epochs",
    "longest_run_in_epoch": "longest bucket run inside an epoch",
    "mean_run": "mean bucket run",
    "runs_z": "runs test z (negative: clustered)",
    "lag1_correlation": "lag-1 correlation of batch length",
    "prefix_deviation": "largest deviation from an even mix",
    "step_share_sd": "step-to-step sd of the main bucket's share",
    "padding_efficiency": "padding efficiency",
    "grad_norm_p95": "gradient norm, 95th percentile",
    "tokens_per_s": "throughput, real tokens",
    "anchors_per_s": "throughput, anchors",
    "data_wait_share": "targets waited for data",
    "target_wait_share": "drafter waited for targets",
    "loss_at_equal_anchors": "loss at equal anchors seen",
    "expected_acceptance_at_equal_anchors": "expected acceptance length at equal anchors seen",
    "loss_composition_share": "the bucket mix's part of the whole loss variance, trend included",
}
# Metrics that are a mean or a scatter over steps, and so have an interval of their own; all others are one number per run.
OVER_STEPS = (
    "final_loss", "loss_sd_detrended", "grad_norm_mean", "grad_norm_sd_detrended", "loss_at_equal_anchors",
    "expected_acceptance_at_equal_anchors",
)  # fmt: skip
# Differences that the summary puts in words, when they have an interval.
TOLD = ("final_loss", "loss_sd_detrended", "grad_norm_mean", "grad_norm_sd_detrended")
SHOWN_SETTINGS = 6
FEW_RUNS = 4
MAX_COMPARISON_TABLES = 8
MAX_STATES = 8


@dataclass(frozen=True)
class Table:
    """A table of texts: the first column names the row, `bold` holds the numbers of rows to stress, and
    `note` stands beneath it."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ""
    bold: frozenset[int] = frozenset()
    note: str = ""


def number(value: Any, digits: int = 3) -> str:
    """A value for people: `digits` significant digits, thousands separated, a dash for "not measured"."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not isinstance(value, (int, float)):
        return str(value)
    if isnan(value) or isinf(value):
        return str(value)
    if isinstance(value, int) or abs(value) >= 10**digits:
        return f"{value:,.0f}"
    text = f"{value:.{digits}g}"
    if "e" in text:
        return f"{value:,.0f}" if abs(value) >= 1 else f"{value:.2g}"
    return text


def signed(value: float | None) -> str:
    return "–" if value is None else ("+" if value > 0 else "") + number(value)


def head_lines(runs: Sequence[RunFacts], rows: Sequence[Row], differences: Sequence[str]) -> list[str]:
    """What the report is about. `differences` are those that forbid a plain comparison."""
    lines = []
    if differences:
        lines.append("These runs are not comparable, read on with care. " + "; ".join(differences) + ".")
    return [*lines, _what(runs, rows)]


def state_lines(runs: Sequence[RunFacts], rows: Sequence[Row]) -> list[str]:
    """How far the runs are that have not completed, and why they failed."""
    lines = []
    for run, row in zip(runs, rows, strict=True):
        state = row["state"]
        if state == "completed":
            continue
        planned = run.manifest.get("num_planned_steps")
        of = f" of {planned:,}" if isinstance(planned, int) and not isinstance(planned, bool) and planned > 0 else ""
        line = f"{row['name']}: {state or 'unknown state'}, step {row['num_steps']:,}{of}"
        if state == "running":
            line += f", as of {_minute(run.manifest.get('updated'))}" if run.manifest.get("updated") else ""
            line += ". What follows is about the steps so far; analyse again for more"
        elif run.manifest.get("error"):
            line += f". It ended with: {' '.join(str(run.manifest['error']).split())}"
        lines.append(line.rstrip(".") + ".")
    more = len(lines) - MAX_STATES
    return lines if more <= 0 else [*lines[:MAX_STATES], f"And {more} more that have not completed."]


def figure_lines(rows: Sequence[Row], comparisons: Sequence[Row]) -> list[str]:
    """The most important figures in plain words; of many runs only what they have in common."""
    lines: list[str] = []
    if len(rows) <= FEW_RUNS:
        lines += [_order_line(row) for row in rows]
        lines += [line for line in (_acceptance_line(row) for row in rows) if line]
        lines += [line for line in (checkpoint_line(row) for row in rows) if line]
        for other in rows[1:]:
            lines += _difference_lines(rows[0], other, comparisons)
    else:
        lines += _lines_for_many(rows)
    for row in rows:
        if row["num_skipped"]:
            lines.append(f"{row['name']}: the non-finite guard left out {row['num_skipped']} of {row['num_steps']} steps.")
    return lines


def _minute(text: Any) -> str:
    return str(text)[:16].replace("T", " ") + " UTC"


def _what(runs: Sequence[RunFacts], rows: Sequence[Row]) -> str:
    steps = [f"{number(row['num_steps'])} step{'' if row['num_steps'] == 1 else 's'}" for row in rows]
    states = ", ".join(
        f"{row['name']} ({many}, {row['state'] or 'unknown state'})" for row, many in zip(rows, steps, strict=True)
    )
    if len(runs) == 1:
        return f"One run: {states}."
    if len(runs) > FEW_RUNS:
        states = shortened([row["name"] for row in rows])
    changed = [f"{key} ({shortened(list(dict.fromkeys(map(str, values))))})" for key, values in config_differences(runs).items()]
    more = f" and {len(changed) - SHOWN_SETTINGS} more" if len(changed) > SHOWN_SETTINGS else ""
    how = f"They differ in {'; '.join(changed[:SHOWN_SETTINGS])}{more}." if changed else "Their configurations are the same."
    return f"{len(runs)} runs: {states}. {how}"


def shortened(names: Sequence[str]) -> str:
    """The first few of many names."""
    more = f" and {len(names) - FEW_RUNS} more" if len(names) > FEW_RUNS else ""
    return ", ".join(names[:FEW_RUNS]) + more


def _lines_for_many(rows: Sequence[Row]) -> list[str]:
    best = [row["name"] for row in rows if row["longest_run_in_epoch"] == row["shortest_possible_longest_run"]]
    worst = max(rows, key=lambda row: row["longest_run_in_epoch"])
    shuffled = number(worst["shuffled_longest_run_median"])
    lines = [
        f"Inside an epoch, the longest run of batches from one bucket is the shortest possible in {len(best)} of {len(rows)} runs"
        f"{': ' + shortened(best) if best else ''}; the longest of all, {number(worst['longest_run_in_epoch'])} batches, "
        f"is in {worst['name']}, where shuffling every epoch at random gives {shuffled} (median)."
    ]
    known = sorted((row for row in rows if row["acceptance_length"] is not None), key=lambda row: row["acceptance_length"])
    if known:
        low, high = known[0], known[-1]
        lines.append(
            f"Acceptance length, +1 included: from {low['acceptance_length']:.2f} ({low['name']}) "
            f"to {high['acceptance_length']:.2f} ({high['name']}) tokens per target forward."
        )
    wrong = [row["name"] for row in rows if row["lossless"] is False]
    if wrong:
        lines.append(f"THE OUTPUT DIFFERS from plain greedy decoding in {shortened(wrong)}.")
    return lines


def _order_line(row: Row) -> str:
    longest, bound = row["longest_run_in_epoch"], row["shortest_possible_longest_run"]
    low, high = number(row["shuffled_longest_run_p05"]), number(row["shuffled_longest_run_p95"])
    shuffled = number(row["shuffled_longest_run_median"]) + (f" ({low} to {high} in 90 of 100 shuffles)" if low != high else "")
    verdict = "which is the shortest possible" if longest == bound else f"the shortest possible is {bound}"
    joined = f" Where two epochs meet, runs joined to {row['longest_run']}." if row["longest_run"] > longest else ""
    return (
        f"{row['name']}: inside an epoch, the longest run of batches from one bucket is {longest}, {verdict}; "
        f"shuffling every epoch at random gives {shuffled} as the longest of all epochs.{joined}"
    )


def _acceptance_line(row: Row) -> str | None:
    if row["acceptance_length"] is None:
        return None
    untrained = row["acceptance_length_untrained"]
    before = f" (untrained {untrained:.2f})" if untrained is not None else ""
    same = {True: "; its output equals plain greedy decoding", False: "; ITS OUTPUT DIFFERS from plain greedy decoding"}
    return (
        f"{row['name']}: acceptance length {row['acceptance_length']:.2f} tokens per target forward, +1 included{before}"
        f"{same.get(row['lossless'], '')}."
    )


def _difference_lines(first: Row, other: Row, comparisons: Sequence[Row]) -> list[str]:
    """A line for each difference that stands out from the noise between steps, and one for all that do not."""
    lines, noise = [], []
    for metric in TOLD:
        row = find(comparisons, metric, first["run_id"], other["run_id"])
        if row is None or row["ci_low"] is None:
            continue
        change = f"{number(row['value_a'])} -> {number(row['value_b'])}"
        ends = f"{signed(row['ci_low'])} to {signed(row['ci_high'])}"
        if excludes_zero(row):
            interval = f"95 % interval of the difference {ends}, over the noise between steps"
            lines.append(f"{LABELS[metric]}, {first['name']} -> {other['name']}: {change} ({interval}).")
        else:
            noise.append(f"{LABELS[metric]} {change} ({ends})")
    if noise:
        lines.append(
            f"{first['name']} -> {other['name']}, no difference that stands out from the noise between steps (95 % interval of "
            f"the difference): {'; '.join(noise)}."
        )
    return lines


def run_table(rows: Sequence[Row]) -> Table:
    """The runs side by side; a column per run while they are few, else a row per run."""
    quantities: list[tuple[str, Any]] = [
        ("order", lambda r: number(r["order"])),
        ("state", lambda r: number(r["state"])),
        ("steps", lambda r: number(r["num_steps"])),
        ("final loss, nats", lambda r: number(r["final_loss"], 4)),
        ("acceptance length, trained (+1 incl.)", lambda r: _hundredths(r["acceptance_length"])),
        ("acceptance length, untrained (+1 incl.)", lambda r: _hundredths(r["acceptance_length_untrained"])),
        ("output equals plain greedy", lambda r: number(r["lossless"])),
        (
            "longest bucket run in an epoch / shortest possible",
            lambda r: f"{r['longest_run_in_epoch']} / {r['shortest_possible_longest_run']}",
        ),
        ("longest run in an epoch if shuffled, median", lambda r: number(r["shuffled_longest_run_median"])),
        ("gradient norm, median", lambda r: number(r["grad_norm_median"])),
        ("gradient norm, 95th percentile", lambda r: number(r["grad_norm_p95"])),
        ("padding efficiency", lambda r: number(r["padding_efficiency"])),
        ("anchors per second", lambda r: number(r["anchors_per_s"])),
    ]
    if len(rows) <= FEW_RUNS:
        body = [[label, *(value(row) for row in rows)] for label, value in quantities]
        return Table(["", *(row["name"] for row in rows)], body)
    return Table(
        ["run", *(label for label, _ in quantities)], [[row["name"], *(value(row) for _, value in quantities)] for row in rows]
    )


def label(metric: str, unit: str = "1") -> str:
    """A metric's name for people, with its unit where it has one."""
    return LABELS.get(metric, metric.replace("_", " ")) + ("" if unit == "1" else f" ({unit})")


def rank(metric: str) -> int:
    """The place of a metric in `LABELS`; those that are not there come last."""
    return list(LABELS).index(metric) if metric in LABELS else len(LABELS)


def between(low: float | None, high: float | None, shown: Callable[[float], str]) -> str:
    """An interval; a dash where there is none."""
    return "–" if low is None or high is None else f"{shown(low)} to {shown(high)}"


def comparison_tables(rows: Sequence[Row], comparisons: Sequence[Row]) -> list[Table]:
    """The first run against each of the next ones; rows whose interval excludes zero are stressed."""
    tables = []
    for other in rows[1 : 1 + MAX_COMPARISON_TABLES]:
        found = [c for c in comparisons if (c["run_a"], c["run_b"]) == (rows[0]["run_id"], other["run_id"])]
        found = [c for c in found if c["difference"] is not None]
        body = [
            [
                label(c["metric"], c["unit"]),
                number(c["value_a"]),
                number(c["value_b"]),
                signed(c["difference"]),
                _interval(c),
                effect(c),
            ]
            for c in found
        ]
        header = ["", rows[0]["name"], other["name"], "difference", "95 % interval", "effect"]
        bold = frozenset(i for i, c in enumerate(found) if excludes_zero(c))
        tables.append(Table(header, body, f"{rows[0]['name']} against {other['name']}", bold))
    return tables


def _interval(row: Row) -> str:
    if row["ci_low"] is None:
        if row["metric"] not in OVER_STEPS:
            return "one run each"
        worth = row["independent_steps"]
        return "too few steps" if worth is None else f"too few steps (worth {worth:.0f} independent ones)"
    return between(row["ci_low"], row["ci_high"], signed)


def effect(row: Row) -> str:
    """The effect size of a row of `comparisons` or `group_comparisons`."""
    if row["effect_size"] is None:
        return "–"
    return f"×{exp(row['effect_size']):.2f}" if row["effect_kind"] == "log ratio" else f"{row['effect_size']:+.2f} sd"


def bucket_table(
    rows: Sequence[Row], bucket_stats: Sequence[Row], ranges: Mapping[str, Mapping[int, str]], why_not: str
) -> Table:
    """One row per run and bucket.

    Args:
        ranges: by run id the lengths of each bucket, where they are known.
        why_not: stands beneath where they are not known.
    """
    names = {row["run_id"]: row["name"] for row in rows}
    body = [
        [
            names[b["run_id"]],
            str(b["bucket"]),
            ranges.get(b["run_id"], {}).get(b["bucket"], "–"),
            number(b["num_batches"]),
            _percent(b["batch_share"]),
            _percent(b["token_share"]),
            _percent(b["padding_efficiency"]),
            number(b["mean_loss"]),
        ]
        for b in bucket_stats
    ]
    header = ["run", "bucket", "lengths, tokens", "batches", "of batches", "of tokens", "padding efficiency", "mean loss, nats"]
    return Table(header, body, note=why_not if any(row[2] == "–" for row in body) else "")


def _hundredths(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"
