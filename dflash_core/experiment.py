"""The composition root: joins the components, one function for each stage of an experiment.

`prepare`, `plan`, `create_run`, `train_run`, `evaluate_run` and `analyze` are called by the command line and by the flows
alike. Heavy imports (torch, pandas) are made inside the stages that need them, so that reading a file and `--help` stay
fast.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from dflash_core.errors import ConfigError, UserError
from dflash_core.experiment_data import (
    dataset_folder,
    describe_bucket_choice,
    describe_dataset,
    draft_spec,
    edges,
    plan,
    prepare,
    sample_lines,
    target_folder,
    workspace,
)
from dflash_core.experiment_evaluation import evaluate_run
from dflash_core.experiment_export import export_run
from dflash_core.experiment_file import ExperimentConfig, load_experiment
from dflash_core.experiment_validation import check_validation, how_to_validate
from dflash_core.provenance import digest_json, digest_weights, write_atomically
from dflash_core.training.run_folder import RunFolder, identity_differences, now

if TYPE_CHECKING:
    from dflash_core.training.job import TrainingJob

__all__ = [
    "ExperimentConfig",
    "analyze",
    "check",
    "create_run",
    "describe_bucket_choice",
    "describe_dataset",
    "evaluate_run",
    "export_run",
    "load_experiment",
    "plan",
    "prepare",
    "run_attempt",
    "run_state",
    "sample_lines",
    "train_command",
    "train_run",
    "training_job",
    "workspace",
]

# What a resumed run may change: none of it reaches the weights except through rounding. `num_epochs` and `max_steps`
# move the end of the learning-rate schedule, which is the one intended use of changing them.
SAFE_TO_CHANGE = {
    "checkpoint_every",
    "keep_last",
    "keep_every",
    "keep_best",
    "max_skipped_in_a_row",
    "num_epochs",
    "max_steps",
    "self_checks",
}


def _identity(config: ExperimentConfig, saved: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """What a run is, as flat keys: everything that reaches its weights. A checkpoint must agree with all of it.

    `saved` is what the run said before: a run that has begun does not need the drafter that it began with any more.
    """
    from dflash_core.data import Dataset

    dataset = Dataset.open(dataset_folder(config))
    identity: dict[str, Any] = {
        "dataset": dataset.fingerprint,
        "tokenizer": dataset.manifest["tokenizer_sha256"],
        "target_weights": digest_weights(target_folder(config)),
        "edges": list(edges(config, dataset.lengths)),
    }
    for section in ("target", "bucketing", "draft", "train"):
        values = getattr(config, section).model_dump(mode="json")
        identity.update({f"{section}.{key}": value for key, value in values.items() if key not in SAFE_TO_CHANGE})
    if (initial := _initial_draft(config)) is not None:  # the weights are meant, wherever they lie
        known = (saved or {}).get("draft.init_from")
        identity["draft.init_from"] = known if known is not None and not initial.is_dir() else digest_weights(initial)
    return identity


def _initial_draft(config: ExperimentConfig) -> Path | None:
    """The folder of the drafter whose weights training begins with."""
    return None if config.draft.init_from is None else Path(config.draft.init_from)


def _check_initial_draft(config: ExperimentConfig) -> dict[str, Any]:
    """What `check` says of the drafter that training begins with; raises ConfigError where it does not fit."""
    from dflash_core.model.warm_start import check_initial_draft

    initial = _initial_draft(config)
    return {} if initial is None else {"path": str(initial), "differs": check_initial_draft(initial, draft_spec(config))}


def create_run(config: ExperimentConfig, run_name: str, run_dir: Path | None = None) -> Path:
    """Make the folder of a run, or adopt the one that is there.

    The default folder is named by experiment, run, and a digest of config and data, so the same experiment on the same
    data finds its own run again, finished or not.
    """
    before = RunFolder(run_dir).read_manifest().get("identity") if run_dir and (run_dir / "manifest.json").exists() else None
    if before is None:
        _check_initial_draft(config)
    identity = _identity(config, before)
    length = {"max_steps": config.train.max_steps, "num_epochs": config.train.num_epochs}
    run_id = f"{config.name}-{run_name}-{digest_json([identity, length])[:8]}"
    folder = RunFolder(run_dir or workspace() / "runs" / run_id)
    if (folder.path / "manifest.json").exists():
        if folder.is_owned():  # before its config.yaml is written anew
            raise UserError(f"{folder.path}: another process is training this run")
        saved = folder.read_manifest().get("identity", identity)
        different, listed = identity_differences(saved, identity, "there")
        if different:
            raise ConfigError(f"{folder.path}: holds a run with another {', '.join(different)} ({listed})")
    else:
        dataset = dataset_folder(config)
        folder.update_manifest(
            run_id=run_id if run_dir is None else folder.path.name,
            experiment=config.name,
            name=run_name,
            state="created",
            created=now(),
            dataset=str(dataset),
            dataset_fingerprint=identity["dataset"],
            identity=identity,
            target=config.target.path,
            num_steps=0,
            acceptance_length=None,
            acceptance_length_untrained=None,
            lossless=None,
            checkpoint=None,
            export=None,
        )
    single = config.model_dump(mode="json", exclude={"runs"})
    write_atomically(folder.config, yaml.safe_dump(single, sort_keys=False, allow_unicode=True))
    return folder.path


def run_state(run_dir: Path) -> str:
    """`created`, `running`, `completed`, `stopped` or `failed`; a run whose process was killed has failed."""
    run = RunFolder(Path(run_dir))
    state = str(run.read_manifest()["state"])
    if state == "running" and not run.is_owned():
        state = str(run.update_manifest(state="failed", error="the training process was killed")["state"])
    return state


def run_attempt(run_dir: Path) -> int:
    """How often the run has been resumed; -1 before its first start. Tells a new `stopped` from an old one."""
    return int(RunFolder(Path(run_dir)).read_manifest().get("attempt", -1))


def train_command(run_dir: Path) -> list[str]:
    """The command of the training child: one process, or `torchrun` on loopback with one process per cell."""
    config = load_experiment(Path(run_dir) / "config.yaml")
    train = ["-m", "dflash_core", "train", str(Path(run_dir) / "config.yaml"), "--run-dir", str(run_dir)]
    if config.topology.cells == 1:
        return [sys.executable, *train]
    launcher = [sys.executable, "-m", "dflash_core.training.one_node", f"--nproc-per-node={config.topology.cells}"]
    launcher.append(f"--max-restarts={config.topology.max_restarts}")
    return [*launcher, *train]


def training_job(config: ExperimentConfig, run_dir: Path) -> TrainingJob:
    """What `train_run` trains, resolved: for those who run a cell with stand-ins."""
    from dflash_core.training.job import TrainingJob

    run = RunFolder(run_dir)
    before = run.read_manifest().get("identity")
    identity = _identity(config, before)
    saved = before or identity
    if saved["dataset"] == identity["dataset"]:  # chosen once, when the run was made: all cells and attempts use the same
        identity["edges"] = saved["edges"]
    shown = config.model_dump(mode="json")
    return TrainingJob(
        run=run,
        run_id=run.read_manifest()["run_id"],
        dataset=dataset_folder(config),
        edges=tuple(identity["edges"]),
        target_folder=target_folder(config),
        target=config.target,
        spec=draft_spec(config),
        bucketing=config.bucketing,
        train=config.train,
        topology=config.topology,
        prefetch=config.prefetch,
        metrics=config.metrics,
        identity=identity,
        shown_config=shown,
        init_from=_initial_draft(config),
    )


def train_run(config: ExperimentConfig, run_dir: Path) -> dict[str, Any]:
    """Train or resume one run in this process (one cell of it under `torchrun`); returns the manifest.

    A run that is complete is left as it is; with more steps configured it goes on.
    """
    from dflash_core.training.assembly import CellParts
    from dflash_core.training.cell import is_complete, run_cell

    job = training_job(config, Path(run_dir))
    if is_complete(job):
        return job.run.read_manifest()
    return run_cell(job, CellParts(validation=how_to_validate(config)))


def check(config: ExperimentConfig, num_gpus: int | None = None) -> dict[str, Any]:
    """Check what can be checked before anything runs: every run's topology, the target, the input files.

    Args:
        num_gpus: GPUs to check the topology against, for a file that is meant for another machine; the target and the
            data are then not looked for.

    Raises:
        ConfigError, DataError: the first thing that is wrong.
    """
    from dflash_core.data import expand_files
    from dflash_core.training.devices import cell_devices

    placed = {}
    for name, run in config.variants():
        topology = run.topology
        if num_gpus is not None and topology.device == "auto":
            topology = topology.model_copy(update={"device": "cuda" if num_gpus else "cpu"})
        cells = [cell_devices(topology, cell, num_gpus) for cell in range(topology.cells)]
        check_validation(run)
        placed[name] = [{"draft": cell.draft, "targets": list(cell.targets)} for cell in cells]
    result: dict[str, Any] = {"experiment": config.name, "runs": placed}
    if num_gpus is not None:
        result["not_checked"] = ["target", "data"]
    else:
        result["draft"] = draft_spec(config).as_dict()
        result["target"] = {name: _check_target(run) for name, run in config.variants()}
        if initial := {name: found for name, run in config.variants() if (found := _check_initial_draft(run))}:
            result["init_from"] = initial
        result["files"] = [file.url for file in expand_files(config.data.files)]
        if config.data.held_out is not None:
            expand_files([config.data.held_out])
    return result


# A larger target is looked into when a run starts, which loads it anyway.
MOST_CHECKED_BYTES = 2 * 1024**3


def _check_target(config: ExperimentConfig) -> dict[str, Any] | str:
    """Those self-checks of a run that need no training; a line where the target is too large to be loaded for them."""
    from dflash_core.data import Dataset
    from dflash_core.training.self_check import check_target

    folder, data = target_folder(config), dataset_folder(config)
    if sum(file.stat().st_size for file in folder.glob("*.safetensors")) > MOST_CHECKED_BYTES:
        return "weights larger than 2 GiB, which are checked when a run starts"
    dataset = Dataset.open(data) if (data / "manifest.json").exists() else None
    return check_target(folder, config.target, draft_spec(config), config.train.loss, dataset)


# Columns of the console's and the artifact's short table, and how they are headed.
SHORT_TABLE = {
    "run": "name",
    "order": "order",
    "steps": "num_steps",
    "loss": "final_loss",
    "acceptance length (+1 included)": "acceptance_length",
    "untrained": "acceptance_length_untrained",
    "equals greedy": "lossless",
    "longest bucket run": "longest_run_in_epoch",
    "shortest possible": "shortest_possible_longest_run",
    "gradient norm p50": "grad_norm_median",
    "p95": "grad_norm_p95",
}


def analyze(config: ExperimentConfig, run_dirs: Sequence[Path]) -> dict[str, Any]:
    """Compare runs: Parquet tables, `report.html` and `report.md` under `reports/<experiment>`."""
    from dflash_core.analysis import analyze_runs

    out = workspace() / "reports" / config.name
    manifest = analyze_runs([Path(run_dir) for run_dir in run_dirs], out, config.analyze)
    return {
        "path": str(out),
        "report_html": manifest["paths"]["report_html"],
        "report_md": manifest["paths"]["report_md"],
        "table": [{head: row[column] for head, column in SHORT_TABLE.items()} for row in manifest["comparison"]],
        "summary": manifest["summary"],
    }
