"""Many runs in several processes: the same result, and nothing left behind whoever is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest

from dflash_core.analysis import analyze_runs, many_runs
from dflash_core.analysis.many_runs import analyze_each
from dflash_core.analysis.runs import load_all_facts
from dflash_core.config import AnalyzeConfig
from dflash_core.errors import DataError
from tests.fake_runs import FakeRun, write_run
from tests.test_data_parallel import ends_with_its_parent, is_worker, wait_until, workers

CONFIG = AnalyzeConfig()


def made(root: Path, count: int, num_steps: int = 30) -> list[Path]:
    return [write_run(root / f"r{i}", FakeRun(name=f"r{i}", num_steps=num_steps, seed=i)) for i in range(count)]


@pytest.mark.slow
def test_several_processes_give_what_one_gives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = made(tmp_path, 5)
    several = analyze_each(load_all_facts(folders), CONFIG, None, 2)
    assert workers() == []
    one = analyze_each(load_all_facts(folders), CONFIG, None, 1)
    assert [run.run_id for run in several] == [f"r{i}" for i in range(5)]
    for a, b in zip(several, one, strict=True):
        assert a.row == b.row and a.findings == b.findings
        assert all(a.tables[name].equals(b.tables[name]) for name in a.tables)
        for metric, estimate in a.estimates.items():
            other = b.estimates[metric]
            assert (estimate.value, estimate.scale) == (other.value, other.scale)
            assert estimate.resampled is None or np.array_equal(estimate.resampled, other.resampled)
    # And so are the files, to the last byte.
    analyze_runs(folders, tmp_path / "a", CONFIG)
    monkeypatch.setattr(many_runs, "BYTES_PER_PROCESS", 1)
    monkeypatch.setattr(many_runs, "default_num_processes", lambda: 2)
    analyze_runs(folders, tmp_path / "b", CONFIG)
    for path in (tmp_path / "a").glob("*.parquet"):
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes(), path.name
    assert workers() == []


def killer(*_: object) -> None:
    """Stands in for the analysis of a run: what the kernel does when memory is short."""
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
def test_a_process_that_is_killed_is_one_clear_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(many_runs, "_analyze", killer)
    with pytest.raises(DataError, match=r"^a process that analysed a run was killed \(is memory short\?\)$"):
        analyze_each(load_all_facts(made(tmp_path, 3)), CONFIG, None, 2)
    wait_until(lambda: not workers(), 5.0)


@pytest.mark.slow
def test_a_bad_run_is_named_and_ends_all_processes(tmp_path: Path) -> None:
    folders = made(tmp_path, 4)
    (folders[2] / "metrics" / "steps.jsonl").write_text('{"step": 0, "loss": "low"}\n')
    with pytest.raises(DataError, match=r"r2/metrics/steps.jsonl: a field has values of another type"):
        analyze_each(load_all_facts(folders), CONFIG, None, 2)
    assert workers() == []


CHILD = """
import sys
from pathlib import Path
from dflash_core.analysis import many_runs
from dflash_core.analysis.runs import load_all_facts
from dflash_core.config import AnalyzeConfig
folders = sorted(Path(sys.argv[1]).glob("r*"))
facts = load_all_facts(folders) * 4000
print("begun", flush=True)
try:
    many_runs.analyze_each(facts, AnalyzeConfig(), None, 2)
except KeyboardInterrupt:
    sys.exit(77)
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_no_process_outlives_a_parent_that_is_killed(tmp_path: Path, how: signal.Signals) -> None:
    made(tmp_path, 3)
    command = [sys.executable, "-c", CHILD, str(tmp_path)]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)

    def find_family() -> list[psutil.Process]:
        assert parent.stdout is not None and parent.stdout.readline() == b"begun\n"
        family: list[psutil.Process] = []

        def working() -> bool:
            family[:] = psutil.Process(parent.pid).children(recursive=True)
            return sum(is_worker(process) for process in family) == 2

        wait_until(working)
        return family

    ends_with_its_parent(parent, how, find_family)
