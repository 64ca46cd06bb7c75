"""Tokenizing in several processes: jobs go in, and their results come out in the same order.

Work that is less than one chunk for each process is done here, without starting any. At most two chunks per process
are in memory at once, whatever the size of the corpus. When the block ends, however it ends, no process is left.
"""

from __future__ import annotations

import pickle
from collections import deque
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from dflash_core.data.parts import PartSummary
from dflash_core.data.sources import RawChunk
from dflash_core.data.worker import EncodeSettings, PartJob, make_encoder, start_process, write_part, write_part_here
from dflash_core.errors import DataError
from dflash_core.processes import Processes

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from dflash_core.data.template import ChatEncoder

PRELOAD = ["dflash_core.data.worker", "transformers.tokenization_utils_tokenizers", "transformers.utils.chat_template_utils"]

Label = TypeVar("Label")


@dataclass(slots=True)
class _Entry(Generic[Label]):
    """Has work that is not begun, or a future, or what is known of it (which may be nothing)."""

    label: Label
    known: PartSummary | None = None
    work: tuple[PartJob, RawChunk] | None = None
    future: Future[PartSummary] | None = None


class OrderedWork(Generic[Label]):
    """A queue of jobs and of results that were there before, each with a label; as a context manager.

    Invariant: at most `2 * num_workers` jobs are queued (one without processes).
    """

    def __init__(self, num_workers: int, tokenizer: PreTrainedTokenizerFast, settings: EncodeSettings) -> None:
        self._num_workers, self._tokenizer, self._settings = num_workers, tokenizer, settings
        self._queue: deque[_Entry[Label]] = deque()
        self._num_jobs = 0
        self._processes: Processes | None = None
        self._encoder: ChatEncoder | None = None
        self._processes_work = False

    def __enter__(self) -> OrderedWork[Label]:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if self._processes is not None:
            self._processes.close(at_once=kind is not None)

    def __len__(self) -> int:
        return len(self._queue)

    def full(self) -> bool:
        """Whether a result must be taken out before the next chunk goes in."""
        return self._num_jobs >= (1 if self._num_workers == 1 else 2 * self._num_workers)

    def add(self, label: Label, known: PartSummary | None = None) -> None:
        """Queue something that needs no work."""
        self._queue.append(_Entry(label, known))

    def submit(self, label: Label, job: PartJob, chunk: RawChunk) -> None:
        """Queue a chunk; raises `DataError` if a process was killed."""
        self._queue.append(_Entry(label, work=(job, chunk)))
        self._num_jobs += 1
        waiting = [entry for entry in self._queue if entry.work is not None]
        if self._processes is None and self._num_workers > 1 and len(waiting) == self._num_workers:
            self._processes = Processes(
                self._num_workers, start_process, (pickle.dumps(self._tokenizer), self._settings), PRELOAD
            )
        if self._processes is not None:
            for entry in waiting:
                self._start(self._processes, entry)

    def take(self) -> tuple[Label, PartSummary | None]:
        """The next result, in the order in which jobs were queued; waits for it.

        Raises:
            DataError: a part cannot be written, or a process was killed.
        """
        entry = self._queue.popleft()
        self._num_jobs -= entry.work is not None or entry.future is not None
        if entry.work is not None:
            if self._encoder is None:
                self._encoder = make_encoder(self._tokenizer, self._settings)
            return entry.label, write_part(self._encoder, self._settings, *entry.work)
        if entry.future is None:
            return entry.label, entry.known
        try:
            result = entry.future.result()
        except BrokenProcessPool as error:
            raise self._broken() from error
        self._processes_work = True
        return entry.label, result

    def _start(self, processes: Processes, entry: _Entry[Label]) -> None:
        if entry.work is not None:
            try:
                entry.future = processes.submit(write_part_here, *entry.work)
            except BrokenProcessPool as error:
                raise self._broken() from error
            entry.work = None

    def _broken(self) -> DataError:
        if not self._processes_work:
            hint = 'a script must prepare under `if __name__ == "__main__":`, for each process imports it'
            return DataError(f"a tokenizing process ended before it had done anything ({hint})")
        return DataError(
            "a tokenizing process was killed (is memory short? data.num_workers sets how many there are);"
            " what is done is kept, start again to continue"
        )
