"""The thread that puts checkpoints on disk while training goes on.

    train loop: snapshot (a copy on the CPU) -> room for one -> writer thread: files, digests, fsync, rename, retention

At most two snapshots exist: one is being written, and one waits or is being taken. A third `save` waits until there is room,
so a disk that cannot keep up slows training down (`wait_s` in `checkpoint_begin` says by how much) and does not fill memory.
Snapshots that were written lend their memory to later ones.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from dflash_core.errors import StageError
from dflash_core.model.draft import DFlashDraft
from dflash_core.pipeline import Stopped, Supervisor
from dflash_core.training.checkpoint import CheckpointStore, Score, Snapshot, take_snapshot
from dflash_core.training.retention import Retention, sweep

log = logging.getLogger(__name__)


class CheckpointWriter:
    """Writes snapshots in order, in one thread.

    Args:
        root: folder of the checkpoints.
        retention: which ones are kept.
        supervisor: owner of the thread. A checkpoint that cannot be written stops everything as a `StageError`.
        on_event: called as `on_event(kind, step, **fields)` with `checkpoint_begin` (`snapshot_s`, `wait_s`; from the train
            loop) and `checkpoint_end` (`write_s`, `num_bytes`, `folder`, `kept`; from the writer thread).
        last_written: the checkpoint that the run goes on from, if any.
    """

    def __init__(
        self,
        root: Path,
        retention: Retention,
        supervisor: Supervisor,
        on_event: Callable[..., None],
        last_written: Path | None = None,
    ) -> None:
        self.last_written = last_written
        self._store = CheckpointStore(root, retention)
        sweep(root)  # a run that resumes at its last checkpoint writes no other that would
        self._supervisor, self._on_event = supervisor, on_event
        self._changed = threading.Condition()
        self._waiting: Snapshot | None = None
        self._room: list[Snapshot] = []
        self._ended = self._done = False
        supervisor.start("checkpoint writer", write_snapshots, self)

    def save(
        self,
        next_step: int,
        draft: DFlashDraft,
        optimizer: torch.optim.Optimizer,
        counters: dict[str, Any],
        score: Score | None = None,
    ) -> None:
        """Copy the state and hand it to the thread. Called by the train loop only.

        Raises:
            Stopped: an earlier checkpoint could not be written, or the run is stopping for another reason.
        """
        with self._changed:
            self._supervisor.check()
            free = lambda: self._waiting is None  # noqa: E731
            waited = self._supervisor.wait_for(self._changed, free, float("inf"), "room for a checkpoint")
            room = self._room.pop() if self._room else None
        started = time.monotonic()
        snapshot = take_snapshot(next_step, draft, optimizer, counters, score, room)
        self._on_event("checkpoint_begin", next_step, snapshot_s=time.monotonic() - started, wait_s=waited)
        with self._changed:
            self._waiting = snapshot
            self._changed.notify_all()

    def finish(self) -> None:
        """Wait until everything saved is on disk."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()
            self._supervisor.wait_for(self._changed, lambda: self._done, float("inf"), "the last checkpoint")
        self._supervisor.check()

    def best(self) -> tuple[int, Score] | None:
        """See `CheckpointStore.best`; to be asked after `finish`."""
        return self._store.best()

    def _next(self) -> Snapshot | None:
        with self._changed:
            due = lambda: self._waiting is not None or self._ended  # noqa: E731
            try:
                self._supervisor.wait_for(self._changed, due, float("inf"), "a snapshot")
            except Stopped:
                if self._waiting is None:
                    raise
            snapshot, self._waiting = self._waiting, None
            self._done = snapshot is None
            self._changed.notify_all()
        return snapshot

    def _write(self, snapshot: Snapshot) -> None:
        stage = f"checkpoint of step {snapshot.next_step}"
        try:
            with self._supervisor.busy(stage):
                written = self._store.write(snapshot)
            self.last_written = written.folder
            self._on_event(
                "checkpoint_end",
                snapshot.next_step,
                write_s=written.write_s,
                num_bytes=written.num_bytes,
                folder=written.folder.name,
                kept=written.kept,
            )
        except OSError as error:
            raise StageError(stage, None, error) from error
        log.info("checkpoint %s", written.folder.name)
        with self._changed:
            self._room.append(snapshot)


def write_snapshots(writer: CheckpointWriter) -> None:
    """Body of the writer thread. Ends with the run; a snapshot that waits is still written when the run is stopping."""
    while (snapshot := writer._next()) is not None:
        writer._write(snapshot)
