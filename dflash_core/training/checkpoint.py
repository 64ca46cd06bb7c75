"""Checkpoints: everything a run needs to go on, written whole or not at all.

A checkpoint `checkpoints/step-000100/` holds the draft in its serving format (`config.json`, `model.safetensors`), the
optimizer (`optimizer.pt`), and `state.json` with the counters and the digests of the other files. The train loop takes
a snapshot (a copy on the CPU) and goes on; one writer thread puts it on disk: temporary folder, fsync, rename.
`state.json` is written last and names the digests, so a damaged folder is recognised and the one before is used.

There is no random state to keep: plan and anchors are functions of the seed, and the draft has no dropout. The data
position is the number of the next step; nothing that was prefetched counts.
"""

from __future__ import annotations

import io
import logging
import queue
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dflash_core.errors import CheckpointError, DataError
from dflash_core.model.draft import DFlashDraft
from dflash_core.model.spec import DraftSpec
from dflash_core.model.weights import CONFIG_FILE, WEIGHTS_FILE, load_draft, save_draft
from dflash_core.pipeline import Supervisor
from dflash_core.provenance import digest_file, read_json, sync_to_disk, write_atomically, write_json

log = logging.getLogger(__name__)
STATE_FILE, OPTIMIZER_FILE = "state.json", "optimizer.pt"
SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Snapshot:
    """A copy of the trained state on the CPU. `counters` goes into `state.json` as it is."""

    next_step: int
    spec: DraftSpec
    tensors: dict[str, torch.Tensor]
    optimizer: dict[str, Any]
    counters: dict[str, Any]


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: _copied(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_copied(inner) for inner in value)
    return value


def take_snapshot(next_step: int, draft: DFlashDraft, optimizer: torch.optim.Optimizer, counters: dict[str, Any]) -> Snapshot:
    """Copy the state. On a GPU this waits for the step's kernels, so it is taken right after a step."""
    return Snapshot(next_step, draft.spec, _copied(draft.state_dict()), _copied(optimizer.state_dict()), dict(counters))


def write_checkpoint(root: Path, snapshot: Snapshot, keep_last: int) -> Path:
    """Write one checkpoint under `root` and drop the oldest beyond `keep_last`."""
    root.mkdir(parents=True, exist_ok=True)
    for leftover in root.glob(".tmp-*"):
        shutil.rmtree(leftover)
    folder = root / f"step-{snapshot.next_step:06d}"
    temporary = root / f".tmp-{folder.name}"
    temporary.mkdir()
    save_draft(temporary, snapshot.spec, snapshot.tensors)
    buffer = io.BytesIO()
    torch.save(snapshot.optimizer, buffer)
    write_atomically(temporary / OPTIMIZER_FILE, buffer.getvalue())
    digests = {name: digest_file(temporary / name) for name in (CONFIG_FILE, WEIGHTS_FILE, OPTIMIZER_FILE)}
    state = {"schema_version": SCHEMA_VERSION, "next_step": snapshot.next_step, "digests": digests, "counters": snapshot.counters}
    write_json(temporary / STATE_FILE, state)
    sync_to_disk(temporary)
    if folder.exists():  # a resumed run reaches the same step again with the same content
        shutil.rmtree(folder)
    temporary.rename(folder)
    sync_to_disk(root)
    # A folder of a later step is a damaged one that was passed over; it must not push out what was just written.
    for old in [path for path in _by_step(root) if _step(path) <= snapshot.next_step][:-keep_last]:
        shutil.rmtree(old)
    return folder


def _step(folder: Path) -> int:
    return int(folder.name.removeprefix("step-"))


def _by_step(root: Path) -> list[Path]:
    """Checkpoint folders in the order of their steps; as text, step-1000000 would come before step-999999."""
    return sorted((path for path in root.glob("step-*") if path.name[5:].isdigit() and path.is_dir()), key=_step)


def check_checkpoint(folder: Path) -> dict[str, Any]:
    """The content of `state.json`, after comparing all digests.

    Raises:
        CheckpointError: a file is missing, damaged, or of another schema.
    """
    try:
        state = read_json(folder / STATE_FILE)
        if state["schema_version"] != SCHEMA_VERSION:
            raise CheckpointError(f"{folder}: schema version {state['schema_version']}, expected {SCHEMA_VERSION}")
        if not {"next_step", "counters"} <= set(state):
            raise CheckpointError(f"{folder}: {STATE_FILE} lacks a key")
        for name in (CONFIG_FILE, WEIGHTS_FILE, OPTIMIZER_FILE):
            digest = state["digests"][name]
            if digest_file(folder / name) != digest:
                raise CheckpointError(f"{folder / name}: damaged (its digest differs from {STATE_FILE})")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{folder}: not a complete checkpoint ({type(error).__name__}: {error})") from None
    return dict(state)


def newest_checkpoint(root: Path) -> tuple[Path, dict[str, Any]] | None:
    """The newest undamaged checkpoint and its state; damaged ones are reported and passed over."""
    for folder in reversed(_by_step(root)):
        try:
            return folder, check_checkpoint(folder)
        except CheckpointError as error:
            log.warning("checkpoint passed over: %s", error)
    return None


def restore(folder: Path, draft: DFlashDraft, optimizer: torch.optim.Optimizer) -> None:
    """Load the weights and the optimizer of a checked checkpoint in place."""
    try:
        saved = load_draft(folder)
    except DataError as error:
        raise CheckpointError(str(error)) from None
    if saved.spec != draft.spec:
        raise CheckpointError(f"{folder}: the checkpoint's draft has another shape than the configured one")
    draft.load_state_dict(saved.state_dict())
    optimizer.load_state_dict(torch.load(folder / OPTIMIZER_FILE, map_location="cpu", weights_only=True))


class CheckpointWriter:
    """One thread that writes snapshots in order; at most one waits, a second makes `submit` wait."""

    def __init__(self, root: Path, keep_last: int, supervisor: Supervisor) -> None:
        self.root, self.keep_last = root, keep_last
        self._supervisor = supervisor
        self._pending: queue.Queue[Snapshot | None] = queue.Queue(maxsize=1)
        supervisor.start("checkpoint writer", write_snapshots, self)

    def submit(self, snapshot: Snapshot | None) -> None:
        while True:
            self._supervisor.check()
            try:
                return self._pending.put(snapshot, timeout=0.1)
            except queue.Full:
                continue

    def finish(self) -> None:
        """Wait until everything submitted is on disk."""
        self.submit(None)
        while self._pending.unfinished_tasks:
            self._supervisor.check()
            self._supervisor.sleep(0.01)


def write_snapshots(writer: CheckpointWriter) -> None:
    """Body of the writer thread. Ends with the run; a pending snapshot is still written when the run is stopping."""
    while True:
        try:
            snapshot = writer._pending.get(timeout=0.1)
        except queue.Empty:
            if writer._supervisor.stopping:
                return
            continue
        try:
            if snapshot is None:
                return
            with writer._supervisor.busy(f"checkpoint of step {snapshot.next_step}"):
                folder = write_checkpoint(writer.root, snapshot, writer.keep_last)
            log.info("checkpoint %s", folder.name)
        finally:
            writer._pending.task_done()
