"""What one training run is made of, resolved and checked, as the composition root hands it over."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_core.config import BucketingConfig, MetricsConfig, PrefetchConfig, TargetConfig, TopologyConfig, TrainConfig
from dflash_core.model.spec import DraftSpec
from dflash_core.training.run_folder import RunFolder


@dataclass(frozen=True)
class TrainingJob:
    """Inputs of a run. `identity` is what a checkpoint must agree with to be resumed.

    `init_from` is the folder of a drafter whose weights a run without a checkpoint begins with.
    """

    run: RunFolder
    run_id: str
    dataset: Path
    edges: tuple[int, ...]
    target_folder: Path
    target: TargetConfig
    spec: DraftSpec
    bucketing: BucketingConfig
    train: TrainConfig
    topology: TopologyConfig
    prefetch: PrefetchConfig
    metrics: MetricsConfig
    identity: dict[str, Any]
    shown_config: dict[str, Any]
    init_from: Path | None = None
