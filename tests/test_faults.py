"""Whatever goes wrong in a run: it ends soon, says where and why in one line, and a resume goes on as if nothing had been."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

from dflash_core import experiment as root
from dflash_core.training.run_folder import RunFolder
from tests.harness.bench import Bench, assert_same_run, assert_whole, rows
from tests.harness.client import Child, wait_until

pytest_plugins = ["tests.harness.fixtures"]

OFTEN = "train.checkpoint_every=2"
STALL_S = 3.0
END_S = 5.0  # from the detection of a fault to the end of the process

# Where a stage is broken (which call of it), and how the error must name it.
STAGES = {
    "feed": (14, r"stage 'feed'"),
    "loader": (12, r"stage 'loader \d', batch \d+"),
    "target": (12, r"stage 'target 0', batch 11"),
    "drafter": (12, r"stage 'drafter', batch 11"),
    "optimizer": (6, r"stage 'optimizer step 5'"),
    "checkpoint": (0, r"stage 'checkpoint[^']*'"),
    "monitor": (3, r"stage 'monitor'"),
}
CAUSES = {
    "raises": r": RuntimeError: boom",
    "dies": r": SystemExit: 7",
    "blocks": r": no progress for [\d.]+ s",
    "nothing": r": (Type|Value|Attribute)Error: .*None",
    "garbage": r": (Type|Value|Attribute)Error: ",
}
# What the error cannot know: who is at fault is then told by the one that was waiting, or by the next in the line.
TOLD_BY_OTHERS = {
    ("feed", "blocks"): r"stage '(feed|pipeline|ready buffer.*)'",
    ("monitor", "blocks"): r"stage '(monitor|pipeline)'",
}
BREAKS = "tests.harness.breaks"
BROKEN = re.compile(r"^broken at ([\d.]+)$", re.MULTILINE)


def told(stage: str, kind: str) -> str:
    """How the error line must read, as a pattern."""
    return "^error: " + TOLD_BY_OTHERS.get((stage, kind), STAGES[stage][1]) + CAUSES[kind]


def start_broken(bench: Bench, run_dir: Path, stage: str, kind: str) -> Child:
    """Returns once the stage is broken, so that what comes next does not slow it down."""
    if stage == "checkpoint":
        patch = (f"{BREAKS}:break_file_change", {"kind": kind, "containing": "step-000006"})
    else:
        patch = (f"{BREAKS}:break_stage", {"stage": stage, "kind": kind, "number": STAGES[stage][0]})
    [child] = bench.start(run_dir, patch)
    wait_until(lambda: child.poll() is not None or BROKEN.search(child.output()) is not None)
    return child


def assert_failed(run_dir: Path, child: Child, pattern: str, longest_s: float = END_S, code: int = 3) -> str:
    """Ended as a failure ends: soon, one line, the same in the manifest, and what was saved is whole."""
    assert child.wait() == code, child.output()[-4000:]
    broken = BROKEN.search(child.output())
    assert broken, "nothing was broken: this test has lost its sense"
    assert child.ended - float(broken[1]) < longest_s
    [line] = child.errors()
    assert re.search(pattern, line), line
    manifest = RunFolder(run_dir).read_manifest()
    assert manifest["state"] == "failed"
    assert line == "error: " + " ".join(manifest["error"].split())
    assert_whole(run_dir)
    return line


def assert_resumes(bench: Bench, run_dir: Path) -> None:
    [child] = bench.start(run_dir)
    assert child.wait() == 0, child.output()
    assert_same_run(bench.reference(OFTEN), run_dir)


SLOW = pytest.mark.slow


FIRST = {("target", "raises"), ("checkpoint", "raises")}
FAULTS = [
    (stage, kind)
    for stage in STAGES
    for kind in ("raises", "dies", "nothing", "garbage")
    # Nobody looks at what these two return.
    if not (stage in ("optimizer", "checkpoint") and kind in ("nothing", "garbage"))
]


@pytest.mark.parametrize(("stage", "kind"), [pytest.param(*fault, marks=() if fault in FIRST else SLOW) for fault in FAULTS])
def test_a_stage_that_fails(bench: Bench, stage: str, kind: str) -> None:
    run_dir = bench.make(f"{stage}-{kind}", OFTEN)
    assert_failed(run_dir, start_broken(bench, run_dir, stage, kind), told(stage, kind))
    assert_resumes(bench, run_dir)


@SLOW
def test_a_stage_that_blocks(bench: Bench) -> None:
    """The blocked code never returns, in the main thread or in another: the process ends all the same."""
    limit = f"prefetch.stall_timeout_s={STALL_S}"
    runs = {stage: bench.make(f"{stage}-blocks", OFTEN, limit) for stage in STAGES}
    children = {stage: start_broken(bench, run_dir, stage, "blocks") for stage, run_dir in runs.items()}
    for stage, run_dir in runs.items():
        assert_failed(run_dir, children[stage], told(stage, "blocks"), 2.0 * STALL_S + END_S)
    assert_resumes(bench, runs["checkpoint"])
    assert_resumes(bench, runs["drafter"])


OFTEN_FULL = ("the system refuses to write",)
DISKS = {
    "a file cannot be made": ("break_file_change", {"kind": "full disk", "containing": "step-000006", "events": ["open"]}),
    "a folder cannot be made": ("break_file_change", {"kind": "full disk", "containing": "step-000006", "events": ["os.mkdir"]}),
    "the rename fails": ("break_file_change", {"kind": "full disk", "containing": "step-000006", "events": ["os.rename"]}),
    "fsync fails": ("break_fsync", {"thread": "checkpoint", "number": 16}),
    "the system refuses to write": ("limit_file_size", {"num_bytes": 50_000}),
}


@pytest.mark.parametrize("what", [pytest.param(what, marks=() if what in OFTEN_FULL else SLOW) for what in DISKS])
def test_a_full_disk_while_a_checkpoint_is_written(bench: Bench, what: str) -> None:
    """Injected at each of the steps of a write, and as the system itself refuses it. Earlier checkpoints stay as they are."""
    run_dir = bench.make(what.replace(" ", "-"), OFTEN)
    function, arguments = DISKS[what]
    [child] = bench.start(run_dir, (f"{BREAKS}:{function}", arguments))
    assert_failed(run_dir, child, r"^error: stage 'checkpoint[^']*': .*(No space left on device|File too large)")
    saved = {path.name for path in (run_dir / "checkpoints").glob("step-*")}
    assert saved == (set() if function == "limit_file_size" else {"step-000002", "step-000004"})
    assert_resumes(bench, run_dir)


@SLOW
@pytest.mark.parametrize("stream", ["steps", "batches", "stats", "events"])
def test_a_full_disk_while_metrics_are_written(bench: Bench, stream: str) -> None:
    """`/dev/full` is the system's own full disk. It cannot be flushed either, which must not hide the first failure."""
    run_dir = bench.make(f"full-{stream}", OFTEN)
    link = run_dir / "metrics" / f"{stream}.jsonl"
    link.parent.mkdir()
    link.symlink_to("/dev/full")
    [child] = bench.start(run_dir)
    assert child.wait() == 3, child.output()
    stage = "monitor" if stream == "stats" else r"metrics of step \d+"
    [line] = child.errors()
    assert re.search(rf"^error: stage '{stage}': OSError: \[Errno 28\] No space left on device", line), line
    assert RunFolder(run_dir).read_manifest()["error"] == line.removeprefix("error: ")
    link.unlink()  # before anybody reads it: it is endless, too
    assert_whole(run_dir)
    assert_resumes(bench, run_dir)


@pytest.fixture
def own_bench(bench: Bench, tmp_path: Path) -> Bench:
    """A bench whose dataset may be damaged."""
    experiment = tmp_path / "micro.yaml"
    experiment.write_text(bench.experiment.read_text().replace("name: micro", "name: damaged"))
    return Bench(tmp_path, experiment, bench.server)


@SLOW
@pytest.mark.parametrize("action", ["truncate", "delete"])
def test_a_shard_that_changes_while_a_run_is_on(own_bench: Bench, action: str) -> None:
    """A deleted file stays mapped and the run goes on. One that is cut off ends the run before it is read there."""
    few = ("prefetch.queue_batches=1", "prefetch.num_workers=1", "prefetch.max_bytes=100000")
    run_dir = own_bench.make("shard", OFTEN, *few)
    [part] = (Path(RunFolder(run_dir).read_manifest()["dataset"]) / "tokens").glob("part-*.arrow")
    [child] = own_bench.start(run_dir, (f"{BREAKS}:at_step", {"step": 3, "action": action, "path": str(part)}))
    if action == "delete":
        assert child.wait() == 0, child.output()
        assert child.output().count(f"{part}: deleted while in use") == 1
    else:
        if child.wait() == -signal.SIGBUS:  # between the look at a file and its reading lies some time, though little
            assert "Fatal Python error: Bus error" in child.output()
        else:
            assert child.wait() == 3, child.output()
            told = rf"^error: stage 'loader 0', batch \d+: DataError: {part}: cut off while in use \(\d+ of \d+ bytes"
            [line] = child.errors()
            assert re.search(told, line), line
        assert root.run_state(run_dir) == "failed"
        assert_whole(run_dir)
    assert own_bench.train(run_dir) == [0]  # the command line prepares the data again where they are damaged
    assert_same_run(own_bench.reference(OFTEN, *few), run_dir)


def test_a_run_that_is_deleted_while_it_is_trained(bench: Bench) -> None:
    """It stops, and does not leave a folder that looks like a run."""
    run_dir = bench.make("deleted", OFTEN)
    out = bench.folder / "deleted.txt"
    deleted = (f"{BREAKS}:at_step", {"step": 4, "action": "delete folder", "path": str(run_dir)})
    [child] = bench.start(run_dir, deleted, out=out)
    assert child.wait() == 3, child.output()
    assert [line for line in child.errors() if "deleted" in line] == [
        f"error: {run_dir}: the run was deleted while it was trained"
    ]
    assert not (run_dir / "manifest.json").exists()


@pytest.mark.slow
def test_two_cells_skip_a_step_together_and_each_names_its_batches(bench: Bench) -> None:
    """One batch of one cell is poisoned: no cell applies the step, and the weights stay the same in both."""
    two = "topology.cells=2"
    run_dir = bench.make("poisoned", OFTEN, two)
    codes = [child.wait() for child in bench.start(run_dir, (f"{BREAKS}:poison_batch", {"seq_no": 7}))]
    assert codes == [0, 0]
    skips = {row["cell"]: row for row in rows(run_dir, "events") if row["kind"] == "skip"}
    assert set(skips) == {0, 1} and {row["step"] for row in skips.values()} == {3}
    assert sorted(n for row in skips.values() for n in row["batches"]) == [6, 7]
    assert sorted(n for row in skips.values() for n in row["not_finite"]) == [7]
    assert [row["step"] for row in rows(run_dir, "steps") if row["skipped"]] == [3]
    again = bench.make("poisoned-again", OFTEN, two)
    assert [child.wait() for child in bench.start(again, (f"{BREAKS}:poison_batch", {"seq_no": 7}))] == [0, 0]
    assert_same_run(again, run_dir)
