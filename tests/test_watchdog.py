"""The watchdog and the supervisor: what counts as a stall, what does not, who is named, and how everything ends."""

from __future__ import annotations

import io
import logging
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from dflash_core.errors import DFlashError, StageError
from dflash_core.pipeline import Channel, ReorderBuffer, Stopped, Supervisor, threads, watchdog
from dflash_core.pipeline.threads import PAUSE_S
from dflash_core.pipeline.watchdog import find_stall, watch_for_stalls

WAIT_S = 8.0
LIMIT_S = 0.25


def never(error: DFlashError) -> None:
    raise AssertionError(f"gave up: {error}")


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not true():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.002)


class Clock:
    """Time by hand, for the rules; `Supervisor` and the watchdog read it in place of the machine's."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.time = 1000.0
        monkeypatch.setattr(threads.time, "monotonic", lambda: self.time)

    def passes(self, seconds: float) -> None:
        self.time += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


@contextmanager
def another(supervisor: Supervisor, what: str, batch: int | None, *, working: bool, patience: float = 1.0) -> Iterator[None]:
    """As if another thread of the cell were at something."""
    key = hash((what, batch))
    supervisor._activities[key] = threads.Activity(f"cell/{what}", what, batch, supervisor.now(), working, patience)
    yield
    del supervisor._activities[key]
    supervisor.progressed()


# The rules, on a clock of our own.


def test_work_is_a_stall_once_it_lasts_longer_than_the_limit(clock: Clock) -> None:
    supervisor = Supervisor("cell")
    with supervisor.busy("target 2", 17):
        clock.passes(9.9)
        assert find_stall(supervisor, 10.0) is None
        clock.passes(0.2)
        supervisor.progressed()  # others go on around it
        stall = find_stall(supervisor, 10.0)
    assert str(stall) == "stage 'target 2', batch 17: no progress for 10.1 s: this work does not end"
    assert find_stall(supervisor, 10.0) is None


def test_the_longest_stuck_is_named(clock: Clock) -> None:
    supervisor = Supervisor("cell")
    with another(supervisor, "target 0", 3, working=True):
        clock.passes(2.0)
        with supervisor.busy("drafter", 1):
            clock.passes(11.0)
            stall = find_stall(supervisor, 10.0)
    assert stall is not None and (stall.stage, stall.batch) == ("target 0", 3)


def test_waiting_for_slow_work_within_its_limit_is_no_stall(clock: Clock) -> None:
    """The drafter waits while nothing is heard of for longer than the limit in all, but each piece of work is within it."""
    supervisor = Supervisor("cell")
    with another(supervisor, "ready buffer", None, working=False):
        for _ in range(5):
            clock.passes(6.0)  # between two pieces of work
            assert find_stall(supervisor, 10.0) is None
            with supervisor.busy("target 0", 1):
                assert supervisor.idle_s == 0.0  # beginning counts, also for the limits of waits
                clock.passes(9.5)
                assert find_stall(supervisor, 10.0) is None


def test_patience_covers_the_waits_of_others_too(clock: Clock) -> None:
    supervisor = Supervisor("cell")
    with another(supervisor, "target 0 queue (empty)", None, working=False), supervisor.busy("optimizer step 3", patience=1.5):
        clock.passes(14.0)
        assert find_stall(supervisor, 10.0) is None
        clock.passes(1.1)
        stall = find_stall(supervisor, 10.0)
    assert stall is not None and stall.stage == "optimizer step 3"


def test_work_around_other_work_begins_anew_when_that_ends(clock: Clock) -> None:
    supervisor = Supervisor("cell")
    channel: Channel[int] = Channel("c", 1, supervisor, WAIT_S)
    with supervisor.busy("outer", 1):
        for _ in range(4):
            with supervisor.busy("inner", 2):
                clock.passes(8.0)
            assert find_stall(supervisor, 10.0) is None
        clock.passes(11.0)
        stall = find_stall(supervisor, 10.0)
        channel.put(1)
    assert stall is not None and (stall.stage, stall.batch) == ("outer", 1)


def test_when_all_wait_the_message_tells_for_what_and_how_long(clock: Clock) -> None:
    supervisor = Supervisor("cell")
    with another(supervisor, "feed (full)", 40, working=False):
        clock.passes(3.0)
        with another(supervisor, "target 1 queue (empty)", None, working=False):
            # as if this thread waited too
            supervisor._activities[threading.get_ident()] = threads.Activity("MainThread", "ready", None, clock.time, False)
            supervisor.progressed()
            clock.passes(10.0)
            assert find_stall(supervisor, 10.0) is None
            clock.passes(1.0)
            stall = find_stall(supervisor, 10.0)
            assert str(stall) == (
                "stage 'pipeline': no progress for 11.0 s (cell/feed (full) waits for feed (full) with batch 40 for 14.0 s; "
                "cell/target 1 queue (empty) waits for target 1 queue (empty) for 11.0 s; MainThread waits for ready for 11.0 s)"
            )


def test_a_main_thread_that_says_nothing_is_named_with_its_place(clock: Clock) -> None:
    supervisor = Supervisor("cell")
    with another(supervisor, "ready buffer", None, working=False):
        clock.passes(11.0)
        stall = find_stall(supervisor, 10.0)
    assert stall is not None and stall.stage == "MainThread"
    assert "MainThread is in " in str(stall) and "watchdog.py:" in str(stall) and "waits for ready buffer" in str(stall)


def test_a_pause_of_the_whole_process_is_nobodys_stall(clock: Clock) -> None:
    supervisor = Supervisor("cell")
    with supervisor.busy("target 0", 1):
        before = clock.time
        clock.passes(3600.0)
        for _ in range(3):  # several threads see the same pause
            supervisor.notice_pause(before, 1.0)
        assert find_stall(supervisor, 10.0) is None
        assert supervisor.idle_s == pytest.approx(1.0)
        before = clock.time
        clock.passes(1.0 + PAUSE_S / 2)
        supervisor.notice_pause(before, 1.0)  # a little late: no pause
        assert supervisor.idle_s == pytest.approx(2.0 + PAUSE_S / 2)
        clock.passes(9.0)
        assert find_stall(supervisor, 10.0) is not None


# The real thing, on threads.


@pytest.mark.parametrize("kind", ["python", "c"])
def test_a_stage_that_blocks_is_named_and_the_log_holds_all_stacks(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    release = threading.Event()

    def block() -> None:
        with supervisor.busy("target 1", 12):
            if kind == "c":
                time.sleep(LIMIT_S * 6)  # hears nothing
            while kind == "python" and not release.is_set():
                sum(range(1000))

    with caplog.at_level(logging.ERROR), Supervisor("cell", join_timeout_s=WAIT_S) as supervisor:
        ready: ReorderBuffer[int] = ReorderBuffer("ready buffer", 0, supervisor, WAIT_S)
        supervisor.start("target 1", block)
        with watchdog(supervisor, LIMIT_S, never, grace_s=WAIT_S), pytest.raises(Stopped):
            ready.get()  # the main thread waits for what will not come
        release.set()
    failure = supervisor.failure
    assert isinstance(failure, StageError) and (failure.stage, failure.batch) == ("target 1", 12)
    assert "this work does not end" in str(failure)
    logged = "\n".join(record.getMessage() for record in caplog.records)
    assert logged.count("stacks of all threads") == 1
    assert "thread cell/target 1:" in logged and "in block" in logged
    assert "thread MainThread:" in logged and "in get" in logged


def test_a_wait_that_nobody_answers_is_a_stall(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR), Supervisor("cell") as supervisor:
        queue: Channel[int] = Channel("target 0 queue", 1, supervisor, WAIT_S)
        ready: ReorderBuffer[int] = ReorderBuffer("ready buffer", 4, supervisor, WAIT_S)
        supervisor.start("target 0", queue.get)
        with watchdog(supervisor, LIMIT_S, never, grace_s=WAIT_S), pytest.raises(Stopped):
            ready.get()
    text = str(supervisor.failure)
    assert "stage 'pipeline': no progress for 0." in text
    assert "cell/target 0 waits for target 0 queue (empty) for 0." in text
    assert "MainThread waits for ready buffer (position 4) for 0." in text
    assert "stacks of all threads" in caplog.text


def test_a_main_thread_that_blocks_is_named_and_the_process_is_given_up_once(caplog: pytest.LogCaptureFixture) -> None:
    given_up: list[DFlashError] = []
    with caplog.at_level(logging.ERROR), Supervisor("cell") as supervisor:
        queue: Channel[int] = Channel("target 0 queue", 1, supervisor, WAIT_S)
        supervisor.start("target 0", queue.get)
        with watchdog(supervisor, LIMIT_S, given_up.append, grace_s=0.2):
            until(lambda: bool(given_up))  # hears nothing of the stop
            time.sleep(0.5)
    assert given_up == [supervisor.failure]
    assert isinstance(given_up[0], StageError) and given_up[0].stage == "MainThread"
    assert "MainThread is in until" in str(given_up[0]) or "MainThread is in <lambda>" in str(given_up[0])
    logged = [record.getMessage() for record in caplog.records if "stacks of all threads" in record.getMessage()]
    assert len(logged) == 2 and logged[1].startswith("the cell does not end by itself")


@pytest.mark.parametrize("failing", [True, False])
def test_nobody_gives_up_on_a_cell_that_ends_within_the_grace(failing: bool) -> None:
    """After a failure it has the grace; after a plain stop, with the state already saved, the limit."""
    given_up: list[DFlashError] = []
    with Supervisor("cell") as supervisor, watchdog(supervisor, LIMIT_S, given_up.append, grace_s=3.0 if failing else 0.1):
        supervisor.fail(StageError("target 0", 1, "broken")) if failing else supervisor.stop()
        time.sleep(0.1)
    assert given_up == []


def test_a_plain_stop_that_does_not_end_is_ended() -> None:
    """Such as a metrics file on a disk that is gone, which nobody closes any more."""
    given_up: list[DFlashError] = []
    with Supervisor("cell") as supervisor, watchdog(supervisor, LIMIT_S, given_up.append, grace_s=0.1):
        supervisor.stop()
        until(lambda: bool(given_up))
    assert str(given_up[0]).startswith("stage 'end of the run': it has not ended")


def test_a_failure_during_a_plain_stop_still_has_its_grace_only() -> None:
    given_up: list[DFlashError] = []
    error = StageError("checkpoint writer", None, "disk full")
    with Supervisor("cell") as supervisor, watchdog(supervisor, LIMIT_S, given_up.append, grace_s=0.1):
        supervisor.stop()
        time.sleep(0.1)
        supervisor.fail(error)
        until(lambda: bool(given_up))
    assert given_up == [error]


def test_a_slow_pipeline_that_moves_raises_no_alarm() -> None:
    """Each piece of work takes a third of the limit, and all together take longer than it."""
    with Supervisor("cell") as supervisor:
        queue: Channel[int] = Channel("queue", 1, supervisor, WAIT_S)
        ready: ReorderBuffer[int] = ReorderBuffer("ready buffer", 0, supervisor, WAIT_S)

        def target() -> None:
            for i in range(4):
                item = queue.get()
                with supervisor.busy("target 0", i):
                    time.sleep(0.3)
                ready.put(i, item)

        with watchdog(supervisor, 0.9, never):
            supervisor.start("target 0", target)
            for i in range(4):
                queue.put(i)
                time.sleep(0.05)  # between two pieces of work
                ready.get()
    assert supervisor.failure is None


def test_time_before_the_watch_does_not_count() -> None:
    """Building a cell may take longer than the limit."""
    with Supervisor("cell") as supervisor:
        supervisor._last_progress -= 3600.0
        with watchdog(supervisor, 10 * LIMIT_S, never):
            time.sleep(1.5 * LIMIT_S)
    assert supervisor.failure is None


def test_a_log_that_hangs_does_not_hold_the_watchdog() -> None:
    """The stuck thread holds the lock of a log handler, as it does when it hangs in a write to a dead disk."""
    given_up: list[DFlashError] = []
    handler, logger = logging.StreamHandler(io.StringIO()), logging.getLogger("dflash_core")
    logger.addHandler(handler)
    try:
        with Supervisor("cell") as supervisor, watchdog(supervisor, LIMIT_S, given_up.append, grace_s=0.1):
            handler.acquire()
            until(lambda: bool(given_up))
            handler.release()
    finally:
        logger.removeHandler(handler)
    assert len(given_up) == 1


def test_a_defect_of_the_watchdog_itself_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(watch_for_stalls.__globals__, "find_stall", lambda *_: 1 / 0)
    with Supervisor("cell") as supervisor, watchdog(supervisor, LIMIT_S, never):
        until(lambda: supervisor.failure is not None)
    assert "stage 'watchdog': ZeroDivisionError" in str(supervisor.failure)


def test_the_watch_ends_with_the_cell() -> None:
    ended = threading.Event()
    ended.set()
    with Supervisor("cell") as supervisor:
        watch_for_stalls(supervisor, 600.0, ended, never)  # returns at once
        before = threading.active_count()
        with watchdog(supervisor, 600.0, never):
            assert threading.active_count() == before + 1
        assert threading.active_count() == before


STOPPED_PROCESS = """
import sys, time
from dflash_core.pipeline import Channel, Supervisor, watchdog
with Supervisor("cell") as supervisor:
    channel = Channel("queue", 1, supervisor, timeout_s=0.8)
    def produce():
        for i in range(12):
            with supervisor.busy("loader", i):
                time.sleep(0.1)
            channel.put(i)
    with watchdog(supervisor, 0.8, lambda error: None):
        supervisor.start("loader", produce)
        for i in range(12):
            channel.get()
            print(i, flush=True)
print("failure:", supervisor.failure, flush=True)
"""


@pytest.mark.slow
def test_a_process_that_was_stopped_and_continued_goes_on() -> None:
    """SIGSTOP for longer than every limit, as a frozen machine does it."""
    child = subprocess.Popen([sys.executable, "-c", STOPPED_PROCESS], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None
        child.stdout.readline()
        child.send_signal(signal.SIGSTOP)
        time.sleep(2.5)
        child.send_signal(signal.SIGCONT)
        out, err = child.communicate(timeout=30)
    finally:
        child.kill()
        child.wait(WAIT_S)
    assert out.endswith("failure: None\n"), out + err


# The supervisor.


@pytest.mark.parametrize("error", [ValueError("a"), SystemExit(3), KeyboardInterrupt(), MemoryError(), GeneratorExit()])
def test_whatever_a_thread_dies_of_is_the_failure(error: BaseException) -> None:
    def die() -> None:
        with supervisor.busy("outer", 1), supervisor.busy("inner", 7):
            raise error

    with Supervisor("cell") as supervisor:
        supervisor.start("loader 3", die)
        until(lambda: supervisor.failure is not None)
    failure = supervisor.failure
    assert isinstance(failure, StageError) and failure.__cause__ is error
    assert (failure.stage, failure.batch) == ("loader 3", 7)
    assert type(error).__name__ in str(failure)


def test_a_stage_that_returns_before_its_work_is_done_is_a_failure() -> None:
    with Supervisor("cell") as supervisor:
        supervisor.start("target 0", lambda: None, done=lambda: False)
        until(lambda: supervisor.failure is not None)
    assert str(supervisor.failure) == "stage 'target 0': it ended before its work was done"


def test_a_stage_that_calls_itself_stopped_unasked_is_a_failure() -> None:
    def leave() -> None:
        raise Stopped

    with Supervisor("cell") as supervisor:
        supervisor.start("target 0", leave)
        until(lambda: supervisor.failure is not None)
    assert str(supervisor.failure) == "stage 'target 0': it ended although nobody asked it to stop"


def test_a_stage_may_end_when_its_work_is_done_or_a_stop_was_asked_for() -> None:
    with Supervisor("cell") as supervisor:
        supervisor.start("done", lambda: None, done=lambda: True)
        supervisor.start("free", lambda: None)
        supervisor.start("stopped", lambda: supervisor.sleep(WAIT_S) and None, done=lambda: False)
        until(lambda: sum(t.is_alive() for t in supervisor._threads) == 1)
        assert supervisor.failure is None
        assert supervisor.close() == []
    assert supervisor.failure is None


def test_the_first_failure_wins_and_later_ones_are_told_at_debug(caplog: pytest.LogCaptureFixture) -> None:
    # By name: whoever has imported the flows has set a level for the package.
    with caplog.at_level(logging.DEBUG, "dflash_core"), Supervisor("cell") as supervisor:
        supervisor.fail(StageError("target 0", 1, ValueError("first")))
        supervisor.fail(StageError("target 1", 2, ValueError("second")))
        with pytest.raises(StageError, match="target 0"):
            supervisor.check()
    told = [(r.levelname, r.getMessage(), r.exc_info is not None) for r in caplog.records if "stage" in r.getMessage()]
    assert told == [
        ("ERROR", "stage 'target 0', batch 1: ValueError: first", True),
        ("DEBUG", "after the first failure: stage 'target 1', batch 2: ValueError: second", True),
    ]


def test_close_ends_all_stages_within_its_limit_and_names_those_that_stay(caplog: pytest.LogCaptureFixture) -> None:
    release = threading.Event()
    with (
        caplog.at_level(logging.ERROR),
        pytest.raises(StageError, match=r"'cell/deaf 0, cell/deaf 1'.*did not end when asked"),
        Supervisor("cell", join_timeout_s=0.3) as supervisor,
    ):
        queue: Channel[int] = Channel("queue", 1, supervisor, WAIT_S)
        for i in range(2):
            supervisor.start(f"deaf {i}", release.wait, WAIT_S)
            supervisor.start(f"hears {i}", queue.get)
        started = time.monotonic()
        assert supervisor.close() == ["cell/deaf 0", "cell/deaf 1"]
        assert supervisor.close() == ["cell/deaf 0", "cell/deaf 1"]  # a second time it does not wait again
        assert time.monotonic() - started < WAIT_S / 2  # the limit is for all together
    release.set()
    assert "threads that did not end: cell/deaf 0, cell/deaf 1" in caplog.text


def test_a_failure_keeps_no_tensors_alive() -> None:
    """What passes through `busy` and is handled (an out-of-memory error) must not be held with its frames."""
    import gc
    import weakref

    class Large:
        pass

    with Supervisor("cell") as supervisor:

        def fail_and_go_on() -> weakref.ref[Large]:
            large = Large()
            try:
                with supervisor.busy("target 0", 1):
                    raise MemoryError(large)
            except MemoryError:
                return weakref.ref(large)

        held = fail_and_go_on()
        gc.collect()
        assert held() is None
