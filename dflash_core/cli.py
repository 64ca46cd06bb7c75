"""The `dflash` command. Thin: each command reads its input and calls one function of `dflash_core.experiment`.

Exit codes: 0 done, 2 the user's mistake, 3 training failed, 4 stopped by a signal with a checkpoint saved, 130
interrupted. Every error is one line on standard error; `--debug` before the command shows the traceback.
"""

from __future__ import annotations

import copy
import json
import logging
import os
import signal
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from dflash_core import cli_registry
from dflash_core.errors import (
    EXIT_INTERRUPTED,
    EXIT_STOPPED_BY_SIGNAL,
    EXIT_TRAINING_FAILED,
    EXIT_USER_ERROR,
    ConfigError,
    DFlashError,
)
from dflash_core.redaction import without_secrets

app = typer.Typer(
    help="Trains DFlash drafters: regenerate, prepare, plan, simulate, create, train, watch, evaluate, export, analyze,"
    " registry.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(cli_registry.app, name="registry")
Experiment = Annotated[Path, typer.Argument(help="Experiment file (YAML)")]
Overrides = Annotated[list[str] | None, typer.Option("--set", help="Change a key of the experiment: a.b=value; may be repeated")]
RunName = Annotated[str | None, typer.Option("--run", help="Name of one run of the experiment")]


def _show(result: Any) -> None:
    typer.echo(json.dumps(result, indent=2, ensure_ascii=False))


def _draw(lines: list[str]) -> None:
    """For a reader, not for a program: beside the JSON on standard output."""
    for line in lines:
        typer.echo(line, err=True)


class _OneLine(logging.Formatter):
    """Leaves tracebacks out."""

    def format(self, record: logging.LogRecord) -> str:
        plain = copy.copy(record)
        plain.exc_info = plain.exc_text = None
        return super().format(plain)


def _log_to(*handlers: logging.Handler) -> None:
    logger = logging.getLogger("dflash_core")
    logger.setLevel(logging.INFO)
    for handler in handlers:
        full = isinstance(handler, logging.FileHandler) or "--debug" in sys.argv[1:2]
        kind = logging.Formatter if full else _OneLine
        handler.setFormatter(kind("%(asctime)s %(levelname)s %(message)s", datefmt="%H:%M:%S"))
        logger.addHandler(handler)


def _one_run(path: Path, overrides: list[str] | None, name: str | None) -> tuple[str, Any]:
    from dflash_core.experiment import load_experiment

    variants = dict(load_experiment(path, overrides or []).variants())
    if name is None and len(variants) == 1:
        return next(iter(variants.items()))
    if name not in variants:
        given = f"no run {name!r}" if name else "several runs"
        raise ConfigError(f"{path}: {given}; choose one with --run: {', '.join(variants)}")
    return name, variants[name]


@app.callback()
def _options(debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks")] = False) -> None:
    """Options that go before the command."""


@app.command()
def regenerate(experiment: Experiment, overrides: Overrides = None) -> None:
    """Have the target answer the prompts of regenerate.files anew, by a server or in this process; goes on where it was."""
    from dflash_core.experiment_file import load_experiment
    from dflash_core.experiment_regenerate import regenerate as answer
    from dflash_core.progress import AnswerLogProgress

    _log_to(logging.StreamHandler())
    _show(answer(load_experiment(experiment, overrides or []), AnswerLogProgress()))


@app.command()
def prepare(
    experiment: Experiment,
    overrides: Overrides = None,
    show: Annotated[int, typer.Option(min=0, help="Print this many sequences, with supervised tokens in colour")] = 0,
) -> None:
    """Turn conversations into a dataset folder."""
    from dflash_core import experiment as root
    from dflash_core.progress import prepare_progress

    _log_to(logging.StreamHandler())
    config = root.load_experiment(experiment, overrides or [])
    with prepare_progress() as progress:
        result = root.prepare(config, progress)
    _draw(root.describe_dataset(config))
    if show:
        for line in root.sample_lines(config, show, colour=sys.stdout.isatty() and "NO_COLOR" not in os.environ):
            typer.echo(line)
    _show(result)


@app.command()
def plan(experiment: Experiment, overrides: Overrides = None) -> None:
    """Show bucket boundaries, what other numbers of buckets would cost, and the statistics of every order."""
    from dflash_core import experiment as root
    from dflash_core.progress import prepare_progress

    config = root.load_experiment(experiment, overrides or [])
    with prepare_progress() as progress:
        root.prepare(config, progress)
    result = root.plan(config)
    _draw(root.describe_dataset(config))
    _draw(root.describe_bucket_choice(result))
    _show(result)


@app.command()
def simulate(
    experiment: Experiment,
    measured: Annotated[Path | None, typer.Option(help="Run folder whose measured costs are used instead of a table")] = None,
    gpus: Annotated[str, typer.Option(help="GPUs: a number, a list 4,8 or a range 1..1024; default 8")] = "",
    cores: Annotated[int | None, typer.Option(help="Cores of a machine without GPUs (needs --measured)")] = None,
    card: Annotated[str, typer.Option(help="H200, H100, B200, A100-80, L40S or RTX4090")] = "H200",
    target_model: Annotated[
        str | None, typer.Option(help="qwen3-4b, -8b, -14b, -32b or gemma3-27b, for the experiment's")
    ] = None,
    mean_length: Annotated[float | None, typer.Option(help="Mean tokens of lognormal lengths, for the dataset's")] = None,
    length_sigma: Annotated[float, typer.Option(help="Standard deviation of the logarithm of these lengths")] = 0.8,
    lengths: Annotated[Path | None, typer.Option(help="CSV with length,count to draw lengths from, for the dataset's")] = None,
    supervised_share: Annotated[float, typer.Option(help="Supervised share of each drawn sequence")] = 0.6,
    peak_share: Annotated[float, typer.Option(help="Share of the card's peak that is reached (an assumption)")] = 0.4,
    steps: Annotated[int, typer.Option(min=1, max=1000, help="Steps that are counted")] = 16,
    run: RunName = None,
    overrides: Overrides = None,
) -> None:
    """Predict throughput and waits of every topology, say what bounds it, and name the best one."""
    from dflash_core.experiment_simulation import simulate_experiment
    from dflash_core.simulation import Assumptions, SimulationRequest, describe_simulation, parse_gpus

    request = SimulationRequest(
        measured=measured,
        gpus=parse_gpus(gpus or "8") if gpus or cores is None else (),
        cores=cores,
        card=card,
        target_model=target_model,
        mean_length=mean_length,
        length_sigma=length_sigma,
        lengths_file=lengths,
        supervised_share=supervised_share,
        steps=steps,
        assumptions=Assumptions(peak_share=peak_share),
    )
    _, config = _one_run(experiment, overrides, run)
    result = simulate_experiment(config, request)
    _show(result)
    sys.stdout.flush()
    _draw(describe_simulation(result))  # behind the JSON, which is long, so that on a terminal it is what one sees


@app.command()
def create(
    experiment: Experiment,
    run_dir: Annotated[Path | None, typer.Option(help="Run folder; default: named by experiment, run and content")] = None,
    run: RunName = None,
    overrides: Overrides = None,
) -> None:
    """Prepare the dataset and make the folder of a run without training it, for torchrun on several nodes; prints the folder."""
    from dflash_core import experiment as root
    from dflash_core.progress import prepare_progress

    _log_to(logging.StreamHandler())
    name, config = _one_run(experiment, overrides, run)
    with prepare_progress() as progress:
        root.prepare(config, progress)
    typer.echo(root.create_run(config, name, run_dir))


@app.command()
def train(
    experiment: Experiment,
    run_dir: Annotated[Path | None, typer.Option(help="Run folder; a run that is in it is resumed")] = None,
    run: RunName = None,
    overrides: Overrides = None,
) -> None:
    """Train one run, or resume it. Under torchrun this process is one cell."""
    from dflash_core import experiment as root
    from dflash_core.progress import prepare_progress
    from dflash_core.training.run_folder import RunFolder

    name, config = _one_run(experiment, overrides, run)
    cell = os.environ.get("RANK")
    if cell is not None:
        from dflash_core.training.distributed import end_with_launcher

        end_with_launcher()
    if cell is None and config.topology.cells > 1:
        raise ConfigError(
            f"{experiment}: topology.cells is {config.topology.cells}; start them with python -m flows.train {experiment}"
        )
    if cell is None:
        with prepare_progress() as progress:
            root.prepare(config, progress)
        run_dir = root.create_run(config, name, run_dir)
    elif run_dir is None:
        raise ConfigError("under torchrun --run-dir is needed; dflash create makes the folder")
    log_file = RunFolder(run_dir).log_file(int(cell or 0))
    log_file.parent.mkdir(parents=True, exist_ok=True)
    _log_to(logging.StreamHandler(), logging.FileHandler(log_file))  # the file has tracebacks, the terminal only with --debug
    manifest = root.train_run(config, run_dir)
    if cell in (None, "0"):  # the others may come here before the first has written how the run ended
        typer.echo(f"{manifest['state']}: {manifest['num_steps']} steps, {run_dir}")


@app.command()
def evaluate(
    path: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="Run folder; with --draft an experiment file or a run folder")],
    checkpoint: Annotated[str, typer.Option(help="newest, best, or a step")] = "newest",
    draft: Annotated[Path | None, typer.Option(help="Draft folder (z-lab format) that is measured instead of a run's")] = None,
    prompts: Annotated[str | None, typer.Option(help="File with prompts, for the experiment's data.held_out")] = None,
    max_prompts: Annotated[int | None, typer.Option(min=1, help="Prompts decoded, for evaluate.max_prompts")] = None,
    out: Annotated[Path | None, typer.Option(help="With --draft: folder for evaluation.json and evaluation.jsonl")] = None,
    overrides: Overrides = None,
) -> None:
    """Measure acceptance length, losslessness and speed of a run's checkpoint, or of any draft folder, on held-out prompts."""
    from dflash_core.evaluation import describe_evaluation
    from dflash_core.experiment_evaluation import Chosen, evaluate_folder, evaluate_run
    from dflash_core.experiment_file import load_experiment

    _log_to(logging.StreamHandler())
    chosen = Chosen(checkpoint, prompts, max_prompts)
    if draft is not None:
        if checkpoint != "newest":
            raise ConfigError("--checkpoint chooses among those of a run; with --draft the folder is what is measured")
        config = load_experiment(path / "config.yaml" if path.is_dir() else path, overrides or [])
        result = evaluate_folder(config, draft, chosen=chosen, out=out)
    elif path.is_file():
        raise ConfigError(f"{path}: a file, not a run folder; an experiment file needs --draft FOLDER beside it")
    elif out is not None or overrides:
        raise ConfigError("--out and --set go with --draft; a run is evaluated as its config.yaml says, into its own folder")
    else:
        result = evaluate_run(path, chosen=chosen)
    _show(result)
    sys.stdout.flush()
    _draw(describe_evaluation(result))


@app.command()
def export(
    run_dir: Annotated[Path, typer.Argument(help="Run folder")],
    out: Annotated[Path | None, typer.Option(help="Folder to write; default: export/ in the run folder")] = None,
    form: Annotated[str, typer.Option("--format", help="zlab (vLLM, SGLang) or speculators (vLLM)")] = "zlab",
    checkpoint: Annotated[str, typer.Option(help="newest, best, or the number of a step")] = "newest",
    dtype: Annotated[str, typer.Option(help="Number format of the written weights: float32 or bfloat16")] = "float32",
    verify: Annotated[
        bool, typer.Option("--verify", help="Also run what was written and the checkpoint on the same blocks, and show how near")
    ] = False,
) -> None:
    """Write a checkpoint of a run for serving engines, with a model card."""
    from dflash_core import experiment as root

    _log_to(logging.StreamHandler())
    result = root.export_run(run_dir, out, form=form, checkpoint=checkpoint, dtype=dtype, verify=verify)
    if verify:
        _show(result)
    else:
        typer.echo(result["path"])


@app.command()
def analyze(
    run_dirs: Annotated[list[Path], typer.Argument(help="Run folders to compare; the first is the one compared with")],
    out: Annotated[Path | None, typer.Option(help="Folder of the report; default: reports/RUN below DFLASH_HOME")] = None,
    allow_different: Annotated[
        bool, typer.Option("--allow-different", help="Compare runs of other data, target, step size or loss, too")
    ] = False,
) -> None:
    """Compare runs: Parquet tables and a self-contained report.html."""
    from dflash_core.analysis import analyze_runs
    from dflash_core.config import AnalyzeConfig
    from dflash_core.experiment import workspace

    config = AnalyzeConfig(allow_different=allow_different)
    manifest = analyze_runs(run_dirs, out or workspace() / "reports" / run_dirs[0].absolute().name, config)
    for line in manifest["summary"]:
        typer.echo(line)
    typer.echo(manifest["paths"]["report_html"])


@app.command()
def watch(
    run_dir: Annotated[Path, typer.Argument(help="Run folder")],
    every: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Show the run once, as it is now")] = False,
    report: Annotated[bool, typer.Option("--report", help="Write the report of the run as it is now, and end")] = False,
) -> None:
    """Show a run in the terminal while it lives: progress, loss, queues, what it waits for, events and warnings."""
    if report:
        analyze([run_dir])
        return
    from dflash_core.metrics.watch import watch as show_run

    show_run(run_dir, every, once)


@app.command()
def doctor(
    experiment: Experiment,
    overrides: Overrides = None,
    gpus: Annotated[int | None, typer.Option(help="Check the topology against this many GPUs instead of this machine's")] = None,
) -> None:
    """Check an experiment file, its topology, its target, and that its data files exist, before anything runs."""
    from dflash_core import experiment as root
    from dflash_core.experiment_doctor import describe_check

    found = root.check(root.load_experiment(experiment, overrides or []), gpus)
    _show(found)
    sys.stdout.flush()
    _draw(describe_check(found))


def main() -> None:
    """Run the command line and end with the exit code of what happened."""
    debug = "--debug" in sys.argv[1:2]
    try:
        # typer makes a KeyboardInterrupt an exit code of its own, which without standalone mode it only returns.
        if app(standalone_mode=False) == EXIT_INTERRUPTED:
            raise KeyboardInterrupt
    except DFlashError as error:
        _fail(error, str(error), error.exit_code, debug)
    except KeyboardInterrupt as error:
        _fail(error, "interrupted", EXIT_INTERRUPTED, debug)
    except Exception as error:  # noqa: BLE001 - top of the program
        if hasattr(error, "exit_code") and hasattr(error, "format_message"):  # a usage error of the command line itself
            _fail(error, error.format_message(), EXIT_USER_ERROR, debug)
        _fail(error, f"unexpected {type(error).__name__}: {error} (dflash --debug shows where)", EXIT_TRAINING_FAILED, debug)


def _fail(error: BaseException, text: str, code: int, debug: bool) -> None:
    if code == EXIT_STOPPED_BY_SIGNAL:  # a further signal must not turn a saved run into a killed one on its last inch
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
    if debug:
        raise error
    print(f"error: {without_secrets(' '.join(text.split()))}", file=sys.stderr)  # noqa: T201 - the program's own last line
    sys.exit(code)
