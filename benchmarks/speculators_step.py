"""One training step of the draft on a CPU, ours against speculators' eager one: time and peak memory.

    .venv-peers/bin/python -m benchmarks.speculators_step [--rounds N] [--threads N]

SmolLM2's shape with random weights, one row of 2048 tokens, 128 anchors, blocks of 16, fp32, with 5 layers and 5 taps and
with 2 layers and 3 taps. A step is forward, loss and backward of one batch; the optimizer is left out on both sides (it is the
same AdamW over the same parameters). Both compute the weighted cross-entropy of the same slots.

- ours: `DraftTrainer.add`, as a run on a CPU calls it.
- speculators `eager` and `sdpa`: its model in training mode with that `--draft-attn-impl` and `--loss-implementation eager`,
  for its default attention needs a compiler and its fused losses need Triton. Its step has one more pass through the head, for
  its labels are the argmax of the verifier's logits; ours come with the batch.

Time: all in one process, in turns, the first changing from round to round; medians of the wall and the processor time, and
the median over the rounds of the ratio within a round, by either clock. Memory: each in a process of its own; the peak of the
resident set during the first step, less the resident set before it, when weights and batch are there (gradients count).
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import torch

from benchmarks.speculators_peer import (
    Batch,
    export,
    load_peer,
    our_batch,
    our_trainer,
    peer_loss,
    random_draft,
    random_verifier,
)
from dflash_core.model.spec import DraftSpec

REPOSITORY = Path(__file__).resolve().parents[1]
LENGTH, ANCHORS = 2048, 128
SIDES = ("ours", "eager", "sdpa")
FASTER, SMALLER = 1.5, 0.5


def smollm2_spec(num_layers: int, target_layer_ids: tuple[int, ...]) -> DraftSpec:
    """A draft for SmolLM2-135M."""
    return DraftSpec(
        hidden_size=576, intermediate_size=1536, num_layers=num_layers, num_heads=9, num_kv_heads=3, head_dim=64,
        vocab_size=49152, rms_norm_eps=1e-5, rope_theta=100_000.0, max_position_embeddings=8192, tie_word_embeddings=True,
        num_target_layers=30, block_size=16, mask_token_id=16, target_layer_ids=target_layer_ids,
    )  # fmt: skip


ROWS = {"5 layers": smollm2_spec(5, (1, 7, 14, 20, 27)), "2 layers": smollm2_spec(2, (1, 14, 27))}


def make_step(side: str, row: str, folder: Path) -> Callable[[], None]:
    """A function that does one step; weights and batch are built here. `folder` holds the exported draft."""
    spec = ROWS[row]
    batch = Batch.make(spec, LENGTH, ANCHORS)
    if side == "ours":
        draft = random_draft(spec)
        scale = spec.hidden_size**-0.5
        head_VD = torch.empty(spec.vocab_size, spec.hidden_size).normal_(0.0, scale)
        trainer, ready = our_trainer(draft, head_VD, head_VD), our_batch(batch, spec.block_size)

        def step() -> None:
            trainer.add(trainer.begin(), ready)

    else:
        model = load_peer(folder, side).train()

        def step() -> None:
            model.zero_grad()
            peer_loss(model, batch).backward()

    return step


def resident(field: str) -> int:
    """Bytes that the process holds (`VmRSS`) or has held at most (`VmHWM`)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


def measure_memory(side: str, row: str, folder: Path) -> dict[str, float]:
    """Peak of a step above what was there before it, and what that was, in MiB."""
    step = make_step(side, row, folder)
    gc.collect()
    try:
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew; loading may have been higher
        before, how = resident("VmRSS"), "VmHWM"
    except OSError:  # not Linux, or not allowed: then the peak of loading counts for the start
        before, how = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, "ru_maxrss"
    step()
    peak = resident("VmHWM") if how == "VmHWM" else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"before": before / 2**20, "growth": (peak - before) / 2**20}


def memory_in_own_process(side: str, row: str, folder: Path, threads: int) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.speculators_step", "--memory", side, row, str(folder), "--threads", str(threads)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr}")
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def measure_times(row: str, folder: Path, rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Wall and processor seconds of each side's steps."""
    steps = {side: make_step(side, row, folder) for side in SIDES}
    for step in steps.values():
        step()
    times: dict[str, list[tuple[float, float]]] = {side: [] for side in SIDES}
    for number in range(rounds):
        first = number % len(SIDES)
        for side in SIDES[first:] + SIDES[:first]:
            wall, cpu = time.perf_counter(), time.process_time()
            steps[side]()
            times[side].append((time.perf_counter() - wall, time.process_time() - cpu))
    return times


def compare(row: str, folder: Path, rounds: int, threads: int) -> bool:
    """Print a row's tables; True if ours is fast and small enough against the eager one."""
    memory = {side: memory_in_own_process(side, row, folder, threads) for side in SIDES}
    share = {side: memory["ours"]["growth"] / memory[side]["growth"] for side in SIDES}
    for side in SIDES:
        growth, before = memory[side]["growth"], memory[side]["before"]
        print(f"{row:<10}{side:<8}{growth:>8.0f} MiB above {before:.0f} MiB, ours / it {share[side]:.2f}", flush=True)
    times = measure_times(row, folder, rounds)
    ratios = {}
    for side in SIDES:
        wall, cpu = (statistics.median(clock) for clock in zip(*times[side], strict=True))
        pairs = list(zip(times[side], times["ours"], strict=True))
        ratios[side], by_cpu = (statistics.median(a[clock] / b[clock] for a, b in pairs) for clock in (0, 1))
        print(
            f"{row:<10}{side:<8}{wall:>8.2f} s, {cpu:.2f} s of processor, it / ours {ratios[side]:.2f}, {by_cpu:.2f}", flush=True
        )
    return ratios["eager"] >= FASTER and share["eager"] <= SMALLER


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument(
        "--memory", nargs=3, metavar=("SIDE", "ROW", "FOLDER"), help="measure one side's memory, for this script's own use"
    )
    return parser.parse_args()


def main() -> int:
    args = parse()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    if args.memory:
        side, row, folder = args.memory
        print(json.dumps(measure_memory(side, row, Path(folder))))
        return 0
    print(
        f"speculators {version('speculators')}, torch {torch.__version__}, {args.threads} threads, "
        f"load {os.getloadavg()[0]:.1f}, fp32, {LENGTH} tokens, {ANCHORS} anchors x 16 slots, {args.rounds} rounds"
    )
    met = []
    for row, spec in ROWS.items():
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            rows = random_verifier(folder / "verifier", spec)
            export(folder / "draft", random_draft(spec), *rows, folder / "verifier")
            met.append(compare(row, folder / "draft", args.rounds, args.threads))
        gc.collect()
    print(f"at least {FASTER} times as fast as eager, at most {SMALLER} of its memory: {'met' if all(met) else 'NOT MET'}")
    return 0 if all(met) else 1


if __name__ == "__main__":
    sys.exit(main())
