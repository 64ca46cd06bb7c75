"""Conversations in, dataset folder out: read, render, tokenize, shard, count (docs/design.md 4).

Rows stream through in chunks, in the order of files and rows; that order is the dataset's. The folder appears whole or
not at all. A folder that was made from the same files with the same settings and tokenizer is kept as it is.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from dflash_core.config import DataConfig
from dflash_core.data.dataset import Dataset
from dflash_core.data.replace_folder import folder_lock, replaced_folder
from dflash_core.data.rows import BadRow, Conversation, Reject, parse_row, reject, rows_of
from dflash_core.data.sources import content_identity, expand_files, read_chunks
from dflash_core.data.store import MANIFEST, SCHEMA_VERSION, Fingerprint, LengthBins, RejectWriter, ShardWriter
from dflash_core.data.template import ChatEncoder, Encoded, Rendered
from dflash_core.data.tokenizer import chat_template_digest, tokenizer_digest
from dflash_core.errors import DataError
from dflash_core.provenance import digest_json, write_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

logger = logging.getLogger(__name__)

CHUNK_ROWS = 256


def prepare_dataset(
    config: DataConfig,
    tokenizer: PreTrainedTokenizerFast,
    *,
    target: str,
    folder: Path,
    progress: Callable[[int], None] | None = None,
) -> dict[str, Any]:
    """Make the dataset `folder`, or keep the one that is there if it would come out the same.

    Args:
        target: name of the target, recorded in the manifest.
        progress: called now and then with the number of rows read so far.

    Returns:
        The manifest, with `reused` added.

    Raises:
        DataError: a file is missing, changes while it is read or has a bad row (with `on_bad_row: error`); no row is
            usable; the folder holds something that is not a dataset, or another process is preparing it.
    """
    paths = expand_files(config.files)
    digests = [{"path": path.url, "sha256": content_identity(path)} for path in paths]
    settings = {
        "schema_version": SCHEMA_VERSION,
        "target": target,
        **config.model_dump(mode="json", exclude={"files", "held_out"}),
    }
    origin: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "name": config.name,
        "target": target,
        "tokenizer_sha256": tokenizer_digest(tokenizer),
        "chat_template_sha256": chat_template_digest(tokenizer),
        "config_sha256": digest_json(settings),
        "max_length": config.max_length,
        "over_long": config.over_long,
    }
    manifest = _reusable(folder, origin, digests)  # without the lock: several runs may start on one finished dataset
    if manifest is not None:
        return {**manifest, "reused": True}
    with folder_lock(folder):
        manifest = _reusable(folder, origin, digests)
        if manifest is not None:
            return {**manifest, "reused": True}
        with replaced_folder(folder) as new:
            job = _Job(config, new, origin["tokenizer_sha256"])
            job.run(ChatEncoder(tokenizer), progress)
            if [content_identity(path) for path in paths] != [item["sha256"] for item in digests]:
                raise DataError(f"{', '.join(config.files)}: a file changed while it was read; start again")
            sources = [{**item, "rows": job.rows.get(item["path"], 0)} for item in digests]
            manifest = {**origin, "source_files": sources, **job.counts()}
            write_json(new / MANIFEST, manifest)
    logger.info("%s: %d sequences, %d tokens", folder, manifest["num_sequences"], manifest["num_tokens"])
    return {**manifest, "reused": False}


def _reusable(folder: Path, origin: dict[str, Any], digests: list[dict[str, str]]) -> dict[str, Any] | None:
    """The manifest of the dataset that is there, if it is whole and was made from the same things."""
    if not folder.exists():
        return None
    if not folder.is_dir() or (any(folder.iterdir()) and not (folder / MANIFEST).exists()):
        raise DataError(f"{folder}: exists and is not a dataset; move it away")
    try:
        manifest = Dataset.open(folder).manifest
    except DataError as error:
        logger.warning("%s; it is prepared anew", error)
        return None
    made_from = [{"path": item["path"], "sha256": item["sha256"]} for item in manifest["source_files"]]
    same = made_from == digests and all(manifest.get(key) == value for key, value in origin.items())
    return manifest if same else None


class _Job:
    """One pass over the rows into an empty folder."""

    def __init__(self, config: DataConfig, folder: Path, tokenizer_sha256: str) -> None:
        self._config, self._folder = config, folder
        self._shards = ShardWriter(folder, config.shard_sequences)
        self._rejects = RejectWriter(folder)
        self._bins = LengthBins(config.max_length)
        self._fingerprint = Fingerprint(tokenizer_sha256)
        self._totals = {"num_sequences": 0, "num_tokens": 0, "num_supervised": 0, "longest": 0, "num_parts": 0}
        self.rows: dict[str, int] = {}

    def run(self, encoder: ChatEncoder, progress: Callable[[int], None] | None) -> None:
        """Write shards, rejects and the fine histogram."""
        num_rows = 0
        try:
            for chunk in _chunks(_conversations(self._config), CHUNK_ROWS):
                self._take(chunk, encoder)
                num_rows += len(chunk)
                if progress is not None:
                    progress(num_rows)
        finally:
            self._rejects.close()
        if not self._totals["num_sequences"]:
            first = self._rejects.first
            files = ", ".join(self._config.files)
            raise DataError(f"{files}: no usable row; {num_rows} rejected, the first: {first}" if first else f"{files}: no rows")
        self._totals["num_parts"] = self._shards.close()
        self._bins.write(self._folder)

    def counts(self) -> dict[str, Any]:
        """The part of the manifest that this pass found out."""
        rejected = dict(sorted(self._rejects.counts.items()))
        return {**self._totals, "num_rejected": rejected, "fingerprint": self._fingerprint.hexdigest()}

    def _take(self, chunk: list[Conversation | Reject], encoder: ChatEncoder) -> None:
        """Render what can be rendered, tokenize it in one call, and write rows and rejects in the order of the rows."""
        results: list[tuple[Conversation, Rendered] | Reject] = []
        for item in chunk:
            self.rows[item.source_file] = self.rows.get(item.source_file, 0) + 1
            results.append(item if isinstance(item, Reject) else self._render(item, encoder))
        encoded = iter(encoder.encode([result[1] for result in results if not isinstance(result, Reject)]))
        for result in results:
            if isinstance(result, Reject):
                self._rejects.add(result)
            else:
                self._write(result[0], next(encoded))

    def _render(self, conversation: Conversation, encoder: ChatEncoder) -> tuple[Conversation, Rendered] | Reject:
        try:
            return conversation, encoder.render(conversation)[0]
        except BadRow as error:
            rejected = reject(conversation, error)
            if self._config.on_bad_row == "error":
                raise DataError(str(rejected)) from error
            return rejected

    def _write(self, conversation: Conversation, encoded: Encoded) -> None:
        ids, mask, limit = encoded.input_ids, encoded.loss_mask, self._config.max_length
        if len(ids) > limit:
            if self._config.over_long == "drop":
                self._rejects.add(reject(conversation, BadRow("over-long", f"{len(ids)} tokens, at most {limit}")))
                return
            ids, mask = ids[:limit], mask[:limit]
        if not has_supervised_pair(mask):
            self._rejects.add(reject(conversation, BadRow("no supervised pair", f"within {len(ids)} tokens")))
            return
        num_supervised = int(mask.sum())
        self._shards.add(conversation.sample_id, conversation.source, ids, mask)
        self._bins.add(conversation.source, len(ids), num_supervised)
        self._fingerprint.add(ids, mask)
        self._totals["num_sequences"] += 1
        self._totals["num_tokens"] += len(ids)
        self._totals["num_supervised"] += num_supervised
        self._totals["longest"] = max(self._totals["longest"], len(ids))


def has_supervised_pair(loss_mask: NDArray[np.bool_]) -> bool:
    """Whether a bool mask [S] has a position that can be an anchor: it and the next one are supervised (docs/field.md 1)."""
    return bool((loss_mask[:-1] & loss_mask[1:]).any())


def _chunks(items: Iterable[Conversation | Reject], size: int) -> Iterator[list[Conversation | Reject]]:
    iterator = iter(items)
    while chunk := list(islice(iterator, size)):
        yield chunk


def _conversations(config: DataConfig) -> Iterator[Conversation | Reject]:
    seen: set[str] = set()
    for file in expand_files(config.files):
        for chunk in read_chunks(file, CHUNK_ROWS, 1 << 24):
            for row, value in rows_of(chunk):
                try:
                    if isinstance(value, BadRow):
                        raise value
                    conversation = parse_row(
                        value,
                        source_file=file.url,
                        row=row,
                        default_id=f"{file.url}:{row}",
                        default_source=file.stem,
                        columns={str(field): column for field, column in config.columns.items()},
                    )
                    if conversation.sample_id in seen:
                        raise BadRow("duplicate id", repr(conversation.sample_id))
                except BadRow as error:
                    rejected = Reject(file.url, row, error.reason, error.detail)
                    if config.on_bad_row == "error":
                        raise DataError(str(rejected)) from error
                    yield rejected
                else:
                    seen.add(conversation.sample_id)
                    yield conversation
