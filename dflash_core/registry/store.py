"""The registry of one target: `registry/<target>/` below the workspace.

    registry.parquet   every decision (`lineage`); the last row says which drafter is in use
    drafters/<id>/     the promoted drafters, copied and never changed again
    current            link to the one in use, for serving engines

A change is three steps under one lock: the drafter's copy takes its name, the table is replaced, the link is switched. The
table is the truth, so replacing it is the moment at which a decision counts: a process that is killed before leaves the old
state (and perhaps a copy, which the same decision finds again), and one that is killed after it leaves an old link, which
whoever opens the registry next sets right.
"""

from __future__ import annotations

import fcntl
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from dflash_core.errors import DataError, UserError
from dflash_core.provenance import git_state, sync_to_disk
from dflash_core.registry.files import Export, damage, keep_copy, remove_leftovers
from dflash_core.registry.lineage import Entry, read_entries, write_entries
from dflash_core.registry.paired import Estimate
from dflash_core.registry.promotion import Measured, Rule, Verdict

TABLE, DRAFTERS, CURRENT, LOCK = "registry.parquet", "drafters", "current", ".lock"
NEW_LINK = ".current.new"
LOCK_S, POLL_S = 600.0, 0.05  # a drafter of some GB is copied under the lock
DIGEST_DIGITS = 8
# Of two processes that leave the current drafter for the same reason, the second one adds nothing.
SAME_DECISION = ("drafter", "decision", "reason", "compared_with", "sources_sha256", "current")


@dataclass(frozen=True)
class Candidate:
    """A drafter that is decided about, and where it comes from; for the fields see `lineage.Entry`."""

    export: Export
    parent: str | None
    target: str
    target_weights: str
    experiment: str
    run_id: str
    checkpoint: str
    dataset: str
    dataset_fingerprint: str
    sources: tuple[str, ...]
    sources_sha256: str
    settings_sha256: str
    prompts_sha256: str


def registry_folder(workspace: Path, target: str, target_weights: str) -> Path:
    """Where the registry of a target is. Other weights under the same name are another target: no drafter of one fits the other.

    Args:
        target: path or name of the target; its last part names the folder.
        target_weights: digest of its weights.
    """
    last = re.split(r"[/\\:]", target.rstrip("/\\"))[-1]
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", last).strip(".-") or "target"
    return workspace / "registry" / f"{name}-{target_weights[:DIGEST_DIGITS]}"


def find_registries(workspace: Path, target: str | None = None) -> list[Registry]:
    """The registries of a workspace, by name; with `target` those whose name begins so."""
    folders = sorted(path.parent for path in (workspace / "registry").glob(f"*/{TABLE}"))
    return [Registry(folder) for folder in folders if target is None or folder.name.startswith(target)]


class Registry:
    """The registry in a folder, which need not be there yet. Nothing is written before the first decision."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def current_link(self) -> Path:
        """What a serving engine loads."""
        return self.folder / CURRENT

    def entries(self) -> list[Entry]:
        """All decisions, the oldest first. A link that a killed process has left behind is set right.

        Raises:
            DataError: the table is damaged, or missing where drafters are.
        """
        entries = self._read()
        if entries and not self._link_is_right(entries[-1].current):
            with self._locked() as entries:
                pass
        return entries

    def current(self) -> str | None:
        """The id of the drafter in use; None: there is none."""
        entries = self.entries()
        return entries[-1].current if entries else None

    def drafter_folder(self, drafter: str) -> Path:
        return self.folder / DRAFTERS / drafter

    def promotion_of(self, drafter: str) -> Entry:
        """The row with which a drafter was last promoted; raises DataError where it never was."""
        for entry in reversed(self._read()):
            if entry.drafter == drafter and entry.decision == "promoted":
                return entry
        raise DataError(f"{self.folder}: drafter {drafter} was never promoted")

    def find(self, beginning: str) -> str:
        """The id that begins so; raises UserError for none or several."""
        ids = sorted({entry.drafter for entry in self._read()})
        found = [name for name in ids if name.startswith(beginning)]
        if beginning in found:
            return beginning
        if len(found) != 1:
            what = f"several drafters begin so: {', '.join(found)}" if found else "no such drafter (dflash registry list)"
            raise UserError(f"{self.folder.name}: {beginning}: {what}")
        return found[0]

    def check(self, drafter: str) -> str | None:
        """What is wrong with the copy of a promoted drafter, in one line; None: it is whole."""
        return damage(self.drafter_folder(drafter), self.promotion_of(drafter).files)

    def add(
        self, candidate: Candidate, new: Measured, old: Measured | None, verdict: Verdict, rule: Rule, approval: str | None = None
    ) -> Entry:
        """Record a decision, and with a promotion put the drafter into use.

        It counts for the drafter it was compared with: if another one is in use by now, the candidate is not promoted.

        Raises:
            DataError: the exported files have changed since they were read, or the registry is damaged or cannot be written.
        """
        with self._locked() as entries:
            previous = entries[-1].current if entries else None
            compared_with = None if old is None else old.name
            if previous == candidate.export.drafter and verdict.promote:  # another process has promoted the same drafter
                return self.promotion_of(previous)
            if previous != compared_with:
                was, now = compared_with or "none", previous or "none"
                text = f"the current drafter changed from {was} to {now} while this one was made; they were not compared"
                verdict = Verdict("kept", text, verdict.compared)
            current = candidate.export.drafter if verdict.promote else previous
            entry = _entry(candidate, new, verdict, rule, previous, current, compared_with, approval)
            if verdict.promote:
                files = keep_copy(candidate.export, self.drafter_folder(candidate.export.drafter))
                entry = replace(entry, files=files)
            else:
                for earlier in entries:
                    if all(getattr(earlier, key) == getattr(entry, key) for key in SAME_DECISION):
                        return earlier
            self._commit([*entries, entry])
            return entry

    def roll_back(self, drafter: str | None = None, reason: str = "") -> Entry:
        """Put an earlier drafter into use again: the one before the current one's promotion, or the one named.

        Raises:
            UserError: there is none, or the one named is in use already or was never promoted.
            DataError: its files are damaged.
        """
        with self._locked() as entries:
            current = entries[-1].current if entries else None
            if current is None:
                raise UserError(f"{self.folder.name}: no drafter is in use, so there is nothing to roll back")
            taken_back = self.promotion_of(current)
            chosen = taken_back.previous if drafter is None else self.find(drafter)
            if chosen is None:
                raise UserError(f"{self.folder.name}: {current} is the first drafter; there is none before it")
            if chosen == current:
                raise UserError(f"{self.folder.name}: {chosen} is in use already")
            if not any(entry.drafter == chosen and entry.decision == "promoted" for entry in entries):
                raise UserError(f"{self.folder.name}: {chosen} was never promoted, so its files are not kept here")
            if (problem := self.check(chosen)) is not None:
                raise DataError(problem)
            text = f"taken back by hand for {chosen}" + (f": {reason}" if reason else "")
            entry = replace(
                taken_back,
                time=datetime.now(UTC),
                decision="rolled_back",
                reason=text,
                previous=current,
                current=chosen,
                approval=None,
                git_commit=_git_commit(),
            )
            self._commit([*entries, entry])
            return entry

    def _read(self) -> list[Entry]:
        entries = read_entries(self.folder / TABLE)
        if not entries and self.current_link.is_symlink():
            raise DataError(f"{self.folder / TABLE}: is missing, though {CURRENT} names a drafter; restore it from a backup")
        return entries

    def _commit(self, entries: list[Entry]) -> None:
        write_entries(self.folder / TABLE, entries)
        self._set_link(entries[-1].current)

    def _link_is_right(self, current: str | None) -> bool:
        link = self.current_link
        wanted = None if current is None else str(Path(DRAFTERS) / current)
        return (str(link.readlink()) if link.is_symlink() else None) == wanted

    def _set_link(self, current: str | None) -> None:
        """Let `current` name a drafter (no row of ours leaves a registry that had one without)."""
        if current is None or self._link_is_right(current):
            return
        if self.current_link.exists() and not self.current_link.is_symlink():
            raise DataError(f"{self.current_link}: is no link to a drafter; move it away")
        new = self.folder / NEW_LINK
        new.unlink(missing_ok=True)
        new.symlink_to(Path(DRAFTERS) / current)
        new.replace(self.current_link)
        sync_to_disk(self.folder)

    @contextmanager
    def _locked(self) -> Iterator[list[Entry]]:
        """Hold the registry; yields its rows, with everything that a killed process has left set right."""
        try:
            (self.folder / DRAFTERS).mkdir(parents=True, exist_ok=True)
            with (self.folder / LOCK).open("ab") as file:
                deadline = time.monotonic() + LOCK_S
                while not _try_lock(file.fileno()):
                    if time.monotonic() > deadline:
                        raise UserError(f"{self.folder}: another process has held the registry for {LOCK_S:.0f} s")
                    time.sleep(POLL_S)
                remove_leftovers(self.folder / DRAFTERS)
                for path in self.folder.glob(f".{TABLE}.*.tmp"):
                    path.unlink(missing_ok=True)
                entries = self._read()
                self._set_link(entries[-1].current if entries else None)
                yield entries
        except OSError as error:
            raise DataError(f"{error.filename or self.folder}: {error.strerror or error}") from error


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _git_commit() -> str:
    return str(git_state(Path(__file__).parent)["commit"])


def _entry(
    candidate: Candidate,
    new: Measured,
    verdict: Verdict,
    rule: Rule,
    previous: str | None,
    current: str | None,
    compared_with: str | None,
    approval: str | None,
) -> Entry:
    found = verdict.compared
    old = None if found is None or compared_with is None else found.old
    given = {key: value for key, value in vars(candidate).items() if key != "export"}
    return Entry(
        **given,
        drafter=candidate.export.drafter,
        files=candidate.export.files,
        time=datetime.now(UTC),
        decision=verdict.decision,
        reason=verdict.reason,
        previous=previous,
        current=current,
        compared_with=compared_with,
        block_size=new.block_size,
        num_prompts=len(new.prompts),
        lossless=new.lossless,
        **_estimate("acceptance_length", "acceptance", None if found is None else found.new),
        **_estimate("old_acceptance_length", "old_acceptance", old),
        **_estimate("difference", "difference", None if found is None else found.difference),
        confidence=rule.confidence,
        min_gain=rule.min_gain,
        approval=approval,
        git_commit=_git_commit(),
    )


def _estimate(name: str, ends: str, found: Estimate | None) -> dict[str, Any]:
    values = (None, None, None) if found is None else (found.value, found.low, found.high)
    return dict(zip((name, f"{ends}_low", f"{ends}_high"), values, strict=True))
