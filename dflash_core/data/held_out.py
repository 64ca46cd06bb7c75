"""Held-out prompts for the evaluation, from the same kinds of files and rows as the training data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dflash_core.data.rows import BadRow, Conversation, Message, Reject, parse_row, reject, rows_of
from dflash_core.data.sources import expand_files, read_chunks
from dflash_core.data.template import ChatEncoder
from dflash_core.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

CHUNK_ROWS, CHUNK_BYTES = 256, 1 << 24


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as token ids, up to the point where the target answers."""

    id: str
    source: str
    input_ids: tuple[int, ...]


def read_prompts(
    path: str | Path,
    tokenizer: PreTrainedTokenizerFast,
    max_prompts: int,
    *,
    columns: Mapping[str, str] = {},
    template_variables: Mapping[str, bool | int | str] = {},
) -> list[Prompt]:
    """Read at most `max_prompts` prompts, spread evenly over the rows, always the same ones.

    A row's prompt is everything before its last message if that is an assistant turn, else the whole row; of a
    plain-text row it is the text. Every row is checked, picked or not.

    Args:
        path: a file, glob or fsspec URL (see `sources.expand_files`).
        columns: see `rows.parse_row`; `template_variables`: see `template.ChatEncoder`.

    Raises:
        DataError: a file is missing or has no rows, or a row is bad; the text names file and row.
    """
    pattern = path.as_posix() if isinstance(path, Path) else path
    conversations = list(_conversations(pattern, columns))
    if not conversations:
        raise DataError(f"{pattern}: no rows")
    encoder = ChatEncoder(tokenizer, template_variables=template_variables)
    count = min(max_prompts, len(conversations))
    return [_prompt(conversations[number * len(conversations) // count], encoder) for number in range(count)]


def _conversations(pattern: str, columns: Mapping[str, str]) -> Iterator[Conversation]:
    seen: set[str] = set()
    for file in expand_files([pattern]):
        for chunk in read_chunks(file, CHUNK_ROWS, CHUNK_BYTES):
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
                        columns=columns,
                        needs_answer=False,
                    )
                    if conversation.sample_id in seen:
                        raise BadRow("duplicate id", repr(conversation.sample_id))
                    if conversation.text is None and not _turns_before_answer(conversation):
                        raise BadRow("no prompt", "nothing stands before the answer")
                except BadRow as error:
                    raise DataError(str(Reject(file.url, row, error.reason, error.detail))) from error
                seen.add(conversation.sample_id)
                yield conversation


def _turns_before_answer(conversation: Conversation) -> tuple[Message, ...]:
    messages = conversation.messages
    return messages[:-1] if messages[-1].role == "assistant" else messages


def _prompt(conversation: Conversation, encoder: ChatEncoder) -> Prompt:
    try:
        if conversation.text is not None:
            ids = encoder.encode_text_prompt(conversation)
        else:
            ids = encoder.encode_prompt(_turns_before_answer(conversation), conversation.tools)
    except BadRow as error:
        raise DataError(str(reject(conversation, error))) from error
    return Prompt(conversation.sample_id, conversation.source, tuple(ids.tolist()))
