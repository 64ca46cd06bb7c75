"""Conversations in, dataset folder out: read, render, tokenize in parallel, merge, count (docs/design.md 4).

Source files become parts, which depend on nothing but the file's content and the settings; parts that an interrupted
job or an earlier dataset has are taken over. The dataset's order and fingerprint depend on content only (see `merge`).
The folder appears whole or not at all. A folder that was made from the same files with the same settings and tokenizer
is kept as it is.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash_core.config import DataConfig
from dflash_core.data.dataset import Dataset
from dflash_core.data.files import adopt_parts, remove_other_parts, remove_unfinished, take_files
from dflash_core.data.histogram import write_length_bins
from dflash_core.data.merge import Merged, merge_parts
from dflash_core.data.progress import PrepareProgress, ProgressCounter
from dflash_core.data.regenerate_folder import check_mode, find_answers
from dflash_core.data.replace_folder import folder_lock, replaced_folder
from dflash_core.data.sources import expand_files, one_line
from dflash_core.data.store import MANIFEST, NO_FAULT, REJECTS, SCHEMA_VERSION, TOKENS
from dflash_core.data.tokenize_files import TokenizeJob
from dflash_core.data.tokenizer import chat_template_digest, tokenizer_digest
from dflash_core.data.worker import EncodeSettings
from dflash_core.errors import DataError
from dflash_core.processes import default_num_processes
from dflash_core.provenance import digest_json, write_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

logger = logging.getLogger(__name__)

# What a user can set if rows are refused for that.
REMEDIES = {
    "template rewrites history": "data.rewritten_history says what becomes of such rows",
    "no messages": "data.columns maps columns that are called otherwise",
}
# What no row of a dataset depends on.
NOT_IN_THE_RESULT = {"files", "held_out", "num_workers", "on_bad_row"}


def prepare_dataset(
    config: DataConfig,
    tokenizer: PreTrainedTokenizerFast,
    *,
    target: str,
    folder: Path,
    progress: Callable[[PrepareProgress], None] | None = None,
) -> dict[str, Any]:
    """Make the dataset `folder`, or keep the one that is there if it would come out the same.

    Where it starts processes, they import the program's main module, as `multiprocessing` has it: a script must call
    this under `if __name__ == "__main__"`.

    Args:
        target: name of the target, recorded in the manifest.
        progress: called about four times a second at most, and once at the end; not if the dataset is kept.

    Returns:
        The manifest, with `reused` added.

    Raises:
        DataError: a file is missing, changes while it is read or has a bad row (with `on_bad_row: error`); no row is
            usable; a tokenizing process was killed; the folder holds something that is not a dataset, or another
            process is preparing it. What was tokenized by then is kept in a hidden folder beside, and found there.
    """
    job = PrepareJob.of(config, tokenizer, target, folder)
    try:
        return _prepared(job, progress)
    except OSError as error:
        raise DataError(f"{error.filename or folder}: {error.strerror or one_line(error)}") from error


def _prepared(job: PrepareJob, progress: Callable[[PrepareProgress], None] | None) -> dict[str, Any]:
    folder = job.folder
    manifest = job.reusable()  # without the lock: several runs may start on one finished dataset
    if manifest is not None:
        return {**manifest, "reused": True}
    with folder_lock(folder):
        manifest = job.reusable()
        if manifest is not None:
            return {**manifest, "reused": True}
        with replaced_folder(folder) as building:
            try:
                manifest = job.build(building, progress)
            except BaseException:
                remove_unfinished(building, building / TOKENS)
                raise
    logger.info("%s: %d sequences, %d tokens", folder, manifest["num_sequences"], manifest["num_tokens"])
    _warn_of_rejects(folder, manifest)
    return {**manifest, "reused": False}


def _warn_of_rejects(folder: Path, manifest: dict[str, Any]) -> None:
    """Rows that are left out must be noticed also by somebody who looks at the training alone."""
    counts: dict[str, int] = manifest["num_rejected"]
    if counts:
        num_rows = sum(item["rows"] for item in manifest["source_files"])
        where = folder / REJECTS
        logger.warning(
            "%s: %d of %d rows are left out (%s); see %s", folder, sum(counts.values()), num_rows, _by_count(counts), where
        )


def _by_count(counts: dict[str, int]) -> str:
    """Reasons and how often each was met, the most frequent first."""
    return ", ".join(f"{reason}: {count}" for reason, count in sorted(counts.items(), key=lambda item: -item[1]))


class PrepareJob:
    """One preparation; the source files are identified at once."""

    @classmethod
    def of(cls, config: DataConfig, tokenizer: PreTrainedTokenizerFast, target: str, folder: Path) -> PrepareJob:
        """The job that makes the dataset `folder`; raises `DataError` for files that are missing."""
        origin: dict[str, Any] = {
            "schema_version": SCHEMA_VERSION,
            "name": config.name,
            "target": target,
            "tokenizer_sha256": tokenizer_digest(tokenizer),
            "chat_template_sha256": chat_template_digest(tokenizer),
            "config_sha256": digest_json({"target": target, **config.model_dump(mode="json", exclude=NOT_IN_THE_RESULT)}),
            "max_length": config.max_length,
            "over_long": config.over_long,
        }
        if folder.is_symlink():  # a dataset that lies elsewhere stays there, and is built beside that place
            folder = folder.resolve()
        return cls(config, tokenizer, folder, origin)

    def __init__(self, config: DataConfig, tokenizer: PreTrainedTokenizerFast, folder: Path, origin: dict[str, Any]) -> None:
        self._config, self._tokenizer, self.folder = config, tokenizer, folder
        self._settings = EncodeSettings(
            max_length=config.max_length,
            over_long=config.over_long,
            columns={str(ours): theirs for ours, theirs in config.columns.items()},
            template_variables=dict(config.template_variables),
            rewritten_history=config.rewritten_history,
        )
        decisive = {
            **asdict(self._settings),
            "shard_sequences": config.shard_sequences,
            **{key: origin[key] for key in ("schema_version", "tokenizer_sha256", "chat_template_sha256")},
        }
        self.files, repeated = take_files(expand_files(config.files), decisive)
        self._origin = {**origin, "repeated_files": [asdict(item) for item in repeated]}
        if answers := find_answers(self.files):  # made by `dflash regenerate`: by whom and in which mode
            check_mode(answers, tokenizer, config.template_variables)
            self._origin["answers"] = answers

    def reusable(self) -> dict[str, Any] | None:
        """The manifest of the dataset that is there, if it is whole and was made from the same things."""
        folder = self.folder
        if not folder.exists():
            return None
        if not folder.is_dir() or (any(folder.iterdir()) and not (folder / MANIFEST).exists()):
            raise DataError(f"{folder}: exists and is not a dataset; move it away")
        try:
            manifest = Dataset.open(folder).manifest
        except DataError as error:
            logger.warning("%s; it is prepared anew", error)
            return None
        made_from = [(item.get("path"), item.get("identity")) for item in manifest["source_files"]]
        same = made_from == [(file.url, file.identity) for file in self.files]
        same = same and all(manifest.get(key) == value for key, value in self._origin.items())
        faults = [reason for reason in manifest.get("num_rejected", {}) if reason not in NO_FAULT]
        return None if not same or (faults and self._config.on_bad_row == "error") else manifest

    def take_over(self, building: Path) -> Path:
        """Keep what is of use in the folder of an earlier job, and of a finished dataset; returns the folder of parts."""
        tokens = building / TOKENS
        tokens.mkdir(exist_ok=True)
        (building / MANIFEST).unlink(missing_ok=True)
        remove_other_parts(tokens, self.files)
        adopt_parts(self.folder / TOKENS, tokens, self.files)
        return tokens

    def tokenize_job(self, tokens: Path, faults_are_errors: bool, counter: ProgressCounter) -> TokenizeJob:
        """What makes parts in the folder `tokens`."""
        return TokenizeJob(tokens, self._settings, self._config.shard_sequences, faults_are_errors, counter)

    def build(self, building: Path, progress: Callable[[PrepareProgress], None] | None) -> dict[str, Any]:
        """Fill the folder; returns the manifest."""
        tokens = self.take_over(building)
        sizes = [file.num_bytes for file in self.files]
        total = None if None in sizes else sum(size for size in sizes if size is not None)
        counter = ProgressCounter(progress, len(self.files), total)
        strict = self._config.on_bad_row == "error"
        self.tokenize_job(tokens, strict, counter).run(
            self.files, self._tokenizer, self._config.num_workers or default_num_processes()
        )
        merged = merge_parts(building, self.files, self._origin["tokenizer_sha256"])
        if not merged.counts["num_sequences"]:
            raise DataError(self._nothing_usable(merged))
        if strict and merged.first_fault is not None:
            raise DataError(str(merged.first_fault))
        manifest = {**self._origin, **merged.counts}
        write_json(building / MANIFEST, manifest)
        # Opening it compares all counts with the parts.
        write_length_bins(Dataset.open(building), building, self._config.max_length)
        counter.show(last=True)
        return manifest

    def _nothing_usable(self, merged: Merged) -> str:
        files = ", ".join(self._config.files)
        if merged.first_reject is None:
            return f"{files}: no rows"
        counts: dict[str, int] = merged.counts["num_rejected"]
        rejected = f"{sum(counts.values())} rejected ({_by_count(counts)})"
        text = f"{files}: no usable row; {rejected}, the first: {merged.first_reject}"
        if merged.first_reject.reason == "template rewrites history" and self._config.rewritten_history != "reject":
            return text
        remedy = REMEDIES.get(merged.first_reject.reason)
        return f"{text}; {remedy}" if remedy else text
