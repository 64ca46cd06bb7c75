"""Packed rows against padded batches: what a token costs in target and drafter, on the demo's corpus and tiny target.

    python benchmarks/packed.py [batches]

Takes the demo's own settings (6 buckets, its token budget, its draft) and trains the first batches of an epoch in both
strategies, in turns in one process, so that a busy machine slows both down alike. Prints the time per 1000 real tokens of
the target's forward pass and of the drafter's step, the share of real tokens among those computed and in the budget, and
how many times as many tokens per second packed rows train.
Preparing the corpus goes into a temporary workspace.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from dflash_core import experiment as root
from dflash_core.config import Strategy
from dflash_core.data import Dataset
from dflash_core.experiment_file import ExperimentConfig
from dflash_core.model.anchors import default_gamma, slot_weights
from dflash_core.model.draft import DFlashDraft
from dflash_core.model.target import FrozenTarget
from dflash_core.pipeline import Loaded
from dflash_core.records import PlannedBatch
from dflash_core.training.collate import Collator
from dflash_core.training.distributed import CellGroup
from dflash_core.training.loop import DraftTrainer
from dflash_core.training.schedule import RunPlan
from dflash_core.training.target_loop import Ready

REPOSITORY = Path(__file__).resolve().parents[1]
STRATEGIES: tuple[Strategy, ...] = ("padded", "packed")


@dataclass
class Spent:
    """What one strategy has trained so far, and in which time."""

    batches: list[PlannedBatch]
    num_tokens: int = 0
    num_padded: int = 0
    num_anchors: int = 0
    num_sequences: int = 0
    load_s: float = 0.0
    target_s: float = 0.0
    draft_s: float = 0.0

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / (self.target_s + self.draft_s)


def train(batch: PlannedBatch, spent: Spent, collator: Collator, target: FrozenTarget, trainer: DraftTrainer) -> None:
    started = time.perf_counter()
    shape, payload = collator(batch)
    loaded = time.perf_counter()
    features = target.features(payload.tokens_RS, None, payload.documents)
    served = time.perf_counter()
    totals = trainer.begin()
    trainer.add(totals, Ready(Loaded(batch, shape, payload, 0), features, 0.0, 0.0, 0.0))
    trainer.end(0, totals, False)
    spent.draft_s += time.perf_counter() - served
    spent.target_s += served - loaded
    spent.load_s += loaded - started
    spent.num_tokens += shape.num_tokens
    spent.num_padded += shape.num_padded_tokens
    spent.num_anchors += shape.num_anchors
    spent.num_sequences += shape.num_sequences


def plan_of(config: ExperimentConfig, lengths: object, strategy: Strategy) -> RunPlan:
    bucketing = config.bucketing.model_copy(update={"strategy": strategy})
    train_config = config.train.model_copy(update={"num_epochs": 1, "max_steps": None})
    return RunPlan(lengths, root.edges(config, lengths), bucketing, train_config, 1)  # type: ignore[arg-type]


def report(spent: dict[Strategy, Spent], num_steps: dict[Strategy, int], token_budget: int) -> None:
    head = ("efficiency", "fill", "tokens", "sequences", "anchors", "load", "target", "drafter", "tokens/s", "steps/epoch")
    print(f"{'':8}" + "".join(f"{name:>12}" for name in head))
    for strategy, s in spent.items():
        n, k = len(s.batches), s.num_tokens / 1000
        values = (s.num_tokens / n, s.num_sequences / n, s.num_anchors / n, 1e3 * s.load_s / k, 1e3 * s.target_s / k)
        row = "".join(f"{value:12.1f}" for value in (*values, 1e3 * s.draft_s / k, s.tokens_per_s))
        shares = "".join(f"{s.num_tokens / whole:12.3f}" for whole in (s.num_padded, n * token_budget))
        print(f"{strategy:8}{shares}{row}{num_steps[strategy]:12d}")
    padded, packed = (spent[strategy] for strategy in STRATEGIES)
    print(f"packed / padded: tokens/s {packed.tokens_per_s / padded.tokens_per_s:.2f}")


def main() -> None:
    num_batches = int(sys.argv[1]) if len(sys.argv) > 1 else 60
    os.chdir(REPOSITORY)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as workspace:
        os.environ["DFLASH_HOME"] = workspace
        config = root.load_experiment(Path("flows/experiments/demo.yaml"))
        root.prepare(config)
        dataset = Dataset.open(root.dataset_folder(config))
        spec = root.draft_spec(config)
        target = FrozenTarget(root.target_folder(config), spec.target_layer_ids, "float32", "sdpa", "cpu")
        weights = slot_weights(spec.block_size, default_gamma(spec.block_size))
        collator = Collator(
            dataset,
            seed=0,
            num_anchors=config.train.num_anchors,
            weights_K=weights,
            pad_token_id=target.shape.pad_token_id,
            pin=False,
        )
        plans = {strategy: plan_of(config, dataset.lengths, strategy) for strategy in STRATEGIES}
        planned = {strategy: list(plan.batches(0)) for strategy, plan in plans.items()}
        num_batches = min(num_batches, *map(len, planned.values()))
        spent = {strategy: Spent(batches[:num_batches]) for strategy, batches in planned.items()}
        trainers = {
            strategy: DraftTrainer(
                DFlashDraft(spec).initialise(0), target.embedding_VH, target.head_VH, config.train, 1000, 6, CellGroup()
            )
            for strategy in STRATEGIES
        }
        for strategy in STRATEGIES:  # the first calls of every kind are slow
            train(spent[strategy].batches[0], Spent([]), collator, target, trainers[strategy])
        for pair in zip(*(spent[strategy].batches for strategy in STRATEGIES), strict=True):
            for strategy, batch in zip(STRATEGIES, pair, strict=True):
                train(batch, spent[strategy], collator, target, trainers[strategy])
    print(f"{num_batches} batches of {config.bucketing.token_budget} tokens, one thread; times in ms per 1000 real tokens")
    report(spent, {strategy: plan.num_steps for strategy, plan in plans.items()}, config.bucketing.token_budget)


if __name__ == "__main__":
    main()
