"""How long the analysis of many long runs takes, how much memory, and whether both grow in proportion.

    python benchmarks/analysis_scale.py [--quick] [--batches-per-step 4] [--cases 50x20000]

Generates run folders as training leaves them (columns and sizes of real rows, six buckets, a checkpoint and a measurement per
500 steps, a snapshot of the queues per 10) in a temporary folder, then runs `dflash analyze` on them in a process of its own:
once from JSONL, which also compacts it, and once more from the Parquet that this left. Printed are wall and processor
seconds, and the peak over time of the memory of all its processes (proportional set size: pages that they share count once;
the sum of their resident sets stands beside it, where these count for each). Generating is not timed. Runs of one length
share the content of four, by hard links, so files come from memory and not from a disk. Ends with code 1 if 50 runs of 20,000
steps take more than 20 s from Parquet, which completed trainings of this length leave, or more than 2 GB from either.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import yaml

REPOSITORY = Path(__file__).resolve().parents[1]
MAX_SECONDS, MAX_BYTES = 20.0, 2 * 1024**3
RUNS, STEPS = 50, 20_000
NUM_CONTENTS = 4
SHARES = np.array((0.08, 0.10, 0.10, 0.10, 0.10, 0.52))
UPPER = np.array((64, 128, 192, 256, 384, 512))
BUDGET = 2048

BATCH = (
    '{"run_id":"%s","attempt":0,"time":%.6f,"seq_no":%d,"step":%d,"epoch":%d,"cell":0,"target":%d,"bucket":%d,'
    '"num_sequences":%d,"mean_seq_len":%r,"max_seq_len":%d,"num_tokens":%d,"num_padded_tokens":%d,"cost":%d,"num_anchors":%d,'
    '"num_supervised":%d,"loss_sum":%r,"weight_sum":%r,"load_s":%r,"queued_s":%r,"target_forward_s":%r,"target_busy_s":%r,'
    '"draft_busy_s":%r}\n'
)
STEP = (
    '{"run_id":"%s","attempt":0,"time":%.6f,"step":%d,"epoch":%d,"loss":%r,"num_supervised":%d,"accuracy_by_position":%s,'
    '"expected_acceptance_length":%r,"num_batches":%d,"num_sequences":%d,"num_anchors":%d,"num_tokens":%d,'
    '"num_padded_tokens":%d,"bucket_counts":%s,"grad_norm":%r,"clipped":%s,"lr":%r,"skipped":false,"forward_s":%r,'
    '"backward_s":%r,"reduce_s":%r,"optimizer_s":%r,"optimizer_busy_s":%r,"data_wait_s":%r,"target_wait_s":%r,"step_s":%r,'
    '"log_s":%r,"mean_seq_len":%r,"max_seq_len":%d,"prefetch_depths":[%d,%d],"ready_depth":%d}\n'
)


@dataclass(frozen=True)
class Measured:
    """Of one analysis: seconds, and bytes of all its processes together."""

    wall_s: float
    cpu_s: float
    peak_pss: int
    peak_rss: int


def write_content(folder: Path, num_steps: int, per_step: int, seed: int) -> None:
    """The metrics of one run."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(seed)
    num = num_steps * per_step
    step = np.repeat(np.arange(num_steps), per_step)
    bucket = rng.choice(len(SHARES), num, p=SHARES)
    longest = UPPER[bucket] - rng.integers(0, 8, num)
    sequences = BUDGET // longest
    padded = sequences * longest
    tokens = (padded * rng.uniform(0.85, 1.0, num)).astype(int)
    anchors, supervised = sequences * 24, tokens // 3
    loss = 1.2 + 4 * np.exp(-step / (0.05 * num_steps)) + 0.3 * (bucket == 5) + rng.normal(0, 0.05, num)
    weight = supervised * 0.55
    epoch = (np.arange(num) * 3) // num
    began = 1.77e9 + np.arange(num_steps) * 0.5
    times = rng.gamma(4.0, 0.025, (num, 5))
    columns = (
        np.repeat(began, per_step), np.arange(num), step, epoch, np.arange(num) % 2, bucket, sequences, tokens / sequences,
        longest, tokens, padded, padded, anchors, supervised, loss * weight, weight, *times.T,
    )  # fmt: skip
    lines = [BATCH % ("generated", *row) for row in zip(*(column.tolist() for column in columns), strict=True)]
    (folder / "batches.jsonl").write_text("".join(lines))

    def summed(values: np.ndarray) -> np.ndarray:
        return values.reshape(num_steps, per_step).sum(axis=1)

    counts = np.zeros((num_steps, len(SHARES)), dtype=int)
    np.add.at(counts, (step, bucket), 1)
    accuracy = 0.8 ** np.arange(1, 8) * (1 - np.exp(-np.arange(num_steps) / (0.2 * num_steps)))[:, None]
    norm = 0.6 + 2 * np.exp(-np.arange(num_steps) / (0.05 * num_steps)) + rng.gamma(2.0, 0.05, num_steps)
    parts = rng.gamma(4.0, 0.02, (num_steps, 7))
    step_s = parts.sum(axis=1) + 0.1 + 1e-5 * summed(padded)
    depths = rng.integers(0, 8, (num_steps, 3))
    columns = (
        began, np.arange(num_steps), epoch[::per_step], summed(loss * weight) / summed(weight), summed(supervised), accuracy,
        1 + np.cumprod(accuracy, axis=1).sum(axis=1), np.full(num_steps, per_step), summed(sequences), summed(anchors),
        summed(tokens), summed(padded), counts, norm, np.where(norm > 1, "true", "false"),
        6e-4 * (1 - np.arange(num_steps) / num_steps), *parts.T, step_s, parts[:, 0] * 0.01,
        summed(tokens) / summed(sequences), longest.reshape(num_steps, -1).max(axis=1),
        *depths.T,
    )  # fmt: skip
    lines = [STEP % ("generated", *row) for row in zip(*(column.tolist() for column in columns), strict=True)]
    (folder / "steps.jsonl").write_text("".join(lines))
    write_rows(folder / "events.jsonl", events(num_steps, began, step_s))
    write_rows(folder / "stats.jsonl", stats(num_steps, per_step, depths, counts))
    write_rows(folder / "evals.jsonl", evals(num_steps))


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps({"run_id": "generated", "attempt": 0, **row}) + "\n" for row in rows))


def events(num_steps: int, began: np.ndarray, step_s: np.ndarray) -> list[dict[str, Any]]:
    rows = []
    for step in range(500, num_steps, 500):
        time_s = float(began[step] - step_s[step] + 0.01)
        rows += [
            {"kind": "checkpoint_begin", "time": time_s, "step": step, "cell": 0, "snapshot_s": 0.01, "wait_s": 0.0},
            {"kind": "checkpoint_end", "time": time_s + 1, "step": step, "cell": 0, "write_s": 0.9, "num_bytes": 10_000_000,
             "folder": f"step-{step:06d}", "kept": [step]},
        ]  # fmt: skip
    return rows


def stats(num_steps: int, per_step: int, depths: np.ndarray, counts: np.ndarray) -> list[dict[str, Any]]:
    so_far = np.cumsum(counts, axis=0)
    rows = []
    for step in range(0, num_steps, 10):
        done, pair = (step + 1) * per_step, [0.25 * step, 0.75 * step]
        rows.append(
            {
                "time": 1.77e9 + step * 0.5, "step": step, "cell": 0, "num_batches": done, "num_sequences": done * 5,
                "num_tokens": done * 1900, "num_padded_tokens": done * 2048, "bucket_counts": so_far[step].tolist(),
                "bucket_pct": (100 * so_far[step] / done).tolist(), "avg_seq_len": 380.0, "max_seq_len": 512,
                "avg_batch_size": 5.0, "padding_efficiency": 0.927, "dispatched_per_target": [done // 2, done - done // 2],
                "current_run": 1, "longest_run": 9, "mean_run": 1.3, "prefetch_depths": depths[step, :2].tolist(),
                "queue_put_wait_s": pair, "queue_get_wait_s": pair, "queue_tokens": [4096, 2048], "queue_bytes": [65536, 32768],
                "queue_mean_depths": [2.5, 3.25], "queue_max_depths": [8, 8], "queue_full_shares": [0.02, 0.03],
                "queue_empty_shares": [0.1, 0.2], "observed_s": step * 0.5, "budget_wait_s": 0.1 * step,
                "loader_idle_s": 1.5 * step, "reserved_bytes": 10_000_000, "max_reserved_bytes": 60_000_000, "ready_depth": 2,
                "ready_mean_depth": 2.5, "ready_max_depth": 8, "ready_get_wait_s": 0.05 * step, "ready_held_up_s": 0.01 * step,
                "ready_waiting_for": None, "ready_longest_wait_s": 0.6, "ready_longest_wait_position": 0,
            }
        )  # fmt: skip
    return rows


def evals(num_steps: int) -> list[dict[str, Any]]:
    rows = []
    for kind, step, tau in [("untrained", 0, 1.0), *(("training", s, 2.0) for s in range(500, num_steps, 500)),
                            ("trained", num_steps, 2.4)]:  # fmt: skip
        row = {"time": 1.77e9 + step * 0.5, "step": step, "kind": kind, "source": "all"}
        rows.append({**row, "position": None, "metric": "acceptance_length", "value": tau})
        rows += [{**row, "position": k, "metric": "prefix_survival", "value": 0.6**k} for k in range(1, 8)]
    return rows


def write_run(folder: Path, content: Path, order: str, seed: int) -> Path:
    (folder / "metrics").mkdir(parents=True)
    for path in content.iterdir():
        os.link(path, folder / "metrics" / path.name)
    config = {
        "name": "generated",
        "bucketing": {"num_buckets": len(SHARES), "token_budget": BUDGET, "batches_per_step": 4, "order": order},
        "train": {"seed": seed, "clip_norm": 1.0, "num_epochs": 3},
    }
    manifest = {
        "run_id": folder.name, "name": f"{order}-seed{seed}", "state": "completed", "acceptance_length": 2.4,
        "acceptance_length_untrained": 1.0, "lossless": True, "dataset_fingerprint": "f00d", "target": "tiny",
        "created": "2026-01-02T03:04:05+00:00", "finished": "2026-01-02T06:04:05+00:00",
    }  # fmt: skip
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


def analyze(runs: list[Path], out: Path) -> Measured:
    """`dflash analyze` in a process, watched from outside."""
    command = [sys.executable, "-m", "dflash_core", "analyze", *map(str, runs), "--out", str(out)]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    started = time.monotonic()
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    root, seconds, pss, rss = psutil.Process(process.pid), {}, 0, 0
    while process.poll() is None:
        shared = resident = 0
        for one in tree(root):
            try:
                seconds[one.pid] = sum(one.cpu_times()[:2])
                memory = one.memory_full_info()
            except psutil.Error:
                continue
            shared, resident = shared + memory.pss, resident + memory.rss
        pss, rss = max(pss, shared), max(rss, resident)
        time.sleep(0.05)
    wall = time.monotonic() - started
    if process.returncode:
        raise SystemExit(f"dflash analyze ended with {process.returncode}")
    return Measured(wall, sum(seconds.values()), pss, rss)


def tree(root: psutil.Process) -> list[psutil.Process]:
    try:
        return [root, *root.children(recursive=True)]
    except psutil.Error:
        return []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tenth of the steps; only orders of magnitude")
    parser.add_argument("--batches-per-step", type=int, default=4)
    parser.add_argument("--cases", nargs="+", metavar="RUNSxSTEPS", help="these instead of the usual ones")
    arguments = parser.parse_args()
    steps = STEPS // 10 if arguments.quick else STEPS
    cases = [(10, steps), (25, steps), (RUNS, steps), (100, steps), (RUNS, steps // 4), (RUNS, steps // 2)]
    if arguments.cases:
        cases = [(int(runs), int(length)) for runs, length in (case.split("x") for case in arguments.cases)]
    print(f"{arguments.batches_per_step} batches per step, load of the machine {os.getloadavg()[0]:.1f}, cores {os.cpu_count()}")
    print(f"{'runs':>5} {'steps':>7} {'from':>8} {'wall s':>8} {'cpu s':>8} {'PSS MB':>8} {'RSS MB':>8} {'cpu ms per run':>15} "
          f"{'cpu µs per step':>16}")  # fmt: skip
    within = True
    with tempfile.TemporaryDirectory(prefix="dflash-analysis-") as name:
        root = Path(name)
        for count, length in cases:
            contents = [root / "contents" / f"{length}-{seed}" for seed in range(NUM_CONTENTS)]
            for seed, content in enumerate(contents):
                if not content.is_dir():
                    write_content(content, length, arguments.batches_per_step, seed)
            case = root / f"case-{count}-{length}"
            names = [(("diverse", "shuffle")[i % 2], i // 2) for i in range(count)]
            runs = [write_run(case / f"run-{i:03d}", contents[i % NUM_CONTENTS], *one) for i, one in enumerate(names)]
            for source in ("JSONL", "Parquet"):
                found = analyze(runs, case / "report")
                print(
                    f"{count:>5} {length:>7} {source:>8} {found.wall_s:>8.1f} {found.cpu_s:>8.1f} {found.peak_pss / 1e6:>8.0f} "
                    f"{found.peak_rss / 1e6:>8.0f} {1e3 * found.cpu_s / count:>15.0f} "
                    f"{1e6 * found.cpu_s / count / length:>16.1f}",
                    flush=True,
                )
                if (count, length) == (RUNS, STEPS):
                    # A training this long leaves Parquet when it completes; from JSONL are read those that were killed.
                    within &= (found.wall_s <= MAX_SECONDS or source == "JSONL") and found.peak_pss <= MAX_BYTES
            report = case / "report" / "report.html"
            print(f"{'':>13} report.html {report.stat().st_size / 1e6:.1f} MB")
            shutil.rmtree(case)
    sys.exit(0 if within else 1)


if __name__ == "__main__":
    main()
