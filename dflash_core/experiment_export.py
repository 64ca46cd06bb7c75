"""The composition root's export side: a run's checkpoint is written for serving engines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dflash_core.errors import CheckpointError, ConfigError, DataError, SchemaError
from dflash_core.experiment_data import target_folder
from dflash_core.experiment_file import load_experiment
from dflash_core.training.run_folder import RunFolder

DTYPES = ("float32", "bfloat16")


def export_run(
    run_dir: Path,
    out: Path | None = None,
    *,
    form: str = "zlab",
    checkpoint: str = "newest",
    dtype: str = "float32",
    verify: bool = False,
) -> dict[str, Any]:
    """Export one of a run's checkpoints; see `dflash_core.export.export_draft` for what is returned.

    Args:
        out: folder to write; default: `export/` of the run, or `export-FORMAT/` for other formats than z-lab's.
        form: a format of `dflash_core.export.FORMATS`.
        checkpoint: `newest`, `best` (by its score: measured before estimated), or the number of a step.
        dtype: number format of the written weights.
        verify: run the reloaded draft and the checkpoint's on the same blocks, and compare.

    Raises:
        DataError: there is no such checkpoint, the folder cannot be written, or what was written differs.
        ConfigError: an argument is none of those that there are.
    """
    from dflash_core.export import FORMATS, Exporting, export_draft
    from dflash_core.model.target import DTYPES as NUMBER_FORMATS

    for key, value, allowed in (("--format", form, FORMATS), ("--dtype", dtype, DTYPES)):
        if value not in allowed:
            raise ConfigError(f"{key} {value}: not one of {', '.join(allowed)}")
    run = RunFolder(Path(run_dir))
    run.read_manifest()
    found = _chosen(run, checkpoint)
    folder = out or (run.export if form == "zlab" else run.path / f"export-{form}")
    target, name = _target(run) if verify or form == "speculators" else (None, "")
    what = Exporting(found, folder, NUMBER_FORMATS[dtype], form, target, name)
    return {**export_draft(what, verify=verify), "checkpoint": found.name}


def _chosen(run: RunFolder, which: str) -> Path:
    """The folder of the checkpoint that was asked for; it is whole."""
    from dflash_core.training.checkpoint import best_checkpoint, check_checkpoint, newest_checkpoint
    from dflash_core.training.retention import by_step, checkpoint_folder

    if which in ("newest", "best"):
        found = newest_checkpoint(run.checkpoints) if which == "newest" else best_checkpoint(run.checkpoints)
        if found is None:
            raise DataError(f"{run.path}: no checkpoint {'with a score ' if which == 'best' else ''}to export")
        return found[0]
    if not which.isdecimal():
        raise ConfigError(f"--checkpoint {which}: not newest, best or the number of a step")
    folder = checkpoint_folder(run.checkpoints, int(which))
    if not folder.is_dir():
        there = ", ".join(str(int(path.name.removeprefix("step-"))) for path in by_step(run.checkpoints))
        raise DataError(f"{folder}: no such checkpoint; there are those of steps {there or '(none)'}")
    try:
        check_checkpoint(folder)
    except SchemaError:
        raise
    except CheckpointError as error:  # the user chose it
        raise DataError(str(error)) from None
    return folder


def _target(run: RunFolder) -> tuple[Path | None, str]:
    """The target's folder, and a name by which it can be loaded.

    There is none where it is not on this machine any more: final states are compared then.
    """
    try:
        config = load_experiment(run.config)
        folder = target_folder(config)
    except ConfigError:
        return None, ""
    return folder, str(folder) if config.target.path.startswith("package:") else config.target.path
