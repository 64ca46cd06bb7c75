"""The composition root's part for answers: prompts of any corpus become rows that the experiment's target has answered.

A server does it (`regenerate.base_url`), or for small targets this process. Either way what is finished lies in a log and the
job can be ended at any moment and started again; the folder `answers/<data.name>` of the workspace appears as a whole.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash_core.config import RegenerateConfig
from dflash_core.data import expand_files
from dflash_core.data.files import TakenFile, take_files
from dflash_core.data.regenerate_folder import MANIFEST, THINKING, is_whole, read_answers, take_over, write_answers
from dflash_core.data.regenerate_inputs import InputRow, read_inputs
from dflash_core.data.regenerate_log import AnswerLog
from dflash_core.data.regenerate_tally import Tally
from dflash_core.data.replace_folder import folder_lock, replaced_folder
from dflash_core.data.rows import parse_row
from dflash_core.data.template import ChatEncoder, RewrittenHistoryError
from dflash_core.errors import ConfigError, DataError
from dflash_core.experiment_data import target_folder, workspace
from dflash_core.experiment_file import ExperimentConfig
from dflash_core.provenance import digest_json, digest_weights, package_versions

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

log = logging.getLogger(__name__)
SCHEMA_VERSION = 1
Progress = Callable[[int, int], None]


def answers_folder(config: ExperimentConfig) -> Path:
    """Where the experiment's answers are, or will be; `data.files` takes `part-*.jsonl` in it."""
    return workspace() / "answers" / config.data.name


def template_variables(config: ExperimentConfig) -> dict[str, bool | int | str]:
    """What the chat template is given: the experiment's variables, and the thinking mode.

    Raises:
        ConfigError: the two contradict each other.
    """
    variables, thinking = dict(config.data.template_variables), config.regenerate.thinking
    if thinking is None:
        return variables
    if variables.get(THINKING, thinking) != thinking:
        raise ConfigError(
            f"regenerate.thinking: {thinking}, but data.template_variables has {THINKING}: {variables[THINKING]};"
            " the drafter would be trained in another mode than its answers were made in"
        )
    return {**variables, THINKING: thinking}


def check_regenerate(config: ExperimentConfig) -> dict[str, Any]:
    """Check what can be checked before anything is asked: files, address, key, target, mode.

    Raises:
        ConfigError, DataError: the first thing that is wrong.
    """
    from dflash_core.data import load_tokenizer
    from dflash_core.data.regenerate_client import check_base_url

    regenerate = config.regenerate
    if not regenerate.files:
        raise ConfigError(f"experiment {config.name}: regenerate.files names no file")
    files = [file.url for file in expand_files(regenerate.files)]
    variables = template_variables(config)
    _api_key(regenerate)
    load_tokenizer(target_folder(config))
    server = None if regenerate.base_url is None else check_base_url(regenerate.base_url)
    return {"experiment": config.name, "files": files, "server": server, "template_variables": variables}


def _api_key(regenerate: RegenerateConfig) -> str | None:
    name = regenerate.api_key_env
    if name is None:
        return None
    key = os.environ.get(name)
    if not key:
        raise ConfigError(f"regenerate.api_key_env: the environment variable {name} is not set")
    if not key.isascii() or not key.isprintable() or " " in key:
        raise ConfigError(f"regenerate.api_key_env: what {name} holds cannot be sent as a key (spaces, line ends, other letters)")
    return key


@dataclass(frozen=True)
class _Job:
    """What is asked, of whom, and what tells this job from others."""

    config: ExperimentConfig
    files: list[TakenFile]
    variables: dict[str, bool | int | str]
    tokenizer: PreTrainedTokenizerFast
    encoder: ChatEncoder
    digest: str

    @classmethod
    def of(cls, config: ExperimentConfig) -> _Job:
        """What a configuration asks for, its tokenizer and template loaded; raises ConfigError or DataError."""
        from dflash_core.data import load_tokenizer

        check_regenerate(config)
        regenerate, variables = config.regenerate, template_variables(config)
        files, _ = take_files(expand_files(regenerate.files), {})
        tokenizer = load_tokenizer(target_folder(config))
        encoder = ChatEncoder(tokenizer, template_variables=variables)
        identity = {
            "schema_version": SCHEMA_VERSION,
            "files": [(file.url, file.identity) for file in files],
            "columns": dict(config.data.columns),
            "template_variables": variables,
            "target": config.target.path,
            "model": regenerate.model,
            "by_server": regenerate.base_url is not None,
            "max_new_tokens": regenerate.max_new_tokens,
            "temperature": regenerate.temperature,
        }
        if regenerate.base_url is None:
            identity["weights"] = [digest_weights(target_folder(config)), config.target.dtype]
        return cls(config, files, variables, tokenizer, encoder, digest_json(identity))

    @property
    def log_path(self) -> Path:
        folder = answers_folder(self.config)
        return folder.with_name(f".{folder.name}.{self.digest[:12]}.log")

    def check_row(self, row: dict[str, Any]) -> None:
        """Raise BadRow for a row that data preparation would not take.

        A template that shows earlier turns otherwise is no fault of the answer: `data.rewritten_history` decides then.
        """
        with suppress(RewrittenHistoryError):
            self.encoder.render(
                parse_row(row, source_file=row["file"], row=row["row"], default_id=row["id"], default_source=row["source"])
            )

    def facts(self, made_by: Mapping[str, Any]) -> dict[str, Any]:
        """What the manifest says besides counts."""
        regenerate = self.config.regenerate
        thinking = self.variables.get(THINKING)
        return {
            "name": self.config.data.name,
            "experiment": self.config.name,
            "digest": self.digest,
            "files": [{"path": file.url, "identity": file.identity} for file in self.files],
            "target": self.config.target.path,
            "made_by": dict(made_by),
            "sampling": {"temperature": regenerate.temperature, "max_new_tokens": regenerate.max_new_tokens},
            "thinking": thinking if isinstance(thinking, bool) else None,
            "template_variables": self.variables,
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "versions": {**package_versions(), "httpx2": metadata.version("httpx2")},
        }


def regenerate(config: ExperimentConfig, progress: Progress | None = None) -> dict[str, Any]:
    """Answer the prompts of `regenerate.files` anew, or keep the answers that are there if they are the same job's.

    Rows that failed for a passing reason are asked again when a finished job is called again.

    Args:
        progress: called with the rows answered and failed in this call.

    Returns:
        The manifest, with `path`, and `reused` where nothing was asked.

    Raises:
        ConfigError: a key is wrong; the server refuses name or key.
        DataError: a file cannot be read, or no row was answered.
        ServerError: the server is gone or answers nothing. What is done is kept.
    """
    job, folder = _Job.of(config), answers_folder(config)
    if folder.is_symlink():
        folder = folder.resolve()
    with folder_lock(folder):
        if folder.exists() and (not folder.is_dir() or (any(folder.iterdir()) and read_answers(folder) is None)):
            raise DataError(f"{folder}: exists and holds no answers; move it away")
        finished = _finished(folder, job)
        if finished is not None and not finished["num_passing"]:
            job.log_path.unlink(missing_ok=True)
            return {**finished, "path": str(folder), "reused": True}
        try:
            manifest = _answered(job, folder, finished, progress)
        except KeyboardInterrupt:
            log.warning("interrupted; what is answered is kept in %s: run the same command again to go on", job.log_path)
            raise
    log.info(
        "%s: %d rows answered, %d failed, %d cannot be asked", folder, manifest["num_answered"], manifest["num_failed"],
        manifest["num_skipped"],
    )  # fmt: skip
    return {**manifest, "path": str(folder), "reused": False}


def _finished(folder: Path, job: _Job) -> dict[str, Any] | None:
    manifest = read_answers(folder)
    if manifest is None or manifest.get("digest") != job.digest:
        return None
    if not is_whole(folder, manifest):
        log.warning("%s: its parts are not those of %s; it is made anew", folder, MANIFEST)
        return None
    return manifest


def _answered(job: _Job, folder: Path, finished: dict[str, Any] | None, progress: Progress | None) -> dict[str, Any]:
    """Answer what is not answered yet, and write the folder."""
    by_server = job.config.regenerate.base_url is not None
    made_by = _by_server(job, finished, progress) if by_server else _in_process(job, finished, progress)
    facts = job.facts(made_by)
    with _open_log(job, made_by) as answers, replaced_folder(folder) as building:
        manifest = write_answers(building, answers, facts)
    job.log_path.unlink()
    return manifest


def _open_log(job: _Job, made_by: Mapping[str, Any], finished: dict[str, Any] | None = None) -> AnswerLog:
    """The job's log; where there is none it begins with what a finished folder has."""
    path, made_for = job.log_path, {"digest": job.digest, "model": made_by["model"]}
    if finished is not None and not path.exists():
        aside = path.with_suffix(".taking")  # whole, or not there
        aside.unlink(missing_ok=True)
        with AnswerLog(aside, made_for) as taken:
            take_over(answers_folder(job.config), finished, taken)
        aside.replace(path)
    return AnswerLog(path, made_for)


def _rows(job: _Job, answers: AnswerLog) -> Iterator[InputRow]:
    """The rows that are not done yet."""
    if len(answers.done):
        log.info("%s: %d rows are done already", answers_folder(job.config), len(answers.done))
    return read_inputs(job.files, {str(ours): theirs for ours, theirs in job.config.data.columns.items()}, answers.done)


def _by_server(job: _Job, finished: dict[str, Any] | None, progress: Progress | None) -> dict[str, Any]:
    return asyncio.run(_ask_server(job, finished, progress))


async def _ask_server(job: _Job, finished: dict[str, Any] | None, progress: Progress | None) -> dict[str, Any]:
    from dflash_core.data.regenerate_client import AnswerClient, RequestSettings
    from dflash_core.data.regenerate_server import answer_by_server

    regenerate = job.config.regenerate
    settings = RequestSettings(
        regenerate.max_new_tokens, regenerate.temperature, job.variables, regenerate.retries, regenerate.timeout_s,
        regenerate.concurrency,
    )  # fmt: skip
    async with AnswerClient(str(regenerate.base_url), regenerate.model, _api_key(regenerate), settings) as client:
        listed = await client.find_model()
        made_by = {"kind": "server", "base_url": client.base_url, "model": client.model, "listed": listed}
        with _open_log(job, made_by, finished) as answers:
            await answer_by_server(_rows(job, answers), client, regenerate.concurrency, Tally(answers, job.check_row, progress))
        return {**made_by, "retried": dict(client.counts.retried)}


def _in_process(job: _Job, finished: dict[str, Any] | None, progress: Progress | None) -> dict[str, Any]:
    import torch

    from dflash_core.data.regenerate_local import answer_here
    from dflash_core.evaluation.answers import answer_many
    from dflash_core.model.target import FrozenTarget
    from dflash_core.training.devices import device_kind

    config, settings = job.config, job.config.regenerate
    folder, device = target_folder(config), device_kind(config.topology)
    torch.set_num_threads(config.topology.threads_per_device)
    target = FrozenTarget(folder, (0,), config.target.dtype, config.target.attn_implementation, device)
    made_by = {
        "kind": "process",
        "model": config.target.path,
        "weights": digest_weights(folder),
        "dtype": config.target.dtype,
        "device": device,
    }
    positions = getattr(target.model.config.get_text_config(), "max_position_embeddings", None)
    longest = None if positions is None else positions - settings.max_new_tokens
    if longest is not None and longest < 1:
        raise ConfigError(
            f"regenerate.max_new_tokens: {settings.max_new_tokens} do not fit into the target's {positions} positions"
        )
    with _open_log(job, made_by, finished) as answers:
        answer_here(
            _rows(job, answers),
            job.tokenizer,
            job.encoder,
            lambda prompts, seeds: answer_many(
                target,
                prompts,
                settings.max_new_tokens,
                temperature=settings.temperature,
                seeds=seeds,
                batch_prompts=settings.concurrency,
            ),
            target.shape.eos_token_ids,
            longest,
            settings.concurrency,
            Tally(answers, job.check_row, progress),
        )
    return made_by
