"""Several runs, one after another or, where there is enough to read, in a process per core."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool

import numpy as np
import pandas as pd

from dflash_core.analysis.intervals import named_rng
from dflash_core.analysis.one_run import RunAnalysis, analyze_one
from dflash_core.analysis.runs import RunFacts
from dflash_core.config import AnalyzeConfig
from dflash_core.errors import DataError
from dflash_core.processes import Processes, default_num_processes, one_thread

# Of resamples and permutations, with the run's id and the statistic's name: what a run gives depends on no other run.
SEED = 20_260_101
# A process is worth starting (about a second) when there is more than this to read.
BYTES_PER_PROCESS = 64 * 1024**2


def analyze_each(
    runs: Sequence[RunFacts], config: AnalyzeConfig, bins: pd.DataFrame | None, num_processes: int | None = None
) -> list[RunAnalysis]:
    """Analyse the runs; the result is in their order and does not depend on the number of processes.

    Args:
        num_processes: default: as many as there is work for, at most one per core.

    Raises:
        UserError, DataError: see `runs.load_run`; of several runs' errors the first. DataError if a process was killed.
    """
    if num_processes is None:
        num_processes = min(default_num_processes(), len(runs), sum(map(_metric_bytes, runs)) // BYTES_PER_PROCESS)
    if num_processes <= 1:
        return [_analyze(run, config, bins) for run in runs]
    processes = Processes(num_processes, one_thread)
    done = False
    try:
        waiting: deque[Future[RunAnalysis]] = deque()
        found = []
        for run in runs:
            if len(waiting) >= 2 * num_processes:
                found.append(waiting.popleft().result())
            waiting.append(processes.submit(_analyze, run, config, bins))
        found += [future.result() for future in waiting]
        done = True
    except BrokenProcessPool:
        raise DataError("a process that analysed a run was killed (is memory short?)") from None
    finally:
        processes.close(at_once=not done)
    return found


def _analyze(run: RunFacts, config: AnalyzeConfig, bins: pd.DataFrame | None) -> RunAnalysis:
    return analyze_one(run, config, named_rng(np.random.default_rng(SEED), run.run_id), bins)


def _metric_bytes(run: RunFacts) -> int:
    return sum(path.stat().st_size for path in (run.folder / "metrics").glob("*.jsonl"))
