"""Looks for leaks, wrong taps, heads and masks before the first step of every run; `train.self_checks: false` leaves it out.

"Looks fine in training, fails in serving" has a handful of causes that crash nothing, and each of them can be found in a
second on what is in memory anyway. Every cell looks on its own devices. Weights and random states are not touched, so that
a run trains the same with the checks and without.

    target      taps, head, embedding, logits, batching     of each of the cell's targets   (self_check_target)
    mask        the mask row                                                                (self_check_mask)
    draft       rows, leaks, packed, reference              as it is trained                (self_check_draft)
    export      tensor names and config keys                                                (self_check_export)
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dflash_core.config import TargetConfig
from dflash_core.data import Dataset
from dflash_core.model.draft import DFlashDraft
from dflash_core.model.spec import DraftSpec
from dflash_core.model.target import FrozenTarget
from dflash_core.training.job import TrainingJob
from dflash_core.training.loop import DraftTrainer
from dflash_core.training.self_check_draft import DraftProbe, check_leaks, check_packed, check_reference
from dflash_core.training.self_check_export import check_export_keys
from dflash_core.training.self_check_mask import check_mask
from dflash_core.training.self_check_report import Report
from dflash_core.training.self_check_target import (
    check_batching,
    check_embedding,
    check_head,
    check_logits,
    check_taps,
    check_trainer_rows,
)

log = logging.getLogger(__name__)
# Tokens of the sequences that targets are tried on: a forward pass of a 135M target takes a tenth of a second on a core.
SHORT, LONG = 10, 16
NUM_TRIED = 64  # sequences among which a long enough one is looked for


def run_self_checks(
    job: TrainingJob, dataset: Dataset, targets: Mapping[str, object], trainer: DraftTrainer
) -> dict[str, Any] | None:
    """Run all checks of a cell; returns the fields of the event `self_check`, or None where they are switched off.

    A stand-in for the target has no model that could be looked into: its checks are left out.

    Raises:
        ConfigError: a key of the experiment is wrong, and which.
        TrainingError: what would be trained is not what is served.
    """
    if not job.train.self_checks:
        return None
    report = Report()
    packed = job.bucketing.strategy == "packed"
    mask = job.spec.mask_token_id
    for number, target in enumerate(targets.values()):
        if not isinstance(target, FrozenTarget):
            report.skipped.append("target: a stand-in")
            continue
        short, long = _sequences(dataset, target.shape.vocab_size)
        _check_model(report, target, job.target_folder, long, mask, job.train.loss)
        if not packed:
            report.run("batching", check_batching, target, short, long, target.shape.pad_token_id)
        report.run("rows", check_trainer_rows, trainer, target)
        if number == 0:
            report.run("mask", check_mask, target, job.target_folder, mask, dataset)
    probe = DraftProbe(trainer)
    report.run("leaks", check_leaks, probe)
    if packed:
        report.run("packed", check_packed, probe)
    report.run("reference", check_reference, probe)
    report.run("export", check_export_keys, trainer.draft)
    log.info("%s", report.line())
    return report.fields()


def check_target(
    folder: Path, config: TargetConfig, spec: DraftSpec, loss: str = "cross_entropy", dataset: Dataset | None = None
) -> dict[str, Any]:
    """The checks that need no draft, for `dflash doctor`: loads the target on the CPU.

    Args:
        folder: the target's Hugging Face folder.
        spec: the configured draft.
        loss: `train.loss`.
        dataset: the prepared dataset if there is one; real text for the taps, and where the mask is looked for.

    Returns:
        The fields of a `self_check` event.

    Raises:
        ConfigError, TrainingError: as `run_self_checks`.
    """
    target = FrozenTarget(folder, spec.target_layer_ids, config.dtype, "sdpa", "cpu", config.feature_dtype)
    report = Report()
    short, long = _sequences(dataset, target.shape.vocab_size)
    _check_model(report, target, folder, long, spec.mask_token_id, loss)
    report.run("batching", check_batching, target, short, long, target.shape.pad_token_id)
    report.run("mask", check_mask, target, folder, spec.mask_token_id, dataset)
    with torch.device("meta"):  # names and shapes alone
        draft = DFlashDraft(spec)
    report.run("export", check_export_keys, draft)
    return report.fields()


def _check_model(report: Report, target: FrozenTarget, folder: Path, tokens_1S: Tensor, mask: int, loss: str) -> None:
    report.run("embedding", check_embedding, target, torch.cat([tokens_1S[0], torch.tensor([mask])]))
    report.run("head", check_head, target, folder)
    report.run("logits", check_logits, target, tokens_1S, loss)
    report.run("taps", check_taps, target, tokens_1S)


def _sequences(dataset: Dataset | None, vocab_size: int) -> tuple[Tensor, Tensor]:
    """A short and a long sequence [1, S] of real text; of ascending ids where there is none."""
    if dataset is None or len(dataset) == 0:
        ids = torch.arange(LONG).remainder(vocab_size).unsqueeze(0)
        return ids[:, :SHORT].flip(1), ids
    count = min(len(dataset), NUM_TRIED)
    dataset.check_files(range(count))
    by_length = sorted(range(count), key=lambda index: (-int(dataset.lengths[index]), index))
    long, other = (torch.tensor(dataset.tokens(i)[0][:LONG].astype("int64")).unsqueeze(0) for i in (by_length[0], by_length[-1]))
    return other[:, : min(SHORT, long.shape[1])], long
