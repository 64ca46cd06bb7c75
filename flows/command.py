"""The command line that all flows share: check the input, get a server, run the flow, show what came of it.

The order matters. Input is checked before anything is started, so a mistake costs no waiting; and the server's address
must stand in the environment before Prefect is first imported, so a flow's file calls `main` above that import.
"""

from __future__ import annotations

import argparse
import atexit
import gc
import importlib
import importlib.util
import logging
import signal
import sys
import traceback
import warnings
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from dflash_core.errors import DFlashError, TrainingError, UserError
from dflash_core.redaction import without_secrets
from flows import console, server

log = logging.getLogger(__name__)
EXIT_DEFECT = 1
MOST_RUNS = 32  # of a sweep
WIDEST = 6  # columns
MOST_SHARDS = 10_000  # as flows/tasks.Request has it
HELP = {
    "experiment": "Run an experiment: prepare, plan, train and evaluate each run, analyze.",
    "regenerate": "Have the target answer the prompts of an experiment anew.",
    "prepare": "Prepare the dataset of an experiment.",
    "train": "Train the runs of an experiment, or one of them.",
    "evaluate": "Evaluate the trained runs of an experiment, or one of them.",
    "analyze": "Compare the runs of an experiment and write the report.",
    "sweep": "Run an experiment with a grid of changes, and compare all runs.",
    "retrain": "Train a drafter on new data from the current one, and promote it if it is better.",
}


class Terminated(BaseException):
    """SIGTERM arrived; like KeyboardInterrupt it passes every `except Exception`."""


def main(stage: str, argv: Sequence[str] | None = None) -> int:
    """Run the flow `stage` of the module `flows.<stage>` and return the exit code (docs/design.md 5).

    A signal that did not end in a saved training gives 128 + its number; a defect gives 1 and a traceback.
    """
    arguments = _parser(stage).parse_args(argv)
    raise_on_sigterm()
    atexit.register(gc.freeze)  # the interpreter's last collections walk all of torch and Prefect, 0.6 s, and free nothing
    console.show_our_lines()
    if not arguments.debug:
        warnings.simplefilter("ignore", FutureWarning)  # of libraries, about later versions of themselves; pytest shows them
    try:
        _run(stage, arguments)
    except DFlashError as error:
        return _fail(str(error), error.exit_code, arguments.debug)
    except KeyboardInterrupt:
        return _fail("interrupted; run the same command again to go on", 128 + signal.SIGINT, arguments.debug)
    except Terminated:
        return _fail("ended by SIGTERM; run the same command again to go on", 128 + signal.SIGTERM, arguments.debug)
    except Exception as error:  # noqa: BLE001 - the top of the program
        if _is_lost_server(error):
            return _fail(*_of_lost_server(error), arguments.debug)
        return _fail(f"unexpected {type(error).__name__}: {error} (a defect; --debug shows where)", EXIT_DEFECT, arguments.debug)
    return 0


def _parser(stage: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"python -m flows.{stage}", description=HELP[stage])
    parser.add_argument("experiment", help="the experiment file")
    parser.add_argument("--set", action="append", default=[], metavar="a.b=VALUE", dest="overrides", help="change a key")
    parser.add_argument("--keep-server", action="store_true", help="leave the background Prefect server running")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    if stage in ("regenerate", "prepare", "train", "experiment", "sweep"):
        what = "answers" if stage == "regenerate" else "tokenizing"
        runner = parser.add_argument_group(f"{what} in shards (docs/scale.md)")
        runner.add_argument("--task-runner", choices=("thread", "process", "ray", "dask"), help="what runs the shards")
        runner.add_argument("--task-runner-address", metavar="URL", help="an existing Ray or Dask cluster; default: a local one")
        runner.add_argument("--shards", type=int, metavar="N", help="number of shards; default: one for each core")
    if stage in ("train", "evaluate", "retrain", "sweep"):
        parser.add_argument("--run", metavar="NAME", help="only this run of the experiment")
    if stage == "sweep":
        parser.add_argument(
            "--grid", action="append", required=True, metavar="a.b=VALUE,VALUE", help="change a key; may be repeated"
        )
        parser.add_argument("--most", type=int, default=MOST_RUNS, help="refuse a grid with more runs; default: %(default)s")
    return parser


def raise_on_sigterm() -> None:
    """Let SIGTERM raise `Terminated` in the main thread, as SIGINT raises KeyboardInterrupt."""
    signal.signal(signal.SIGTERM, _raise_terminated)


def _raise_terminated(_number: int, _frame: object) -> None:
    raise Terminated


def _fail(text: str, code: int, debug: bool) -> int:
    if debug:
        traceback.print_exc()
    sys.stderr.write(f"error: {without_secrets(text)}\n")
    return code


def _is_lost_server(error: Exception) -> bool:
    """True for what Prefect's client raises when nobody answers it any more."""
    httpx = sys.modules.get("httpx")  # Prefect has imported it
    return httpx is not None and isinstance(error, httpx.TransportError)


def _of_lost_server(error: BaseException) -> tuple[str, int]:
    """Line and exit code: of our own error that Prefect could not be told, else that the server is gone."""
    cause = error.__context__
    while cause is not None:
        if isinstance(cause, DFlashError):
            return str(cause), cause.exit_code
        cause = cause.__context__
    text = f"Prefect's server does not answer any more ({error}); what was done is saved; run the same command again to go on"
    return text, TrainingError.exit_code


def _run(stage: str, arguments: argparse.Namespace) -> None:
    from dflash_core.experiment import workspace

    run = getattr(arguments, "run", None)
    runner = _runner(arguments)
    if stage == "sweep":
        _check_sweep(arguments)
    else:
        _check(stage, arguments.experiment, arguments.overrides, run)
    with server.session(workspace(), keep=arguments.keep_server) as url:
        module = importlib.import_module(f"flows.{stage}")  # the first import of Prefect
        from flows import reconcile, tasks

        console.tame_prefect()
        embedded = server.find(workspace()) if server.external_url(workspace()) is None else None
        short_lived = embedded is not None and not embedded.keep
        log.info(
            "Prefect: %s%s",
            without_secrets(url.removesuffix("/api")),
            " (until the end of this run; --keep-server keeps it)" if short_lived else "",
        )
        asked = {"experiment": arguments.experiment, "overrides": tuple(arguments.overrides), "run": run, **runner}
        if stage == "sweep":
            request = module.SweepRequest(**asked, grid=tuple(arguments.grid), most=arguments.most)
        else:
            request = tasks.Request(**asked)
        reconcile.mark_dead_runs()
        try:
            result = getattr(module, stage)(request)
        finally:
            _flush_prefect()
    _show(result)


def _check_sweep(arguments: argparse.Namespace) -> None:
    from flows.grid import expand

    expanded = expand(arguments.experiment, arguments.overrides, arguments.run, arguments.grid, arguments.most)
    _check("sweep", arguments.experiment, expanded, None)


def _runner(arguments: argparse.Namespace) -> dict[str, Any]:
    """The fields of a request that say how shards are run; raises UserError for what cannot be."""
    runner = getattr(arguments, "task_runner", None)
    address, shards = getattr(arguments, "task_runner_address", None), getattr(arguments, "shards", None)
    if runner is None and (address is not None or shards is not None):
        raise UserError("--shards and --task-runner-address need --task-runner")
    if shards is not None and not 0 < shards <= MOST_SHARDS:
        raise UserError(f"--shards {shards}: expected 1 to {MOST_SHARDS}")
    if address is not None and runner not in ("ray", "dask"):
        raise UserError(f"--task-runner-address: {runner} runs on this node and has none")
    if runner in ("ray", "dask") and importlib.util.find_spec(f"prefect_{runner}") is None:
        raise UserError(f"--task-runner {runner} needs the extra {runner!r}: pip install -e '.[{runner}]'")
    return {"task_runner": runner, "task_runner_address": address, "shards": shards}


def _check(stage: str, path: str, overrides: Sequence[str], run: str | None) -> None:
    """Everything that can be known before the server is started: file, keys, topology, target, input files.

    Of a retraining the target is looked into only where there is something to train, for that loads it.
    """
    from dflash_core.experiment import check, load_experiment
    from dflash_core.experiment_regenerate import check_regenerate

    config = load_experiment(path, overrides)
    names = [name for name, _ in config.variants()]
    if run is not None and run not in names:
        raise UserError(f"{path}: no run {run!r}; there are: {', '.join(names)}")
    if stage == "regenerate":  # makes the files that the other stages look for
        check_regenerate(config)
        return
    if stage == "retrain":
        from dflash_core.experiment_retrain import look

        if len(names) > 1 and run is None:
            raise UserError(f"{path}: a retraining is one run; choose one with --run: {', '.join(names)}")
        if look(dict(config.variants())[run or names[0]]).nothing_new is not None:
            return
    check(config)


def _flush_prefect() -> None:
    """Let Prefect send its last lines and events while the server still runs."""
    from prefect.events.worker import EventsWorker
    from prefect.logging.handlers import APILogHandler

    APILogHandler().flush()
    EventsWorker.drain_all(timeout=5)


def _show(result: dict[str, Any]) -> None:
    """The end of the console output: a table, if there is one, and the paths."""
    output = Console()
    if rows := result.get("table"):
        output.print(_table(rows))
    if text := result.get("text"):
        output.print(text, soft_wrap=True, highlight=False, markup=False)
    for name, path in result.get("paths", {}).items():
        output.print(f"{name}: {path}", soft_wrap=True, highlight=False)


def _table(rows: list[dict[str, Any]]) -> Table:
    """One line per row; one column per row where the columns would be too many to read."""
    from flows.tasks import cell

    lines = [list(rows[0]), *([cell(row.get(key)) for key in rows[0]] for row in rows)]
    if len(rows[0]) > WIDEST:
        lines = [list(line) for line in zip(*lines, strict=True)]
    table = Table(*lines[0], header_style="bold")
    for line in lines[1:]:
        table.add_row(*line)
    return table
