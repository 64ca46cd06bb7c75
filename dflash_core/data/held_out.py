"""Held-out prompts for the evaluation, from the same kind of JSONL file as the training data."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dflash_core.data.sources import BadRow, Conversation, Message, Reject, parse_row, read_rows, reject
from dflash_core.data.template import ChatEncoder
from dflash_core.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as token ids, up to the point where the target answers."""

    id: str
    source: str
    input_ids: tuple[int, ...]


def read_prompts(path: Path, tokenizer: PreTrainedTokenizerFast, max_prompts: int) -> list[Prompt]:
    """Read at most `max_prompts` prompts, spread evenly over the file, always the same ones.

    A row's prompt is everything before its last message if that is an assistant turn, else the whole row. Every row is
    checked, picked or not.

    Raises:
        DataError: the file is missing or has no rows, or a row is bad; the text names file and row.
    """
    if not path.is_file():
        raise DataError(f"{path}: no such file")
    conversations: list[Conversation] = []
    seen: set[str] = set()
    for row, line in read_rows(path):
        try:
            conversation = parse_row(line, path, row, needs_answer=False)
            if conversation.sample_id in seen:
                raise BadRow("duplicate id", repr(conversation.sample_id))
            if not _prompt_of(conversation):
                raise BadRow("no prompt", "nothing stands before the answer")
        except BadRow as error:
            raise DataError(str(Reject(path.as_posix(), row, error.reason, error.detail))) from error
        seen.add(conversation.sample_id)
        conversations.append(conversation)
    if not conversations:
        raise DataError(f"{path}: no rows")
    encoder = ChatEncoder(tokenizer)
    count = min(max_prompts, len(conversations))
    prompts = []
    for number in range(count):
        conversation = conversations[number * len(conversations) // count]
        try:
            ids = encoder.encode_prompt(_prompt_of(conversation))
        except BadRow as error:
            raise DataError(str(reject(conversation, error))) from error
        prompts.append(Prompt(conversation.sample_id, conversation.source, tuple(ids.tolist())))
    return prompts


def _prompt_of(conversation: Conversation) -> tuple[Message, ...]:
    messages = conversation.messages
    return messages[:-1] if messages[-1].role == "assistant" else messages
