"""All detectors over one run, and their findings as rows."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from dflash_core.analysis.findings.curves import CURVE_DETECTORS
from dflash_core.analysis.findings.finding import KINDS, STRENGTHS, Context, Detector, Finding
from dflash_core.analysis.findings.queues import QUEUE_DETECTORS
from dflash_core.analysis.intervals import named_rng
from dflash_core.analysis.runs import Run

DETECTORS: tuple[Detector, ...] = (*CURVE_DETECTORS, *QUEUE_DETECTORS)


def find_all(run: Run, context: Context, detectors: Sequence[Detector] = DETECTORS) -> list[Finding]:
    """What the detectors find in a run, strongest first. Each draws from the random generator of its own name."""
    found: list[Finding] = []
    for detector in detectors:
        found += detector(run, replace(context, rng=named_rng(context.rng, detector.__name__)))
    kinds = list(KINDS)
    return sorted(found, key=lambda one: (STRENGTHS.index(one.strength), kinds.index(one.kind)))


def finding_rows(found: Sequence[Finding]) -> list[dict[str, Any]]:
    """Rows of the table `findings`; `evidence` is JSON text."""
    return [{**asdict(one), "evidence": json.dumps(one.evidence), "at_steps": list(one.at_steps)} for one in found]
