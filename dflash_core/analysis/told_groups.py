"""Groups of runs that differ in nothing but seeds, as a report tells them: lines for its head, and tables."""

from __future__ import annotations

from collections.abc import Sequence

from dflash_core.analysis.compare import excludes_zero
from dflash_core.analysis.summary import FEW_RUNS, MAX_COMPARISON_TABLES, Row, Table, between, effect, label, number, rank, signed

# What the first lines say of groups.
TOLD = ("acceptance_length", "final_loss", "loss_sd_detrended")


def group_lines(groups: Sequence[Row], comparisons: Sequence[Row]) -> list[str]:
    """A line for each of the most important metrics: the means of the groups with several runs, and how far the others are from
    the first of them. Nothing unless two groups have several runs each.

    Args:
        groups: rows of `groups`, in the order of the runs.
        comparisons: rows of `group_comparisons`.
    """
    return [line for metric in TOLD if (line := _line([row for row in groups if row["metric"] == metric], comparisons))]


def _line(rows: Sequence[Row], comparisons: Sequence[Row]) -> str | None:
    several = [row for row in rows if row["num_runs"] > 1]
    if len(several) < 2:
        return None
    shown = several[:FEW_RUNS]
    metric, first = shown[0]["metric"], shown[0]["group"]
    counts = {row["num_runs"] for row in shown}
    each = f" ({counts.pop()} runs each)" if len(counts) == 1 else ""
    means = ", ".join(f"{row['group']} {number(row['mean'])}" + ("" if each else f" ({row['num_runs']} runs)") for row in shown)
    more = f" and {len(several) - len(shown)} more groups" if len(several) > len(shown) else ""
    found = {(row["group_a"], row["group_b"]): row for row in comparisons if row["metric"] == metric}
    against = [found[first, row["group"]] for row in shown[1:] if (first, row["group"]) in found]
    told = [_difference(row) for row in against]
    name = label(metric)
    return f"{name[0].upper()}{name[1:]}: {means}{more}{each}. Against {first}: {', '.join(told)}."


def _difference(row: Row) -> str:
    if row["difference"] == row["ci_low"] == row["ci_high"] == 0:
        return f"{row['group_b']} the same"
    return f"{row['group_b']} {signed(row['difference'])} ({_interval(row)})"


def _interval(row: Row) -> str:
    ends = f"95 % interval {between(row['ci_low'], row['ci_high'], number)}"
    return ends if excludes_zero(row) else f"{ends}: other seeds alone could do that"


def group_tables(groups: Sequence[Row], comparisons: Sequence[Row]) -> list[Table]:
    """The groups side by side, and each two of the first few against each other; none where every group is a single run.

    Args:
        groups: rows of `groups`, in the order of the runs.
        comparisons: rows of `group_comparisons`.
    """
    if not any(row["num_runs"] > 1 for row in groups):
        return []
    pairs = dict.fromkeys((row["group_a"], row["group_b"]) for row in comparisons)
    return [_side_by_side(groups), *(_pair(*pair, comparisons) for pair in list(pairs)[:MAX_COMPARISON_TABLES])]


def _side_by_side(groups: Sequence[Row]) -> Table:
    num_runs = {row["group"]: max(one["num_runs"] for one in groups if one["group"] == row["group"]) for row in groups}
    known = {(row["metric"], row["group"]): row for row in groups}
    units = {row["metric"]: row["unit"] for row in groups}
    body = [
        [label(metric, units[metric]), *(_mean(known.get((metric, group)), many) for group, many in num_runs.items())]
        for metric in sorted(units, key=rank)
    ]
    header = ["", *(f"{group} ({many} run{'s' if many > 1 else ''})" for group, many in num_runs.items())]
    return Table(header, body, "Mean ± standard deviation between runs")


def _mean(row: Row | None, num_runs: int) -> str:
    if row is None:
        return "–"
    fewer = f" ({row['num_runs']} runs)" if row["num_runs"] < num_runs else ""
    return number(row["mean"]) + ("" if row["sd"] is None else f" ± {number(row['sd'], 2)}") + fewer


def _pair(a: str, b: str, comparisons: Sequence[Row]) -> Table:
    found = sorted(
        (row for row in comparisons if (row["group_a"], row["group_b"]) == (a, b)), key=lambda row: rank(row["metric"])
    )
    body = [
        [
            label(row["metric"], row["unit"]),
            number(row["value_a"]),
            number(row["value_b"]),
            signed(row["difference"]),
            between(row["ci_low"], row["ci_high"], signed),
            effect(row),
        ]
        for row in found
    ]
    by_seed = ", seed by seed" if all(row["paired"] for row in found) else ""
    header = ["", a, b, "difference", "95 % interval", "effect"]
    bold = frozenset(i for i, row in enumerate(found) if excludes_zero(row))
    return Table(header, body, f"{a} against {b}{by_seed}", bold)
