"""Measured acceptance length: the draft-verify loop on held-out prompts."""

from dflash_core.evaluation.acceptance import Acceptance, Baseline, Evaluation, evaluate_draft
from dflash_core.evaluation.bootstrap import ratio_interval
from dflash_core.evaluation.decode import (
    Decoded,
    greedy_decode,
    greedy_decode_many,
    speculative_decode,
    speculative_decode_many,
)
from dflash_core.evaluation.describe import describe_evaluation
from dflash_core.evaluation.lossless import Difference, explain_difference
from dflash_core.evaluation.speed import measure_speed

__all__ = [
    "Acceptance",
    "Baseline",
    "Decoded",
    "Difference",
    "Evaluation",
    "describe_evaluation",
    "evaluate_draft",
    "explain_difference",
    "greedy_decode",
    "greedy_decode_many",
    "measure_speed",
    "ratio_interval",
    "speculative_decode",
    "speculative_decode_many",
]
