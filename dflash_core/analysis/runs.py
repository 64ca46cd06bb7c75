"""One run folder in memory, and whether several of them may be compared."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import yaml

from dflash_core.analysis.reader import last_attempts, numbers, read_stream
from dflash_core.errors import DataError, UserError
from dflash_core.provenance import read_json

ENDED = ("completed", "stopped", "failed")
COMPARABLE_FIELDS = ("dataset_fingerprint", "target")
# With what it is where a run of an earlier version does not say. Another loss function, or other weights of its slots, gives
# losses and gradient norms in another unit; another block size lets an acceptance length grow to another limit.
COMPARABLE_KEYS: Mapping[str, Any] = {
    "bucketing.batches_per_step": None,
    "bucketing.token_budget": None,
    "train.loss": "cross_entropy",
    "train.loss_gamma": None,
    "draft.block_size": None,
}
# More than anybody cuts lengths into: what says so is damaged, and arrays by bucket would fill the memory.
MOST_BUCKETS = 100_000
MANIFEST_KINDS: Mapping[str, tuple[type, ...]] = {
    "state": (str,),
    "lossless": (bool,),
    "acceptance_length": (int, float),
    "acceptance_length_untrained": (int, float),
}
DPACE_KEY = "train.dpace_alpha"


@dataclass(frozen=True)
class RunFacts:
    """What a run folder says about the run besides its metrics."""

    folder: Path
    run_id: str
    name: str
    manifest: Mapping[str, Any]
    config: Mapping[str, Any]
    provenance: Mapping[str, Any]

    def setting(self, dotted: str) -> Any:
        """The value of `bucketing.order` and the like, None where the configuration has no such key."""
        value: Any = self.config
        for key in dotted.split("."):
            if not isinstance(value, Mapping) or key not in value:
                return None
            value = value[key]
        return value


@dataclass(frozen=True)
class Run(RunFacts):
    """A run folder (docs/design.md 4), with the last attempt of each step only.

    `steps` is sorted by step and `batches` by sequence number: the order in which they were trained. `kept` holds what
    `once_per_run` keeps.
    """

    num_attempts: int
    steps: pa.Table
    batches: pa.Table
    evals: pa.Table
    events: pa.Table
    stats: pa.Table
    kept: dict[Callable[..., Any], Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def num_buckets(self) -> int:
        """Buckets of the configuration, or as many as the batches show."""
        seen = int(self.buckets().max()) + 1
        configured = self.setting("bucketing.num_buckets")
        return max(seen, configured) if isinstance(configured, int) and configured <= MOST_BUCKETS else seen

    def buckets(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """The bucket of each batch in training order; not to be written to."""
        return _buckets(self)


Made = TypeVar("Made")


def once_per_run(make: Callable[[Run], Made]) -> Callable[[Run], Made]:
    """For what several tables and detectors take from a run, and takes long: it is made once and kept with the run.

    All callers get the same object, so none may write to it.
    """

    @wraps(make)
    def kept(run: Run) -> Made:
        if make not in run.kept:
            run.kept[make] = make(run)
        found: Made = run.kept[make]
        return found

    return kept


@once_per_run
def _buckets(run: Run) -> np.ndarray[Any, np.dtype[np.int64]]:
    return numbers(run.batches, "bucket").astype(np.int64)


def load_facts(folder: Path) -> RunFacts:
    """Read a run folder's documents.

    Raises:
        UserError: it is no run folder; names the file.
        DataError: a document is damaged.
    """
    if not folder.is_dir():
        raise UserError(f"{folder}: no such run folder")
    manifest, config = _document(folder / "manifest.json"), _document(folder / "config.yaml")
    provenance = _document(folder / "provenance.json") if (folder / "provenance.json").is_file() else {}
    for key, kinds in MANIFEST_KINDS.items():
        if not isinstance(manifest.get(key), (*kinds, type(None))):
            raise DataError(f"{folder / 'manifest.json'}: {key} cannot be {manifest[key]!r}")
    run_id = str(manifest.get("run_id") or folder.name)
    return RunFacts(folder, run_id, str(manifest.get("name") or run_id), manifest, config, provenance)


def load_run(folder: Path) -> Run:
    """Read a run folder. The metrics of a run that has ended are compacted to Parquet on the way.

    Raises:
        UserError: it is no run folder, or the run has no finished step; names the file.
        DataError: a file is damaged; names file and row.
    """
    return load_metrics(load_facts(folder))


def load_metrics(facts: RunFacts) -> Run:
    """Read the metrics of a run; see `load_run`."""
    folder = facts.folder
    compact = facts.manifest.get("state") in ENDED
    streams = {name: read_stream(folder, name, compact=compact) for name in ("steps", "batches", "evals", "events", "stats")}
    for name in ("steps", "batches"):
        if not len(streams[name]):
            raise UserError(f"{folder / 'metrics' / name}.jsonl: missing or without rows: the run has not finished a step")
    for name, columns in {"steps": ("step",), "batches": ("step", "seq_no", "bucket")}.items():
        for column in columns:
            if streams[name][column].null_count:
                raise DataError(f"{folder / 'metrics' / name}.jsonl: rows without {column}")
            low, high = pc.min_max(streams[name][column]).as_py().values()
            if low < 0 or (column == "bucket" and high >= MOST_BUCKETS):
                raise DataError(f"{folder / 'metrics' / name}.jsonl: {column} {low if low < 0 else high} cannot be")
    return Run(
        **{field.name: getattr(facts, field.name) for field in fields(RunFacts)},
        num_attempts=int(numbers(streams["steps"], "attempt", missing=0).max()) + 1,
        steps=_one_per_key(streams["steps"], "step"),
        batches=_one_per_key(last_attempts(streams["batches"]), "seq_no"),
        evals=last_attempts(streams["evals"], ("kind", "source", "position", "metric", "step")),
        events=streams["events"],
        stats=last_attempts(streams["stats"]).sort_by("step"),
    )


def _document(path: Path) -> Mapping[str, Any]:
    try:
        value = read_json(path) if path.suffix == ".json" else yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: not a run folder, this file cannot be read: {error.strerror}") from None
    except (ValueError, yaml.YAMLError) as error:
        raise DataError(f"{path}: damaged: {' '.join(str(error).split())}") from None
    if not isinstance(value, Mapping):
        raise DataError(f"{path}: holds a {type(value).__name__}, not keys and values")
    return value


def _one_per_key(table: pa.Table, key: str) -> pa.Table:
    """One row per key, of its last attempt, sorted by key."""
    table = last_attempts(table, (key,))
    values = numbers(table, key)
    if (values[1:] > values[:-1]).all():
        return table
    order = np.argsort(values, kind="stable")
    values = values[order]
    is_last = np.append(values[1:] != values[:-1], True)
    return table.take(pa.array(order[is_last]))


def load_all_facts(folders: Sequence[Path]) -> list[RunFacts]:
    """Read the documents of several run folders; runs of one name get their ids for names.

    Raises:
        UserError: no folder was given, or two hold the same run.
    """
    if not folders:
        raise UserError("no run folders to analyse")
    runs: dict[str, RunFacts] = {}
    for folder in folders:
        run = load_facts(folder)
        if run.run_id in runs:
            raise UserError(f"{folder}: run {run.run_id} is already given as {runs[run.run_id].folder}")
        runs[run.run_id] = run
    times = Counter(run.name for run in runs.values())
    # Runs of one name, such as the same variant with other overrides, are told apart by their folders.
    return [replace(run, name=run.run_id) if times[run.name] > 1 else run for run in runs.values()]


def load_runs(folders: Sequence[Path]) -> list[Run]:
    """Read several run folders whole, all at once in memory; raises as `load_all_facts` and `load_metrics` do."""
    return [load_metrics(facts) for facts in load_all_facts(folders)]


def incomparable(runs: Sequence[RunFacts]) -> list[str]:
    """What forbids a plain comparison: other data, target, step size or loss. One line per difference, none when all agree."""
    values = {field: [run.manifest.get(field) for run in runs] for field in COMPARABLE_FIELDS}
    values |= {
        key: [usual if run.setting(key) is None else run.setting(key) for run in runs] for key, usual in COMPARABLE_KEYS.items()
    }
    if "dpace" in values["train.loss"]:  # no other loss heeds it
        values[DPACE_KEY] = [run.setting(DPACE_KEY) for run in runs]
    return [
        f"{label}: " + ", ".join(f"{run.name} has {value}" for run, value in zip(runs, found, strict=True))
        for label, found in values.items()
        if len({repr(value) for value in found}) > 1
    ]


def config_differences(runs: Sequence[RunFacts]) -> dict[str, list[Any]]:
    """The dotted configuration keys that the runs do not share, with one value per run; the run's own name is left out."""
    flat = [flatten(run.config) for run in runs]
    keys = sorted({key for config in flat for key in config})
    different = {key: [config.get(key) for config in flat] for key in keys if key not in ("name", "run_id")}
    return {key: values for key, values in different.items() if len({repr(value) for value in values}) > 1}


def flatten(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A configuration as dotted keys."""
    flat: dict[str, Any] = {}
    for key, item in value.items():
        if isinstance(item, Mapping):
            flat |= flatten(item, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = item
    return flat
