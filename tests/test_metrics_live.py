"""The live console: what it says, that log lines run above it untorn, and that it gives everything back."""

from __future__ import annotations

import errno
import fcntl
import io
import logging
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from dflash_core.metrics import ConsoleSink, FanOut, MemorySink
from dflash_core.metrics.background import BackgroundSink
from dflash_core.metrics.live import LiveSink, console_sinks, is_live_terminal
from dflash_core.metrics.run_view import MOST_POINTS, WINDOW_STEPS, History, RunView
from dflash_core.metrics.screen import BLOCKS, live_lines, sparkline

TIMES = {"step_s": 1.0, "forward_s": 0.3, "backward_s": 0.2, "optimizer_s": 0.1, "reduce_s": 0.1}
WIDTH = 120


def step(number: int, **fields: Any) -> dict[str, Any]:
    base = {
        "step": number,
        "attempt": 0,
        "time": 1e9 + 2.0 * number,
        "loss": 3.0,
        "grad_norm": 0.5,
        "num_tokens": 1000,
        "num_anchors": 50,
    }
    return {**base, "expected_acceptance_length": 1.75, "skipped": False, **TIMES, **fields}


def screen_after(output: str) -> list[str]:
    """The rows of a terminal that got `output`: carriage returns, line feeds, cursor up and erase line; colours are passed by."""
    rows: list[list[str]] = [[]]
    x = y = 0
    for piece in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|[^\x1b]", output):
        if piece == "\n":
            x, y = 0, y + 1
        elif piece == "\r":
            x = 0
        elif piece.endswith("A") and piece.startswith("\x1b"):
            y -= int(piece[2:-1] or 1)
            assert y >= 0, "the cursor left the screen"
        elif piece == "\x1b[2K":
            rows[y] = []
        elif not piece.startswith("\x1b"):
            rows[y] += [" "] * (x + 1 - len(rows[y]))
            rows[y][x] = piece
            x += 1
        while len(rows) <= y:
            rows.append([])
    return ["".join(row).rstrip() for row in rows]


def text_of(view: RunView) -> str:
    console = Console(file=io.StringIO(), width=WIDTH)
    console.print(live_lines(view, "mine"))
    file = console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue()


def test_the_display_tells_progress_figures_and_what_is_waited_for() -> None:
    view = RunView(total_steps=200)
    for number in range(100):
        view.take("steps", step(number, target_wait_s=0.2, skipped=number == 3))
    view.take("events", {"kind": "validation", "step": 90, "acceptance_length": 2.31, "validation_s": 0.0})
    text = text_of(view)
    assert "mine" in text and "step 100 of 200 · 50% · 3 min 20 s left" in text  # 2 s a step, by the rows' own times
    assert "loss 3.0000" in text and "gradient norm 0.5 " in text and "1 skipped" in text
    assert "expected 1.75 · measured 2.31 after 90 steps" in text
    assert "1,000 tokens/s · 50 anchors/s · 2.00 s per step" in text
    assert "waiting for: drafter 70% · target 20% · other 10%" in text
    assert "not measured yet" in text_of(RunView(total_steps=200)) and "step 0 of 200" in text_of(RunView(total_steps=200))


@pytest.mark.parametrize(
    ("fields", "shares"),
    [
        ({"target_wait_s": 0.3, "data_wait_s": 0.0}, {"drafter": 0.7, "target": 0.3}),
        ({"target_wait_s": 0.3, "data_wait_s": 0.9}, {"drafter": 0.7, "loader": 0.3}),
        ({"target_wait_s": 0.3, "data_wait_s": 0.2}, {"drafter": 0.7, "loader": 0.2, "target": 0.1}),
        ({"target_wait_s": 0.0, "data_wait_s": 0.9}, {"drafter": 0.7, "other": 0.3}),  # idle targets that nobody waits for
    ],
)
def test_a_wait_is_the_loaders_only_while_drafter_and_targets_both_wait(
    fields: dict[str, float], shares: dict[str, float]
) -> None:
    view = RunView()
    for number in range(5):
        view.take("steps", step(number, **fields))
    assert {name: round(share, 3) for name, share in view.time_shares().items() if share > 1e-9} == shares


def test_pauses_between_steps_and_waits_for_other_cells_are_told_apart() -> None:
    view = RunView(num_cells=2)
    for number in range(10):
        view.take("steps", step(number, reduce_s=0.4, log_s=0.1))
    view.take("events", {"kind": "checkpoint_begin", "step": 5, "snapshot_s": 1.0, "wait_s": 2.0, "time": 1e9})
    view.take("events", {"kind": "validation", "step": 8, "validation_s": 6.0, "acceptance_length": None})
    shares = {name: round(20 * share, 3) for name, share in view.time_shares().items()}
    assert shares == {
        "loader": 0, "target": 0, "drafter": 6, "cells": 4, "checkpoint": 3, "validation": 6, "logging": 1, "other": 0
    }  # fmt: skip
    for number in range(10, 10 + WINDOW_STEPS):  # and are forgotten with the steps around them
        view.take("steps", step(number))
    assert view.time_shares()["checkpoint"] == 0 and len(view.recent) == WINDOW_STEPS


def test_a_resume_forgets_what_is_trained_again() -> None:
    view = RunView(total_steps=100)
    for number in range(30):
        view.take("steps", step(number, loss=1.0))
        view.take("stats", {"step": number, "attempt": 0, "cell": 1, "observed_s": 10.0 * number})
    view.take("events", {"kind": "validation", "step": 25, "acceptance_length": 3.0})
    view.take("events", {"kind": "resume", "step": 20, "attempt": 1})
    assert view.num_done == 20 and not view.stats and view.measured is None and view.attempt == 1
    for number in range(20, 24):
        view.take("steps", step(number, attempt=1, loss=2.0, time=5e9 + number))
    view.take("steps", step(29, attempt=0))  # a late row of the attempt that is over
    assert view.num_done == 24 and [number for number, _ in view.loss.points] == list(range(24))
    assert view.seconds_per_step() == 1.0  # the time between the attempts is not that of a step


@given(st.integers(1, 6 * MOST_POINTS), st.integers(1, 60))
def test_a_history_is_bounded_and_keeps_the_shape(count: int, columns: int) -> None:
    history = History()
    for number in range(count):
        history.add(number, float(number))
    history.add(count, float("nan"))
    assert len(history.points) <= MOST_POINTS and history.points[0][0] == 0
    found = history.columns(columns)
    assert len(found) <= columns and found == sorted(found)
    assert found[-1] >= 0.9 * (count - 1) - count / columns
    history.forget_from(count // 2)
    assert all(number < count // 2 for number, _ in history.points)


def test_a_sparkline_is_not_flattened_by_the_first_steps() -> None:
    assert sparkline([]) == "" and sparkline([2.0, 2.0]) == "▁▁"
    line = sparkline([1e6, *(float(40 - i) for i in range(40))])
    assert len(line) == 41 and line[0] == "█" and set(BLOCKS) == set(line) and list(line) == sorted(line, reverse=True)


def test_log_lines_run_above_the_display_and_everything_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.StringIO()
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    logger = logging.getLogger("dflash_core")
    handler = logging.StreamHandler(terminal)
    monkeypatch.setattr(logger, "handlers", [handler])
    logger.setLevel(logging.INFO)
    now = [0.0]
    sink = LiveSink("mine", 300, terminal, clock=lambda: now[0])
    lines = ConsoleSink(300, 0.001)
    for number in range(300):
        now[0] += 0.1
        sink.log("steps", step(number))
        lines.log("steps", step(number))  # stands in the log file, and not on this terminal
        if number % 100 == 0:
            logger.info("note %d [bold] %s", number, "x" * 30)
    sink.close()
    sink.close()
    assert handler.stream is terminal and not handler.filters and "\x1b[?25l" not in terminal.getvalue()
    logger.info("behind it")
    rows = [row for row in screen_after(terminal.getvalue()) if row]
    assert rows[:3] == [f"note {number} [bold] {'x' * 30}" for number in (0, 100, 200)]
    assert "step 300 of 300" in rows[3] and [row.split()[0] for row in rows[4:]] == [
        "loss",
        "acceptance",
        "1,000",
        "waiting",
        "behind",
    ]
    drawn = terminal.getvalue().count("waiting for")
    assert 60 <= drawn <= 75, "at most two a second, and again below each log line"


class Gone(io.StringIO):
    """A terminal whose window was closed."""

    broken = False

    def write(self, text: str) -> int:
        if self.broken:
            raise OSError(errno.EIO, "Input/output error")
        return super().write(text)


def test_a_terminal_that_goes_away_ends_the_display_and_not_the_run(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logging, "raiseExceptions", False)  # what the handler itself says of a lost terminal
    terminal, truth = Gone(), MemorySink()
    handler = logging.StreamHandler(terminal)
    monkeypatch.setattr(logging.getLogger("dflash_core"), "handlers", [handler])
    display = BackgroundSink(LiveSink("mine", 10, terminal, clock=iter(range(1000)).__next__))
    both = FanOut([truth, display])
    terminal.broken = True
    both.log("steps", step(0))
    display._thread.join(5)
    for number in range(1, 4):
        both.log("steps", step(number))
    both.close()
    assert len(truth.rows["steps"]) == 4 and caplog.text.count("LiveSink is switched off") == 1
    assert handler.stream is terminal and not handler.filters


def test_there_is_no_display_without_a_terminal_of_ones_own(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert [type(sink) for sink in console_sinks("mine", 10, 5.0)] == [ConsoleSink]
    leader, follower = pty.openpty()
    with os.fdopen(leader), os.fdopen(follower, "w") as stream:
        monkeypatch.setenv("TERM", "xterm")
        assert not is_live_terminal(stream)  # a terminal, and another session's
        monkeypatch.setattr(os, "tcgetpgrp", lambda _: os.getpgrp())
        assert is_live_terminal(stream)
        for name, value in (("TERM", "dumb"), ("RANK", "0")):
            with monkeypatch.context() as patch:
                patch.setenv(name, value)
                assert not is_live_terminal(stream)
        monkeypatch.setattr("dflash_core.metrics.live.is_live_terminal", lambda _: True)
        monkeypatch.setattr("dflash_core.metrics.live.live_lines", lambda *_: 1 / 0)
        assert [type(sink) for sink in console_sinks("mine", 10, 5.0)] == [ConsoleSink]
    assert "no live display: ZeroDivisionError" in caplog.text


TRAINING = """
import logging, sys, threading, time
from dflash_core.metrics import FanOut
from dflash_core.metrics.live import console_sinks
logger = logging.getLogger("dflash_core")
logger.setLevel(logging.INFO)
logger.addHandler(logging.StreamHandler())
sinks = console_sinks("mine", 150, 0.001)
assert len(sinks) == 2
both = FanOut(sinks)
def note(thread):
    for i in range(40):
        logger.info("thread %d note %d", thread, i)
        time.sleep(0.005)
threads = [threading.Thread(target=note, args=(t,)) for t in range(3)]
for thread in threads: thread.start()
for i in range(150):
    both.log("steps", {"step": i, "loss": 1.0, "step_s": 0.01, "forward_s": 0.01, "num_tokens": 1, "num_anchors": 1})
    if i % 50 == 0: print("printed", i, file=sys.stderr)
    time.sleep(0.002)
for thread in threads: thread.join()
both.close()
left = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
print("left", left, file=sys.stderr)
"""


def test_on_a_real_terminal_with_threads_that_log_and_print(tmp_path: Path) -> None:
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 500, WIDTH, 0, 0))

    def own_terminal() -> None:
        os.setsid()
        fcntl.ioctl(2, termios.TIOCSCTTY, 0)

    environment = {**os.environ, "TERM": "xterm-256color"}
    for name in ("RANK", "TORCHELASTIC_RUN_ID", "COLUMNS"):
        environment.pop(name, None)
    process = subprocess.Popen(
        [sys.executable, "-c", TRAINING],
        stdin=follower,
        stdout=follower,
        stderr=follower,
        env=environment,
        preexec_fn=own_terminal,
    )
    os.close(follower)
    output = b""
    while True:
        try:
            data = os.read(leader, 65536)
        except OSError:  # the other end is closed
            data = b""
        if not data:
            break
        output += data
    os.close(leader)
    assert process.wait(timeout=10) == 0, output.decode()
    rows = [row for row in screen_after(output.decode()) if row]
    above, display = rows[:-6], rows[-6:]
    wanted = {f"thread {t} note {i}" for t in range(3) for i in range(40)} | {f"printed {i}" for i in (0, 50, 100)}
    assert set(above) == wanted and len(above) == len(wanted), "a line is torn, lost, or left behind by the display"
    assert "step 150 of 150" in display[0] and display[4].startswith("waiting for: drafter") and display[5] == "left []"
