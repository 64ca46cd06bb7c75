"""Checkpoints: everything a run needs to go on, written whole or not at all.

A checkpoint `checkpoints/step-000100/` holds the draft in its serving format (`config.json`, `model.safetensors`), the
optimizer (`optimizer.pt`), and `state.json` with the counters, the score, the digests of the other files and one of itself.
All is written into a hidden folder, digested on the way, brought to the disk, and gets its name by a rename at the end. So
a damaged folder is recognised, and the one before is used.

There is no random state to keep. The order of the batches, the anchors and the initial weights are each drawn from a
generator of their own, made from seed and epoch; the draft has no dropout; the learning rate is a function of the step.
Nothing reads the global generators of `random`, numpy or torch (`tests/test_checkpoint_run.py` scrambles them). The data
position is the number of the next step; nothing that was prefetched counts.

The score of a checkpoint says how good its draft is, the higher the better; scores of one kind can be compared. It is the
acceptance length measured at that step (`dflash_core.training.validation`), and the kind then names prompts and settings.
Where nothing was measured it is the mean `expected_acceptance_length` of the steps since the checkpoint before, without those
that were skipped: a rate over the last interval, as noisy as that.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch.serialization import get_crc32_options, set_crc32_options

from dflash_core.errors import CheckpointError, DataError, SchemaError
from dflash_core.model.draft import DFlashDraft
from dflash_core.model.spec import DraftSpec
from dflash_core.model.weight_files import WEIGHTS_FILE
from dflash_core.model.weights import CONFIG_FILE, draft_config, load_draft, weight_pieces
from dflash_core.provenance import digest_file, digest_json, read_json, sync_to_disk, write_atomically
from dflash_core.training.hashed_file import HashedFile
from dflash_core.training.retention import WRITING, Retention, by_step, checkpoint_folder, hide, remove, step_of, sweep

log = logging.getLogger(__name__)
STATE_FILE, OPTIMIZER_FILE = "state.json", "optimizer.pt"
SCHEMA_VERSION = 2
EXPECTED, MEASURED = "expected_acceptance_length", "acceptance_length"  # how the kinds of scores begin


@dataclass(frozen=True)
class Score:
    """How good a draft is, and what was looked at; scores of different kinds say nothing about each other."""

    value: float
    kind: str = EXPECTED

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Score | None:
        """The score in a checkpoint's `state.json`; None where there is none, or where it is no finite number."""
        value = state["score"]
        if not isinstance(value, int | float) or not math.isfinite(value):
            return None
        return cls(float(value), str(state.get("score_kind") or EXPECTED))

    @property
    def is_measured(self) -> bool:
        return self.kind.startswith(MEASURED)


@dataclass(frozen=True)
class Snapshot:
    """A copy of the trained state on the CPU. `counters` goes into `state.json` as it is."""

    next_step: int
    spec: DraftSpec
    tensors: dict[str, torch.Tensor]
    optimizer: dict[str, Any]
    counters: dict[str, Any]
    score: Score | None = None


def _copied(value: Any, room: Any) -> Any:
    """`value` with all tensors copied to the CPU; where `room` holds a tensor of the same kind, into that one."""
    if isinstance(value, torch.Tensor):
        if isinstance(room, torch.Tensor) and room.shape == value.shape and room.dtype == value.dtype:
            return room.copy_(value.detach())
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        known = room if isinstance(room, dict) else {}
        return {key: _copied(inner, known.get(key)) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_copied(inner, None) for inner in value)
    return value


def take_snapshot(
    next_step: int,
    draft: DFlashDraft,
    optimizer: torch.optim.Optimizer,
    counters: dict[str, Any],
    score: Score | None = None,
    room: Snapshot | None = None,
) -> Snapshot:
    """Copy the state. On a GPU this waits for the step's kernels, so it is taken right after a step.

    `room` is an earlier snapshot that nobody needs any more; its memory is used again. Memory that is new costs several times
    as much as the copy, because the system hands it out page by page.
    """
    tensors = _copied(draft.state_dict(), room and room.tensors)
    state = _copied(optimizer.state_dict(), room and room.optimizer)
    return Snapshot(next_step, draft.spec, tensors, state, dict(counters), score)


@dataclass(frozen=True)
class Written:
    """A checkpoint on disk. `kept` are the steps whose checkpoints there are now."""

    folder: Path
    num_bytes: int
    write_s: float
    kept: list[int]


class CheckpointStore:
    """The checkpoints of one run: writes them, drops what is not kept, and remembers which ones it has found whole."""

    def __init__(self, root: Path, retention: Retention) -> None:
        self.root, self.retention = root, retention
        self._good: dict[int, bool] = {}
        self._scores: dict[int, Score | None] = {}

    def write(self, snapshot: Snapshot) -> Written:
        """Write one checkpoint and drop the others that are not kept.

        Raises:
            OSError: the disk is full, and the like. The earlier checkpoints are as they were, unless the new one is whole.
        """
        started = time.monotonic()
        step, folder = snapshot.next_step, checkpoint_folder(self.root, snapshot.next_step)
        self.root.mkdir(exist_ok=True)  # never the run folder: a run that was deleted stays deleted
        sweep(self.root)
        temporary = folder.with_name(f"{WRITING}{folder.name}")
        replaced = None
        try:
            num_bytes = _write_files(temporary, snapshot)
            if folder.exists() or folder.is_symlink():  # a damaged one that was passed over
                replaced = hide(folder)
            temporary.rename(folder)
        except BaseException:
            if temporary.exists():
                _try_to_remove(temporary)
            raise
        sync_to_disk(self.root)
        if replaced is not None:
            remove(replaced)
        self._good[step], self._scores[step] = True, snapshot.score
        return Written(folder, num_bytes, time.monotonic() - started, self._prune(step))

    def _prune(self, newest: int) -> list[int]:
        """Drop what is not kept; returns the steps that are. What is of a later step than `newest` is not looked at.

        Such a folder is a damaged one that was passed over; it must not push out what was just written.
        """
        steps = [step for folder in by_step(self.root) if (step := step_of(folder)) <= newest]
        scores = {step: self._score(step) for step in steps} if self.retention.keep_best else {}
        comparable = comparable_scores(scores)
        kept, surplus = self.retention.surplus(steps, self._is_good, comparable.get)
        hidden = [hide(checkpoint_folder(self.root, step)) for step in surplus]
        if hidden:
            sync_to_disk(self.root)
        for folder in hidden:
            remove(folder)
        return kept

    def best(self) -> tuple[int, Score] | None:
        """The step of the whole checkpoint with the highest measured score, and the score; None where none was measured."""
        scores = {step: self._score(step) for step in map(step_of, by_step(self.root))}
        for step in best_first(scores):
            score = scores[step]
            if score is not None and score.is_measured and self._is_good(step):
                return step, score
        return None

    def _is_good(self, step: int) -> bool:
        """Whether a checkpoint is whole. Those of an earlier process are read for it, once."""
        if step not in self._good:
            try:
                check_checkpoint(checkpoint_folder(self.root, step))
                self._good[step] = True
            except CheckpointError as error:
                log.warning("checkpoint not counted: %s", error)
                self._good[step] = False
        return self._good[step]

    def _score(self, step: int) -> Score | None:
        if step not in self._scores:
            try:
                self._scores[step] = Score.from_state(read_state(checkpoint_folder(self.root, step)))
            except CheckpointError:
                self._scores[step] = None
        return self._scores[step]


def _try_to_remove(folder: Path) -> None:
    try:
        remove(folder)
    except OSError as error:  # what went wrong before is what the user must see; the next write sweeps this up
        log.warning("%s: could not be removed: %s", folder, error)


def _write_files(folder: Path, snapshot: Snapshot) -> int:
    """Write the files of a checkpoint and bring them to the disk; returns the number of bytes."""
    folder.mkdir()
    written: dict[str, HashedFile] = {}

    def put(name: str, pieces: Iterable[bytes | memoryview]) -> None:
        with HashedFile(folder / name) as file:
            for piece in pieces:
                file.write(piece)
        written[name] = file

    put(CONFIG_FILE, [_text(draft_config(snapshot.spec, snapshot.tensors))])
    put(WEIGHTS_FILE, weight_pieces(snapshot.tensors))
    with HashedFile(folder / OPTIMIZER_FILE) as file:
        _save_optimizer(snapshot.optimizer, file)
    written[OPTIMIZER_FILE] = file
    state: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "next_step": snapshot.next_step,
        **_score_fields(snapshot.score),
        "counters": snapshot.counters,
        "digests": {name: file.digest for name, file in written.items()},
    }
    put(STATE_FILE, [_state_text(state)])
    sync_to_disk(folder)
    return sum(file.num_bytes for file in written.values())


def _score_fields(score: Score | None) -> dict[str, Any]:
    return {"score": score and score.value, "score_kind": score and score.kind}


def _state_text(state: dict[str, Any]) -> bytes:
    return _text({**state, "digest": digest_json(state)})


def _text(value: Any) -> bytes:
    return (json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode()


def _save_optimizer(optimizer: dict[str, Any], file: HashedFile) -> None:
    checksums = get_crc32_options()
    # They take longer than SHA-256 does where the processor has instructions for that, and say less.
    set_crc32_options(False)
    try:
        torch.save(optimizer, cast(IO[bytes], file))
    except RuntimeError:
        if file.failure is None:
            raise
        raise file.failure from None
    finally:
        set_crc32_options(checksums)


def read_state(folder: Path) -> dict[str, Any]:
    """The content of `state.json`, which is whole; the other files are not looked at.

    Raises:
        CheckpointError: it is missing, damaged, of another schema, or of another step than the folder's.
    """
    try:
        state = read_json(folder / STATE_FILE)
        version = state["schema_version"]
        if version != SCHEMA_VERSION and isinstance(version, int) and isinstance(state["next_step"], int):
            raise SchemaError(
                f"{folder}: schema version {version}, expected {SCHEMA_VERSION}; go on with the version of this program that"
                " wrote it, or begin a new run"
            )
        if digest_json({key: value for key, value in state.items() if key != "digest"}) != state["digest"]:
            raise CheckpointError(f"{folder / STATE_FILE}: damaged (its content has another digest than it says)")
        if checkpoint_folder(folder.parent, state["next_step"]) != folder:
            raise CheckpointError(f"{folder / STATE_FILE}: belongs to step {state['next_step']}")
        if not {"score", "counters", "digests"} <= set(state):
            raise CheckpointError(f"{folder}: {STATE_FILE} lacks a key")
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{folder}: not a complete checkpoint ({type(error).__name__}: {error})") from None
    return dict(state)


def set_score(folder: Path, score: Score) -> None:
    """Give a whole checkpoint a score afterwards; `state.json` is replaced at once and as a whole."""
    state = {key: value for key, value in read_state(folder).items() if key != "digest"}
    write_atomically(folder / STATE_FILE, _state_text({**state, **_score_fields(score)}))


def check_checkpoint(folder: Path) -> dict[str, Any]:
    """The content of `state.json`, after comparing all digests: reads every file once.

    Raises:
        CheckpointError: a file is missing, damaged, of another schema, or of another step than the folder's.
    """
    state = read_state(folder)
    try:
        for name in (CONFIG_FILE, WEIGHTS_FILE, OPTIMIZER_FILE):
            if digest_file(folder / name) != state["digests"][name]:
                raise CheckpointError(f"{folder / name}: damaged (its digest differs from {STATE_FILE})")
    except (OSError, LookupError, TypeError) as error:
        raise CheckpointError(f"{folder}: not a complete checkpoint ({type(error).__name__}: {error})") from None
    return state


def newest_checkpoint(root: Path) -> tuple[Path, dict[str, Any]] | None:
    """The newest undamaged checkpoint and its state; damaged ones are reported and passed over.

    Raises:
        SchemaError: a checkpoint of another version of this program; passing over it would begin the run anew.
    """
    for folder in reversed(by_step(root)):
        try:
            return folder, check_checkpoint(folder)
        except SchemaError:
            raise
        except CheckpointError as error:
            log.warning("checkpoint passed over: %s", error)
    return None


def comparable_scores(scores: dict[int, Score | None]) -> dict[int, float]:
    """The values, by step, of those scores that can be compared with the newest measured one.

    Without a measured one they are those of the newest kind: figures of the training itself.
    """
    found = {step: score for step, score in sorted(scores.items()) if score is not None}
    kinds = [score.kind for score in found.values() if score.is_measured] or [score.kind for score in found.values()]
    return {step: score.value for step, score in found.items() if score.kind == kinds[-1]}


def best_first(scores: dict[int, Score | None]) -> list[int]:
    """The steps of those scores that can be compared, the best one first and the older of two equals before the newer."""
    values = comparable_scores(scores)
    return sorted(values, key=lambda step: (-values[step], step))


def best_checkpoint(root: Path) -> tuple[Path, dict[str, Any]] | None:
    """The undamaged checkpoint with the highest score and its state; the older of two equals. None where none has a score.

    Measured scores count before estimates (`comparable_scores`); the state's `score_kind` says which it is.

    Raises:
        SchemaError: a checkpoint of another version of this program.
    """
    scores: dict[int, Score | None] = {}
    for folder in by_step(root):
        try:
            scores[step_of(folder)] = Score.from_state(read_state(folder))
        except SchemaError:
            raise
        except CheckpointError as error:
            log.warning("checkpoint passed over: %s", error)
    for step in best_first(scores):
        try:
            return checkpoint_folder(root, step), check_checkpoint(checkpoint_folder(root, step))
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
