"""Whatever goes wrong in a run: it ends soon, says where and why in one line, and a resume goes on as if nothing had been."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dflash_core import experiment as root
from dflash_core.training.run_folder import RunFolder
from tests.harness.bench import Bench, assert_same_run, assert_whole
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
    "blocks": r": no progress for \d+ s",
    "nothing": r": (Type|Attribute)Error: .*None",
    "garbage": r": (Type|Value|Attribute)Error: ",
}
# What the error cannot know: who is at fault is then told by the one that was waiting, or by the next in the line.
TOLD_BY_OTHERS = {
    ("feed", "blocks"): r"stage '(feed|pipeline|ready buffer.*)'",
    ("loader", "dies"): r"stage 'loader \d'(, batch \d+)?",
    ("loader", "garbage"): r"stage 'loader \d'(, batch \d+)?",
    ("target", "dies"): r"stage 'target 0'(, batch 11)?",
    ("target", "nothing"): r"stage '(target 0|drafter)', batch 11",
    ("target", "garbage"): r"stage '(target 0|drafter)', batch 11",
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


@pytest.mark.parametrize("kind", ["raises", *(pytest.param(kind, marks=SLOW) for kind in ("dies", "nothing", "garbage"))])
@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_that_fails(bench: Bench, stage: str, kind: str) -> None:
    if stage in ("optimizer", "checkpoint") and kind in ("nothing", "garbage"):
        pytest.skip("nobody looks at what these return")
    run_dir = bench.make(f"{stage}-{kind}", OFTEN)
    assert_failed(run_dir, start_broken(bench, run_dir, stage, kind), told(stage, kind))
    assert_resumes(bench, run_dir)


def test_a_stage_that_blocks(bench: Bench) -> None:
    """The blocked code never returns, in the main thread or in another: the process ends all the same."""
    runs = {stage: bench.make(f"{stage}-blocks", OFTEN, f"prefetch.stall_timeout_s={STALL_S}") for stage in STAGES}
    children = {stage: start_broken(bench, run_dir, stage, "blocks") for stage, run_dir in runs.items()}
    for stage, run_dir in runs.items():
        assert_failed(run_dir, children[stage], told(stage, "blocks"), 2.0 * STALL_S + END_S)
    assert_resumes(bench, runs["checkpoint"])
    assert_resumes(bench, runs["drafter"])


DISKS = {
    "a file cannot be made": ("break_file_change", {"kind": "full disk", "containing": "step-000006", "events": ["open"]}),
    "a folder cannot be made": ("break_file_change", {"kind": "full disk", "containing": "step-000006", "events": ["os.mkdir"]}),
    "the rename fails": ("break_file_change", {"kind": "full disk", "containing": "step-000006", "events": ["os.rename"]}),
    "fsync fails": ("break_fsync", {"number": 30}),
    "the system refuses to write": ("limit_file_size", {"num_bytes": 50_000}),
}


@pytest.mark.parametrize("what", DISKS)
def test_a_full_disk_while_a_checkpoint_is_written(bench: Bench, what: str) -> None:
    run_dir = bench.make(what.replace(" ", "-"), OFTEN)
    function, arguments = DISKS[what]
    if what == "the system refuses to write":
        assert bench.train(run_dir, (f"{BREAKS}:signal_at_step", {"step": 5, "number": 9})) == [-9]
    [child] = bench.start(run_dir, (f"{BREAKS}:{function}", arguments))
    line = assert_failed(run_dir, child, r"^error: stage 'checkpoint[^']*': .*(No space left on device|File too large)", code=3)
    print(line)
    assert_resumes(bench, run_dir)


@pytest.mark.parametrize("stream", ["steps", "batches", "stats", "events"])
def test_a_full_disk_while_metrics_are_written(bench: Bench, stream: str) -> None:
    """`/dev/full` is the system's own full disk."""
    run_dir = bench.make(f"full-{stream}", OFTEN)
    (run_dir / "metrics").mkdir()
    link = run_dir / "metrics" / f"{stream}.jsonl"
    link.symlink_to("/dev/full")
    [child] = bench.start(run_dir)
    assert child.wait() == 3
    [line] = child.errors()
    print(line)
    link.unlink()
    assert_resumes(bench, run_dir)


@pytest.mark.parametrize("action", ["delete", "truncate"])
def test_a_shard_that_changes_while_a_run_is_on(bench: Bench, action: str) -> None:
    run_dir = bench.make(f"shard-{action}", OFTEN)
    dataset = Path(RunFolder(run_dir).read_manifest()["dataset"])
    [part] = (dataset / "tokens").glob("part-*.arrow")
    [child] = bench.start(run_dir, (f"{BREAKS}:at_step", {"step": 3, "action": action, "path": str(part)}))
    print(child.wait(), child.output())
    root.prepare(root.load_experiment(bench.experiment))


def test_a_run_folder_that_is_deleted_while_the_run_is_on(bench: Bench) -> None:
    run_dir = bench.make("deleted", OFTEN)
    [child] = bench.start(run_dir, (f"{BREAKS}:at_step", {"step": 3, "action": "delete folder", "path": str(run_dir)}))
    print(child.wait(), child.output(), sorted(run_dir.rglob("*")))
    assert 0
