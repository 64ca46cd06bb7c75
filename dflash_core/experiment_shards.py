"""The composition root's part for a preparation in shards (see `dflash_core.data.shards`).

A shard is a small dictionary that JSON can hold: it goes to another process or node, which must see the same folders.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from dflash_core.config import DataConfig
from dflash_core.experiment_data import dataset_folder, draft_spec, target_folder
from dflash_core.experiment_file import ExperimentConfig


def plan_shards(config: ExperimentConfig, num_shards: int) -> list[dict[str, Any]]:
    """At most `num_shards` shards of about equal size; none if there is nothing to tokenize.

    Raises:
        ConfigError, DataError: what `prepare` would say before it begins.
    """
    from dflash_core.data import load_tokenizer
    from dflash_core.data.shards import plan_shards as plan

    draft_spec(config)  # a target that does not fit must not cost a preparation
    folder, dataset = target_folder(config), dataset_folder(config)
    shards = plan(config.data, load_tokenizer(folder), target=config.target.path, folder=dataset, num_shards=num_shards)
    shared = {
        "data": config.data.model_dump(mode="json"),
        "target": config.target.path,
        "target_folder": str(folder.absolute()),
        "dataset": str(dataset),
    }
    return [{**shared, "stripes": [asdict(stripe) for stripe in shard]} for shard in shards]


def make_shard(shard: dict[str, Any]) -> dict[str, int]:
    """Make the parts of a shard; returns `num_parts`, `num_rows`, `num_rejected`, `num_tokens`. Raises DataError."""
    from dflash_core.data import load_tokenizer
    from dflash_core.data.shards import Stripe
    from dflash_core.data.shards import make_shard as make

    return make(
        DataConfig.model_validate(shard["data"]),
        load_tokenizer(Path(shard["target_folder"])),
        target=shard["target"],
        folder=Path(shard["dataset"]),
        stripes=[Stripe(**stripe) for stripe in shard["stripes"]],
    )
