"""Channels, the byte budget and the re-order buffer: bounds, order, wake-ups, and what their counters say."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_core.errors import StageError
from dflash_core.pipeline import ByteBudget, Channel, Closed, ReorderBuffer, Stopped, Supervisor, threads
from dflash_core.pipeline.occupancy import Occupancy, WaitClock

WAIT_S = 5.0


def until(true: Callable[[], bool]) -> None:
    """Wait for what another thread is about to do."""
    deadline = time.monotonic() + WAIT_S
    while not true():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.001)


def waits_at(supervisor: Supervisor, place: str) -> bool:
    return any(activity.what == place and not activity.working for activity in supervisor.activities())


def test_a_channel_is_bounded_by_bytes_and_a_larger_item_passes_alone() -> None:
    with Supervisor("test") as supervisor:
        channel: Channel[str] = Channel("c", 10, supervisor, timeout_s=0.1, max_bytes=100)
        channel.put("a", num_bytes=60)
        channel.put("b", num_bytes=40)
        with pytest.raises(StageError, match=r"c \(full\).*batch 7: no progress for 0.1 s"):
            channel.put("c", num_bytes=1, batch=7)
        assert channel.get() == "a"
        with pytest.raises(StageError):
            channel.put("large", num_bytes=1000)
        assert channel.get() == "b"
        channel.put("large", num_bytes=1000)  # nothing is in the way any more
        with pytest.raises(StageError):
            channel.put("d", num_bytes=1)
        assert channel.stats().num_bytes == 1000
        assert channel.get() == "large"


@given(st.lists(st.tuples(st.integers(0, 60), st.booleans()), max_size=40), st.integers(1, 5), st.integers(1, 100))
def test_bounds_order_and_counts_of_a_channel(moves: list[tuple[int, bool]], capacity: int, max_bytes: int) -> None:
    """Against a plain list: whatever is put and taken, the bounds hold and one snapshot agrees with itself."""
    with Supervisor("test") as supervisor:
        channel: Channel[int] = Channel("c", capacity, supervisor, timeout_s=-1.0, max_bytes=max_bytes)  # never wait
        inside: list[tuple[int, int]] = []
        for number, (size, take) in enumerate(moves):
            if take and inside:
                assert channel.get() == inside.pop(0)[0]
            fits = not inside or (len(inside) < capacity and sum(s for _, s in inside) + size <= max_bytes)
            if fits:
                channel.put(number, load=2 * size, num_bytes=size)
                inside.append((number, size))
            else:
                with pytest.raises(StageError):
                    channel.put(number, load=2 * size, num_bytes=size)
            stats = channel.stats()
            total = sum(s for _, s in inside)
            assert (stats.depth, stats.num_bytes, stats.load) == (len(inside), total, 2 * total)
            assert stats.num_put - stats.num_got == stats.depth <= stats.occupancy.max_depth <= capacity
            assert total <= max(max_bytes, max(s for _, s in inside))


def test_after_closing_nothing_can_be_put_and_what_is_inside_is_drained() -> None:
    with Supervisor("test") as supervisor:
        channel: Channel[int] = Channel("c", 3, supervisor, WAIT_S)
        channel.put(1)
        channel.put(2)
        channel.close()
        with pytest.raises(Closed):
            channel.put(3)
        assert channel.is_closed() and not channel.is_drained()
        assert [channel.get(), channel.get()] == [1, 2]
        assert channel.is_drained()
        for _ in range(2):
            with pytest.raises(Closed):
                channel.get()


def test_a_large_item_is_not_passed_for_ever_by_small_ones() -> None:
    """Putters are served in the order in which they came."""
    with Supervisor("test") as supervisor:
        channel: Channel[str] = Channel("c", 10, supervisor, WAIT_S, max_bytes=100)
        channel.put("first", num_bytes=60)
        supervisor.start("large", lambda: channel.put("large", num_bytes=90))
        until(lambda: channel.stats().put_wait_s > 0)
        supervisor.start("small", lambda: channel.put("small", num_bytes=10))  # would fit at once
        until(lambda: len([a for a in supervisor.activities() if a.what == "c (full)"]) == 2)
        assert channel.depth() == 1
        assert [channel.get(), channel.get(), channel.get()] == ["first", "large", "small"]


def test_waits_are_counted_while_they_last() -> None:
    with Supervisor("test") as supervisor:
        channel: Channel[int] = Channel("c", 1, supervisor, WAIT_S)
        supervisor.start("taker", channel.get)
        until(lambda: channel.get_wait_s > 0.02)
        assert channel.stats().put_wait_s == 0.0
        channel.put(1)
        until(lambda: channel.depth() == 0)
        ended = channel.get_wait_s
        time.sleep(0.01)
        assert channel.get_wait_s == ended
        channel.put(2)
        supervisor.start("putter", channel.put, 3)
        until(lambda: channel.put_wait_s > 0.02)
        assert channel.get() == 2
        budget = ByteBudget(10, supervisor, WAIT_S)
        budget.reserve(10)
        supervisor.start("feed", budget.reserve, 1)
        until(lambda: budget.wait_s > 0.02)
        budget.release(10)
        until(lambda: budget.reserved == 1)
        assert budget.max_reserved == 10


def test_occupancy_is_weighted_by_time() -> None:
    seen = Occupancy(now=100.0)
    seen.change(101.0, depth=2, full=False)  # empty for 1 s
    seen.change(104.0, depth=4, full=True)  # 2 for 3 s
    seen.change(109.0, depth=1, full=False)  # 4 and full for 5 s
    stats = seen.stats(110.0)  # 1 for 1 s
    assert stats.observed_s == 10.0
    assert stats.mean_depth == pytest.approx((2 * 3 + 4 * 5 + 1) / 10)
    assert (stats.max_depth, stats.full_share, stats.empty_share) == (4, 0.5, 0.1)
    assert seen.stats(110.0) == stats


def test_a_wait_clock_adds_up_several_waiters() -> None:
    clock = WaitClock()
    clock.start(10.0)
    clock.start(12.0)
    assert clock.seconds(13.0) == pytest.approx(4.0)
    clock.end(10.0, 14.0)
    assert clock.seconds(15.0) == pytest.approx(4.0 + 3.0)
    clock.end(12.0, 15.0)
    assert clock.seconds(99.0) == pytest.approx(7.0)


def test_full_and_empty_shares_of_a_channel() -> None:
    """Full is whatever lets the next item wait: the count, or the bytes."""
    with Supervisor("test") as supervisor:
        by_count: Channel[int] = Channel("c", 1, supervisor, WAIT_S)
        by_bytes: Channel[int] = Channel("b", 9, supervisor, WAIT_S, max_bytes=50)
        half: Channel[int] = Channel("h", 9, supervisor, WAIT_S, max_bytes=50)
        for channel, size in ((by_count, 0), (by_bytes, 50), (half, 25)):
            channel.put(1, num_bytes=size)
        time.sleep(0.02)
        shares = [channel.stats().occupancy for channel in (by_count, by_bytes, half)]
        assert shares[0].full_share > 0.5 and shares[1].full_share > 0.5 and shares[2].full_share == 0.0
        assert all(share.empty_share < 0.5 and share.mean_depth > 0.5 for share in shares)


def test_the_reorder_buffer_tells_a_straggler_from_slow_targets() -> None:
    with Supervisor("test") as supervisor:
        buffer: ReorderBuffer[str] = ReorderBuffer("r", 5, supervisor, WAIT_S)
        taken: list[str] = []

        def take(count: int) -> None:
            taken.extend(buffer.get()[0] for _ in range(count))

        supervisor.start("trainer", take, 1)
        until(lambda: buffer.stats().get_wait_s > 0.02)
        stats = buffer.stats()
        assert (stats.waiting_for, stats.held_up_s, stats.longest_wait_position) == (5, 0.0, 5)
        buffer.put(7, "seven")
        buffer.put(6, "six")
        until(lambda: buffer.stats().held_up_s > 0.02)
        buffer.put(5, "five")
        until(lambda: bool(taken))
        stats = buffer.stats()
        assert (stats.depth, stats.max_depth, stats.waiting_for) == (2, 3, None)
        assert 0.02 < stats.held_up_s < stats.get_wait_s and stats.longest_wait_s == pytest.approx(stats.get_wait_s, abs=0.01)
        take(2)
        later = buffer.stats()
        assert taken == ["five", "six", "seven"]
        assert (later.held_up_s, later.longest_wait_position) == (stats.held_up_s, 5)


def test_a_position_that_comes_twice_is_a_defect() -> None:
    with Supervisor("test") as supervisor:
        buffer: ReorderBuffer[int] = ReorderBuffer("ready buffer", 0, supervisor, WAIT_S)
        buffer.put(0, 1)
        with pytest.raises(AssertionError, match="ready buffer: position 0 came twice"):
            buffer.put(0, 2)
        assert buffer.get()[0] == 1
        with pytest.raises(AssertionError):
            buffer.put(0, 3)


def wake_putter(supervisor: Supervisor, done: threading.Event) -> tuple[str, Callable[[], object]]:
    channel: Channel[int] = Channel("c", 1, supervisor, WAIT_S)
    channel.put(1)
    supervisor.start("putter", lambda: (channel.put(2), done.set()))
    return "c (full)", channel.get


def wake_second_putter(supervisor: Supervisor, done: threading.Event) -> tuple[str, Callable[[], object]]:
    """There is room, but somebody came first and now leaves the line, by putting or by an error."""
    channel: Channel[int] = Channel("c", 2, supervisor, WAIT_S)
    first = object()
    channel._putters.append(first)
    supervisor.start("second", lambda: (channel.put(3), done.set()))

    def leave() -> None:
        with channel._lock:
            channel._drop(first)

    return "c (full)", leave


def wake_taker(supervisor: Supervisor, done: threading.Event) -> tuple[str, Callable[[], object]]:
    channel: Channel[int] = Channel("c", 1, supervisor, WAIT_S)
    supervisor.start("taker", lambda: (channel.get(), done.set()))
    return "c (empty)", lambda: channel.put(1)


def wake_taker_by_closing(supervisor: Supervisor, done: threading.Event) -> tuple[str, Callable[[], object]]:
    channel: Channel[int] = Channel("c", 1, supervisor, WAIT_S)

    def take() -> None:
        with pytest.raises(Closed):
            channel.get()
        done.set()

    supervisor.start("taker", take)
    return "c (empty)", channel.close


def wake_putter_by_closing(supervisor: Supervisor, done: threading.Event) -> tuple[str, Callable[[], object]]:
    channel: Channel[int] = Channel("c", 1, supervisor, WAIT_S)
    channel.put(1)

    def put() -> None:
        with pytest.raises(Closed):
            channel.put(2)
        assert channel.depth() == 1
        done.set()

    supervisor.start("putter", put)
    return "c (full)", channel.close


def wake_feed(supervisor: Supervisor, done: threading.Event) -> tuple[str, Callable[[], object]]:
    budget = ByteBudget(10, supervisor, WAIT_S)
    budget.reserve(8)
    supervisor.start("feed", lambda: (budget.reserve(8), done.set()))
    return "byte budget (full)", lambda: budget.release(8)


def wake_trainer(supervisor: Supervisor, done: threading.Event) -> tuple[str, Callable[[], object]]:
    buffer: ReorderBuffer[int] = ReorderBuffer("ready", 3, supervisor, WAIT_S)
    buffer.put(4, 4)
    supervisor.start("trainer", lambda: (buffer.get(), done.set()))
    return "ready (position 3)", lambda: buffer.put(3, 3)


WAKING = [
    wake_putter, wake_second_putter, wake_taker, wake_taker_by_closing, wake_putter_by_closing, wake_feed, wake_trainer,
]  # fmt: skip


@pytest.mark.parametrize("prepare", WAKING)
def test_waiters_are_woken_and_need_no_poll(
    prepare: Callable[[Supervisor, threading.Event], tuple[str, Callable[[], object]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a poll every half minute only a notification can bring the waiter on in time."""
    monkeypatch.setattr(threads, "POLL_S", 30.0)
    done = threading.Event()
    with Supervisor("test", join_timeout_s=1.0) as supervisor:
        place, wake = prepare(supervisor, done)
        until(lambda: waits_at(supervisor, place))
        time.sleep(0.01)  # from announcing the wait into it
        wake()
        assert done.wait(WAIT_S)


@pytest.mark.parametrize("prepare", WAKING)
@pytest.mark.parametrize("fails", [True, False])
def test_every_wait_ends_when_the_supervisor_stops(
    prepare: Callable[[Supervisor, threading.Event], tuple[str, Callable[[], object]]], fails: bool
) -> None:
    done = threading.Event()
    with Supervisor("test", join_timeout_s=WAIT_S) as supervisor:
        place, _ = prepare(supervisor, done)
        until(lambda: waits_at(supervisor, place))
        supervisor.fail(StageError("elsewhere", 3, "broken")) if fails else supervisor.stop()
        assert supervisor.close() == [] and not done.is_set()
        assert str(supervisor.failure) == ("stage 'elsewhere', batch 3: broken" if fails else "None")
        assert supervisor.activities() == []


def test_after_a_stop_nobody_takes_up_new_work() -> None:
    with Supervisor("test") as supervisor:
        channel: Channel[int] = Channel("c", 2, supervisor, WAIT_S)
        buffer: ReorderBuffer[int] = ReorderBuffer("r", 0, supervisor, WAIT_S)
        channel.put(1)
        buffer.put(0, 1)
        supervisor.stop()
        for call in (channel.get, lambda: channel.put(2), buffer.get, lambda: ByteBudget(9, supervisor, WAIT_S).reserve(1)):
            with pytest.raises(Stopped):
                call()
