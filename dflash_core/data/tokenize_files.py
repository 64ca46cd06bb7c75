"""From source files to parts, in as many processes as there are.

The parent reads raw chunks, which is cheap, and hands them out. Where a chunk ends depends on the file and on
`shard_sequences` alone, so a part that an earlier job finished is found by its name, and a file whose parts are all
there is not read again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dflash_core.data.files import FileChangedError, TakenFile, done_parts, read_marker, usable_part, write_marker
from dflash_core.data.parts import PartSummary
from dflash_core.data.pool import OrderedWork
from dflash_core.data.progress import ProgressCounter
from dflash_core.data.rows import Reject
from dflash_core.data.sources import RawChunk, read_chunks
from dflash_core.data.worker import EncodeSettings, PartJob
from dflash_core.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


@dataclass(frozen=True, slots=True)
class _Label:
    """A part of a file (`end_byte`: how far the file has been read), or its end (`num_parts` is not None)."""

    file: TakenFile
    end_byte: int = 0
    num_parts: int | None = None
    reused: bool = False


class TokenizeJob:
    """Makes the parts of source files that are not there yet."""

    def __init__(
        self,
        tokens_folder: Path,
        settings: EncodeSettings,
        shard_sequences: int,
        faults_are_errors: bool,
        progress: ProgressCounter,
    ) -> None:
        self._folder, self._settings, self._shard_sequences = tokens_folder, settings, shard_sequences
        self._faults_are_errors, self._progress = faults_are_errors, progress

    def run(self, files: Sequence[TakenFile], tokenizer: PreTrainedTokenizerFast, num_workers: int) -> None:
        """Afterwards every file has a marker.

        Raises:
            DataError: a row is faulty and that is an error (the first one in the order of files and rows); a file
                cannot be read, or changed; a part cannot be written; a process was killed.
        """
        with self._without_changed_files(), OrderedWork[_Label](num_workers, tokenizer, self._settings) as work:
            for file in files:
                self._add_file(file, work)
            while len(work):
                self._account(*work.take())

    def run_stripe(self, file: TakenFile, stripe: int, num_stripes: int, tokenizer: PreTrainedTokenizerFast) -> int:
        """Make every `num_stripes`-th part of a file, from number `stripe` on, in this process; a whole file gets its marker.

        Returns:
            The number of parts that are there then, made now or before.

        Raises:
            DataError: as `run`.
        """
        if num_stripes == 1:
            self.run([file], tokenizer, num_workers=1)
            return read_marker(self._folder, file) or 0
        count = 0
        with self._without_changed_files(), OrderedWork[_Label](1, tokenizer, self._settings) as work:
            for number, chunk in enumerate(read_chunks(file.file, self._shard_sequences, file.chunk_bytes)):
                file.check_unchanged()
                if number % num_stripes == stripe:
                    self._add_chunk(file, number, chunk, work)
                    count += 1
            while len(work):
                self._account(*work.take())
            file.check_unchanged(thoroughly=True)
        return count

    @contextmanager
    def _without_changed_files(self) -> Iterator[None]:
        """Delete the parts of a file that turns out to have changed."""
        try:
            yield
        except FileChangedError as error:
            for path in self._folder.glob(f"*-{error.key}*"):
                path.unlink(missing_ok=True)
            raise

    def _add_file(self, file: TakenFile, work: OrderedWork[_Label]) -> None:
        done = done_parts(self._folder, file)
        if done is not None:
            for summary in done:
                work.add(_Label(file), summary)
            work.add(_Label(file, num_parts=len(done), reused=True))
            return
        num_parts = 0
        for num_parts, chunk in enumerate(read_chunks(file.file, self._shard_sequences, file.chunk_bytes), start=1):
            # A chunk that was read from a changed file must not become a part under the key of the old content.
            file.check_unchanged()
            self._add_chunk(file, num_parts - 1, chunk, work)
        work.add(_Label(file, num_parts=num_parts))

    def _add_chunk(self, file: TakenFile, number: int, chunk: RawChunk, work: OrderedWork[_Label]) -> None:
        while work.full():
            self._account(*work.take())
        name, label = file.part(number), _Label(file, chunk.end_byte)
        known = usable_part(self._folder, name)
        if known is None:
            work.submit(label, PartJob(self._folder, name, file.url, file.file.stem, file.id_prefix), chunk)
        else:
            work.add(label, known)

    def _account(self, label: _Label, summary: PartSummary | None) -> None:
        """Take in the next result; results come in the order of files and rows."""
        if summary is not None:
            fault = summary.first_fault
            if fault is not None and self._faults_are_errors:
                raise DataError(str(Reject(label.file.url, *fault)))
            self._progress.add(summary.num_rows, summary.num_rejected, summary.num_tokens)
            self._progress.bytes_in_file = label.end_byte
        elif label.num_parts is not None:
            if not label.reused:
                label.file.check_unchanged(thoroughly=True)
                write_marker(self._folder, label.file, label.num_parts)
            self._progress.finish_file(label.file.num_bytes or label.end_byte, label.reused)
        self._progress.show()
