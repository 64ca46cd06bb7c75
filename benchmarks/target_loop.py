"""The target loop's forward pass against the same model's plain one, which keeps all hidden states.

    python benchmarks/target_loop.py [batches] [rounds]

`FrozenTarget.features` records the tapped layers alone and stops behind the last tap; the plain way is
`model(input_ids, output_hidden_states=True)` with the taps picked from its hidden states and joined. Both get the same
tokens, in inference mode, without a cache, with one thread, in turns in one process, so that a busy machine slows both down
alike. Two models:

- the demo's: its tiny target, its taps, and batches as its plan forms them (fp32, and bf16 weights);
- the shape of SmolLM2-135M with random weights, two rows of 256 tokens and default taps: with a vocabulary of 49152 the
  head that is not computed weighs more than the layers.

Prints medians of the processor and wall time per batch; how many times as fast the target loop is, as the median over pairs
by either clock and as the ratio of the batches' best processor times, which a busy machine moves least; and the largest
difference between the two, absolute and as a share of the largest state. Preparing the corpus goes into a temporary
workspace.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from dflash_core import experiment as root
from dflash_core.config import DraftConfig, check_draft_fits
from dflash_core.data import Dataset
from dflash_core.model.target import FrozenTarget
from dflash_core.training.schedule import RunPlan

REPOSITORY = Path(__file__).resolve().parents[1]
SMOLLM2_TOKENS = (2, 256)


@torch.inference_mode()
def plain(target: FrozenTarget, tokens_BS: Tensor) -> Tensor:
    """All layers, final norm and head; then the taps are picked and joined."""
    states = target.model(input_ids=tokens_BS, output_hidden_states=True, use_cache=False).hidden_states
    return torch.cat([states[i + 1] for i in target.layer_ids], dim=-1)


def timed(forward: Callable[[], Tensor]) -> tuple[Tensor, float, float]:
    """The result, and the processor and wall seconds that it took."""
    cpu, wall = time.process_time(), time.perf_counter()
    result = forward()
    return result, time.process_time() - cpu, time.perf_counter() - wall


def compare(name: str, target: FrozenTarget, batches: list[Tensor], rounds: int) -> None:
    """Time both ways over all batches in turns, who comes first changing each time, and print a row."""
    ways: dict[bool, Callable[[Tensor], Tensor]] = {True: target.features, False: lambda tokens: plain(target, tokens)}
    cpu: dict[bool, list[list[float]]] = {tapped: [[] for _ in batches] for tapped in ways}  # by batch, then by round
    wall: list[tuple[float, float]] = []
    difference = largest = 0.0
    for way in ways.values():  # the first calls are slow
        way(batches[0])
    for turn in range(rounds):
        for n, tokens in enumerate(batches):
            results, wall_s = {}, {}
            for tapped in (True, False) if (turn + n) % 2 else (False, True):
                results[tapped], cpu_s, wall_s[tapped] = timed(lambda way=ways[tapped], x=tokens: way(x))  # type: ignore[misc]
                cpu[tapped][n].append(cpu_s)
            wall.append((wall_s[True], wall_s[False]))
            difference = max(difference, float((results[True] - results[False]).abs().max()))
            largest = max(largest, float(results[False].abs().max()))
    flat = {tapped: [seconds for by_round in cpu[tapped] for seconds in by_round] for tapped in ways}
    medians = [1e3 * statistics.median(flat[tapped]) for tapped in ways]
    medians += [1e3 * statistics.median(column) for column in zip(*wall, strict=True)]
    best = {tapped: sum(min(by_round) for by_round in cpu[tapped]) for tapped in ways}
    ratios = [statistics.median(p / t for t, p in zip(flat[True], flat[False], strict=True))]
    ratios += [statistics.median(p / t for t, p in wall), best[False] / best[True]]
    figures = "".join(f"{value:11.1f}" for value in medians) + "".join(f"{ratio:11.2f}" for ratio in ratios)
    print(f"{name:16}{len(wall):6d}{figures}{difference:12.1e}{difference / largest:12.1e}", flush=True)


def demo_batches(count: int) -> tuple[Path, tuple[int, ...], list[Tensor]]:
    """Target folder and taps of the demo, and the tokens of batches spread over the first epoch of its plan."""
    config = root.load_experiment(Path("flows/experiments/demo.yaml"))
    root.prepare(config)
    dataset = Dataset.open(root.dataset_folder(config))
    planned = list(RunPlan(dataset.lengths, root.edges(config, dataset.lengths), config.bucketing, config.train, 1).batches(0))
    batches = []
    for batch in planned[:: max(1, len(planned) // count)][:count]:
        rows = [torch.from_numpy(dataset.tokens(sample)[0].copy()).long() for sample in batch.samples]
        batches.append(torch.nn.utils.rnn.pad_sequence(rows, batch_first=True))
    return root.target_folder(config), root.draft_spec(config).target_layer_ids, batches


def save_smollm2_shape(folder: Path) -> tuple[int, ...]:
    """Save a model of SmolLM2-135M's shape with random weights; returns the default taps of such a target."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    return check_draft_fits(DraftConfig(), config.num_hidden_layers)


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 8
    rounds = int(sys.argv[2]) if len(sys.argv) > 2 else 5
    os.chdir(REPOSITORY)
    torch.set_num_threads(1)
    head = ("tapped ms", "plain ms", "wall", "plain wall", "x faster", "by wall", "by best")
    with tempfile.TemporaryDirectory() as workspace:
        os.environ["DFLASH_HOME"] = workspace
        folder, taps, batches = demo_batches(count)
        print(f"{'':16}{'pairs':>6}" + "".join(f"{name:>11}" for name in head) + f"{'difference':>12}{'relative':>12}")
        compare("demo float32", FrozenTarget(folder, taps, "float32", "sdpa", "cpu"), batches, rounds)
        few = batches[:: max(1, len(batches) // 3)]  # many CPUs have no bf16 arithmetic of their own
        compare("demo bfloat16", FrozenTarget(folder, taps, "bfloat16", "sdpa", "cpu"), few, max(1, rounds // 2))
        smollm2 = Path(workspace) / "smollm2"
        taps = save_smollm2_shape(smollm2)
        tokens = [torch.randint(0, 49152, SMOLLM2_TOKENS, generator=torch.Generator().manual_seed(0))]
        compare("SmolLM2 float32", FrozenTarget(smollm2, taps, "float32", "sdpa", "cpu"), tokens, rounds)


if __name__ == "__main__":
    main()
