"""Answers in shards: processes on any nodes that share the workspace answer a share of the rows each, into logs of their own.

    .NAME.DIGEST.log              the job's log; while shards run nobody writes to it
    .NAME.DIGEST.shard-NNNNN.log  what a shard has ended; the next start, in shards or not, takes it into the job's log
    .NAME.DIGEST.flow             renewed by the flow that asked for the shards; without it they end

A row belongs to a shard by its place in the input alone, so shards need no word of each other, and a shard that is made twice,
or started again, asks nothing twice that had ended. How many shards there are may change from start to start.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from dflash_core.data.regenerate_log import AnswerLog
from dflash_core.errors import DFlashError
from dflash_core.processes import repeated

logger = logging.getLogger("dflash_core.regenerate")
LEASE_EVERY_S, LEASE_PATIENCE_S, LOOK_EVERY_S = 5.0, 60.0, 0.5
GOLDEN, WORD = 0x9E3779B97F4A7C15, 64  # 2**64 divided by the golden ratio


class FlowGoneError(DFlashError):
    """The flow that asked for a shard has ended. What is done is kept."""


def shard_of(key: int, num_shards: int) -> int:
    """The shard that a row belongs to, by its key (`regenerate_log.row_key`).

    Multiples of the golden ratio, modulo one, spread evenly over whatever intervals (Knuth, The Art of Computer Programming 3,
    6.4): neighbouring rows go to different shards, shares differ by a few rows, and a period in the data does not show.
    """
    return ((key * GOLDEN) % (1 << WORD) * num_shards) >> WORD


def shard_log(log: Path, number: int) -> Path:
    """The log of one shard of the job whose log is `log`."""
    return log.with_name(f"{log.name.removesuffix('.log')}.shard-{number:05d}.log")


def shard_logs(log: Path) -> list[Path]:
    """The logs that shards have left, in order."""
    return sorted(log.parent.glob(f"{log.name.removesuffix('.log')}.shard-*.log"))


def lease_path(log: Path) -> Path:
    """The file that the flow renews."""
    return log.with_name(f"{log.name.removesuffix('.log')}.flow")


def take_in_shards(answers: AnswerLog, job: dict[str, object]) -> None:
    """Take what shards have ended into the job's log, and delete theirs. To be called while no shard runs."""
    for path in shard_logs(answers.path):
        with AnswerLog(path, job) as shard:
            answers.take_in(shard)
        path.unlink()


# ---- the flow is there, or it is not ----


@contextmanager
def kept_lease(path: Path, each_time: Callable[[], None] | None = None, every_s: float = LEASE_EVERY_S) -> Iterator[None]:
    """Renew a lease while inside; shards that look at it end when it is gone, or was not renewed for a minute.

    Args:
        each_time: called after each renewal, in a thread of its own.
    """

    def renew() -> None:
        with suppress(OSError):  # a network that is away for a moment
            path.write_text(f"{time.time_ns()}\n")
        if each_time is not None:
            with suppress(OSError):
                each_time()

    path.write_text(f"{time.time_ns()}\n")
    try:
        with repeated(renew, every_s, "lease"):
            yield
    finally:
        path.unlink(missing_ok=True)


class LeaseWatch:
    """Raises FlowGoneError when called after the lease has gone. Clocks of nodes need not agree: only changes count."""

    def __init__(self, path: Path, patience_s: float = LEASE_PATIENCE_S, clock: Callable[[], float] = time.monotonic) -> None:
        self._path, self._patience_s, self._clock = path, patience_s, clock
        self._seen, self._content = clock(), ""
        self._looked = float("-inf")

    def __call__(self) -> None:
        now = self._clock()
        if now - self._looked < LOOK_EVERY_S:
            return
        self._looked = now
        try:
            content = self._path.read_text()
        except FileNotFoundError:
            raise FlowGoneError(f"{self._path}: the flow has ended; what this shard answered is kept") from None
        except OSError:  # a network that is away for a moment
            content = self._content
        if content != self._content:
            self._content, self._seen = content, now
        elif now - self._seen > self._patience_s:
            raise FlowGoneError(f"{self._path}: the flow gives no sign any more; what this shard answered is kept")


class ShardProgress:
    """Logs what shards have ended, by reading what their logs grew by; at most every `every_s` seconds."""

    def __init__(self, paths: Sequence[Path], every_s: float) -> None:
        self._ends, self._every_s, self._begin = dict.fromkeys(paths, 0), every_s, time.monotonic()
        self._last = self._begin
        self.num_answered = self.num_failed = 0

    def __call__(self) -> None:
        now = time.monotonic()
        if now - self._last < self._every_s:
            return
        self._last = now
        self.look()
        pace, shards = self.num_answered / (now - self._begin), len(self._ends)
        logger.info(
            "regenerate: %d rows answered in %d shards (%.1f a second), %d failed",
            self.num_answered,
            shards,
            pace,
            self.num_failed,
        )

    def look(self) -> None:
        """Count what is new."""
        for path, end in self._ends.items():
            try:
                with path.open("rb") as file:
                    file.seek(end)
                    self._ends[path] = end + sum(map(self._count, file))
            except OSError:  # not begun yet
                continue

    def _count(self, line: bytes) -> int:
        """Count a line; returns its bytes, 0 for one that is not whole yet."""
        if not line.endswith(b"\n"):
            return 0
        kind = line.split(b"\t", 2)[1]
        self.num_answered += kind == b"A"
        self.num_failed += kind == b"F"
        return len(line)
