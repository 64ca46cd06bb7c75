"""Preparation in shards: one Prefect task for each, run by threads, by processes, or on the nodes of a Ray or Dask cluster.

What a task does is `dflash_core.experiment_shards.make_shard`; the dataset is the one that comes out without shards
(docs/scale.md). Workers on other nodes need the same folders under the same paths.
"""

from __future__ import annotations

import importlib
import logging
import multiprocessing
import os
import secrets
import threading
from typing import TYPE_CHECKING, Any, get_args

from prefect import flow, task
from prefect.cache_policies import NO_CACHE
from prefect.futures import wait
from prefect.task_runners import ProcessPoolTaskRunner, TaskRunner, ThreadPoolTaskRunner

from dflash_core.errors import ConfigError, DataError, DFlashError
from dflash_core.processes import default_num_processes
from flows import tasks
from flows.tasks import Request, TaskRunnerName

if TYPE_CHECKING:
    from dflash_core.experiment import ExperimentConfig

log = logging.getLogger(__name__)
CLUSTERS = {"ray": ("prefect_ray", "RayTaskRunner"), "dask": ("prefect_dask", "DaskTaskRunner")}


def prepare(request: Request, config: ExperimentConfig) -> dict[str, Any]:
    """The dataset of an experiment; with a task runner its parts are made in shards before they are put together."""
    if request.task_runner is not None:
        make_shards.with_options(task_runner=task_runner(request))(request)
    return tasks.prepare(config)


def task_runner(request: Request) -> TaskRunner[Any]:
    """The runner that a request names; raises ConfigError where its package is missing."""
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
        runner: TaskRunner[Any] = getattr(module, kind)(**settings)
        return runner
    if request.task_runner_address is not None:
        raise ConfigError(f"task_runner_address: {name} runs on this node and has none")
    if name == "thread":
        return ThreadPoolTaskRunner(max_workers=workers)
    return ProcessPoolTaskRunner(max_workers=workers, initializer=_end_with_parent)


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


def _end_with_parent() -> None:
    """First thing in a process of the pool: end when the flow is gone, which a SIGKILL of it would not see to."""
    parent = multiprocessing.parent_process()

    def watch() -> None:
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=watch, name="parent", daemon=True).start()


@flow(name="dflash-shards")
def make_shards(config: Request) -> dict[str, int]:
    """Make the parts of the dataset of an experiment, a task for each shard."""
    from dflash_core.experiment_shards import plan_shards

    shards = plan_shards(config.load(), config.shards or default_num_processes())
    if not shards:
        log.info("shards: nothing to tokenize")
        return {}
    log.info("shards: %d, by task runner %s", len(shards), config.task_runner)
    futures = [make_shard.submit(number, shard) for number, shard in enumerate(shards)]
    wait(futures)
    counts: dict[str, int] = {}
    for future in futures:
        try:
            result = future.result()
        except DFlashError:
            raise
        except Exception as error:
            raise DataError(f"a shard could not be made ({type(error).__name__}: {error}); start again to go on") from error
        for key, value in result.items():
            counts[key] = counts.get(key, 0) + value
    log.info("shards: %d parts, %d rows, %d rejected", counts["num_parts"], counts["num_rows"], counts["num_rejected"])
    return counts


@task(name="shard", task_run_name="shard {number}", cache_policy=NO_CACHE)
def make_shard(number: int, shard: dict[str, Any]) -> dict[str, int]:
    """Make the parts of one shard; those that are there stay."""
    from dflash_core.experiment_shards import make_shard as make

    return make(shard)
