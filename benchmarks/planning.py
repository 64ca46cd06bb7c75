"""Planning an epoch against other libraries' samplers: time, memory, padding, order.

    make peers                          # once: the other libraries, in .venv-peers
    python benchmarks/planning.py       # minutes (README.md); --quick: a tenth of everything

All work on the same log-normal lengths. The peers run in a process of their own (`peers.py`) under the interpreter that
`--peers` names, and take turns with the planner, so that a busy machine is busy for all. Ratios are medians over the
rounds of the ratio within a round. Without that interpreter the peers' rows are left out.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dflash_core.bucketing import EpochPlan, choose_boundaries, order_statistics, plan_epoch

IntArray = NDArray[np.int64]
BUDGET, NUM_BUCKETS, BATCHES_PER_STEP, SHORTEST = 8192, 6, 8, 16
WORKER = Path(__file__).with_name("peers.py")


@dataclass(frozen=True)
class Sizes:
    """How much of everything is measured."""

    timed: int  # sequences
    timed_lhotse: int  # it takes minutes for a million
    filled: int
    rounds: int
    rounds_lhotse: int
    scaling: tuple[int, ...]


FULL = Sizes(1_000_000, 100_000, 200_000, 5, 2, (10_000, 100_000, 1_000_000, 10_000_000))
QUICK = Sizes(100_000, 10_000, 20_000, 3, 2, (10_000, 100_000, 1_000_000))


def draw_lengths(count: int) -> IntArray:
    """Log-normal, median 665 tokens, clipped to the budget."""
    return np.clip(np.random.default_rng(0).lognormal(6.5, 1.0, count), SHORTEST, BUDGET).astype(np.int64)


def boundaries(lengths: IntArray) -> tuple[int, ...]:
    return choose_boundaries(lengths, NUM_BUCKETS, "min_padding", token_budget=BUDGET)


def plan(lengths: IntArray, edges: tuple[int, ...] | None = None, *, epoch: int = 0, **options: Any) -> EpochPlan:
    """Our plan, with the boundaries chosen first where none are given."""
    return plan_epoch(
        lengths, edges or boundaries(lengths), token_budget=BUDGET, batches_per_step=BATCHES_PER_STEP, epoch=epoch, **options
    )


# --- the peers' process ---------------------------------------------------------------------------------------------------


class PeerError(Exception):
    """What a peer answered instead of a time."""


class Peers:
    """The other end of peers.py; a context manager that ends its process."""

    def __init__(self, python: Path, lengths: IntArray, folder: Path) -> None:
        self._folder = folder
        np.save(folder / "lengths.npy", lengths)
        self._log = (folder / "peers.log").open("w")
        self._process = subprocess.Popen(
            [str(python), str(WORKER), str(folder / "lengths.npy")],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True,
        )  # fmt: skip
        self.versions: dict[str, str] = self._receive()["versions"]

    def __enter__(self) -> Peers:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()
        self._log.close()

    def batches(self, peer: str, sequences: int, **options: int) -> tuple[IntArray, IntArray]:
        """Sequence indices of one epoch's batches in a row, and where each batch begins (and the last ends)."""
        path = self._folder / "batches.npz"
        self.ask(peer, sequences, 0, options, path)
        with np.load(path) as saved:
            return saved["sample_index"], saved["offsets"]

    def ask(self, peer: str, sequences: int, epoch: int, options: dict[str, int], save: Path | None = None) -> dict[str, float]:
        """Let a peer run for one epoch: seconds as `wall` and `cpu`; raises `PeerError`."""
        request = {"peer": peer, "sequences": sequences, "epoch": epoch, "options": options, "save": save and str(save)}
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise PeerError(self._last_words()) from None
        return self._receive()

    def _receive(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise PeerError(self._last_words())
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            raise PeerError(reply["error"])
        return reply

    def _last_words(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(10)  # its last words may come after its last reply
        lines = (self._folder / "peers.log").read_text(errors="replace").splitlines()
        return f"the peers' process has ended: {lines[-1] if lines else 'no word'}"


# --- (a) time -------------------------------------------------------------------------------------------------------------


class Time(NamedTuple):
    """Seconds by the clock, and those that a core worked on it: a busy machine lengthens the first more."""

    wall: float
    cpu: float


@dataclass
class Contestant:
    """One row of the table of times."""

    name: str
    sequences: int
    rounds: int
    run: Callable[[int], Time]  # takes the epoch
    times: list[Time]


def timed(work: Callable[..., object], epoch: int) -> Time:
    wall, cpu = time.perf_counter(), time.process_time()
    work(epoch=epoch)
    return Time(time.perf_counter() - wall, time.process_time() - cpu)


def median_time(times: Sequence[Time]) -> Time:
    return Time(*(statistics.median(column) for column in zip(*times, strict=True)))


def contestants(lengths: IntArray, sizes: Sizes, peers: Peers | None) -> list[Contestant]:
    n, edges = len(lengths), boundaries(lengths)
    ours: dict[str, Callable[..., object]] = {
        "plan_epoch, 1 cell": partial(plan, lengths, edges),
        "plan_epoch, 8 cells": partial(plan, lengths, edges, num_cells=8),
        "choose_boundaries + plan_epoch, 1 cell": partial(plan, lengths),
        "choose_boundaries + plan_epoch, 8 cells": partial(plan, lengths, num_cells=8),
        "plan_epoch, sort_window 16": partial(plan, lengths, edges, sort_window=16),
        "plan_epoch, packed": partial(plan, lengths, edges, strategy="packed"),
    }
    rows = [Contestant(name, n, sizes.rounds, partial(timed, work), []) for name, work in ours.items()]
    if peers is None:
        return rows

    def peer(name: str, sequences: int, rounds: int, kind: str, **options: int) -> Contestant:
        run = lambda epoch: Time(**peers.ask(kind, sequences, epoch, options))  # noqa: E731
        return Contestant(name, sequences, rounds, run, [])

    few = min(n, sizes.timed_lhotse)
    return [
        *rows,
        peer("speculators multipack, 1 replica", n, sizes.rounds, "multipack", budget=BUDGET, replicas=1),
        peer("speculators multipack, 8 replicas", n, sizes.rounds, "multipack", budget=BUDGET, replicas=8),
        peer("HF LengthGroupedSampler", n, sizes.rounds, "length_grouped", batch_size=fixed_batch_size(lengths)),
        peer("lhotse DynamicBucketingSampler", few, sizes.rounds_lhotse, "dynamic_bucketing", budget=BUDGET, num_buckets=6),
    ]


def fixed_batch_size(lengths: IntArray) -> int:
    """A batch of this many average sequences holds the budget; a sampler of fixed size cannot do better."""
    return max(1, int(BUDGET // lengths.mean()))


def compare_times(lengths: IntArray, sizes: Sizes, peers: Peers | None) -> None:
    print(f"\n(a) Planning one epoch of {len(lengths):,} sequences: median of {sizes.rounds} rounds, in turns")
    rows = contestants(lengths, sizes, peers)
    given, chosen = rows[0], rows[2]
    for epoch in range(sizes.rounds):
        first = epoch % len(rows)  # another one each round, so that none always finds its data out of the caches
        for row in rows[first:] + rows[:first]:
            if epoch < row.rounds:
                try:
                    row.times.append(row.run(epoch))
                except PeerError as error:
                    print(f"{row.name}: left out ({error})")
                    rows.remove(row)
    heads = f"{'seconds':>9} {'min':>8} {'max':>8} {'cpu s':>8} {'us/seq.':>8} {'x given':>8} {'x chosen':>9}"
    print(f"{'':42} {'sequences':>10} {heads}")
    for row in rows:
        middle, walls = median_time(row.times), [spent.wall for spent in row.times]
        print(
            f"{row.name:42} {row.sequences:10,} {middle.wall:9.3f} {min(walls):8.3f} {max(walls):8.3f} {middle.cpu:8.3f} "
            f"{middle.wall / row.sequences * 1e6:8.3f} {ratio(row, given):8.1f} {ratio(row, chosen):9.1f}"
        )
    print(f"x given, x chosen: time per sequence over that of {given.name} and of {chosen.name}")
    print("multipack and HF run in every rank, so theirs is the time of one rank; a plan serves all cells")


def ratio(row: Contestant, base: Contestant) -> float:
    """Median over the rounds of the time per sequence over the base's."""
    scale = base.sequences / row.sequences
    return statistics.median(a.wall / b.wall * scale for a, b in zip(row.times, base.times, strict=False))


# --- scaling --------------------------------------------------------------------------------------------------------------


def measure_one(count: int, strategy: str) -> None:
    """In a fresh process: plan, tell the peak of its memory, plan some more for the time."""
    lengths = draw_lengths(count)
    start = time.perf_counter()
    edges = boundaries(lengths)
    choosing = time.perf_counter() - start
    work = partial(plan, lengths, edges, num_cells=8, strategy=strategy)
    times = [timed(work, 0)]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    times += [timed(work, epoch) for epoch in range(1, max(3, min(20, int(3 / times[0].wall))))]
    print(json.dumps({"choosing": choosing, "peak": peak, **median_time(times)._asdict()}))


def show_scaling(sizes: Sizes) -> None:
    """Called before this process grows: Linux counts the starting process's own peak into its child's."""
    print("\nGrowth, 8 cells, each row in a fresh process; the peak is of the whole process, lengths and interpreter included")
    print(f"{'sequences':>12} {'strategy':>9} {'choose s':>9} {'plan s':>9} {'cpu s':>9} {'us/seq.':>8} {'peak MB':>9}")
    for strategy in ("padded", "packed"):
        for count in sizes.scaling:
            command = [sys.executable, __file__, "--measure", str(count), "--strategy", strategy]
            row = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
            print(
                f"{count:12,} {strategy:>9} {row['choosing']:9.4f} {row['wall']:9.4f} {row['cpu']:9.4f} "
                f"{row['wall'] / count * 1e6:8.3f} {row['peak'] / 1e6:9.0f}"
            )


# --- (b) padding and (c) order --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Epoch:
    """The batches of one epoch, from whichever sampler; one entry per batch."""

    name: str
    num_tokens: IntArray
    num_sequences: IntArray
    longest: IntArray
    packed: bool  # whole sequences one after the other instead of side by side: nothing is padded

    @classmethod
    def of(cls, name: str, lengths: IntArray, sample_index: IntArray, offsets: IntArray, *, packed: bool) -> Epoch:
        taken = lengths[sample_index]
        starts = offsets[:-1]
        return cls(name, np.add.reduceat(taken, starts), np.diff(offsets), np.maximum.reduceat(taken, starts), packed)

    @property
    def num_padded_tokens(self) -> IntArray:
        return self.num_tokens if self.packed else self.num_sequences * self.longest

    @property
    def mean_length(self) -> NDArray[np.float64]:
        return self.num_tokens / self.num_sequences


def our_epochs(lengths: IntArray) -> list[Epoch]:
    edges = boundaries(lengths)
    variants: dict[str, dict[str, Any]] = {"ours, random in 6 buckets": {}}
    variants |= {f"ours, sort_window {window}": {"sort_window": window} for window in (8, 16, 32, 64)}
    variants |= {"ours, packed": {"strategy": "packed"}}
    epochs = []
    for name, options in variants.items():
        made = plan(lengths, edges, **options)
        epochs.append(Epoch.of(name, lengths, made.sample_index, made.offsets, packed="strategy" in options))
    return epochs


def peer_epochs(lengths: IntArray, peers: Peers) -> list[Epoch]:
    n, size = len(lengths), fixed_batch_size(lengths)
    variants: dict[str, tuple[str, dict[str, int]]] = {
        "lhotse, 6 equal-duration buckets": ("dynamic_bucketing", {"budget": BUDGET, "num_buckets": 6}),
        f"HF length grouped, {size} a batch": ("length_grouped", {"batch_size": size}),
    }
    variants |= {f"multipack, {r} replicas": ("multipack", {"budget": BUDGET, "replicas": r}) for r in (1, 2, 8)}
    epochs = []
    for name, (kind, options) in variants.items():
        try:
            sample_index, offsets = peers.batches(kind, n, **options)
        except PeerError as error:
            print(f"{name}: left out ({error})")
        else:
            epochs.append(Epoch.of(name, lengths, sample_index, offsets, packed=kind == "multipack"))
    return epochs


def compare_padding(epochs: list[Epoch], num_sequences: int) -> None:
    print(f"\n(b) Padding of one epoch of {num_sequences:,} sequences, budget {BUDGET} padded tokens a batch")
    print(f"{'':34} {'batches':>8} {'efficiency':>10} {'fill':>7} {'over budget':>11} {'largest':>8} {'left out':>8}")
    for e in epochs:
        padded = e.num_padded_tokens
        tokens = int(e.num_tokens.sum())
        print(
            f"{e.name:34} {len(padded):8,} {tokens / padded.sum():10.4f} {tokens / (len(padded) * BUDGET):7.4f} "
            f"{np.mean(padded > BUDGET):11.2%} {padded.max() / BUDGET:8.2f} {num_sequences - e.num_sequences.sum():8,}"
        )
    print("efficiency: tokens per padded token (count x longest; 1 where nothing is padded); fill: tokens per batch and budget;")
    print("over budget: batches of more padded tokens than the budget; largest: of the budget; left out: sequences")


def compare_orders(epochs: list[Epoch], edges: tuple[int, ...]) -> None:
    print(f"\n(c) Order of the same batches, steps of {BATCHES_PER_STEP}; a batch counts for the bucket of its longest sequence")
    print(f"{'':34} {'longest run':>11} {'R*':>4} {'prefix dev.':>11} {'step share sd':>13} {'lag-1':>7}")
    for e in epochs:
        bucket = np.searchsorted(np.asarray(edges), e.longest, side="left")
        step = np.arange(len(bucket)) // BATCHES_PER_STEP
        s = order_statistics(bucket, step=step, mean_length=e.mean_length, num_buckets=len(edges))
        print(
            f"{e.name:34} {s.longest_run:11} {s.shortest_possible_longest_run:4} {s.prefix_deviation or 0:11.2f} "
            f"{s.step_share_sd or 0:13.3f} {s.lag1_correlation or 0:7.3f}"
        )


# --- main -----------------------------------------------------------------------------------------------------------------


def compare(sizes: Sizes, python: Path) -> None:
    show_scaling(sizes)
    lengths = draw_lengths(sizes.timed)
    part = lengths[: sizes.filled]
    print(f"\nLengths: log-normal(6.5, 1), {SHORTEST} to {BUDGET}; mean {lengths.mean():.0f}, median {np.median(lengths):.0f}")
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        peers = None
        try:
            peers = stack.enter_context(Peers(python, lengths, Path(folder)))
            print("Peers: " + ", ".join(f"{name} {number}" for name, number in peers.versions.items()))
        except (PeerError, OSError) as error:
            print(f"The peers' rows are left out ({error}): make peers, or --peers PYTHON")
        compare_times(lengths, sizes, peers)
        epochs = our_epochs(part) + (peer_epochs(part, peers) if peers else [])
    compare_padding(epochs, len(part))
    compare_orders(epochs, boundaries(part))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = Path(__file__).parents[1] / ".venv-peers" / "bin" / "python"
    parser.add_argument("--peers", type=Path, default=default, metavar="PYTHON", help="interpreter that has the peers")
    parser.add_argument("--quick", action="store_true", help="a tenth of everything")
    parser.add_argument("--measure", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--strategy", default="padded", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure is not None:
        measure_one(arguments.measure, arguments.strategy)
        return
    load = os.getloadavg()[0]
    print(f"numpy {np.__version__}, {os.cpu_count()} cores, load {load:.1f}" + (" (busy: times are noisy)" if load > 0.5 else ""))
    compare(QUICK if arguments.quick else FULL, arguments.peers)


if __name__ == "__main__":
    main()
