"""A preparation in shards: processes on any nodes that share the folder make parts, and `prepare_dataset` then finds them.

A part is named by what it was made from, so it does not matter who makes it, when, or how often; the dataset is the one that
`prepare_dataset` makes alone. Files that are larger than a shard's share are made in stripes: each shard reads all of the
file, which is cheap, and tokenizes every n-th chunk.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dflash_core.config import DataConfig
from dflash_core.data.files import FileChangedError, TakenFile, done_parts
from dflash_core.data.prepare import PrepareJob
from dflash_core.data.progress import ProgressCounter
from dflash_core.data.replace_folder import building_folder, folder_lock, shared_building
from dflash_core.data.sources import one_line
from dflash_core.data.store import TOKENS
from dflash_core.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

UNKNOWN_BYTES = 64 * 2**20  # taken for the size of a file whose file system does not tell


@dataclass(frozen=True, slots=True)
class Stripe:
    """Every `num_stripes`-th part of a source file, from number `stripe` on; `key` says which content of the file is meant."""

    url: str
    key: str
    stripe: int = 0
    num_stripes: int = 1


def plan_shards(
    config: DataConfig, tokenizer: PreTrainedTokenizerFast, *, target: str, folder: Path, num_shards: int
) -> list[list[Stripe]]:
    """What each shard is to make, at most `num_shards` of about equal size; none if the parts or the whole dataset are there.

    Raises:
        DataError: as `prepare_dataset`.
    """
    job = PrepareJob.of(config, tokenizer, target, folder)
    try:
        if job.reusable() is not None:
            return []
        with folder_lock(job.folder):
            tokens = job.take_over(building_folder(job.folder))
            left = [file for file in job.files if done_parts(tokens, file) is None]
    except OSError as error:
        raise DataError(f"{error.filename or folder}: {error.strerror or one_line(error)}") from error
    return share_out([(_absolute(file), file.key, _size(file)) for file in left], num_shards)


def share_out(files: Sequence[tuple[str, str, int]], num_shards: int) -> list[list[Stripe]]:
    """Files (url, key, bytes) in shards of about equal size: files above a fair share in stripes, the largest pieces first.

    Deterministic. A shard that would be empty is left out.
    """
    fair = max(1, -(-sum(size for _, _, size in files) // num_shards))
    pieces: list[tuple[float, Stripe]] = []
    for url, key, size in files:
        count = min(num_shards, max(1, -(-size // fair)))
        pieces += [(size / count, Stripe(url, key, number, count)) for number in range(count)]
    pieces.sort(key=lambda piece: (-piece[0], piece[1].url, piece[1].stripe))
    shards: list[list[Stripe]] = [[] for _ in range(num_shards)]
    loads = [0.0] * num_shards
    for share, stripe in pieces:
        lightest = loads.index(min(loads))
        shards[lightest].append(stripe)
        loads[lightest] += max(share, 1.0)
    return [shard for shard in shards if shard]


def make_shard(
    config: DataConfig, tokenizer: PreTrainedTokenizerFast, *, target: str, folder: Path, stripes: Sequence[Stripe]
) -> dict[str, int]:
    """Make the parts of one shard, in this process alone; parts that are there stay.

    Rows that are wrong are kept with the parts; whether they are an error is decided where the parts are put together.

    Returns:
        `num_parts`, and `num_rows`, `num_rejected`, `num_tokens` of these.

    Raises:
        DataError: a file cannot be read, or is another one by now; a part cannot be written; a job that is not in shards is
            preparing the dataset.
    """
    job = PrepareJob.of(config.model_copy(update={"files": _urls(stripes)}), tokenizer, target, folder)
    files = {file.key: file for file in job.files}
    counter, num_parts = ProgressCounter(None, len(files), None), 0
    try:
        with shared_building(job.folder) as building:
            tokens = building / TOKENS
            tokens.mkdir(exist_ok=True)
            work = job.tokenize_job(tokens, False, counter)
            for stripe in stripes:
                if stripe.key not in files:
                    raise DataError(f"{stripe.url}: the file changed since the shards were planned; start again")
                num_parts += work.run_stripe(files[stripe.key], stripe.stripe, stripe.num_stripes, tokenizer)
    except FileChangedError as error:
        raise DataError(str(error)) from error  # which can be sent to another process
    except OSError as error:
        raise DataError(f"{error.filename or folder}: {error.strerror or one_line(error)}") from error
    counts = {"num_rows": counter.num_rows, "num_rejected": counter.num_rejected, "num_tokens": counter.num_tokens}
    return {"num_parts": num_parts, **counts}


def _urls(stripes: Iterable[Stripe]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(stripe.url for stripe in stripes))


def _absolute(file: TakenFile) -> str:
    """Shards may run in other folders than this process."""
    return file.url if "://" in file.url or "::" in file.url else Path(file.url).absolute().as_posix()


def _size(file: TakenFile) -> int:
    return UNKNOWN_BYTES if file.num_bytes is None else file.num_bytes
