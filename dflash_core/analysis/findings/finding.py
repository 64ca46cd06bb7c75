"""What a finding is: a cause or a fault that the rows of a run support, with the evidence and the rows to look at.

**Strength is the size of the harm, not how sure the cause is.** What is not sure is not printed at all; so a finding whose cause
is certain may be weak, because little is lost by it. `strong`: worth acting on even if it is the only finding; `moderate`: a
clear effect of medium size; `weak`: real, and small. What is measured, by kind, and from where on it is moderate and strong:

- `batch_order`: by how many points the largest bucket's share of a step scatters beyond what whole batches need (5, 15); with
  one batch a step, the longest run (any; four times the shortest possible one).
- `loss_composition`: share of the loss's roughness that is the bucket mix (35 %, 60 %).
- `spikes_in_bucket_runs`: share of the gradient spikes in runs of the bucket (50 %, 75 %).
- `resets`, `divergence`: how far and how often the curve falls back, or whether it comes back at all.
- `dead_positions`: always strong, for a slot is lost.
- `train_serve_gap`: what decoding accepts of what training promises (35 % or less, 20 % or less).
- `starved_*`: how many times faster the run could be (1.25, 1.5).
- `unequal_dispatch`: what the target with most batches has beyond its share (10 %, 20 %), or queues that hold up others.
- `padding`: share of the padded tokens that other boundaries would save (8 %, 15 %).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import pandas as pd
from numpy.random import Generator

from dflash_core.analysis.runs import Run
from dflash_core.config import AnalyzeConfig

Strength = Literal["strong", "moderate", "weak"]
STRENGTHS: tuple[Strength, ...] = ("strong", "moderate", "weak")

# Every kind that there is, with what it says. The documentation's table is made from it.
KINDS: dict[str, str] = {
    "batch_order": "buckets come in longer runs than they need to",
    "loss_composition": "the loss is rough because of which buckets a step holds, not because of training",
    "spikes_in_bucket_runs": "gradient spikes fall into runs of one bucket",
    "resets": "the loss or the accuracy falls back at certain moments, and what those moments coincide with",
    "divergence": "loss or gradient norm grow without bound or stop being finite",
    "dead_positions": "slots of the block that learn nothing",
    "train_serve_gap": "training promises another acceptance length than decoding measures",
    "starved_by_loader": "targets wait for batches: loading, the byte budget or the queues are too small",
    "starved_by_target": "the drafter waits for target states",
    "starved_by_drafter": "targets wait for the drafter",
    "unequal_dispatch": "targets got unequal numbers of batches",
    "padding": "padding that other bucket boundaries would save",
}


@dataclass(frozen=True)
class Finding:
    """One row of `findings.parquet`.

    Args:
        kind: a key of `KINDS`.
        run_id: the run that it is about.
        strength: size of the harm (above).
        title: one line that a person reads first; says what is the matter, in the run's own figures where that is short.
        text: one to four sentences in plain words: the evidence, with units and intervals, and what was ruled out.
        advice: what to do about it, one or two sentences; names keys of the experiment file.
        measure: what `value` measures, a few words.
        value: the figure that the finding rests on, in `unit`.
        low: lower end of its 95 % interval; None where there is no interval.
        high: upper end.
        threshold: the value from which on the finding is printed.
        table: the stream of the run (`steps`, `batches`, `stats`, `evals`, `events`) or the report's table to look at.
        rows: the rows to look at, as the condition of an SQL query over that table (`step BETWEEN 120 AND 140`).
        evidence: further figures, JSON values by name.
        at_steps: up to a few hundred steps that a plot may mark.
    """

    kind: str
    run_id: str
    strength: Strength
    title: str
    text: str
    advice: str
    measure: str
    value: float
    unit: str
    low: float | None
    high: float | None
    threshold: float
    table: str
    rows: str
    evidence: Mapping[str, Any] = field(default_factory=dict)
    at_steps: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in KINDS or self.strength not in STRENGTHS:
            raise ValueError(f"no such finding: {self.kind}, {self.strength}")


@dataclass(frozen=True)
class Context:
    """What a detector may use besides the run.

    Args:
        config: keys `analyze` of the experiment.
        rng: for resamples and permutations; the detector's own.
        bins: `length_bins` of the dataset (docs/design.md 4), None where it is not there.
    """

    config: AnalyzeConfig
    rng: Generator
    bins: pd.DataFrame | None = None


# A detector looks at one run for one kind of cause. It returns nothing where the data do not support one, also where a column
# that it needs is missing or the run is too short to say.
Detector = Callable[[Run, Context], list[Finding]]
