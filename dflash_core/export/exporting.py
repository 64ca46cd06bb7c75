"""Exports a checkpoint: writes a format, reads it back, puts a model card beside it, and lets the folder appear as a whole."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dflash_core.errors import DataError
from dflash_core.export.folder import CARD_FILE, export_folder
from dflash_core.export.model_card import card_text
from dflash_core.export.run_facts import read_run_facts
from dflash_core.export.speculators import read_speculators, read_speculators_rows, write_speculators
from dflash_core.export.target_rows import TargetRows, read_target_rows
from dflash_core.export.verify import compare_outputs, compare_rows, compare_weights, verify_zlab
from dflash_core.export.zlab import write_zlab
from dflash_core.model.draft import DFlashDraft
from dflash_core.model.weight_files import WEIGHTS_FILE
from dflash_core.model.weights import load_draft, read_config
from dflash_core.provenance import digest_file


@dataclass(frozen=True)
class Exporting:
    """What is exported, and how.

    Attributes:
        checkpoint: folder of a checkpoint; its run, if it lies in one, is what the model card tells of.
        folder: what is written, and replaced as a whole.
        dtype: number format of the written tensors.
        target: the target's folder, where it is at hand; verification then compares logits, and some formats hold its rows.
        target_name: name or folder by which an engine can load the target, for formats that say it.
        evaluation: what was measured of this checkpoint; None: what the run's manifest says.
    """

    checkpoint: Path
    folder: Path
    dtype: torch.dtype = torch.float32
    format: str = "zlab"
    target: Path | None = None
    target_name: str = ""
    evaluation: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class ExportFormat:
    """A format: what writes a draft into an empty folder, and what makes a draft of the written files alone.

    Both get the folder as it is called while it is written; `read` raises DataError for a difference from the checkpoint, with
    the name that the folder will have. `read_rows` gives the copies of the target's embedding and head, if a format has them.
    """

    write: Callable[[Path, DFlashDraft, Exporting], None]
    read: Callable[[Path, Exporting], DFlashDraft]
    read_rows: Callable[[Path], TargetRows] | None = None


def _write_zlab(folder: Path, draft: DFlashDraft, what: Exporting) -> None:
    write_zlab(folder, draft, what.dtype)


def _read_zlab(folder: Path, what: Exporting) -> DFlashDraft:
    return verify_zlab(folder, what.checkpoint, what.folder)


def _write_speculators(folder: Path, draft: DFlashDraft, what: Exporting) -> None:
    rows = _target_rows(draft, what)
    if what.target is None or rows is None:
        raise DataError(f"{what.folder}: the speculators format holds the target's embedding and head, which were not found")
    config = read_config(what.target)
    write_speculators(folder, draft, rows.embedding_VD, rows.head_VD, what.target_name, config, what.dtype)


def _read_speculators(folder: Path, what: Exporting) -> DFlashDraft:
    draft = read_speculators(folder)
    compare_weights(draft, what.checkpoint, what.dtype, what.folder)
    compare_rows(read_speculators_rows(folder), _target_rows(draft, what), what.dtype, what.folder)
    return draft


def _target_rows(draft: DFlashDraft, what: Exporting) -> TargetRows | None:
    return None if what.target is None else read_target_rows(what.target, draft.spec)


FORMATS: dict[str, ExportFormat] = {
    "zlab": ExportFormat(_write_zlab, _read_zlab),
    "speculators": ExportFormat(_write_speculators, _read_speculators, read_speculators_rows),
}


def export_draft(what: Exporting, *, verify: bool = False) -> dict[str, Any]:
    """Write an export. Files, keys and tensors are always compared with the checkpoint, outputs with `verify`.

    What differs does not take the folder's name: an earlier export stays.

    Returns:
        `path`, `format`, `dtype`, `step` and, with `verify`, the figures of the comparison as `verified`.

    Raises:
        DataError: the checkpoint cannot be read, the folder cannot be written, or what was written differs.
    """
    chosen = FORMATS.get(what.format)
    if chosen is None:
        raise DataError(f"--format {what.format}: not one of {', '.join(FORMATS)}")
    draft = load_draft(what.checkpoint)
    facts = read_run_facts(what.checkpoint, what.evaluation)
    dtype = str(what.dtype).removeprefix("torch.")
    result: dict[str, Any] = {"path": str(what.folder), "format": what.format, "dtype": dtype, "step": facts.step}
    with export_folder(what.folder) as new:
        chosen.write(new, draft, what)
        written = chosen.read(new, what)
        if written.spec != draft.spec:
            raise DataError(f"{what.folder}: the written config reads back as another draft")
        if verify:
            rows, own = _target_rows(draft, what), chosen.read_rows and chosen.read_rows(new)
            figures = compare_outputs(written, what.checkpoint, what.dtype, rows, what.folder, own)
            num_parameters = sum(parameter.numel() for parameter in written.parameters())
            sizes = {"num_tensors": len(written.state_dict()), "num_parameters": num_parameters}
            result["verified"] = {**sizes, "weights_sha256": digest_file(new / WEIGHTS_FILE), **figures}
        (new / CARD_FILE).write_text(card_text(facts, draft.spec, dtype, what.format), encoding="utf-8")
    return result


def export_checkpoint(
    checkpoint: Path, folder: Path, dtype: torch.dtype = torch.float32, evaluation: Mapping[str, Any] | None = None
) -> Path:
    """Write a checkpoint in the z-lab format; returns the folder.

    Raises:
        DataError: as `export_draft`.
    """
    export_draft(Exporting(checkpoint, folder, dtype, evaluation=evaluation))
    return folder
