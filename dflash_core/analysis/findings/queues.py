"""The detectors about waiting, dispatch, batch order and padding."""

from __future__ import annotations

from dflash_core.analysis.findings.dispatch import find_unequal_dispatch
from dflash_core.analysis.findings.finding import Detector
from dflash_core.analysis.findings.order import find_batch_order
from dflash_core.analysis.findings.padding import find_padding
from dflash_core.analysis.findings.starvation import find_starvation

QUEUE_DETECTORS: tuple[Detector, ...] = (find_starvation, find_unequal_dispatch, find_batch_order, find_padding)
