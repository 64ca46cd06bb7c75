"""One line of progress now and then, through the log, so that it reaches terminal, log file and Prefect alike."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from dflash_core.metrics.sinks import OptionalSink, check_stream

logger = logging.getLogger(__name__)
PROGRESS_LOGGER = f"{__name__}.progress"  # of the lines that a live display stands in for
progress = logging.getLogger(PROGRESS_LOGGER)

SUMMED_FIELDS = ("num_tokens", "num_anchors", "step_s", "data_wait_s", "target_wait_s", "forward_s", "backward_s", "skipped")


class ConsoleSink(OptionalSink):
    """Logs a line for the first step, the last one, and every `every_s` seconds between them, and one for each validation.

    Rates and shares are those of the steps since the line before. "mostly" names where their time went: `data` (the targets
    waited for batches), `target` (the drafter waited for target states) or `draft` (forward and backward).

    Args:
        total_steps: steps of the whole run, for the progress and the time left.
        clock: seconds, for tests.
    """

    def __init__(self, total_steps: int, every_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._total_steps, self._every_s, self._clock = total_steps, every_s, clock
        self._lock = threading.Lock()
        self._last_line: float | None = None
        self._num_steps = 0
        self._sums = dict.fromkeys(SUMMED_FIELDS, 0.0)

    def log(self, stream: str, row: Mapping[str, Any]) -> None:
        """Count a row of `steps`, and say a line on them when it is time; raises ValueError for an unknown stream."""
        check_stream(stream)
        if stream == "events" and row.get("kind") == "validation":
            logger.info("%s", _validation_line(row))
        if stream != "steps":
            return
        with self._lock:
            self._num_steps += 1
            for field in SUMMED_FIELDS:
                self._sums[field] += float(row.get(field) or 0.0)
            now = self._clock()
            is_last = row.get("step", -1) + 1 >= self._total_steps
            if self._last_line is not None and now - self._last_line < self._every_s and not is_last:
                return
            line = self._line(row)
            self._last_line, self._num_steps = now, 0
            self._sums = dict.fromkeys(SUMMED_FIELDS, 0.0)
        progress.info("%s", line)

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass

    def _line(self, row: Mapping[str, Any]) -> str:
        done, seconds = row.get("step", -1) + 1, self._sums["step_s"]
        parts = [f"step {done:,}/{self._total_steps:,}"]
        for label, field, form in (
            ("loss", "loss", ".4f"),
            ("acceptance length (expected, +1 incl.)", "expected_acceptance_length", ".2f"),
            ("gradient norm", "grad_norm", ".3g"),
        ):
            if row.get(field) is not None:
                parts.append(f"{label} {row[field]:{form}}")
        if seconds > 0:
            parts.append(
                f"{self._sums['num_tokens'] / seconds:,.0f} tokens/s, {self._sums['num_anchors'] / seconds:,.0f} anchors/s"
            )
            parts.append(f"{duration(max(0, self._total_steps - done) * seconds / self._num_steps)} left")
            parts.append(self._where_time_went(seconds))
        if self._sums["skipped"]:
            parts.append(f"{self._sums['skipped']:.0f} skipped")
        return " | ".join(part for part in parts if part)

    def _where_time_went(self, seconds: float) -> str:
        sums = self._sums
        spent = {"data": sums["data_wait_s"], "target": sums["target_wait_s"], "draft": sums["forward_s"] + sums["backward_s"]}
        name = max(spent, key=lambda key: spent[key])
        return f"mostly {name} ({min(1.0, spent[name] / seconds):.0%})" if spent[name] > 0 else ""


def _validation_line(row: Mapping[str, Any]) -> str:
    parts = [f"after {row.get('step', 0):,} steps"]
    for label, field in (("measured on held-out prompts", "acceptance_length"), ("estimated", "expected_acceptance_length")):
        parts.append(f"{label} " + ("no figure" if row.get(field) is None else f"{row[field]:.2f}"))
    return f"acceptance length (+1 incl.) {parts[0]}: {', '.join(parts[1:])} | {row.get('validation_s', 0.0):.1f} s"


def duration(seconds: float) -> str:
    """`42 s`, `3 min 05 s`, `2 h 07 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
