"""Run folders as a training would leave them (docs/design.md 4), made in milliseconds, with causes planted on purpose.

Loss and gradient norm depend on the share of the longest bucket in a step, so an order that clusters buckets makes both
scatter. Everything follows from the seed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml
from numpy.random import Generator

from dflash_core.analysis.stream_columns import EVAL_METRICS, EVENT_KINDS, STREAM_TABLES

UPPER = (64, 128, 192, 256, 384, 512)
SHARES = (0.08, 0.10, 0.10, 0.10, 0.10, 0.52)
TOKEN_BUDGET = 2048


@dataclass(frozen=True)
class FakeRun:
    """What to plant. `manifest` and `config` override the values written, by (dotted) key.

    Each of `plants` gets the rows of all streams by name and changes them before they are written.
    """

    name: str = "diverse"
    order: str = "diverse"
    num_steps: int = 120
    batches_per_step: int = 4
    num_cells: int = 1
    num_targets: int = 2
    seed: int = 0
    length_effect: float = 1.5
    acceptance_length: float = 2.4
    state: str = "completed"
    evals: bool = True
    stats: bool = True
    manifest: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    plants: tuple[Callable[[dict[str, list[dict[str, Any]]]], None], ...] = ()


def bucket_order(order: str, num_batches: int, group: int, rng: Generator) -> np.ndarray:
    """Buckets of the batches in training order."""
    counts = np.floor(np.array(SHARES) * num_batches).astype(int)
    counts[-1] += num_batches - counts.sum()
    buckets = np.repeat(np.arange(len(counts)), counts)
    if order == "sorted":
        return buckets
    if order == "shuffle":
        return rng.permutation(buckets)
    if order == "grouped":
        groups = [buckets[i : i + group] for i in range(0, num_batches, group)]
        return np.concatenate([groups[i] for i in rng.permutation(len(groups))])
    placed, result = np.zeros(len(counts)), [-1, -1]
    for k in range(1, num_batches + 1):
        need = np.where(placed < counts, counts * k / num_batches - placed, -np.inf)
        if result[-1] == result[-2] >= 0 and np.isfinite(np.delete(need, result[-1])).any():
            need[result[-1]] = -np.inf
        result.append(int(np.argmax(need)))
        placed[result[-1]] += 1
    return np.array(result[2:])


def write_dataset(folder: Path, num_sequences: int = 5000, seed: int = 0) -> Path:
    """A dataset folder with its two histograms only."""
    folder.mkdir(parents=True)
    lengths = np.clip(np.random.default_rng(seed).lognormal(5.6, 0.7, num_sequences), 8, UPPER[-1]).astype(int)
    bucket = np.searchsorted(UPPER, lengths)
    sums = [(int((bucket == b).sum()), int(lengths[bucket == b].sum())) for b in range(len(UPPER))]
    pd.DataFrame(
        {
            "bucket": range(len(UPPER)),
            "lower": (0, *UPPER[:-1]),
            "upper": UPPER,
            "num_sequences": [n for n, _ in sums],
            "num_tokens": [t for _, t in sums],
            "num_supervised": [t // 2 for _, t in sums],
            "pct_sequences": [100 * n / num_sequences for n, _ in sums],
            "pct_tokens": [100 * t / lengths.sum() for _, t in sums],
        }
    ).to_parquet(folder / "length_histogram.parquet")
    lower = np.arange(0, UPPER[-1], 16)
    fine = [((lengths > a) & (lengths <= a + 16)) for a in lower]
    pd.DataFrame(
        {
            "lower": lower,
            "upper": lower + 16,
            "source": "all",
            "num_sequences": [int(f.sum()) for f in fine],
            "num_tokens": [int(lengths[f].sum()) for f in fine],
            "num_supervised": [int(lengths[f].sum()) // 2 for f in fine],
        }
    ).to_parquet(folder / "length_bins.parquet")
    return folder


def write_run(folder: Path, fake: FakeRun, dataset: Path | None = None) -> Path:
    """Write one run folder and return it."""
    rng = np.random.default_rng(fake.seed)
    (folder / "metrics").mkdir(parents=True)
    config: dict[str, Any] = {
        "name": "fake",
        "bucketing": {
            "num_buckets": len(UPPER),
            "token_budget": TOKEN_BUDGET,
            "batches_per_step": fake.batches_per_step,
            "order": fake.order,
        },
        "train": {"seed": fake.seed, "clip_norm": 1.0, "num_epochs": 2},
    }
    for dotted, value in fake.config.items():
        section, key = dotted.split(".")
        config[section][key] = value
    manifest = {
        "run_id": folder.name,
        "name": fake.name,
        "state": fake.state,
        "num_steps": fake.num_steps,
        "acceptance_length": fake.acceptance_length if fake.evals else None,
        "acceptance_length_untrained": 1.02 if fake.evals else None,
        "lossless": True if fake.evals else None,
        "checkpoint": "checkpoints/step-000100",
        "dataset": None if dataset is None else str(dataset),
        "dataset_fingerprint": "f00d",
        "target": "tiny_target",
        "created": "2026-01-02T03:04:05+00:00",
        "finished": "2026-01-02T03:14:05+00:00",
        **fake.manifest,
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    (folder / "manifest.json").write_text(json.dumps(manifest))
    (folder / "provenance.json").write_text(json.dumps({"git": {"commit": "abc123", "dirty": False}}))
    batches = batch_rows(folder.name, fake, rng)
    streams = {"batches": batches, "steps": step_rows(folder.name, fake, batches, rng)}
    streams["events"] = checkpoint_events(folder.name, fake)
    streams["evals"] = eval_rows(folder.name, fake) if fake.evals else []
    streams["stats"] = stat_rows(folder.name, fake, rng) if fake.stats else []
    for plant in fake.plants:
        plant(streams)
    for name, rows in streams.items():
        if rows or name == "events":
            write_jsonl(folder / "metrics" / f"{name}.jsonl", rows)
    return folder


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def batch_rows(run_id: str, fake: FakeRun, rng: Generator) -> list[dict[str, Any]]:
    """Rows of `batches`, in order of sequence number."""
    num_batches = fake.num_steps * fake.batches_per_step
    per_epoch = num_batches // 2
    order = np.concatenate(
        [bucket_order(fake.order, n, fake.batches_per_step, rng) for n in (per_epoch, num_batches - per_epoch)]
    )
    rows = []
    for i, bucket in enumerate(order.tolist()):
        longest = UPPER[bucket] - int(rng.integers(0, 8))
        num_sequences = TOKEN_BUDGET // longest
        num_tokens = int(num_sequences * longest * rng.uniform(0.85, 1.0))
        supervised, step = num_tokens // 3, i // fake.batches_per_step
        loss = 2 + 3 * float(np.exp(-step / 60)) + 0.4 * (bucket == len(UPPER) - 1) + float(rng.normal(0, 0.05))
        rows.append(
            {
                "run_id": run_id,
                "attempt": 0,
                "time": 1.77e9 + step * 0.5,
                "seq_no": i,
                "step": step,
                "epoch": int(i >= per_epoch),
                "cell": i % fake.num_cells,
                "target": i % fake.num_targets,
                "bucket": bucket,
                "num_sequences": num_sequences,
                "mean_seq_len": num_tokens / num_sequences,
                "max_seq_len": longest,
                "num_tokens": num_tokens,
                "num_padded_tokens": num_sequences * longest,
                "num_anchors": num_sequences * 16,
                "num_supervised": supervised,
                "loss_sum": loss * supervised,
                "weight_sum": float(supervised),
                "load_s": 0.01,
                "queued_s": 0.05,
                "target_forward_s": 0.1,
            }
        )
    return rows


def step_rows(run_id: str, fake: FakeRun, batches: list[dict[str, Any]], rng: Generator) -> list[dict[str, Any]]:
    """Rows of `steps` that agree with those of the batches."""
    rows, noise = [], 0.0
    for step in range(fake.num_steps):
        part = batches[step * fake.batches_per_step : (step + 1) * fake.batches_per_step]
        counts = np.bincount([b["bucket"] for b in part], minlength=len(UPPER))
        total = {name: sum(b[name] for b in part) for name in ("num_sequences", "num_tokens", "num_padded_tokens", "num_anchors")}
        excess = float(counts[-1]) / len(part) - SHARES[-1]
        noise = 0.5 * noise + float(rng.normal(0, 0.03))
        norm = 0.6 + 1.2 * float(np.exp(-step / 40)) + 0.3 * fake.length_effect * excess + noise
        loss = sum(b["loss_sum"] for b in part) / sum(b["weight_sum"] for b in part)
        accuracy = [0.6 * 0.8**k * (1 - float(np.exp(-(step + 1) / 40))) for k in range(7)]
        rows.append(
            {
                "run_id": run_id,
                "attempt": 0,
                "time": part[0]["time"],
                "step": step,
                "epoch": part[0]["epoch"],
                "loss": loss + fake.length_effect * 0.2 * excess,
                "grad_norm": max(norm, 0.05),
                "clipped": norm > 1.0,
                "lr": 6e-4,
                "num_batches": len(part),
                **total,
                "num_supervised": sum(b["num_supervised"] for b in part),
                "accuracy_by_position": accuracy,
                "expected_acceptance_length": 1 + float(np.sum(np.cumprod(accuracy))),
                "bucket_counts": counts.tolist(),
                "mean_seq_len": total["num_tokens"] / total["num_sequences"],
                "max_seq_len": max(b["max_seq_len"] for b in part),
                "data_wait_s": 0.02,
                "target_wait_s": 0.1,
                "forward_s": 0.15,
                "backward_s": 0.2,
                "optimizer_s": 0.02,
                "step_s": 0.5,
                "prefetch_depths": [int(rng.integers(2, 8)) for _ in range(fake.num_targets)],
                "ready_depth": int(rng.integers(0, 3)),
                "skipped": False,
            }
        )
    return rows


def checkpoint_events(run_id: str, fake: FakeRun) -> list[dict[str, Any]]:
    """A checkpoint every 20 steps, written during the two steps behind it."""
    rows = []
    for step in range(20, fake.num_steps + 1, 20):
        base = {"run_id": run_id, "attempt": 0, "step": step, "cell": 0}
        time = 1.77e9 + (step - 1) * 0.5  # of the row of the step before
        began = {"kind": "checkpoint_begin", "time": time + 0.01, "snapshot_s": 0.01, "wait_s": 0.0}
        ended = {"kind": "checkpoint_end", "time": time + 0.8, "write_s": 0.78, "num_bytes": 10_000_000}
        rows += [{**base, **began}, {**base, **ended, "folder": f"step-{step:06d}", "kept": [step]}]
    return rows


def eval_rows(run_id: str, fake: FakeRun) -> list[dict[str, Any]]:
    """Rows of `evals` before and after training."""
    rows = []
    for kind, step, tau in (("untrained", 0, 1.02), ("trained", fake.num_steps, fake.acceptance_length)):
        base = {"run_id": run_id, "attempt": 0, "time": 1.77e9, "step": step, "kind": kind, "source": "all"}
        rows.append({**base, "position": None, "metric": "acceptance_length", "value": tau})
        accept = (tau - 1) / tau
        for slot in range(1, 8):
            rows.append({**base, "position": slot, "metric": "conditional_acceptance", "value": accept})
            rows.append({**base, "position": slot, "metric": "prefix_survival", "value": accept**slot})
    return rows


def stat_rows(run_id: str, fake: FakeRun, rng: Generator) -> list[dict[str, Any]]:
    """Rows of `stats`, every tenth step."""
    return [
        {
            "run_id": run_id,
            "attempt": 0,
            "time": 1.77e9,
            "step": step,
            "num_batches": step * fake.batches_per_step,
            "bucket_counts": [1, 2, 3, 4, 5, 6],
            "longest_run": 2,
            "prefetch_depths": [int(rng.integers(0, 8)) for _ in range(fake.num_targets)],
            "ready_depth": 1,
        }
        for step in range(0, fake.num_steps, 10)
    ]


def undocumented(run_dir: Path) -> set[str]:
    """What the rows of a run hold that docs/tables.md does not name: `stream.field`, kinds of events, metrics of evaluations."""
    found: set[str] = set()
    for stream, table in STREAM_TABLES.items():
        path = run_dir / "metrics" / f"{stream}.jsonl"
        for row in map(json.loads, path.read_text().splitlines() if path.exists() else []):
            found |= {f"{stream}.{name}" for name in row.keys() - table.columns.keys()}
            if stream == "events" and row["kind"] not in EVENT_KINDS:
                found.add(f"event {row['kind']}")
            if stream == "evals" and row["metric"] not in EVAL_METRICS:
                found.add(f"metric {row['metric']}")
    return found
