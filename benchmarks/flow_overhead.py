"""What Prefect costs: the same chain as a flow on a warm embedded server, and by plain calls of the core.

    python -m benchmarks.flow_overhead [EXPERIMENT.yaml] [--pairs N] [--limit SECONDS]

Both are programs from their start to their end, and do the same work: prepare, plan, train in a child process, evaluate,
analyze. They take turns, each in a fresh workspace, so nothing is adopted; the server of the flows' workspace is started
beforehand. Prints each pair, the medians of wall time and of CPU time (the programs' and their children's, not the
server's), and ends with 1 if the median of the differences of wall time is over the limit. On a busy machine the wall time
says little; the CPU time says more.
"""

from __future__ import annotations

import argparse
import os
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import yaml

from tests.conftest import REPOSITORY, TINY_TARGET, write_micro_experiment

STEPS = 20
PLAIN = """
import os, sys
from pathlib import Path
from dflash_core import experiment
from flows.launch import launch, raise_for_exit

config = experiment.load_experiment(sys.argv[1])
experiment.check(config)
experiment.prepare(config)
experiment.plan(config)
run_dirs = []
for name, variant in config.variants():
    run_dir = experiment.create_run(variant, name)
    log_file = run_dir / "logs" / "train.log"
    raise_for_exit(launch(experiment.train_command(run_dir), log_file=log_file, env=dict(os.environ)), log_file)
    experiment.evaluate_run(run_dir)
    run_dirs.append(run_dir)
print(experiment.analyze(config, run_dirs)["report_html"])
"""


def main() -> int:
    parser = argparse.ArgumentParser(description="What the flows cost over plain calls.")
    parser.add_argument("experiment", nargs="?", help="default: a micro experiment of its own")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--limit", type=float, default=5.0, help="seconds that a flow may add; default: %(default)s")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda _number, _frame: sys.exit(128 + signal.SIGTERM))  # so that the server is stopped, too
    with tempfile.TemporaryDirectory(prefix="flow_overhead_") as folder:
        path = Path(arguments.experiment).resolve() if arguments.experiment else micro_experiment(Path(folder))
        return compare(Path(folder), path, arguments.pairs, arguments.limit)


def micro_experiment(folder: Path) -> Path:
    """The experiment of the tests, a little longer, with the tiny target of the repository."""
    path = write_micro_experiment(folder, TINY_TARGET)
    values = yaml.safe_load(path.read_text())
    values["train"] |= {"max_steps": STEPS, "num_epochs": 1000}
    path.write_text(yaml.safe_dump(values))
    return path


def compare(folder: Path, path: Path, pairs: int, limit_s: float) -> int:
    """Run both in turns; returns the exit code."""
    rows = []
    for number in range(pairs):
        both = {}
        for kind in ("plain", "flow") if number % 2 == 0 else ("flow", "plain"):
            both[kind] = measure(kind, folder / f"{kind}-{number}", path)
        rows.append(both)
        print(
            f"pair {number + 1}: "
            + ", ".join(f"{kind} {wall:.2f} s wall, {cpu:.2f} s CPU" for kind, (wall, cpu) in both.items()),
            f"(load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores)",
            flush=True,
        )
    added = [statistics.median(row["flow"][which] - row["plain"][which] for row in rows) for which in (0, 1)]
    for which, what in enumerate(("wall", "CPU")):
        medians = [statistics.median(row[kind][which] for row in rows) for kind in ("plain", "flow")]
        print(f"{what}: plain {medians[0]:.2f} s, flow {medians[1]:.2f} s; the flow adds {added[which]:.2f} s (median of pairs)")
    print(f"limit: {limit_s:.1f} s of wall time: {'kept' if added[0] <= limit_s else 'NOT KEPT'}")
    return 0 if added[0] <= limit_s else 1


def measure(kind: str, home: Path, path: Path) -> tuple[float, float]:
    """Wall and CPU seconds of one chain in a fresh workspace."""
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("PREFECT_")}
    environment = {**inherited, "DFLASH_HOME": str(home), "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    if kind == "plain":
        return timed(["-c", PLAIN, str(path)], path.parent, environment)
    timed(["-m", "flows.server", "start"], path.parent, environment)
    try:
        return timed(["-m", "flows.experiment", str(path)], path.parent, environment)
    finally:
        timed(["-m", "flows.server", "stop", "--force"], path.parent, environment)


def timed(words: list[str], cwd: Path, environment: Mapping[str, str]) -> tuple[float, float]:
    """Run a Python program to its end; raises SystemExit with its output if it fails."""
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    with tempfile.TemporaryFile("w+") as out:
        process = subprocess.run([sys.executable, *words], cwd=cwd, env=environment, stdout=out, stderr=out, check=False)
        wall_s = time.perf_counter() - started
        if process.returncode != 0:
            out.seek(0)
            raise SystemExit(f"{words[:2]} ended with {process.returncode}:\n{out.read()[-4000:]}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall_s, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


if __name__ == "__main__":
    sys.exit(main())
