"""Measured acceptance length: the draft-verify loop on held-out prompts."""

from dflash_core.evaluation.acceptance import Acceptance, Baseline, Evaluation, evaluate_draft
from dflash_core.evaluation.decode import (
    Decoded,
    greedy_decode,
    greedy_decode_many,
    speculative_decode,
    speculative_decode_many,
)

__all__ = [
    "Acceptance",
    "Baseline",
    "Decoded",
    "Evaluation",
    "evaluate_draft",
    "greedy_decode",
    "greedy_decode_many",
    "speculative_decode",
    "speculative_decode_many",
]
