"""Grids of changes: `--grid train.lr=1e-3,2e-3 --grid draft.num_layers=2,4` makes four runs of one experiment.

The grid becomes the experiment's own `runs`, so that everything downstream is what an experiment with runs does anyway, and a
run whose settings are in an earlier grid too is found again, finished or not.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from typing import Any

import yaml

from dflash_core.errors import ConfigError
from dflash_core.experiment_file import load_experiment
from dflash_core.provenance import digest_json
from flows.command import MOST_RUNS

LONGEST_NAME = 100
EXPONENT = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+")
SUFFIX = "-sweep"  # so that its report does not take the place of the experiment's
# Runs that differ in these have another target, other steps, another loss or another limit of acceptance.
APART = ("target.", "bucketing.token_budget", "bucketing.batches_per_step", "train.loss", "train.dpace_alpha",
         "draft.block_size")  # fmt: skip


def parse(grid: Sequence[str]) -> dict[str, list[Any]]:
    """Values by key, of lines `key=v1,v2,...`; each value is read as YAML, lists in brackets stay whole.

    Raises:
        ConfigError: no values, a value or a key that stands twice, or text that is not YAML.
    """
    axes: dict[str, list[Any]] = {}
    for line in grid:
        key, separator, text = line.partition("=")
        if not separator or not key:
            raise ConfigError(f"--grid {line}: expected key=value,value,...")
        if key in axes:
            raise ConfigError(f"--grid {line}: {key} stands twice")
        if key.split(".")[0] in ("name", "runs", "analyze"):
            raise ConfigError(f"--grid {line}: {key} is no setting of a run")
        if key.split(".")[0] == "data":
            raise ConfigError(
                f"--grid {line}: all runs of a sweep train on one dataset; run a sweep for each, with --set {key}=..."
            )
        try:
            values = [_number(value) for value in yaml.safe_load(f"[{text}]")]
        except yaml.YAMLError as error:
            raise ConfigError(f"--grid {line}: not YAML: {' '.join(str(error).split())}") from None
        if not values:
            raise ConfigError(f"--grid {line}: no values")
        if len({repr(value) for value in values}) < len(values):
            raise ConfigError(f"--grid {line}: a value stands twice")
        axes[key] = values
    if not axes:
        raise ConfigError("--grid: nothing to change; give key=value,value,... at least once")
    return axes


def expand(
    experiment: str, overrides: Sequence[str], run: str | None, grid: Sequence[str], most: int = MOST_RUNS
) -> tuple[str, ...]:
    """Overrides that turn the experiment into one whose runs are all points of the grid.

    An experiment that has runs gives each of them the whole grid (`run`: only that one); where both set a key, the grid counts.

    Raises:
        ConfigError: the grid is not one, a point is no valid run, there are more than `most`, or they could not be compared.
    """
    axes = parse(grid)
    config = load_experiment(experiment, overrides)
    bases = [(one.name, dict(one.set)) for one in config.runs if run in (None, one.name)]
    if not bases and run is not None:
        known = ", ".join(one.name for one in config.runs) or "it has none"
        raise ConfigError(f"{experiment}: no run {run!r}; there are: {known}")
    bases = bases or [("", {})]
    points = list(itertools.product(*axes.values()))
    if len(bases) * len(points) > most:
        raise ConfigError(f"--grid: {len(bases) * len(points)} runs, more than {most}; --most allows more")
    apart = [key for key, values in axes.items() if len(values) > 1 and key.startswith(APART)]
    if apart and not config.analyze.allow_different:
        raise ConfigError(
            f"--grid: runs of another {', '.join(apart)} are not comparable as they are; --set analyze.allow_different=true "
            "trains them all the same, and the report then says first what differs"
        )
    runs = []
    for base, settings in bases:
        for point in points:
            changed = dict(zip(axes, point, strict=True))
            runs.append({"name": _name(base, changed), "set": {**settings, **changed}})
    names = [str(one["name"]) for one in runs]
    if len(set(names)) < len(names):
        raise ConfigError(f"--grid: two runs would have the same name: {', '.join(names)}")
    text = yaml.safe_dump(runs, default_flow_style=True, width=float("inf"), allow_unicode=True).strip()
    expanded = (*overrides, f"name={config.name}{SUFFIX}", f"runs={text}")
    load_experiment(experiment, expanded)
    return expanded


def _name(base: str, changed: dict[str, Any]) -> str:
    """`lr-0.001_num_layers-4`: what the run changes; by whole keys where last parts are the same."""
    short = [key.rpartition(".")[2] for key in changed]
    labels = short if len(set(short)) == len(short) else list(changed)
    words = [f"{label}-{_plain(value)}" for label, value in zip(labels, changed.values(), strict=True)]
    name = "_".join(filter(None, [base, *words]))
    return name if len(name) <= LONGEST_NAME else f"{name[: LONGEST_NAME - 9]}-{digest_json(list(changed.items()))[:8]}"


def _number(value: Any) -> Any:
    """`1e-3` is a number to everybody but YAML 1.1, to which it is a text for want of a point: the name must be that of 0.001."""
    return float(value) if isinstance(value, str) and EXPONENT.fullmatch(value) else value


def _plain(value: Any) -> str:
    return re.sub(r"[^A-Za-z0-9.]+", "-", str(value)).strip("-") or "none"
