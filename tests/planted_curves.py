"""Causes planted into the curves of fake runs. Every function gives a plant of `fake_runs.FakeRun`.

`calm` comes first: it writes curves that nothing is the matter with, whatever the order of the batches is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

Streams = dict[str, list[dict[str, Any]]]
Plant = Callable[[Streams], None]
SLOTS = 7


def calm(
    seed: int = 0, memory: float = 0.0, noise: float = 0.05, norm_tail: float = 0.2, warmup: float = 0.04, epoch_gain: float = 0.0
) -> Plant:
    """Curves of a sound training: loss and accuracy follow a smooth course with AR(1) noise of coefficient `memory`, gradient
    norms are log-normal with `norm_tail`, the rate warms up and falls on a cosine. No bucket differs from another."""

    def plant(streams: Streams) -> None:
        rng = np.random.default_rng([seed, 77])
        steps = streams["steps"]
        n = len(steps)
        t = np.arange(n)
        shocks = rng.normal(0, noise * np.sqrt(1 - memory**2), n)
        slow = np.zeros(n)
        for i in range(1, n):
            slow[i] = memory * slow[i - 1] + shocks[i]
        progress = 1 - np.exp(-t / (n / 4))
        epoch = np.array([row["epoch"] for row in steps])
        level = 3.2 - 1.8 * progress + 4 * np.exp(-t / 3) - epoch_gain * epoch + slow
        rise = 0.08 * np.clip(-slow / max(noise, 1e-9), -3, 3) * progress
        warm = max(1, round(warmup * n))
        for i, row in enumerate(steps):
            accuracy = np.clip((0.02 + 0.63 * progress[i] + 0.1 * rise[i]) * 0.9 ** np.arange(SLOTS), 0, 1)
            labels = row["num_supervised"] // SLOTS
            accuracy = rng.binomial(labels, accuracy) / labels
            row["loss"] = float(level[i])
            row["grad_norm"] = float((0.6 + 40 * np.exp(-i / 2)) * np.exp(rng.normal(0, norm_tail)))
            row["lr"] = 6e-4 * ((i + 1) / warm if i < warm else 0.5 * (1 + np.cos(np.pi * (i - warm) / max(1, n - warm))))
            _set_accuracy(row, accuracy)
        for batch in streams["batches"]:
            batch["loss_sum"] = float(level[batch["step"]] + rng.normal(0, noise)) * batch["weight_sum"]
        _agree(streams)

    return plant


def _set_accuracy(row: dict[str, Any], accuracy: Sequence[float]) -> None:
    row["accuracy_by_position"] = [float(a) for a in accuracy]
    row["expected_acceptance_length"] = 1 + float(np.cumprod(accuracy).sum())


def _agree(streams: Streams) -> None:
    """Evaluation measures what training promises."""
    last = [row["expected_acceptance_length"] for row in streams["steps"][-max(1, len(streams["steps"]) // 10) :]]
    _measured(streams, float(np.mean(last)))


def _measured(streams: Streams, value: float) -> None:
    """Evaluation measured this acceptance length, to a tenth of what the draft adds."""
    rows = [row for row in streams["evals"] if not row["metric"].startswith("acceptance_length_")]
    for row in list(rows):
        if row["kind"] == "trained" and row["metric"] == "acceptance_length":
            row["value"] = value
            for end, factor in (("low", 0.9), ("high", 1.1)):
                rows.append({**row, "metric": f"acceptance_length_{end}", "value": 1 + factor * (value - 1)})
    streams["evals"][:] = rows


def bucket_offset(nats: float, bucket: int = 5) -> Plant:
    """Batches of a bucket lose this much more, so a step's loss follows its mix."""

    def plant(streams: Streams) -> None:
        added: dict[int, float] = {}
        weight: dict[int, float] = {}
        for batch in streams["batches"]:
            more = nats * (batch["bucket"] == bucket) * batch["weight_sum"]
            batch["loss_sum"] += more
            added[batch["step"]] = added.get(batch["step"], 0.0) + more
            weight[batch["step"]] = weight.get(batch["step"], 0.0) + batch["weight_sum"]
        for row in streams["steps"]:
            row["loss"] += added[row["step"]] / weight[row["step"]]

    return plant


def fall_back(steps: Callable[[Streams], Sequence[int]], nats: float = 0.6, lasts: float = 6.0, accuracy: float = 0.4) -> Plant:
    """At the given steps the loss jumps up by `nats` and the accuracy falls by a share; both come back, by e in `lasts`."""

    def plant(streams: Streams) -> None:
        for start in steps(streams):
            for row in streams["steps"]:
                since = row["step"] - start
                if 0 <= since <= 8 * lasts:
                    left = float(np.exp(-since / lasts))
                    row["loss"] += nats * left
                    _set_accuracy(row, [a * (1 - accuracy * left) for a in row["accuracy_by_position"]])

    return plant


def at_checkpoints(streams: Streams) -> list[int]:
    return [event["step"] for event in streams["events"] if event["kind"] == "checkpoint_begin"][:-1]


def at_epochs(streams: Streams) -> list[int]:
    steps = streams["steps"]
    return [row["step"] for before, row in pairwise(steps) if row["epoch"] != before["epoch"]]


def at_steps(*steps: int) -> Callable[[Streams], Sequence[int]]:
    return lambda streams: steps


def epochs_of(length: int) -> Plant:
    """Epochs of this many steps."""

    def plant(streams: Streams) -> None:
        for rows in (streams["steps"], streams["batches"]):
            for row in rows:
                row["epoch"] = row["step"] // length

    return plant


def checkpoints_every(length: int) -> Plant:
    """Checkpoints of another period than the fake run's."""

    def plant(streams: Streams) -> None:
        run_id, count = streams["steps"][0]["run_id"], len(streams["steps"])
        base = {"run_id": run_id, "attempt": 0, "cell": 0}
        streams["events"][:] = [
            {**base, "kind": kind, "step": step, "time": 1.77e9 + step * 0.5 + later}
            for step in range(length, count + 1, length)
            for kind, later in (("checkpoint_begin", 0.01), ("checkpoint_end", 0.8))
        ]

    return plant


def resumed_at(*steps: int) -> Plant:
    """The run was resumed before these steps."""

    def plant(streams: Streams) -> None:
        for name in ("steps", "batches"):
            for row in streams[name]:
                row["attempt"] = sum(row["step"] >= step for step in steps)
        run_id = streams["steps"][0]["run_id"]
        streams["events"] += [
            {"run_id": run_id, "attempt": i + 1, "time": 1.77e9 + step * 0.5, "kind": "resume", "step": step, "cell": 0}
            for i, step in enumerate(steps)
        ]

    return plant


def rate_changed_at(*steps: int) -> Plant:
    """The learning rate doubles at the first of these steps, is back to what it was at the second, and so on."""

    def plant(streams: Streams) -> None:
        for row in streams["steps"]:
            row["lr"] *= 1 + sum(row["step"] >= step for step in steps) % 2

    return plant


def clustered(length: int = 30, num_runs: int = 8, bucket: int = 5, seed: int = 0) -> Plant:
    """All batches of some stretches of steps are of one bucket; losses stay as they are."""

    def plant(streams: Streams) -> None:
        rng = np.random.default_rng([seed, 55])
        num_steps = len(streams["steps"])
        starts = rng.choice(num_steps // (length + 5) - 4, num_runs, replace=False) * (length + 5) + 4 * length
        inside = np.zeros(num_steps, dtype=bool)
        for start in starts + rng.integers(0, 5, num_runs):
            inside[start : start + length] = True
        counts = np.zeros((num_steps, 6), dtype=int)
        for batch in streams["batches"]:
            if inside[batch["step"]]:
                batch["bucket"] = bucket
            counts[batch["step"], batch["bucket"]] += 1
        for row in streams["steps"]:
            row["bucket_counts"] = counts[row["step"]].tolist()

    return plant


def spikes(share: float, seed: int = 0, times: float = 6.0, only_in_runs_of: int | None = None) -> Plant:
    """A share of the steps has a gradient norm that is several times as large: of all, or of those that hold one bucket alone."""

    def plant(streams: Streams) -> None:
        rng = np.random.default_rng([seed, 99])
        for row in streams["steps"]:
            counts = row["bucket_counts"]
            inside = only_in_runs_of is None or counts[only_in_runs_of] == sum(counts)
            if rng.random() < share and inside:
                row["grad_norm"] *= times

    return plant


def explosion(step: int, times: float = 2000.0, lasts: int = 5) -> Plant:
    """The gradient norm of a few steps grows by orders of magnitude."""

    def plant(streams: Streams) -> None:
        for row in streams["steps"]:
            if 0 <= row["step"] - step < lasts:
                row["grad_norm"] *= times

    return plant


def not_finite_from(step: int) -> Plant:
    """From a step on loss and norm are NaN and the steps are skipped."""

    def plant(streams: Streams) -> None:
        for row in streams["steps"]:
            if row["step"] >= step:
                row |= {"loss": float("nan"), "grad_norm": float("nan"), "skipped": True}

    return plant


def climb(step: int, nats_a_step: float) -> Plant:
    """From a step on the loss rises and never comes back."""

    def plant(streams: Streams) -> None:
        for row in streams["steps"]:
            row["loss"] += nats_a_step * max(0, row["step"] - step)

    return plant


def dead_slots(*slots: int, accuracy: float = 0.0) -> Plant:
    """These slots (from 1) have this accuracy in all steps."""

    def plant(streams: Streams) -> None:
        for row in streams["steps"]:
            _set_accuracy(row, [accuracy if k + 1 in slots else a for k, a in enumerate(row["accuracy_by_position"])])
        _agree(streams)

    return plant


def measures(acceptance_length: float) -> Plant:
    """What evaluation measured."""
    return lambda streams: _measured(streams, acceptance_length)
