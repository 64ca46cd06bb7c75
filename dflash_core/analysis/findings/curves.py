"""The detectors that read the curves of a run: loss, gradient norm, accuracy."""

from __future__ import annotations

from dflash_core.analysis.findings.composition import find_composition
from dflash_core.analysis.findings.divergence import find_divergence
from dflash_core.analysis.findings.finding import Detector
from dflash_core.analysis.findings.positions import find_dead_positions
from dflash_core.analysis.findings.resets import find_resets
from dflash_core.analysis.findings.spikes import find_spikes
from dflash_core.analysis.findings.train_serve import find_train_serve_gap

CURVE_DETECTORS: tuple[Detector, ...] = (
    find_composition,
    find_spikes,
    find_resets,
    find_divergence,
    find_dead_positions,
    find_train_serve_gap,
)
