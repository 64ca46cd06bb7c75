"""The composition root's export side: a run's checkpoint is written for serving engines."""

from __future__ import annotations

from pathlib import Path

from dflash_core.errors import DataError
from dflash_core.training.run_folder import RunFolder


def export_run(run_dir: Path, out: Path | None = None) -> Path:
    """Export a run's newest checkpoint; returns the folder written."""
    from dflash_core.export import export_checkpoint
    from dflash_core.training.checkpoint import newest_checkpoint

    run = RunFolder(Path(run_dir))
    run.read_manifest()
    found = newest_checkpoint(run.checkpoints)
    if found is None:
        raise DataError(f"{run.path}: no checkpoint to export")
    return export_checkpoint(found[0], out or run.export)
