"""A sink behind a thread: order, what happens when it fails, hangs or is too slow, and that nothing is left running."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from typing import Any

import pytest

from dflash_core.metrics.background import BackgroundSink
from dflash_core.metrics.sinks import FanOut, MemorySink


class Gate(MemorySink):
    """Takes rows only while the gate is open."""

    def __init__(self) -> None:
        super().__init__()
        self.open, self.entered = threading.Event(), threading.Event()

    def log(self, stream: str, row: Mapping[str, Any]) -> None:
        self.entered.set()
        self.open.wait(10)
        super().log(stream, row)


class Broken(MemorySink):
    def log(self, stream: str, row: Mapping[str, Any]) -> None:
        raise OSError("no connection")


def test_rows_arrive_in_order_and_close_waits_for_them() -> None:
    inner = MemorySink()
    sink = BackgroundSink(inner)
    row = {"step": -1}
    for step in range(300):
        row["step"] = step
        sink.log("steps", row)
    sink.close()
    assert [r["step"] for r in inner.rows["steps"]] == list(range(300)) and inner.closed
    sink.close()


def test_logging_does_not_wait_for_the_sink_and_drops_the_oldest(caplog: pytest.LogCaptureFixture) -> None:
    inner = Gate()
    sink = BackgroundSink(inner, most_waiting=3)
    sink.log("steps", {"step": 0})
    assert inner.entered.wait(5)
    for step in range(1, 9):
        sink.log("steps", {"step": step})
    assert not inner.rows["steps"]
    inner.open.set()
    with caplog.at_level(logging.WARNING):
        sink.close()
    assert [r["step"] for r in inner.rows["steps"]] == [0, 6, 7, 8]
    assert "5 rows are missing" in caplog.text


def test_flush_waits_until_the_rows_are_through() -> None:
    inner = Gate()
    sink = BackgroundSink(inner)
    sink.log("steps", {"step": 0})
    assert inner.entered.wait(5)
    threading.Timer(0.1, inner.open.set).start()
    sink.flush()
    assert len(inner.rows["steps"]) == 1
    sink.close()


def test_a_failing_sink_is_closed_and_told_once(caplog: pytest.LogCaptureFixture) -> None:
    inner, truth = Broken(), MemorySink()
    sink = BackgroundSink(inner)
    both = FanOut([truth, sink])
    both.log("steps", {"step": 0})
    sink._thread.join(5)
    with caplog.at_level(logging.WARNING):
        for step in range(1, 4):
            both.log("steps", {"step": step})
        both.close()
    assert len(truth.rows["steps"]) == 4 and inner.closed
    assert caplog.text.count("Broken is switched off: log failed: OSError: no connection") == 1


def test_a_sink_that_hangs_does_not_hold_up_the_end(caplog: pytest.LogCaptureFixture) -> None:
    inner = Gate()
    sink = BackgroundSink(inner, close_timeout_s=0.1)
    sink.log("steps", {"step": 0})
    assert inner.entered.wait(5)
    with caplog.at_level(logging.WARNING):
        sink.close()
    assert "does not end and is left behind" in caplog.text
    inner.open.set()
    sink._thread.join(5)
    assert inner.closed
