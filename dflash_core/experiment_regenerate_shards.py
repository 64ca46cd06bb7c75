"""The composition root's part for answers in shards (see `dflash_core.data.regenerate_shards`).

`plan_answers` says what there is to do, `answer_shard` does a share of it on whatever node, and `put_together` writes the folder
that `dflash_core.experiment_regenerate.regenerate` would have written. A shard is a dictionary that JSON can hold.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dflash_core.data import expand_files, load_tokenizer
from dflash_core.data.files import FileChangedError, TakenFile, take_files
from dflash_core.data.regenerate_log import AnswerLog, read_done
from dflash_core.data.regenerate_shards import LeaseWatch, ShardProgress, kept_lease, lease_path, shard_log, shard_of
from dflash_core.data.replace_folder import shared_building
from dflash_core.data.sources import one_line
from dflash_core.data.template import ChatEncoder
from dflash_core.errors import ConfigError, DataError
from dflash_core.experiment_file import ExperimentConfig
from dflash_core.experiment_regenerate import (
    AnswerJob,
    Share,
    answer,
    locked_answers,
    open_log,
    template_variables,
    who_answers,
    write_folder,
)

log = logging.getLogger(__name__)
LOG_EVERY_S = 10.0


def plan_answers(config: ExperimentConfig, num_shards: int) -> list[dict[str, Any]]:
    """At most `num_shards` shares of about equal size of the rows; none if the answers are there already.

    Of a server all shards together have `regenerate.concurrency` requests under way, so there are no more shards than that. In
    this process's stead each shard loads the target, and decodes `regenerate.concurrency` prompts together.

    Raises:
        DFlashError: what `regenerate` would say before it asks.
    """
    job, by_server = AnswerJob.of(config), config.regenerate.base_url is not None
    with locked_answers(job) as (folder, finished):
        if finished is not None and not finished["num_passing"]:
            return []
        made_by = who_answers(job)
        with open_log(job, made_by, finished) as answers:
            log.info("%s: %d rows are done already", folder, len(answers.done))
    count = min(num_shards, config.regenerate.concurrency) if by_server else num_shards
    shared = {
        "config": _everywhere(config, job.files).model_dump(mode="json"),
        "target_folder": str(job.target_folder.absolute()),
        "files": [[file.url, file.identity] for file in job.files],
        "digest": job.digest,
        "model": made_by["model"],
        "device": made_by.get("device"),
        "folder": str(folder),
        "log": str(job.log_path),
        "num_shards": count,
    }
    shares = [None] * count if not by_server else _shared_out(config.regenerate.concurrency, count)
    return [{**shared, "number": number, "concurrency": share} for number, share in enumerate(shares)]


def _shared_out(total: int, count: int) -> list[int]:
    return [total // count + (number < total % count) for number in range(count)]


def _everywhere(config: ExperimentConfig, files: Sequence[TakenFile]) -> ExperimentConfig:
    """The configuration with absolute paths of the input: a shard may run in another folder than this process."""
    places = [file.url if "://" in file.url or "::" in file.url else Path(file.url).absolute().as_posix() for file in files]
    return config.model_copy(update={"regenerate": config.regenerate.model_copy(update={"files": tuple(places)})})


def answer_shard(shard: Mapping[str, Any]) -> dict[str, Any]:
    """Answer what is not answered of a shard; returns who did, as it stands in the manifest.

    Raises:
        DFlashError: as `regenerate`; a job that is not in shards has the folder; the flow has ended (FlowGoneError).
    """
    path, number = Path(shard["log"]), int(shard["number"])
    still_wanted = LeaseWatch(lease_path(path))
    try:
        with shared_building(Path(shard["folder"])):
            still_wanted()
            job = _job_of(shard)
            share = Share(
                open_log=lambda made_by: AnswerLog(shard_log(path, number), job.log_header(made_by)),
                done=read_done(path, {"digest": shard["digest"], "model": shard["model"]}),
                is_ours=lambda key: shard_of(key, shard["num_shards"]) == number,
                concurrency=shard["concurrency"],
                device=_device(shard["device"], number),
                still_wanted=still_wanted,
            )
            return answer(job, share)
    except FileChangedError as error:
        raise DataError(str(error)) from error  # which can be sent to another process
    except OSError as error:
        raise DataError(f"{error.filename or path}: {error.strerror or one_line(error)}") from error


def _job_of(shard: Mapping[str, Any]) -> AnswerJob:
    """The job that a shard belongs to; raises DataError where a file is another one on this node."""
    config = ExperimentConfig.model_validate(shard["config"])
    found, _ = take_files(expand_files(config.regenerate.files), {})
    if [file.identity for file in found] != [identity for _, identity in shard["files"]]:
        raise DataError(f"{_first_other(found, shard['files'])}: the file changed since the shards were planned; start again")
    folder, variables = Path(shard["target_folder"]), template_variables(config)
    tokenizer = load_tokenizer(folder)
    encoder, names = ChatEncoder(tokenizer, template_variables=variables), [url for url, _ in shard["files"]]
    return AnswerJob(config, found, variables, tokenizer, encoder, shard["digest"], folder, names)


def _first_other(found: Sequence[TakenFile], planned: Sequence[Sequence[str]]) -> str:
    identities = {file.identity for file in found}
    return next((url for url, identity in planned if identity not in identities), planned[0][0])


def _device(kind: str | None, number: int) -> str | None:
    """Where a shard that decodes itself does so: on the GPUs of a node in turn."""
    if kind != "cuda":
        return kind
    import torch

    if not torch.cuda.device_count():
        raise ConfigError("topology.device: cuda, but a shard was given a node or process without a GPU")
    return f"cuda:{number % torch.cuda.device_count()}"


@contextmanager
def running(shards: Sequence[Mapping[str, Any]]) -> Iterator[None]:
    """Let shards run while inside: they end by themselves soon after, also where the process that called this is killed."""
    path = Path(shards[0]["log"])
    progress = ShardProgress([shard_log(path, int(shard["number"])) for shard in shards], LOG_EVERY_S)
    with kept_lease(lease_path(path), progress):
        yield


def put_together(config: ExperimentConfig, made_by: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Write the folder from what all shards have ended; `made_by` are their results. Returns what `regenerate` returns.

    Raises:
        DataError: a row has not ended, or none was answered.
    """
    job = AnswerJob.of(config)
    with locked_answers(job) as (folder, _), open_log(job, made_by[0]) as answers:
        missing = next(job.rows(answers.ended), None)
        if missing is not None:
            raise DataError(f"{missing.file}: row {missing.row}: no shard has answered it; start again to go on")
        return write_folder(job, folder, answers, _all(made_by))


def _all(made_by: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Who answered: what all shards say, with the tries that any of them repeated."""
    retried: Counter[str] = Counter()
    for one in made_by:
        retried.update(one.get("retried", {}))
    return {**made_by[0], **({"retried": dict(retried)} if "retried" in made_by[0] else {})}
