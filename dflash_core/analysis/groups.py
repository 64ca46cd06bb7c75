"""Runs that differ in nothing but seeds, taken together: how large a difference is against what another seed changes.

Intervals are Student's, over runs: a run is one value, whatever its length. For two groups with the same seeds the
differences run by run are taken (what a seed does to both cancels), else means with Welch's degrees of freedom.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import isfinite, sqrt
from typing import Any

import numpy as np

from dflash_core.analysis.compare import ALL_PAIRS_UP_TO, Estimate
from dflash_core.analysis.intervals import student
from dflash_core.analysis.runs import COMPARABLE_FIELDS, RunFacts, flatten
from dflash_core.analysis.series import FloatArray

EFFECT_KIND = "difference over pooled sd between runs"
SEED_SUFFIX = re.compile(r"[-_. ]*(?:seed|s)?[-_. =]*\d+$")
NOT_SETTINGS = ("name", "run_id", "description")
# Sections of the configuration that change nothing of a run's result.
NOT_SECTIONS = ("metrics", "analyze", "regenerate", "retrain")
MOST_NAMED_KEYS = 3


@dataclass(frozen=True)
class Group:
    """Runs of one configuration; `seeds` are theirs, in the same order."""

    name: str
    run_ids: tuple[str, ...]
    seeds: tuple[Any, ...]


def groups_of(runs: Sequence[RunFacts]) -> list[Group]:
    """Groups in the order of their first runs, each with a name of its own."""
    members: dict[str, list[RunFacts]] = {}
    settings: dict[str, dict[str, Any]] = {}
    for run in runs:
        mine = settings_of(run)
        key = repr(sorted(mine.items()))
        members.setdefault(key, []).append(run)
        settings[key] = mine
    names = _names(list(members.values()), list(settings.values()))
    return [
        Group(name, tuple(run.run_id for run in group), tuple(run.setting("train.seed") for run in group))
        for name, group in zip(names, members.values(), strict=True)
    ]


def settings_of(run: RunFacts) -> dict[str, Any]:
    """What makes a run's result besides chance: its configuration without seeds and names, its data and its target."""
    kept = {key: value for key, value in run.config.items() if key not in (*NOT_SETTINGS, *NOT_SECTIONS)}
    flat = {key: value for key, value in flatten(kept).items() if key.split(".")[-1] != "seed"}
    return flat | {f"{field} of the run": run.manifest.get(field) for field in COMPARABLE_FIELDS}


def _names(groups: Sequence[Sequence[RunFacts]], settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """What the names of a group's runs have in common, else the settings that tell groups apart, else the first run's id."""
    shared = [_shared_name(group) for group in groups]
    if None not in shared and len(set(shared)) == len(groups):
        return [name or "" for name in shared]
    keys = sorted({key for one in settings for key in one})
    different = [key for key in keys if len({repr(one.get(key)) for one in settings}) > 1]
    if 0 < len(different) <= MOST_NAMED_KEYS:
        told = [", ".join(f"{key.split('.')[-1]}={one.get(key)}" for key in different) for one in settings]
        if len(set(told)) == len(groups):
            return told
    return [group[0].run_id for group in groups]


def _shared_name(group: Sequence[RunFacts]) -> str | None:
    """The name of a lone run, or that of all without the seed at its end."""
    if len(group) == 1:
        return group[0].name
    # Runs of one name were given their ids, which end in digits of their own.
    names = {SEED_SUFFIX.sub("", str(run.manifest.get("name") or run.name)) for run in group}
    return names.pop() or None if len(names) == 1 else None


def group_rows(groups: Sequence[Group], found: Mapping[str, Mapping[str, Estimate]]) -> list[dict[str, Any]]:
    """Rows of `groups`."""
    rows = []
    for group in groups:
        for metric, unit in _metrics(groups, found).items():
            values = _values(group, metric, found)
            if not len(values):
                continue
            mean, sd = float(values.mean()), _sd(values)
            half = None if sd is None else student(len(values) - 1) * sd / sqrt(len(values))
            rows.append(
                {
                    "group": group.name,
                    "metric": metric,
                    "num_runs": len(values),
                    "mean": mean,
                    "sd": sd,
                    "low": None if half is None else mean - half,
                    "high": None if half is None else mean + half,
                    "unit": unit,
                }
            )
    return rows


def group_comparison_rows(groups: Sequence[Group], found: Mapping[str, Mapping[str, Estimate]]) -> list[dict[str, Any]]:
    """Rows of `group_comparisons`: of many groups, each with the first. None where every group is a single run."""
    if all(len(group.run_ids) == 1 for group in groups):
        return []
    few = len(groups) <= ALL_PAIRS_UP_TO
    pairs = combinations(groups, 2) if few else ((groups[0], other) for other in groups[1:])
    metrics = _metrics(groups, found)
    return [
        row for a, b in pairs for metric, unit in metrics.items() if (row := _compared(a, b, metric, unit, found)) is not None
    ]


def _compared(a: Group, b: Group, metric: str, unit: str, found: Mapping[str, Mapping[str, Estimate]]) -> dict[str, Any] | None:
    paired = _by_seed(a, b, metric, found)
    values_a, values_b = paired or (_values(a, metric, found), _values(b, metric, found))
    if not len(values_a) or not len(values_b):
        return None
    difference = float(values_b.mean() - values_a.mean())
    half = _half_of_pairs(values_b - values_a) if paired else _half_by_welch(values_a, values_b)
    pooled = _pooled(values_a, values_b)
    return {
        "metric": metric,
        "group_a": a.name,
        "group_b": b.name,
        "num_a": len(values_a),
        "num_b": len(values_b),
        "paired": paired is not None,
        "value_a": float(values_a.mean()),
        "value_b": float(values_b.mean()),
        "difference": difference,
        "ci_low": None if half is None else difference - half,
        "ci_high": None if half is None else difference + half,
        "effect_size": difference / pooled if pooled else None,
        "effect_kind": EFFECT_KIND if pooled else None,
        "unit": unit,
    }


def _by_seed(
    a: Group, b: Group, metric: str, found: Mapping[str, Mapping[str, Estimate]]
) -> tuple[FloatArray, FloatArray] | None:
    """Values of the same seeds side by side; None unless both groups have the same two or more seeds, each once."""
    by_seed = [
        {seed: found[run_id].get(metric) for seed, run_id in zip(group.seeds, group.run_ids, strict=True)} for group in (a, b)
    ]
    same = set(by_seed[0]) == set(by_seed[1]) and len(by_seed[0]) == len(a.run_ids) == len(b.run_ids) >= 2
    if not same or None in by_seed[0]:
        return None
    pairs = [[_number(one[seed]) for one in by_seed] for seed in by_seed[0]]
    known = np.array([pair for pair in pairs if None not in pair], dtype=np.float64).reshape(-1, 2)
    return (known[:, 0], known[:, 1]) if len(known) >= 2 else None


def _metrics(groups: Sequence[Group], found: Mapping[str, Mapping[str, Estimate]]) -> dict[str, str]:
    return {metric: one.unit for group in groups for run_id in group.run_ids for metric, one in found[run_id].items()}


def _values(group: Group, metric: str, found: Mapping[str, Mapping[str, Estimate]]) -> FloatArray:
    values = [_number(found[run_id].get(metric)) for run_id in group.run_ids]
    return np.array([value for value in values if value is not None], dtype=np.float64)


def _number(estimate: Estimate | None) -> float | None:
    known = estimate is not None and estimate.value is not None and isfinite(estimate.value)
    return float(estimate.value) if known and estimate is not None and estimate.value is not None else None


def _sd(values: FloatArray) -> float | None:
    return float(values.std(ddof=1)) if len(values) > 1 else None


def _pooled(a: FloatArray, b: FloatArray) -> float | None:
    """Standard deviation between runs of one group, from both."""
    free = len(a) + len(b) - 2
    return sqrt((len(a) * a.var() + len(b) * b.var()) / free) if free > 0 else None


def _half_of_pairs(differences: FloatArray) -> float:
    n = len(differences)
    return student(n - 1) * float(differences.std(ddof=1)) / sqrt(n)


def _half_by_welch(a: FloatArray, b: FloatArray) -> float | None:
    """Half the width of Welch's interval: degrees of freedom after Satterthwaite."""
    if len(a) < 2 or len(b) < 2:
        return None
    parts = [float(values.var(ddof=1)) / len(values) for values in (a, b)]
    if not sum(parts):
        return 0.0
    free = sum(parts) ** 2 / sum(part**2 / (len(values) - 1) for part, values in zip(parts, (a, b), strict=True))
    return student(free) * sqrt(sum(parts))
