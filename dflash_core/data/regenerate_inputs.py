"""The rows that are to be answered, in the order of the files, read in small pieces while answers are made."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dflash_core.data.files import TakenFile
from dflash_core.data.regenerate_log import row_key
from dflash_core.data.regenerate_turns import Remade
from dflash_core.data.rows import BadRow, parse_row, rows_of
from dflash_core.data.sources import read_chunks

CHUNK_ROWS, CHUNK_BYTES = 64, 1 << 22


@dataclass(frozen=True, slots=True)
class InputRow:
    """One row: a conversation that is to be answered, or why it cannot be."""

    key: int
    file: str
    row: int
    asked: Remade | BadRow

    def trouble(self, error: BadRow) -> dict[str, object]:
        """What stands in the file of errors for this row."""
        name = None if isinstance(self.asked, BadRow) else self.asked.conversation.sample_id
        return {"file": self.file, "row": self.row, "id": name, "status": None, "reason": error.reason, "detail": error.detail}


def read_inputs(
    files: Sequence[TakenFile],
    columns: Mapping[str, str],
    done: NDArray[np.int64],
    is_ours: Callable[[int], bool] = lambda key: True,
    names: Sequence[str] | None = None,
) -> Iterator[InputRow]:
    """All rows but those whose keys are in `done` (ascending, int64 [N]), and those whose keys are not `is_ours`.

    Args:
        names: how the files are called in the rows; None: as they are here.

    Raises:
        DataError: a file cannot be read, or has changed since it was taken in.
    """
    reached = 0
    for number, file in enumerate(files):
        for chunk in read_chunks(file.file, CHUNK_ROWS, CHUNK_BYTES):
            file.check_unchanged()
            for row, value in rows_of(chunk):
                key = row_key(number, row)
                while reached < len(done) and done[reached] < key:
                    reached += 1
                if (reached < len(done) and done[reached] == key) or not is_ours(key):
                    continue
                name = file.url if names is None else names[number]
                yield InputRow(key, name, row, _asked(file, name, row, value, columns))


def _asked(
    file: TakenFile, name: str, row: int, value: dict[str, object] | BadRow, columns: Mapping[str, str]
) -> Remade | BadRow:
    if isinstance(value, BadRow):
        return value
    try:
        # How the old last answer ended says nothing about the new one.
        conversation = parse_row(
            {**value, columns.get("finish_reason", "finish_reason"): None},
            source_file=name,
            row=row,
            default_id=f"{file.id_prefix}:{row}",
            default_source=file.file.stem,
            columns=columns,
            needs_answer=False,
        )
        return Remade(conversation)
    except BadRow as error:
        return error
