"""What a tokenizing process does: one chunk of raw rows in, one part on disk out.

`write_part` is also what a preparation with one process calls; a part does not depend on who made it.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from dflash_core.data.parts import PartSummary, PartWriter, RejectedRow
from dflash_core.data.rows import BadRow, Conversation, parse_row, rows_of
from dflash_core.data.sources import RawChunk
from dflash_core.data.store import NO_PAIR, OVER_LONG
from dflash_core.data.template import ChatEncoder, Encoded, Rendered
from dflash_core.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

# One call of the tokenizer gets at most so much: its results take some hundred bytes for each token.
CALL_ROWS = 256
CALL_CHARACTERS = 2**20
# A tokenizer takes about 160 bytes for each character of a text; a row of 50 MB would cost 8 GB.
MOST_CHARACTERS, MOST_CHARACTERS_PER_TOKEN = 2**21, 8


@dataclass(frozen=True, slots=True)
class EncodeSettings:
    """The part of the configuration that decides what a row becomes."""

    max_length: int
    over_long: Literal["truncate", "drop"]
    columns: dict[str, str]
    template_variables: dict[str, Any]
    rewritten_history: Literal["reject", "last_answer", "each_answer"]


@dataclass(frozen=True, slots=True)
class PartJob:
    """Which part is to be made: `name` in `tokens_folder`. Rows without an id are called `id_prefix`:ROW."""

    tokens_folder: Path
    name: str
    source_file: str
    default_source: str
    id_prefix: str


def make_encoder(tokenizer: PreTrainedTokenizerFast, settings: EncodeSettings) -> ChatEncoder:
    return ChatEncoder(tokenizer, template_variables=settings.template_variables, rewritten_history=settings.rewritten_history)


def write_part(encoder: ChatEncoder, settings: EncodeSettings, job: PartJob, chunk: RawChunk) -> PartSummary:
    """Parse, render and encode the rows of a chunk, and write the part.

    Raises:
        DataError: the part cannot be written.
    """
    work = _Part(encoder, settings, job)
    try:
        with PartWriter(job.tokens_folder, job.name) as writer:
            for group in work.groups(chunk):
                work.encode(group, writer)
            return writer.finish(work.num_rows, sorted(work.rejected, key=lambda item: item[0]))
    except OSError as error:
        raise DataError(f"{job.tokens_folder}: cannot be written to ({error.strerror or error})") from error


class _Part:
    """Rows of one chunk on their way into a part."""

    def __init__(self, encoder: ChatEncoder, settings: EncodeSettings, job: PartJob) -> None:
        self._encoder, self._settings, self._job = encoder, settings, job
        self.num_rows = 0
        self.rejected: list[RejectedRow] = []

    def groups(self, chunk: RawChunk) -> Iterator[list[tuple[Conversation, Rendered]]]:
        """Rendered sequences, cut into pieces for one call of the tokenizer."""
        group: list[tuple[Conversation, Rendered]] = []
        characters = 0
        for row, value in rows_of(chunk):
            self.num_rows += 1
            try:
                if isinstance(value, BadRow):
                    raise value
                conversation = self._parse(row, value)
                rendered = self._encoder.render(conversation)
                self._check_size(rendered)
            except BadRow as error:
                self.rejected.append((row, error.reason, error.detail))
                continue
            for item in rendered:
                group.append((conversation, item))
                characters += len(item.text)
                if len(group) >= CALL_ROWS or characters >= CALL_CHARACTERS:
                    yield group
                    group, characters = [], 0
        if group:
            yield group

    def _check_size(self, rendered: list[Rendered]) -> None:
        limit = max(MOST_CHARACTERS, MOST_CHARACTERS_PER_TOKEN * self._settings.max_length)
        longest = max(len(item.text) for item in rendered)
        if longest > limit:
            raise BadRow(OVER_LONG, f"{longest} characters, at most {limit}")

    def _parse(self, row: int, value: dict[str, Any]) -> Conversation:
        job = self._job
        return parse_row(
            value,
            source_file=job.source_file,
            row=row,
            default_id=f"{job.id_prefix}:{row}",
            default_source=job.default_source,
            columns=self._settings.columns,
        )

    def encode(self, group: list[tuple[Conversation, Rendered]], writer: PartWriter) -> None:
        """Tokenize in one call; write what can be trained on."""
        for (conversation, rendered), encoded in zip(group, self._encoder.encode([item for _, item in group]), strict=True):
            try:
                ids, mask, truncated = self._fit(encoded)
            except BadRow as error:
                self.rejected.append((conversation.row, error.reason, error.detail))
            else:
                name, suffix = conversation.sample_id, rendered.sample_id_suffix
                writer.add(conversation.row, name, suffix, conversation.source, ids, mask, truncated)

    def _fit(self, encoded: Encoded) -> tuple[NDArray[np.int32], NDArray[np.bool_], bool]:
        ids, mask, limit = encoded.input_ids, encoded.loss_mask, self._settings.max_length
        truncated = len(ids) > limit
        if truncated:
            if self._settings.over_long == "drop":
                raise BadRow(OVER_LONG, f"{len(ids)} tokens, at most {limit}")
            ids, mask = ids[:limit], mask[:limit]
        if not has_supervised_pair(mask):
            raise BadRow(NO_PAIR, f"within {len(ids)} tokens")
        return ids, mask, truncated


def has_supervised_pair(loss_mask: NDArray[np.bool_]) -> bool:
    """Whether a bool mask [S] has a position that can be an anchor: it and the next one are supervised (docs/field.md 1)."""
    return bool((loss_mask[:-1] & loss_mask[1:]).any())


_encoder: tuple[ChatEncoder, EncodeSettings] | None = None


def start_process(tokenizer: bytes, settings: EncodeSettings) -> None:
    """First thing in a tokenizing process."""
    global _encoder
    # There are as many processes as there is work for cores.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.environ["RAYON_NUM_THREADS"] = "1"
    import pickle

    # Pickled once, by our own parent.
    _encoder = make_encoder(pickle.loads(tokenizer), settings), settings  # noqa: S301
    # What is here now stays, and rows leave few cycles behind: looking through all of it often costs some percent.
    gc.freeze()
    gc.set_threshold(50_000)


def write_part_here(job: PartJob, chunk: RawChunk) -> PartSummary:
    """`write_part` in a process that `start_process` has set up."""
    if _encoder is None:
        raise RuntimeError("start_process has not run")
    return write_part(*_encoder, job, chunk)
