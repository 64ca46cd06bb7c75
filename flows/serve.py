"""All flows as deployments, served from this machine: `python -m flows.serve [EXPERIMENT ...] [--schedule [CRON]]`.

Each flow gets a page with a form, a queue of its own and a name for `prefect deployment run`; retraining also answers to the
event `dflash.dataset.arrived` and, with `--schedule`, starts every week. The first EXPERIMENT is what the forms begin with. With
several, every one has a set of its own whose names end in the experiment's.

The processes, and who ends whom (see flows/launch.py for the first two):

    this command -> supervisor (flows/child.py) -> Prefect's runner -> flow runs -> supervisor -> training

Ctrl-C and SIGTERM end the runner in good order: it cancels its flow runs, their trainings save their state, and schedules are
paused until the next start. If this command or the runner is killed, the supervisor ends all that is left. One `serve` per
workspace and machine; several machines share a work pool instead (prefect.yaml).
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import sys
import zoneinfo
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash_core.errors import ConfigError, DFlashError, TrainingError, UserError
from dflash_core.redaction import without_secrets
from flows import command, console, server
from flows.deployments import ALL, ARRIVED, DEMO, SLUG, TIMEZONE, WEEKLY, Deployed, experiment_of_event
from flows.launch import last_error_line, launch, only_one

if TYPE_CHECKING:
    from prefect.deployments.runner import RunnerDeployment

log = logging.getLogger("flows.serve")  # this is `__main__`
POLL_S = 2.0  # between two looks of the runner for runs that are due
GRACE_S = 60.0  # Prefect ends its flow runs one after the other, each in 3 to 30 s
LARGEST_LOG = 64 * 1024**2
ENTRY = "DFLASH_SERVE"  # in the environment of the runner's process only


def build(experiments: Sequence[str], schedule: str | None = None, timezone: str = TIMEZONE) -> list[RunnerDeployment]:
    """The deployments for Prefect's runner.

    Args:
        experiments: paths of experiment files, as the flows are to open them; none: the demo.
        schedule: cron line of the weekly retraining; None: Mondays at three, switched off.
        timezone: of the schedule.
    """
    chosen = list(experiments) or [DEMO]
    labels = {path: Path(path).stem for path in chosen} if len(chosen) > 1 else {chosen[0]: None}
    return [_deployment(one, path, label, schedule, timezone) for path, label in labels.items() for one in ALL]


def _deployment(one: Deployed, experiment: str, label: str | None, schedule: str | None, timezone: str) -> RunnerDeployment:
    import importlib

    from prefect.client.schemas.objects import ConcurrencyLimitConfig, ConcurrencyLimitStrategy
    from prefect.deployments.runner import RunnerDeployment
    from prefect.events import DeploymentEventTrigger
    from prefect.flows import Flow
    from prefect.schedules import Cron
    from prefect.types.entrypoint import EntrypointType

    flow: Flow[Any, Any] = getattr(importlib.import_module(one.module), one.stage)
    # Among several experiments each answers for itself: a named one would be retrained once by each of them.
    wanted = experiment_of_event(experiment) if label is None else experiment
    event = DeploymentEventTrigger(expect={ARRIVED}, parameters={"config": {"experiment": wanted}})
    weekly = Cron(schedule or WEEKLY, timezone=timezone, active=schedule is not None, slug=SLUG)
    return RunnerDeployment.from_flow(
        flow,
        name=one.stage if label is None else f"{one.stage}-{label}",
        description=one.description,
        tags=one.all_tags,
        parameters={"config": {"experiment": experiment}},
        concurrency_limit=ConcurrencyLimitConfig(limit=1, collision_strategy=ConcurrencyLimitStrategy.ENQUEUE),
        schedules=[weekly] if one.retrains else [],
        triggers=[event] if one.retrains else [],
        paused=False,  # the end of the last `serve` has paused it
        # By module: it is found whatever folder the deployments are served from.
        entrypoint_type=EntrypointType.MODULE_PATH,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until a signal; returns the exit code (0 after Ctrl-C or SIGTERM, which are how this ends)."""
    arguments = _parser().parse_args(argv)
    if os.environ.pop(ENTRY, None):
        return _run_runner(arguments)
    command.raise_on_sigterm()
    console.show_our_lines()
    try:
        _check(arguments)
        _serve(arguments, list(sys.argv[1:] if argv is None else argv))
    except DFlashError as error:
        sys.stderr.write(f"error: {without_secrets(str(error))}\n")
        return error.exit_code
    except (KeyboardInterrupt, command.Terminated):
        log.info("ended; its flow runs were stopped, and trainings have saved their state")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="dflash serve", description="Serve all flows as Prefect deployments.")
    parser.add_argument("experiments", nargs="*", metavar="EXPERIMENT", help=f"experiment files; default: {DEMO}")
    parser.add_argument(
        "--schedule",
        nargs="?",
        const=WEEKLY,
        metavar="CRON",
        help=f"retrain by itself; without CRON: {WEEKLY!r}, Mondays at three",
    )
    parser.add_argument("--timezone", default=TIMEZONE, help=f"of the schedule, such as Europe/Berlin; default: {TIMEZONE}")
    return parser


def _check(arguments: argparse.Namespace) -> None:
    """All that can be known before a server is started."""
    from dflash_core.experiment import load_experiment
    from dflash_core.experiment_confine import Confinement

    experiments = arguments.experiments or [DEMO]
    stems = [Path(path).stem for path in experiments]
    if len(set(stems)) < len(stems):
        raise ConfigError(
            f"two experiments have the same file name, which their deployments are told apart by: {', '.join(stems)}"
        )
    if arguments.timezone not in zoneinfo.available_timezones():
        raise UserError(f"--timezone {arguments.timezone}: not known; such as UTC or Europe/Berlin")
    if arguments.schedule is not None and len(arguments.schedule.split()) != 5:
        raise UserError(f"--schedule {arguments.schedule!r}: not a cron line of five fields, such as {WEEKLY!r}")
    bounds = None if os.environ.get("DFLASH_CONFINE") == "0" else Confinement.from_environment()
    for path in experiments:
        config = load_experiment(path)
        if bounds is not None:  # as every run of a deployment checks it: better said here than by each of them
            bounds.check_path("experiment", path)
            bounds.check(config)
        if arguments.schedule is not None and len(config.runs) > 1:
            raise UserError(
                f"{path}: a retraining is one run, so --schedule needs an experiment with one; it has {len(config.runs)}"
            )


def _serve(arguments: argparse.Namespace, argv: list[str]) -> None:
    from dflash_core.experiment import workspace

    home = workspace()
    log_file = home / "prefect" / "serve.log"
    # A second one would take the runs of this one's deployments, and pause them when it ends.
    only = only_one(home / "locks" / "serve.lock", f"{home}: its deployments are being served already")
    with only, server.session(home) as url:
        if log_file.exists() and log_file.stat().st_size > LARGEST_LOG:
            log_file.replace(log_file.with_suffix(".log.1"))
        log.info("Prefect: %s; Ctrl-C ends this and what it runs", without_secrets(url.removesuffix("/api")))
        log.info("in another terminal: export PREFECT_API_URL=%s", without_secrets(url))
        environment = {**os.environ, ENTRY: "1", "PYTHONUNBUFFERED": "1"}
        code = launch(
            [sys.executable, "-m", "flows.serve", *argv],
            log_file=log_file,
            env=environment,
            on_line=_say,
            grace_s=GRACE_S,
        )
        if code != 0:
            reason = last_error_line(log_file)
            raise TrainingError(f"serving ended with exit code {code}{': ' + reason if reason else ''}; see {log_file}")


def _say(line: str) -> None:
    sys.stderr.write(line + "\n")


def _run_runner(arguments: argparse.Namespace) -> int:
    """In the process below the supervisor: register everything, say so, and run what is due until SIGTERM."""
    from prefect.runner import Runner

    from flows import reconcile

    console.show_our_lines()
    # The supervisor asks by SIGTERM. Not SIG_IGN, which the flow runs would inherit: they are to be stopped by SIGINT, too.
    signal.signal(signal.SIGINT, lambda _number, _frame: None)
    try:
        deployments = build(arguments.experiments, arguments.schedule, arguments.timezone)
    except ValueError as error:  # Prefect's own check of the cron line
        sys.stderr.write(f"error: --schedule {arguments.schedule!r}: {error}\n")
        return UserError.exit_code
    reconcile.mark_dead_runs()
    asyncio.run(_serve_forever(Runner(name="dflash", query_seconds=POLL_S, limit=len(deployments)), deployments))
    return 0


async def _serve_forever(runner: Any, deployments: Sequence[RunnerDeployment]) -> None:
    for deployment in deployments:
        await runner.aadd_deployment(deployment)
        log.info("serving %s/%s", deployment.flow_name, deployment.name)
    log.info("start one with: prefect deployment run %s/%s", deployments[0].flow_name, deployments[0].name)
    await runner.start()


if __name__ == "__main__":
    sys.exit(main())
