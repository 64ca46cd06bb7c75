"""Findings: what the rows of a run say about the causes of what its curves show.

Each detector looks for one kind of cause and returns nothing where the data do not support it.
"""

from dflash_core.analysis.findings.finding import KINDS, STRENGTHS, Context, Detector, Finding, Strength

__all__ = ["KINDS", "STRENGTHS", "Context", "Detector", "Finding", "Strength"]
