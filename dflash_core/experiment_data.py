"""The data side of an experiment: its folders, the prepared dataset, its buckets, and the plans of an epoch.

`dflash_core.experiment` joins this with training; the command line uses it alone for `prepare` and `plan`. Nothing here
needs torch, but for the target's shape.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash_core.errors import ConfigError
from dflash_core.experiment_file import ExperimentConfig

if TYPE_CHECKING:
    from dflash_core.bucketing import EpochPlan
    from dflash_core.data import PrepareProgress
    from dflash_core.model.spec import DraftSpec

ORDERS = ("diverse", "shuffle", "grouped", "clustered", "sorted")


def workspace() -> Path:
    """The folder that everything goes under: `DFLASH_HOME`, or `workspace` in the current folder."""
    folder = Path(os.environ.get("DFLASH_HOME") or "workspace").absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"DFLASH_HOME: {folder} cannot be made ({error.strerror})") from None
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(f"DFLASH_HOME: {folder} cannot be written to ({error.strerror})") from None
    return folder


def target_folder(config: ExperimentConfig) -> Path:
    """The target's Hugging Face folder; converts a packaged GGUF target once."""
    from dflash_core.model.gguf import resolve_target_folder

    return resolve_target_folder(config.target.path, workspace() / "cache")


def dataset_folder(config: ExperimentConfig) -> Path:
    """Where the experiment's dataset is, or will be."""
    return workspace() / "datasets" / config.data.name


def draft_spec(config: ExperimentConfig) -> DraftSpec:
    """The draft's shape; raises ConfigError where draft, taps or mask token do not fit the target."""
    from dflash_core.data import load_tokenizer, mask_token_id
    from dflash_core.model.spec import DraftSpec
    from dflash_core.model.target import read_target_shape

    folder = target_folder(config)
    shape = read_target_shape(folder)
    mask = mask_token_id(load_tokenizer(folder), config.target.mask_token_id, shape.vocab_size, config.target.path)
    return DraftSpec.build(config.draft, shape, mask)


def prepare(config: ExperimentConfig, progress: Callable[[PrepareProgress], None] | None = None) -> dict[str, Any]:
    """Make the dataset folder, or keep one that is up to date; returns what its manifest says, and `path`."""
    from dflash_core.data import Dataset, load_tokenizer, prepare_dataset, read_prompts, write_length_histogram

    folder = target_folder(config)
    draft_spec(config)  # a target without a mask token, or taps that do not fit, must not cost a preparation
    dataset = dataset_folder(config)
    tokenizer = load_tokenizer(folder)
    if config.data.held_out is not None:  # a missing file or a bad row would be found only after hours of training
        read_prompts(
            config.data.held_out,
            tokenizer,
            config.evaluate.max_prompts,
            columns={str(ours): theirs for ours, theirs in config.data.columns.items()},
            template_variables=config.data.template_variables,
        )
    manifest = prepare_dataset(config.data, tokenizer, target=config.target.path, folder=dataset, progress=progress)
    write_length_histogram(dataset, edges(config, Dataset.open(dataset).lengths))
    copied = ("fingerprint", "num_sequences", "num_tokens", "num_supervised", "num_truncated", "reused")
    return {
        "path": str(dataset),
        **{key: manifest[key] for key in copied},
        "num_rejected": sum(manifest["num_rejected"].values()),
        "rejected_by_reason": manifest["num_rejected"],
    }


def describe_dataset(config: ExperimentConfig, width: int = 100) -> list[str]:
    """Lines that draw the prepared dataset's buckets: their share of sequences, tokens and supervised tokens."""
    from dflash_core.data import draw_histogram

    return draw_histogram(dataset_folder(config), width)


def sample_lines(config: ExperimentConfig, count: int, *, colour: bool) -> Iterator[str]:
    """Lines that show `count` sequences, spread evenly over the prepared dataset, with supervised tokens marked."""
    from dflash_core.data import Dataset, load_tokenizer, show_samples

    dataset = Dataset.open(dataset_folder(config))
    count = min(count, len(dataset))
    chosen = [number * len(dataset) // count for number in range(count)]
    samples = ((dataset.sample_id(i), *dataset.tokens(i)) for i in chosen)
    sources = [str(dataset.sources[i]) for i in chosen]
    return show_samples(samples, load_tokenizer(target_folder(config)), colour=colour, sources=sources)


def describe_bucket_choice(plan: Mapping[str, Any]) -> list[str]:
    """Tables from what `plan` returns: what 1 to 16 buckets would cost, by which their number is chosen, and the orders."""
    rows = plan["num_buckets_compared"]
    lines = [
        "",
        "Random batches in 1 to 16 buckets, as modelled. The cost is padded tokens and 0.2 of a budget for each batch, as a",
        "share of one bucket's, which pads little only because its batches are many and small. Sorted and packed ones pad less.",
        "buckets  modelled cost  padding efficiency  budget fill  batches",
    ]
    for row in rows:
        share = row["modelled_cost"] / rows[0]["modelled_cost"]
        figures = f"{row['padding_efficiency']:18.3f}  {row['budget_fill']:11.3f}  {row['num_batches']:7,}"
        chosen = "  <- now" if tuple(row["edges"]) == tuple(plan["edges"]) else ""
        lines.append(f"{row['num_buckets']:7}  {share:13.1%}  {figures}{chosen}")
    return [*lines, "", *_order_lines(plan)]


def _order_lines(plan: Mapping[str, Any]) -> list[str]:
    """The first epoch in every order."""
    fill = f"padding efficiency {plan['padding_efficiency']:.3f}, budget fill {plan['budget_fill']:.3f}"
    lines = [
        f"The first epoch as planned ({plan['strategy']}): {plan['num_batches']:,} batches, {plan['num_steps']:,} steps, {fill}",
        "order    longest bucket run (shortest possible)  deviation from an even mix  sd of the main bucket's share per step",
    ]
    for order, found in plan["orders"].items():
        deviation, spread = found["prefix_deviation"], found["step_share_sd"]
        lines.append(
            f"{order:8} {found['longest_run']:18,} ({found['shortest_possible_longest_run']:,}) {'':17} {deviation:26,.2f}"
            f"  {'-' if spread is None else f'{spread:.3f}':>38}"
        )
    return lines


def edges(config: ExperimentConfig, lengths: Any) -> tuple[int, ...]:
    """Upper bucket boundaries, chosen or checked."""
    from dflash_core.bucketing import choose_boundaries, validate_boundaries

    bucketing = config.bucketing
    if not isinstance(bucketing.boundaries, str):
        return tuple(validate_boundaries(bucketing.boundaries, lengths))
    return choose_boundaries(
        lengths,
        bucketing.num_buckets,
        bucketing.boundaries,
        bucketing.token_budget,
        max_sequences=bucketing.max_sequences,
        quadratic_length=bucketing.quadratic_length,
    )


def plan(config: ExperimentConfig) -> dict[str, Any]:
    """Boundaries, what other numbers of buckets would cost, and the statistics of the first epoch in every order.

    Returns:
        `edges`, `strategy`, `padding_efficiency`, `budget_fill`, `num_batches`, `num_steps`, `bucket_pct` (share of batches),
        `num_buckets_compared` (random batches with 1 to 16 buckets) and `orders`: for each order the statistics of all
        batches, with those of `steps` and `cells` below them.
    """
    import numpy as np

    from dflash_core.bucketing import padding_efficiency_table, plan_levels
    from dflash_core.data import Dataset
    from dflash_core.training.schedule import plan_configured

    lengths = Dataset.open(dataset_folder(config)).lengths
    chosen, bucketing = edges(config, lengths), config.bucketing
    orders: dict[str, Any] = {}
    epoch: EpochPlan | None = None
    for order in ORDERS:
        in_order = bucketing.model_copy(update={"order": order})
        epoch = plan_configured(lengths, chosen, in_order, num_cells=config.topology.cells, seed=config.train.seed)
        levels = plan_levels(epoch)
        orders[order] = levels.flat.as_dict() | {
            "steps": levels.steps.as_dict(),
            "cells": [cell.as_dict() for cell in levels.cells] if config.topology.cells > 1 else [],
        }
    assert epoch is not None
    counts = np.bincount(epoch.bucket, minlength=len(chosen))
    strategy = bucketing.boundaries if isinstance(bucketing.boundaries, str) else "min_padding"
    return {
        "edges": list(chosen),
        "strategy": bucketing.strategy,
        "padding_efficiency": orders["diverse"]["padding_efficiency"],
        "budget_fill": round(epoch.budget_fill, 4),
        "num_batches": epoch.num_batches,
        "num_steps": epoch.num_steps,
        "bucket_pct": [round(100.0 * int(n) / epoch.num_batches, 2) for n in counts],
        "num_buckets_compared": [
            row.as_dict()
            for row in padding_efficiency_table(
                lengths,
                bucketing.token_budget,
                strategy,
                max_sequences=bucketing.max_sequences,
                quadratic_length=bucketing.quadratic_length,
            )
        ],
        "orders": orders,
    }
