"""The kill matrix: whoever is killed, nobody survives, the run folder is whole, and the same command goes on.

Real trainings, each case one more kill of the same run, which at last has every step once. The cases of `REST` are those that
differ little from another one; `DFLASH_KILL_MATRIX=all` has them run, too.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kill_matrix import Case, Matrix
from tests.serve_place import Place

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
STEPS = 300
INT, TERM, KILL = signal.SIGINT, signal.SIGTERM, signal.SIGKILL
STOPPED, FAILED, EITHER = ("stopped",), ("failed",), ("stopped", "failed")

DIRECT = [
    Case("direct", "flow", INT, STOPPED, ("CANCELLED",), 4),
    Case("direct", "flow", KILL, STOPPED, ("CRASHED",), -KILL),
    Case("direct", "training", KILL, FAILED, ("FAILED",), 3),
    Case("direct", "server", KILL, (), ("RUNNING",)),
    Case("direct", "server and flow", KILL, STOPPED, ("CRASHED",), -KILL),
    Case("direct", "rank", KILL, FAILED, ("FAILED",), 3, cells=2),
]
SERVED = [
    Case("served", "flow", TERM, STOPPED, ("CANCELLED",)),
    Case("served", "flow", KILL, STOPPED, ("CRASHED",)),
    Case("served", "training", KILL, FAILED, ("FAILED",)),
    Case("served", "runner", KILL, STOPPED, ("CANCELLED", "CRASHED")),
    Case("served", "server", KILL, (), ("RUNNING",)),
    Case("served", "server and flow", KILL, STOPPED, ("CRASHED",)),
    Case("served", "serve", KILL, STOPPED, ("CANCELLED",)),
]
REST = [
    Case("direct", "flow", TERM, STOPPED, ("CANCELLED",), 4),
    Case("direct", "supervisor", KILL, STOPPED, ("CANCELLED",), 4),
    Case("direct", "supervisor", TERM, STOPPED, ("CANCELLED",), 4),
    Case("direct", "training", TERM, STOPPED, ("CANCELLED",), 4),
    Case("direct", "server", TERM, (), ("RUNNING",)),
    Case("direct", "training", KILL, EITHER, ("CANCELLED", "FAILED"), 4, cells=2),
    Case("served", "flow", INT, STOPPED, ("CANCELLED",)),
    Case("served", "supervisor", KILL, STOPPED, ("CANCELLED",)),
    Case("served", "training", TERM, STOPPED, ("CANCELLED",)),
    Case("served", "serve", TERM, STOPPED, ("CANCELLED",)),
    Case("served", "serve-supervisor", KILL, STOPPED, ("CANCELLED", "CRASHED")),
    Case("served", "rank", KILL, FAILED, ("FAILED",), cells=2),
    Case("served", "training", KILL, EITHER, ("CANCELLED", "FAILED"), cells=2),
]
rest = pytest.mark.skipif(os.environ.get("DFLASH_KILL_MATRIX") != "all", reason="needs DFLASH_KILL_MATRIX=all")
ALL = sorted(
    [*map(pytest.param, DIRECT + SERVED), *(pytest.param(case, marks=rest) for case in REST)],
    key=lambda one: (one.values[0].where, one.values[0].cells),  # of one kind after the other: a change costs a start
)


@pytest.fixture(scope="module")
def matrix(tmp_path_factory: pytest.TempPathFactory, micro_target: Path) -> Iterator[Matrix]:
    place = Place(tmp_path_factory.mktemp("kills"), micro_target, STEPS)
    made = Matrix(place)
    try:
        place.start_server()
        yield made
        made.end_in_good_order()
    finally:
        place.close()


@pytest.mark.parametrize("case", ALL, ids=lambda case: str(case))
def test_whoever_is_killed(matrix: Matrix, case: Case) -> None:
    if case.where == "served" and matrix.place.serving is None:
        matrix.place.serve()
    matrix.going(case.where, case.cells)
    if case.goes_on:
        matrix.kill_server(case)
    else:
        matrix.kill(case)
        matrix.go_on(case)


def test_the_run_that_was_killed_so_often_is_complete(matrix: Matrix) -> None:
    matrix.finish(*(matrix.under_way or ("direct", 1)))
