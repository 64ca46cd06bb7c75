"""The stages as Prefect tasks, shared by all flows. Each calls one function of `dflash_core.experiment`.

Tasks take the configuration and return small dictionaries, never data. None is cached by Prefect: the stages themselves
recognise finished work by its content, so a flow that is run again adopts it. Call them directly, never with `.submit()`:
Prefect raises its termination signal in the main thread, and there the training child is waited for.
"""

from __future__ import annotations

import logging
import os
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from prefect import task
from prefect.artifacts import create_markdown_artifact
from prefect.cache_policies import NO_CACHE
from prefect.exceptions import TerminationSignal
from prefect.runtime import deployment, flow_run
from prefect.settings import PREFECT_UI_URL
from pydantic import Field, model_validator

from dflash_core.config import Config
from dflash_core.errors import StoppedBySignal, UserError
from dflash_core.redaction import without_secrets
from flows import console
from flows.command import WIDEST
from flows.launch import Relay, launch, node_lock, raise_for_exit
from flows.secret_blocks import key_from_block

if TYPE_CHECKING:
    from dflash_core.experiment import ExperimentConfig

log = logging.getLogger(__name__)
console.set_levels()  # these two also where no command of ours has been called: in the process of a deployment
console.one_line_errors()
LONGEST_NAME = 120
LONGEST_TEXT = 60_000  # characters of an artifact
TaskRunnerName = Literal["thread", "process", "ray", "dask"]
AGAIN = "run the same command again to go on"


def confined() -> bool:
    """Whether parameters may name only places inside the workspace and what was allowed (docs/scale.md, "Security").

    So it is for the runs of a deployment, whose parameters come from a form; DFLASH_CONFINE=1 or 0 decides otherwise.
    """
    setting = os.environ.get("DFLASH_CONFINE", "")
    if setting not in ("", "0", "1"):
        raise UserError(f"DFLASH_CONFINE: {setting!r} is neither 0 nor 1")
    return setting == "1" or (setting == "" and deployment.id is not None)


class Request(Config):
    """An experiment file, and what to change in it for this run."""

    experiment: str = Field(description="Path of the experiment file, such as flows/experiments/demo.yaml")
    overrides: tuple[str, ...] = Field((), description="Each item one key of the file to change, such as train.lr=0.002")
    run: str | None = Field(None, description="Name of one run of the experiment; None: all of them")
    task_runner: TaskRunnerName | None = Field(
        None,
        description="Tokenize or answer in shards by thread, process, ray or dask (docs/scale.md); None: fastest on one node",
    )
    task_runner_address: str | None = Field(
        None, description="Address of the Ray or Dask cluster; None: a local one that ends with the flow"
    )
    shards: int | None = Field(None, gt=0, le=10_000, description="Number of shards; None: one for each core")

    @model_validator(mode="after")
    def _only_shards_need_a_runner(self) -> Request:
        if self.task_runner is None and (self.shards is not None or self.task_runner_address is not None):
            raise ValueError("task_runner: is needed for shards and task_runner_address")
        return self

    def load(self) -> ExperimentConfig:
        """Read the experiment; raises ConfigError, also for a place outside where a deployment may look."""
        from dflash_core.experiment import load_experiment
        from dflash_core.experiment_confine import Confinement

        bounds = Confinement.from_environment() if confined() else None
        if bounds is not None:
            bounds.check_path("experiment", self.experiment)
            if self.task_runner_address is not None:  # a cluster gets code and data, and what it sends back is unpickled
                bounds.check_url("task_runner_address", self.task_runner_address)
        config = load_experiment(self.experiment, self.overrides)
        if bounds is not None:
            bounds.check(config)
        return config

    def variants(self) -> list[tuple[str, ExperimentConfig]]:
        """The runs asked for, by name; raises ConfigError, or UserError for a name the experiment does not have."""
        variants = self.load().variants()
        chosen = [(name, config) for name, config in variants if self.run in (None, name)]
        if not chosen:
            names = ", ".join(name for name, _ in variants)
            raise UserError(f"{self.experiment}: no run {self.run!r}; there are: {names}")
        return chosen


def run_name() -> str:
    """How a flow run is called: by flow, experiment, run and changed keys, in at most 120 characters."""
    stage = str(flow_run.flow_name).removeprefix("dflash-")
    config = flow_run.parameters["config"]
    asked = config if isinstance(config, dict) else config.model_dump()
    lists = [word for key in ("overrides", "grid") for word in asked.get(key) or ()]
    words = [stage, Path(asked["experiment"]).stem, *([asked["run"]] if asked.get("run") else []), *lists]
    name = without_secrets(" ".join(words))
    return name if len(name) <= LONGEST_NAME else name[: LONGEST_NAME - 3] + "..."


class Progress:
    """Logs `done` of `total` at most every `every_s` seconds, and so nothing for short work."""

    def __init__(self, what: str, every_s: float = 5.0) -> None:
        self.what, self.every_s, self.last = what, every_s, time.monotonic()

    def __call__(self, done: int, total: int | None = None) -> None:
        now = time.monotonic()
        if now - self.last >= self.every_s:
            self.last = now
            share = f" of {total} ({done / total:.0%})" if total else ""
            log.info("%s: %d%s", self.what, done, share)


@task(name="regenerate", cache_policy=NO_CACHE)
def regenerate(config: ExperimentConfig) -> dict[str, Any]:
    """Answers of the target for the prompts of the experiment; adopts finished ones, goes on with unfinished ones."""
    from dflash_core.experiment_regenerate import regenerate as answer
    from dflash_core.progress import AnswerLogProgress

    with key_from_block(config.regenerate.api_key_env):
        return log_answers(answer(config, AnswerLogProgress(every_s=5.0)))


def log_answers(answers: dict[str, Any]) -> dict[str, Any]:
    """Say in one line what a regeneration has come to; returns what it was given."""
    log.info(
        "answers: %d rows (%d cut by the limit), %d failed, %d cannot be asked%s", answers["num_answered"], answers["num_cut"],
        answers["num_failed"], answers["num_skipped"], " (unchanged, used again)" if answers["reused"] else "",
    )  # fmt: skip
    return answers


@task(name="prepare", cache_policy=NO_CACHE)
def prepare(config: ExperimentConfig) -> dict[str, Any]:
    """Conversations to a dataset folder; adopts an unchanged one."""
    from dflash_core import experiment
    from dflash_core.progress import ProgressLog

    dataset = experiment.prepare(config, progress=ProgressLog(every_s=5.0))
    log.info(
        "dataset %s: %d sequences, %d tokens, %d rejected%s", config.data.name, dataset["num_sequences"], dataset["num_tokens"],
        dataset["num_rejected"], " (unchanged, used again)" if dataset.get("reused") else "",
    )  # fmt: skip
    for line in experiment.describe_dataset(config):
        log.info("%s", line)
    return dataset


@task(name="plan", cache_policy=NO_CACHE)
def plan(config: ExperimentConfig) -> dict[str, Any]:
    """Bucket boundaries and the statistics of the orders."""
    from dflash_core import experiment

    result = experiment.plan(config)
    log.info("bucket edges %s, padding efficiency %.3f", list(result["edges"]), result["padding_efficiency"])
    return result


@task(name="train", task_run_name="train {run_name}", cache_policy=NO_CACHE)
def train(config: ExperimentConfig, run_name: str) -> dict[str, Any]:
    """Train one run in a child process, resume it, or adopt it if it is complete.

    Raises:
        DFlashError: what the child's exit code stands for. StoppedBySignal: a signal reached this flow and the child
        saved its state; under a deployment Prefect's own signal is passed on instead, so that it sees a cancellation.
    """
    from dflash_core import experiment

    by_deployment = deployment.id is not None  # asked now, for it asks the server, which may be gone when a signal comes
    run_dir = experiment.create_run(config, run_name)
    if experiment.run_state(run_dir) != "completed":
        log_file = run_dir / "logs" / "train.log"
        with node_lock(experiment.workspace() / "locks", f"run {run_dir.name}") as lock:
            if experiment.run_state(run_dir) != "completed":  # somebody else may have trained it while we waited
                log.info("train %s: all output in %s", run_name, log_file)
                _train_child(run_dir, log_file, lock, by_deployment)
                return {"run": run_name, "run_dir": str(run_dir), "adopted": False}
    log.info("train %s: complete already, used again (%s)", run_name, run_dir)
    return {"run": run_name, "run_dir": str(run_dir), "adopted": True}


def _train_child(run_dir: Path, log_file: Path, lock: int, by_deployment: bool) -> None:
    from dflash_core import experiment

    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}  # lines arrive when they are written
    relay = Relay(logging.getLogger("flows.train"))
    before = experiment.run_attempt(run_dir)

    def saved_its_state() -> bool:
        """Whether this launch, and not an earlier one, was stopped in good order."""
        return experiment.run_state(run_dir) == "stopped" and experiment.run_attempt(run_dir) > before

    try:
        code = launch(experiment.train_command(run_dir), log_file=log_file, env=environment, on_line=relay, keep_open=(lock,))
        relay.finish()
    except (KeyboardInterrupt, TerminationSignal):
        if not by_deployment and saved_its_state():
            raise StoppedBySignal(f"training was stopped by a signal and its state saved in {run_dir}; {AGAIN}") from None
        raise
    if code != 0 and saved_its_state():  # torchrun does not pass its ranks' exit codes on
        raise StoppedBySignal(f"training was stopped by a signal and its state saved in {run_dir}; {AGAIN}")
    raise_for_exit(code, log_file)


def trained(request: Request) -> dict[str, str]:
    """Run folders of the runs asked for, by name; raises UserError if one is not trained to its end."""
    from dflash_core import experiment

    run_dirs = {}
    for name, config in request.variants():
        run_dir = experiment.create_run(config, name)
        if (state := experiment.run_state(run_dir)) != "completed":
            raise UserError(
                f"run {name!r} is not trained (state: {state}); run: python -m flows.train {request.experiment} --run {name}"
            )
        run_dirs[name] = str(run_dir)
    return run_dirs


@task(name="evaluate", task_run_name="evaluate {run_name}", cache_policy=NO_CACHE)
def evaluate(run_name: str, run_dir: str) -> dict[str, Any]:
    """Acceptance length of a run's drafter on held-out prompts."""
    from dflash_core import experiment

    result = experiment.evaluate_run(Path(run_dir), progress=Progress(f"evaluate {run_name}: prompts"))
    length, before = _number(result["acceptance_length"]), _number(result.get("acceptance_length_untrained"))
    counts = f"{result['num_prompts']} prompts (untrained {before}), lossless: {_words(result.get('lossless'))}"
    log.info("evaluate %s: acceptance length %s on %s", run_name, length, counts)
    return result


@task(name="analyze", cache_policy=NO_CACHE)
def analyze(config: ExperimentConfig, run_dirs: list[str]) -> dict[str, Any]:
    """Compare runs; writes the report, and publishes its table and its text as a Prefect artifact."""
    from dflash_core import experiment

    result = experiment.analyze(config, [Path(run_dir) for run_dir in run_dirs])
    report = f"Report, on the machine of this flow run: `{result['report_html']}`"
    text = told(Path(result["report_md"]).read_text(encoding="utf-8"))
    markdown = f"# {config.name}\n\n{markdown_table(result['table'])}\n\n{report}\n\n{text}"
    key = "".join(letter if letter.isalnum() else "-" for letter in config.name.lower())
    identifier = create_markdown_artifact(
        markdown, key=f"comparison-{key}", description=f"Comparison of the runs of {config.name}"
    )
    log.info("comparison table: %s/artifacts/artifact/%s", PREFECT_UI_URL.value(), identifier)
    return result


def told(report: str) -> str:
    """The sections of report.md without its title, as many as a page and Prefect's database bear."""
    kept: list[str] = []
    length = 0
    for section in re.split(r"(?m)^(?=## )", report.partition("\n")[2]):
        length += len(section)
        if length > LONGEST_TEXT:
            return "".join(kept) + "(The rest is in the report.)\n"
        kept.append(section)
    return "".join(kept)


def markdown_table(rows: list[dict[str, Any]]) -> str:
    """Rows as a markdown table; the columns are the first row's keys, or its lines where a page cuts off so many columns."""
    if not rows:
        return "(no rows)"
    lines = [list(rows[0]), *([cell(row.get(key)) for key in rows[0]] for row in rows)]
    if len(lines[0]) > WIDEST and len(lines) <= WIDEST:
        lines = [list(line) for line in zip(*lines, strict=True)]
    lines.insert(1, ["---"] * len(lines[0]))
    return "\n".join(f"| {' | '.join(text.replace('|', '/') for text in line)} |" for line in lines)


def cell(value: Any) -> str:
    """A value as the tables show it."""
    if isinstance(value, bool) or value is None:
        return _words(value)
    return _number(value) if isinstance(value, float) else str(value)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _words(value: bool | None) -> str:
    return "-" if value is None else "yes" if value else "NO"
