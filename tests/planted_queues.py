"""Runs whose queue counters agree with each other, because a small model of the pipeline made them; with one thing planted.

The model follows the pipeline's rules (docs/design.md 2) batch by batch: bytes reserved in plan order (here counted in batches),
loading threads, dispatch in plan order into bounded queues, targets side by side, a drafter in plan order, the join of all
cells at the end of a step. From its times come the `steps`, `batches` and `stats` rows that a training would write.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from dflash_core.analysis.runs import Run, load_run
from tests.fake_runs import FakeRun, write_run

Rows = dict[str, list[dict[str, Any]]]
FIRST = 100.0  # seconds before which nothing happened


@dataclass(frozen=True)
class Pipeline:
    """A topology, costs in seconds a batch (`step_s`: once a step), and limits. `slow`: target 0 takes that many times as long;
    `slow_cell`: all targets of cell 1 do.

    `skew`: part of the batches that private counters would give to target 0 beyond its turn. `in_flight`: batches of the byte
    budget.
    """

    cells: int = 1
    targets: int = 2
    load_s: float = 0.005
    target_s: float = 0.18
    draft_s: float = 0.1
    step_s: float = 0.02
    slow: float = 1.0
    skew: float = 0.0
    slow_cell: float = 1.0
    jitter: float = 0.15
    num_workers: int = 4
    queue_batches: int = 8
    in_flight: int = 40
    dispatch: str = "round_robin"
    devices: str = "cuda"
    colocated: bool = False
    num_cpus: int = 64
    stats_every: int = 2


@dataclass
class CellTimes:
    """When what happened to the batches of one cell, [batches] each."""

    cell: int
    num_targets: int
    reserved: list[tuple[float, float]] = field(default_factory=list)
    load: list[tuple[float, float]] = field(default_factory=list)
    loader_idle: list[tuple[float, float]] = field(default_factory=list)
    put: list[tuple[float, float]] = field(default_factory=list)
    sent: list[float] = field(default_factory=list)
    target: list[int] = field(default_factory=list)
    idle: list[tuple[float, float]] = field(default_factory=list)
    served: list[tuple[float, float]] = field(default_factory=list)
    wait: list[tuple[float, float]] = field(default_factory=list)
    drafted: list[tuple[float, float]] = field(default_factory=list)


class CellModel:
    """One cell, fed with one batch after the other."""

    def __init__(self, pipeline: Pipeline, cell: int, rng: np.random.Generator) -> None:
        self.p, self.rng, self.times = pipeline, rng, CellTimes(cell, pipeline.targets)
        self.workers = [FIRST] * pipeline.num_workers
        self.free = [FIRST] * pipeline.targets
        self.begun: list[list[float]] = [[] for _ in range(pipeline.targets)]
        self.counter, self.fed, self.now = 0, FIRST, FIRST

    def noisy(self, seconds: float) -> float:
        return seconds * float(np.exp(self.rng.normal(0, self.p.jitter)))

    def choose(self, at: float, tokens: int, loads: list[list[tuple[float, int]]]) -> int:
        if self.p.dispatch == "least_loaded":
            queued = [sum(n for begun, n in queue if begun > at) for queue in loads]
            return min(range(self.p.targets), key=lambda t: (queued[t], len(loads[t]), t))
        if self.p.skew and self.rng.random() < self.p.skew:
            return 0
        self.counter += 1
        return (self.counter - 1) % self.p.targets

    def train(self, batch: dict[str, Any], loads: list[list[tuple[float, int]]]) -> None:
        """Take a batch through all stages."""
        p, times = self.p, self.times
        i = len(times.sent)
        room = times.drafted[i - p.in_flight][1] if i >= p.in_flight else FIRST
        reserved = max(self.fed, room)
        times.reserved.append((self.fed, reserved))
        worker = int(np.argmin(self.workers))
        begin = max(reserved, self.workers[worker])
        times.loader_idle.append((self.workers[worker], begin))
        loaded = begin + self.noisy(p.load_s)
        times.load.append((begin, loaded))
        self.fed = max(reserved, times.load[i - 2 * p.num_workers][0] if i >= 2 * p.num_workers else FIRST)
        ready = max(loaded, times.sent[-1] if times.sent else FIRST)
        target = self.choose(ready, batch["num_padded_tokens"], loads)
        begun = self.begun[target]
        sent = max(ready, begun[-p.queue_batches] if len(begun) >= p.queue_batches else FIRST)
        self.workers[worker] = max(loaded, times.sent[i - 2 * p.num_workers] if i >= 2 * p.num_workers else FIRST)
        start = max(sent, self.free[target])
        served = start + self.noisy(p.target_s * (p.slow if target == 0 else 1.0) * (p.slow_cell if times.cell == 1 else 1.0))
        times.put.append((ready, sent))
        times.sent.append(sent)
        times.target.append(target)
        times.idle.append((self.free[target], start))
        times.served.append((start, served))
        begun.append(start)
        self.free[target] = served
        loads[target].append((start, batch["num_padded_tokens"]))
        at = max(self.now, served)
        times.wait.append((self.now, at))
        self.now = at + self.noisy(p.draft_s)
        times.drafted.append((at, self.now))


def until(intervals: np.ndarray, at: float) -> float:
    """Seconds of the intervals [n, 2] that had passed by `at`."""
    return float(np.clip(np.minimum(intervals[:, 1], at) - intervals[:, 0], 0, None).sum())


def held_up(times: CellTimes) -> np.ndarray:
    """Part of every wait in which a later batch was there already."""
    wait, served = np.array(times.wait), np.array(times.served)[:, 1]
    later = np.append(np.minimum.accumulate(served[::-1])[::-1][1:], np.inf)
    begin = np.clip(later, wait[:, 0], wait[:, 1])
    return np.stack([begin, wait[:, 1]], axis=1)


def pipelined(p: Pipeline, seed: int) -> Callable[[Rows], None]:
    """A plant that gives all rows the times, targets and counters of the model."""

    def plant(rows: Rows) -> None:
        rng = np.random.default_rng(seed)
        models = [CellModel(p, cell, rng) for cell in range(p.cells)]
        loads: list[list[list[tuple[float, int]]]] = [[[] for _ in range(p.targets)] for _ in range(p.cells)]
        of_cell: list[list[dict[str, Any]]] = [[] for _ in range(p.cells)]
        by_step: dict[int, list[dict[str, Any]]] = {}
        for batch in rows["batches"]:
            by_step.setdefault(batch["step"], []).append(batch)
        ends = []
        for number, row in enumerate(rows["steps"]):
            began = models[0].now
            firsts = [len(model.times.sent) for model in models]
            for place, batch in enumerate(by_step[row["step"]]):
                cell = place % p.cells
                models[cell].train(batch, loads[cell])
                of_cell[cell].append(batch)
            own = models[0].now
            joined = max(model.now for model in models)
            for model in models:
                model.now = joined + p.step_s
            times = models[0].times
            spent = sum(end - begin for begin, end in times.drafted[firsts[0] :])
            row |= {
                "target_wait_s": sum(end - begin for begin, end in times.wait[firsts[0] :]),
                "forward_s": 0.4 * spent,
                "backward_s": 0.6 * spent,
                "reduce_s": joined - own + 0.25 * p.step_s,
                "optimizer_s": 0.75 * p.step_s,
                "optimizer_busy_s": 0.75 * p.step_s,
                "step_s": joined + p.step_s - began,
            }
            ends.append((number, row["step"], began, joined + p.step_s))
        everything = [Counters(model.times, of_cell[cell]) for cell, model in enumerate(models)]
        for number, _, began, end in ends:
            idle = everything[0].target_idle
            rows["steps"][number]["data_wait_s"] = float(np.mean([until(one, end) - until(one, began) for one in idle]))
        write_batches(models, of_cell, p)
        rows["stats"] = [
            {"run_id": rows["steps"][0]["run_id"], "attempt": 0, "time": 1.77e9 + end, "step": step, **counters.at(end, p)}
            for number, step, _, end in ends
            if number % p.stats_every == 0
            for counters in everything
        ]

    return plant


def write_batches(models: list[CellModel], of_cell: list[list[dict[str, Any]]], p: Pipeline) -> None:
    for cell, model in enumerate(models):
        times = model.times
        for i, batch in enumerate(of_cell[cell]):
            spent = {
                "load_s": times.load[i][1] - times.load[i][0],
                "queued_s": times.served[i][0] - times.sent[i],
                "target_forward_s": times.served[i][1] - times.served[i][0],
                "draft_busy_s": times.drafted[i][1] - times.drafted[i][0],
            }
            busy = {"target_busy_s": 0.9 * spent["target_forward_s"]}
            batch |= {"cell": cell, "target": times.target[i], **spent, **busy}


class Counters:
    """The counters of one cell at any time."""

    def __init__(self, times: CellTimes, batches: list[dict[str, Any]]) -> None:
        self.times, self.target = times, np.array(times.target)
        served, idle = np.array(times.served), np.array(times.idle)
        self.sent, self.begun, self.served = np.array(times.sent), served[:, 0], served[:, 1]
        self.tokens = np.array([batch["num_padded_tokens"] for batch in batches])
        after_the_last = np.inf
        self.target_idle, self.put = [], []
        for target in range(times.num_targets):
            own = self.target == target
            last = np.array([[self.served[own].max() if own.any() else FIRST, after_the_last]])
            self.target_idle.append(np.concatenate([idle[own], last]))
            self.put.append(np.array(times.put)[own])
        self.held_up, self.drafted = held_up(times), np.array(times.drafted)
        self.reserved, self.loader_idle, self.wait = (np.array(one) for one in (times.reserved, times.loader_idle, times.wait))

    def at(self, now: float, p: Pipeline) -> dict[str, Any]:
        times, targets = self.times, range(self.times.num_targets)
        queued = [(self.target == t) & (self.sent <= now) & (self.begun > now) for t in targets]
        taken = self.drafted[:, 0] <= now
        return {
            "cell": times.cell,
            "num_batches": int((self.sent <= now).sum()),
            "dispatched_per_target": [int(((self.target == t) & (self.sent <= now)).sum()) for t in targets],
            "prefetch_depths": [int(one.sum()) for one in queued],
            "queue_tokens": [int(self.tokens[one].sum()) for one in queued],
            "queue_get_wait_s": [until(one, now) for one in self.target_idle],
            "queue_put_wait_s": [until(one, now) if len(one) else 0.0 for one in self.put],
            "budget_wait_s": until(self.reserved, now),
            "loader_idle_s": until(self.loader_idle, now),
            "ready_get_wait_s": until(self.wait, now),
            "ready_held_up_s": until(self.held_up, now),
            "ready_depth": int(((self.served <= now) & ~taken).sum()),
            "observed_s": now - FIRST,
        }


def made(
    folder: Path,
    p: Pipeline,
    seed: int = 0,
    num_steps: int = 120,
    order: str = "diverse",
    batches_per_step: int = 4,
    plants: tuple[Callable[[Rows], None], ...] = (),
    dataset: Path | None = None,
) -> Run:
    """A run folder of this pipeline, read again."""
    fake = FakeRun(
        order=order,
        num_steps=num_steps,
        batches_per_step=batches_per_step,
        num_cells=p.cells,
        num_targets=p.targets,
        seed=seed,
        evals=False,
        plants=(pipelined(p, seed), *plants),
    )
    path = write_run(folder, fake, dataset)
    config = yaml.safe_load((path / "config.yaml").read_text())
    config["topology"] = {
        "cells": p.cells,
        "targets_per_cell": p.targets,
        "colocated": p.colocated,
        "threads_per_device": 1,
    }
    config["prefetch"] = {
        "num_workers": p.num_workers,
        "dispatch": p.dispatch,
        "queue_batches": p.queue_batches,
        "max_bytes": p.in_flight * 2**20,
    }
    (path / "config.yaml").write_text(yaml.safe_dump(config))
    names = ["cpu"] * (p.targets + 1) if p.devices == "cpu" else [f"cuda:{i}" for i in range(p.targets + 1)]
    (path / "provenance.json").write_text(json.dumps({"devices": names, "num_cpus": p.num_cpus}))
    return load_run(path)
