"""The composition root's part for answers: prompts of any corpus become rows that the experiment's target has answered.

A server does it (`regenerate.base_url`), or for small targets this process. Either way what is finished lies in a log and the
job can be ended at any moment and started again; the folder `answers/<data.name>` of the workspace appears as a whole.
The same in shards, by several processes or nodes: `dflash_core.experiment_regenerate_shards`.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from dflash_core.config import RegenerateConfig
from dflash_core.data import expand_files
from dflash_core.data.files import TakenFile, take_files
from dflash_core.data.regenerate_folder import MANIFEST, THINKING, is_whole, read_answers, take_over, write_answers
from dflash_core.data.regenerate_inputs import InputRow, read_inputs
from dflash_core.data.regenerate_log import AnswerLog
from dflash_core.data.regenerate_shards import shard_logs, take_in_shards
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

    from dflash_core.data.regenerate_client import AnswerClient

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
class AnswerJob:
    """What is asked, of whom, and what tells this job from others: `digest`, and in the log the name of who answers.

    `names` are how the files were given, where they are read under other paths.
    """

    config: ExperimentConfig
    files: list[TakenFile]
    variables: dict[str, bool | int | str]
    tokenizer: PreTrainedTokenizerFast
    encoder: ChatEncoder
    digest: str
    target_folder: Path
    names: Sequence[str] | None = None

    @classmethod
    def of(cls, config: ExperimentConfig) -> AnswerJob:
        """What a configuration asks for, its tokenizer and template loaded; raises ConfigError or DataError."""
        from dflash_core.data import load_tokenizer

        check_regenerate(config)
        regenerate, variables = config.regenerate, template_variables(config)
        files, _ = take_files(expand_files(regenerate.files), {})
        folder = target_folder(config)
        tokenizer = load_tokenizer(folder)
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
            identity["weights"] = [digest_weights(folder), config.target.dtype]
        return cls(config, files, variables, tokenizer, encoder, digest_json(identity), folder)

    @property
    def log_path(self) -> Path:
        folder = answers_folder(self.config)
        return folder.with_name(f".{folder.name}.{self.digest[:12]}.log")

    def log_header(self, made_by: Mapping[str, Any]) -> dict[str, Any]:
        """What a log of this job must say at its head."""
        return {"digest": self.digest, "model": made_by["model"]}

    def rows(self, done: NDArray[np.int64], is_ours: Callable[[int], bool] = lambda key: True) -> Iterator[InputRow]:
        """The rows of the input but for those that are done, and those that others answer."""
        columns = {str(ours): theirs for ours, theirs in self.config.data.columns.items()}
        return read_inputs(self.files, columns, done, is_ours, self.names)

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
    job = AnswerJob.of(config)
    with locked_answers(job) as (folder, finished):
        if finished is not None and not finished["num_passing"]:
            forget_logs(job)
            return {**finished, "path": str(folder), "reused": True}
        try:
            made_by = answer(job, Share(lambda made_by: open_log(job, made_by, finished), progress=progress))
        except KeyboardInterrupt:
            log.warning("interrupted; what is answered is kept in %s: run the same command again to go on", job.log_path)
            raise
        with open_log(job, made_by) as answers:
            return write_folder(job, folder, answers, made_by)


@contextmanager
def locked_answers(job: AnswerJob) -> Iterator[tuple[Path, dict[str, Any] | None]]:
    """The folder that answers go to, locked, and its manifest if it is finished and this job's; raises DataError."""
    folder = answers_folder(job.config)
    if folder.is_symlink():
        folder = folder.resolve()
    with folder_lock(folder):
        if folder.exists() and (not folder.is_dir() or (any(folder.iterdir()) and read_answers(folder) is None)):
            raise DataError(f"{folder}: exists and holds no answers; move it away")
        yield folder, _finished(folder, job)


def write_folder(job: AnswerJob, folder: Path, answers: AnswerLog, made_by: Mapping[str, Any]) -> dict[str, Any]:
    """The finished folder out of the job's log, which goes; returns what `regenerate` does. To be called under the lock."""
    with replaced_folder(folder) as building:
        manifest = write_answers(building, answers, job.facts(made_by))
    forget_logs(job)
    log.info(
        "%s: %d rows answered, %d failed, %d cannot be asked", folder, manifest["num_answered"], manifest["num_failed"],
        manifest["num_skipped"],
    )  # fmt: skip
    return {**manifest, "path": str(folder), "reused": False}


def _finished(folder: Path, job: AnswerJob) -> dict[str, Any] | None:
    manifest = read_answers(folder)
    if manifest is None or manifest.get("digest") != job.digest:
        return None
    if not is_whole(folder, manifest):
        log.warning("%s: its parts are not those of %s; it is made anew", folder, MANIFEST)
        return None
    return manifest


def forget_logs(job: AnswerJob) -> None:
    """Delete what an unfinished job keeps, once it is finished."""
    for path in (*shard_logs(job.log_path), job.log_path):
        path.unlink(missing_ok=True)


def open_log(job: AnswerJob, made_by: Mapping[str, Any], finished: Mapping[str, Any] | None = None) -> AnswerLog:
    """The job's log with what shards have ended; where there is none it begins with what a finished folder has.

    To be called under the folder's lock.
    """
    path, header = job.log_path, job.log_header(made_by)
    if finished is not None and not path.exists():
        aside = path.with_suffix(".taking")  # whole, or not there
        aside.unlink(missing_ok=True)
        with AnswerLog(aside, header) as taken:
            take_over(answers_folder(job.config), finished, taken)
        aside.replace(path)
    answers = AnswerLog(path, header)
    try:
        take_in_shards(answers, header)
    except BaseException:
        answers.close()
        raise
    return answers


@dataclass(frozen=True)
class Share:
    """What one process answers of a job: all of it, or a shard.

    Attributes:
        open_log: opens the log that is written to, once it is known who answers.
        done: int64 [N], ascending: rows that are not asked again, beside those that this log has.
        is_ours: whether a row, by its key, is in the share.
        concurrency: requests under way; None: as many as the configuration says.
        device: where this process decodes, if it does; None: as the topology says.
        still_wanted: called now and then; what it raises ends the work.
    """

    open_log: Callable[[Mapping[str, Any]], AnswerLog]
    done: NDArray[np.int64] | None = None
    is_ours: Callable[[int], bool] = lambda key: True
    concurrency: int | None = None
    device: str | None = None
    progress: Progress | None = None
    still_wanted: Callable[[], None] | None = None

    def rows(self, job: AnswerJob, answers: AnswerLog) -> Iterator[InputRow]:
        """The rows that are still to be asked."""
        done = answers.done if self.done is None else np.union1d(answers.done, self.done)
        if len(done):
            log.info("%s: %d rows are done already", answers.path, len(done))
        return job.rows(done, self.is_ours)


def answer(job: AnswerJob, share: Share) -> dict[str, Any]:
    """Ask all rows of a share that are not done; returns who answered, as it stands in the manifest."""
    if job.config.regenerate.base_url is None:
        return _answer_here(job, share)
    return asyncio.run(_ask_server(job, share))


def who_answers(job: AnswerJob) -> dict[str, Any]:
    """Who would answer: the server says which model it has, of a target here the weights do."""
    if job.config.regenerate.base_url is None:
        return _this_process(job)

    async def find_model() -> dict[str, Any]:
        async with _client(job, None) as client:
            return _that_server(client, await client.find_model())

    return asyncio.run(find_model())


def _client(job: AnswerJob, concurrency: int | None) -> AnswerClient:
    from dflash_core.data.regenerate_client import AnswerClient, RequestSettings

    regenerate = job.config.regenerate
    settings = RequestSettings(
        regenerate.max_new_tokens, regenerate.temperature, job.variables, regenerate.retries, regenerate.timeout_s,
        concurrency or regenerate.concurrency,
    )  # fmt: skip
    return AnswerClient(str(regenerate.base_url), regenerate.model, _api_key(regenerate), settings)


def _that_server(client: AnswerClient, listed: Mapping[str, Any]) -> dict[str, Any]:
    return {"kind": "server", "base_url": client.base_url, "model": client.model, "listed": dict(listed)}


async def _ask_server(job: AnswerJob, share: Share) -> dict[str, Any]:
    from dflash_core.data.regenerate_server import answer_by_server

    async with _client(job, share.concurrency) as client:
        made_by = _that_server(client, await client.find_model())
        with share.open_log(made_by) as answers:
            tally = Tally(answers, job.check_row, share.progress)
            concurrency = share.concurrency or job.config.regenerate.concurrency
            await answer_by_server(share.rows(job, answers), client, concurrency, tally, share.still_wanted)
        return {**made_by, "retried": dict(client.counts.retried)}


def _this_process(job: AnswerJob) -> dict[str, Any]:
    from dflash_core.training.devices import device_kind

    target = job.config.target
    weights, device = digest_weights(job.target_folder), device_kind(job.config.topology)
    return {"kind": "process", "model": target.path, "weights": weights, "dtype": target.dtype, "device": device}


def _answer_here(job: AnswerJob, share: Share) -> dict[str, Any]:
    import torch

    from dflash_core.data.regenerate_local import answer_here
    from dflash_core.evaluation.answers import answer_many
    from dflash_core.model.target import FrozenTarget

    config, settings = job.config, job.config.regenerate
    made_by = _this_process(job)
    torch.set_num_threads(config.topology.threads_per_device)
    device = share.device or made_by["device"]
    target = FrozenTarget(job.target_folder, (0,), config.target.dtype, config.target.attn_implementation, device)

    def decode(prompts: Sequence[tuple[int, ...]], seeds: Sequence[int]) -> list[tuple[int, ...]]:
        if share.still_wanted is not None:
            share.still_wanted()
        at_once = settings.concurrency
        return answer_many(
            target, prompts, settings.max_new_tokens, temperature=settings.temperature, seeds=seeds, batch_prompts=at_once
        )

    longest, ends = _longest_prompt(target.model.config, settings.max_new_tokens), target.shape.eos_token_ids
    with share.open_log(made_by) as answers:
        tally = Tally(answers, job.check_row, share.progress)
        rows = share.rows(job, answers)
        answer_here(rows, job.tokenizer, job.encoder, decode, ends, longest, settings.concurrency, tally)
    return made_by


def _longest_prompt(config: Any, max_new_tokens: int) -> int | None:
    """Tokens of the longest prompt that leaves room for an answer; None where the target has no limit."""
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    if positions is None:
        return None
    if positions <= max_new_tokens:
        raise ConfigError(f"regenerate.max_new_tokens: {max_new_tokens} do not fit into the target's {positions} positions")
    return int(positions - max_new_tokens)
