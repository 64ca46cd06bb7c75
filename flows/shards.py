"""Preparation and answers in shards: one Prefect task for each, run by threads, by processes, or on a Ray or Dask cluster.

What a task does is `dflash_core.experiment_shards.make_shard` or `dflash_core.experiment_regenerate_shards.answer_shard`; what
comes out is what comes out without shards (docs/scale.md). Workers on other nodes need the same folders under the same paths.
"""

from __future__ import annotations

import importlib
import logging
import multiprocessing
import os
import secrets
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_for_any
from types import FrameType
from typing import TYPE_CHECKING, Any, get_args

from prefect import Task, flow, task
from prefect.cache_policies import NO_CACHE
from prefect.task_runners import ProcessPoolTaskRunner, TaskRunner, ThreadPoolTaskRunner

from dflash_core.errors import ConfigError, DataError, DFlashError
from dflash_core.processes import default_num_processes
from flows import tasks
from flows.launch import signals_held
from flows.reconcile import show_as_cancelled
from flows.secret_blocks import key_from_block
from flows.tasks import Request, TaskRunnerName

if TYPE_CHECKING:
    from dflash_core.experiment import ExperimentConfig

log = logging.getLogger(__name__)
CLUSTERS = {"ray": ("prefect_ray", "RayTaskRunner"), "dask": ("prefect_dask", "DaskTaskRunner")}
LOOK_EVERY_S = 0.5  # whether a signal has arrived while shards run


@dataclass(frozen=True)
class _Around:
    """What a flow in shards needs of its surroundings.

    Attributes:
        pool: one end of a pipe whose other end the processes of a pool watch: they end at once when it is closed.
        handlers: of signals, as they were before a cluster was started.
    """

    pool: Connection
    handlers: dict[int, Any]


_around: ContextVar[_Around | None] = ContextVar("around", default=None)


def prepare(request: Request, config: ExperimentConfig) -> dict[str, Any]:
    """The dataset of an experiment; with a task runner its parts are made in shards before they are put together."""
    if request.task_runner is not None:
        with _pipe_to_pool() as watched:
            make_shards.with_options(task_runner=task_runner(request, watched))(request)
    return tasks.prepare(config)


def regenerate(request: Request, config: ExperimentConfig) -> dict[str, Any]:
    """The answers of an experiment; with a task runner they are made in shards before they are put together."""
    if request.task_runner is None:
        return tasks.regenerate(config)
    # A key that comes from a block stays in the environment until all are done, for threads and processes on this node.
    with key_from_block(config.regenerate.api_key_env):
        with _pipe_to_pool() as watched:
            made_by = answer_shards.with_options(task_runner=task_runner(request, watched))(request)
        return put_together(config, made_by) if made_by else tasks.regenerate(config)


@contextmanager
def _pipe_to_pool() -> Iterator[Connection]:
    """Yield what the pool's processes watch, while its other end and the signals' handlers are where the flow finds them."""
    watched, ours = multiprocessing.Pipe(duplex=False)
    token = _around.set(_Around(ours, {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}))
    try:
        yield watched
    finally:
        _around.reset(token)
        ours.close()
        watched.close()


def task_runner(request: Request, watched: Connection | None = None) -> TaskRunner[Any]:
    """The runner that a request names; raises ConfigError where its package is missing.

    Args:
        watched: the processes of a pool end when the other end of this pipe is closed, and when this process ends.
    """
    name, workers = request.task_runner, request.shards or default_num_processes()
    if name not in get_args(TaskRunnerName):
        raise ConfigError(f"task_runner: {name!r} is none of {', '.join(get_args(TaskRunnerName))}")
    if name in CLUSTERS:
        package, kind = CLUSTERS[name]
        settings = _cluster(request)  # before the import: Ray looks for its token then
        try:
            module = importlib.import_module(package)
        except ImportError as error:
            raise ConfigError(f"task_runner: {name} needs the extra {name!r}: pip install -e '.[{name}]' ({error})") from None
        # Dask says its INFO lines on the console, among them a traceback for a connection that its own cluster closes at the end.
        logging.getLogger("distributed").setLevel(logging.WARNING)
        runner: TaskRunner[Any] = getattr(module, kind)(**settings)
        return runner
    if request.task_runner_address is not None:
        raise ConfigError(f"task_runner_address: {name} runs on this node and has none")
    if name == "thread":
        return ThreadPoolTaskRunner(max_workers=workers)
    return _Pool(max_workers=workers, initializer=_end_with_flow, initargs=(watched,))


def _cluster(request: Request) -> dict[str, Any]:
    """An existing cluster's address; without one a local cluster, which ends with the flow and takes no strangers.

    Dask binds loopback. Ray 2.60 listens on all interfaces whatever it is told, so it gets a token that only this flow has.
    """
    if request.task_runner_address is not None:
        return {"address": request.task_runner_address}
    workers = request.shards or default_num_processes()
    if request.task_runner == "ray":
        os.environ["RAY_AUTH_MODE"], os.environ["RAY_AUTH_TOKEN"] = "token", secrets.token_hex(32)
        return {"init_kwargs": {"num_cpus": workers, "include_dashboard": False, "log_to_driver": False}}
    local = {"n_workers": workers, "threads_per_worker": 1, "host": "127.0.0.1", "dashboard_address": None}
    return {"cluster_kwargs": local}


class _Pool(ProcessPoolTaskRunner):
    """A pool whose processes make no pool of their own.

    Prefect sends the flow's runner along with each task and starts it there once more. Nobody would use it, and its semaphores
    would be found missing, with two lines of Python's, when a process ends at once.
    """

    def __reduce__(self) -> tuple[Callable[..., TaskRunner[Any]], tuple[int]]:
        return ThreadPoolTaskRunner, (1,)


def _submit(work: Task[..., Any], number: int, shard: dict[str, Any]) -> Any:
    """Submit a shard; a signal that arrives meanwhile is raised afterwards, for Prefect would take it for an error of its own.

    Ctrl-C reaches all programs of the terminal. A process of a pool that is just being started would show a traceback, so the
    threads that start them, and with them the processes, hold SIGINT back.
    """
    with signals_held() as held:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            future = work.submit(number, shard)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
    if held:
        signal.raise_signal(held[0])
    return future


def _end_with_flow(watched: Connection | None) -> None:
    """First thing in a process of the pool: end when the flow is gone, or was interrupted, whatever is being done here.

    The pool itself would wait until the shard is done, and would not notice a SIGKILL of the flow at all.
    """
    parent = multiprocessing.parent_process()
    signs: list[Any] = [*([parent.sentinel] if parent is not None else []), *([watched] if watched is not None else [])]

    def watch() -> None:
        wait_for_any(signs)
        os._exit(1)

    if signs:
        threading.Thread(target=watch, name="flow", daemon=True).start()


@flow(name="dflash-shards", on_crashed=[show_as_cancelled])
def make_shards(config: Request) -> dict[str, int]:
    """Make the parts of the dataset of an experiment, a task for each shard."""
    from dflash_core.experiment_shards import plan_shards

    shards = plan_shards(config.load(), config.shards or default_num_processes())
    if not shards:
        log.info("shards: nothing to tokenize")
        return {}
    log.info("shards: %d, by task runner %s", len(shards), config.task_runner)
    counts: dict[str, int] = {}
    for result in _results(make_shard, shards):
        for key, value in result.items():
            counts[key] = counts.get(key, 0) + value
    log.info("shards: %d parts, %d rows, %d rejected", counts["num_parts"], counts["num_rows"], counts["num_rejected"])
    return counts


@task(name="shard", task_run_name="shard {number}", cache_policy=NO_CACHE)
def make_shard(number: int, shard: dict[str, Any]) -> dict[str, int]:
    """Make the parts of one shard; those that are there stay."""
    from dflash_core.experiment_shards import make_shard as make

    return make(shard)


@flow(name="dflash-answer-shards", on_crashed=[show_as_cancelled])
def answer_shards(config: Request) -> list[dict[str, Any]]:
    """Answer the rows of an experiment, a task for each shard; nothing is returned where the answers are there."""
    from dflash_core.experiment_regenerate_shards import plan_answers, running

    shards = plan_answers(config.load(), config.shards or default_num_processes())
    if not shards:
        return []
    log.info("shards: %d, by task runner %s", len(shards), config.task_runner)
    with running(shards):
        return _results(answer_shard, shards)


@task(name="answer-shard", task_run_name="answer shard {number}", cache_policy=NO_CACHE)
def answer_shard(number: int, shard: dict[str, Any]) -> dict[str, Any]:
    """Answer the rows of one shard; those that are answered stay."""
    from dflash_core.experiment_regenerate_shards import answer_shard as answer

    with key_from_block(shard["config"]["regenerate"]["api_key_env"]):
        return answer(shard)


@task(name="put-answers-together", cache_policy=NO_CACHE)
def put_together(config: ExperimentConfig, made_by: list[dict[str, Any]]) -> dict[str, Any]:
    """One folder of answers from what all shards have answered."""
    from dflash_core.experiment_regenerate_shards import put_together as put

    return tasks.log_answers(put(config, made_by))


@contextmanager
def _own_signals(around: _Around) -> Iterator[Callable[[], None]]:
    """Let the flow's handlers hold while inside; yields what raises again if a signal's exception was lost.

    When Ray starts it puts handlers of its own in their place, and while it waits it swallows what a handler raises.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return
    arrived: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        arrived.append(number)
        around.handlers[number](number, frame)

    def raise_again() -> None:
        if arrived:
            around.handlers[arrived[-1]](arrived[-1], None)

    ours = {number: handler for number, handler in around.handlers.items() if callable(handler)}
    for number in ours:
        signal.signal(number, note)
    try:
        yield raise_again
    finally:
        for number, handler in ours.items():
            signal.signal(number, handler)


def _wait(future: Any, raise_again: Callable[[], None]) -> None:
    """Wait for a shard to end, well or not. A wait that returns early has nothing more to wait for."""
    while True:
        begin = time.monotonic()
        future.wait(timeout=LOOK_EVERY_S)
        raise_again()
        if time.monotonic() - begin < LOOK_EVERY_S:
            return


def _results(work: Task[..., Any], shards: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What all shards return, once they have ended; raises the first one's error."""
    around = _around.get()
    assert around is not None
    try:
        with _own_signals(around) as raise_again:
            futures = [_submit(work, number, shard) for number, shard in enumerate(shards)]
            for future in futures:
                _wait(future, raise_again)
    except BaseException:
        around.pool.close()
        raise
    results = []
    for future in futures:
        try:
            results.append(future.result())
        except DFlashError:
            raise
        except Exception as error:
            raise DataError(f"a shard could not be made ({type(error).__name__}: {error}); start again to go on") from error
    return results
