"""The event-driven model: small cases by hand, what must always hold, and a slow reference of small time steps."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_core.pipeline import Channel, Supervisor
from dflash_core.pipeline.dispatch import make_dispatch
from dflash_core.simulation import BatchWork, CellSettings, Machine, Simulated, StepWork, simulate
from dflash_core.simulation.clock import Clock, Pool

PLENTY = 10**9


def work(
    step: int = 0, *, target: float = 1.0, draft: float = 1.0, load: float = 0.0, size: int = 1, tokens: int = 1
) -> BatchWork:
    return BatchWork(step, size, tokens, load, target, draft)


def run(
    cells: list[list[BatchWork]],
    *,
    targets: int = 1,
    machine: Machine | None = None,
    step_work: StepWork | None = None,
    first_step: int = 0,
    last_step: int | None = None,
    **sizes: Any,
) -> Simulated:
    settings = CellSettings(targets, **{"max_bytes": PLENTY, **sizes})
    return simulate(cells, settings, step_work or StepWork(), machine or Machine(), first_step=first_step, last_step=last_step)


def steady(seconds_target: float, seconds_draft: float, **how: Any) -> float:
    """Batches a second, far from both ends; six batches are in flight, unless said otherwise."""
    batches = [work(step, target=seconds_target, draft=seconds_draft) for step in range(60)]
    found = run([batches], first_step=20, last_step=49, **{"max_bytes": 6, **how})
    return found.num_steps / found.duration_s


# small cases


@pytest.mark.parametrize(("target", "draft"), [(1.0, 0.25), (0.25, 1.0), (1.0, 1.0)])
def test_one_target_and_one_drafter_go_at_the_pace_of_the_slower(target: float, draft: float) -> None:
    assert steady(target, draft) == pytest.approx(1.0 / max(target, draft))


@pytest.mark.parametrize(("targets", "expected"), [(1, 0.25), (2, 0.5), (4, 1.0), (8, 1.0)])
def test_targets_add_up_until_the_drafter_is_the_slower(targets: int, expected: float) -> None:
    assert steady(4.0, 1.0, targets=targets) == pytest.approx(expected)


def test_the_first_batch_passes_all_stages_one_after_the_other() -> None:
    found = run([[work(load=1.0, target=2.0, draft=4.0)]], step_work=StepWork(0.5, 0.25))
    assert found.duration_s == pytest.approx(7.75)
    times = found.cells[0]
    assert (times.wait_s, times.draft_s, times.reduce_s, times.optimizer_s) == pytest.approx((3.0, 4.0, 0.5, 0.25))
    assert times.target_busy_s == pytest.approx(2.0)


def test_a_budget_of_one_batch_makes_the_stages_take_turns() -> None:
    """The next batch is not even loaded before the one in flight is trained."""
    assert steady(1.0, 1.0, max_bytes=1) == pytest.approx(0.5)
    assert steady(1.0, 1.0, max_bytes=2) == pytest.approx(1.0)


def test_a_batch_larger_than_the_budget_passes_alone() -> None:
    found = run([[work(size=5), work(size=1), work(size=5)]], max_bytes=3)
    assert found.trained == [[0, 1, 2]]
    assert found.duration_s == pytest.approx(6.0)


def test_waiting_for_bytes_is_told() -> None:
    found = run([[work(step, target=3.0) for step in range(20)]], targets=3, max_bytes=1, first_step=5, last_step=14)
    assert found.cells[0].budget_s == pytest.approx(found.cells[0].total_s)
    assert found.mean_bytes == pytest.approx(1.0)


def test_a_slow_target_has_as_much_behind_it_as_the_stages_hold() -> None:
    """One in the drafter, one in the target, one queued, one with the loader that waits, two in the feed's channel, and one
    in the feed's hands."""
    found = run([[work(step, target=10.0, draft=0.01) for step in range(40)]], num_workers=1, queue_batches=1, last_step=29)
    assert found.mean_bytes == pytest.approx(7.0, abs=0.3)  # the first few find less


def test_a_full_queue_holds_the_turn_and_so_the_other_target() -> None:
    """Round robin, one slot a queue: target 0 has a batch of 100, so batch 4, which is for it, waits; so does batch 5, although
    target 1 is idle."""
    targets = [100.0, 1.0, 1.0, 1.0, 1.0, 1.0]
    batches = [work(target=seconds, draft=0.001) for seconds in targets]
    narrow = run([batches], targets=2, queue_batches=1)
    # 100 for the first, then batches 2 and 4 behind it; batch 5 comes when 4 has gone into the queue at 100.
    assert narrow.duration_s == pytest.approx(102.0, abs=0.01)
    assert narrow.cells[0].target_busy_s == pytest.approx(105.0)
    balanced = run([batches], targets=2, queue_batches=1, dispatch="least_loaded")
    assert balanced.duration_s <= narrow.duration_s


def test_least_loaded_serves_uneven_batches_faster_than_round_robin() -> None:
    """Every other batch is dear: round robin gives all dear ones to one target."""
    batches = [
        work(step, target=3.0 if step % 2 == 0 else 0.5, draft=0.01, tokens=6 if step % 2 == 0 else 1) for step in range(60)
    ]
    by_turns, by_load = (
        run([batches], targets=2, dispatch=policy, queue_batches=2) for policy in ("round_robin", "least_loaded")
    )
    assert by_load.duration_s < 0.8 * by_turns.duration_s


def test_least_loaded_looks_at_what_is_queued_and_not_at_what_was() -> None:
    """A batch of many tokens is quickly done; the third one goes to its target, and not behind the slow second one."""
    batches = [work(target=1.0, tokens=100, draft=0.0), work(target=10.0, draft=0.0), work(target=1.0, draft=0.0)]
    assert run([batches], targets=2, dispatch="least_loaded").duration_s == pytest.approx(10.0)


def test_cells_wait_for_the_dearest_one_at_the_end_of_a_step() -> None:
    cheap, dear = ([work(step, target=0.0, draft=seconds) for step in range(4)] for seconds in (1.0, 3.0))
    found = run([cheap, dear], step_work=StepWork(0.5, 0.0), first_step=1)
    assert found.duration_s == pytest.approx(3 * 3.5)
    assert found.cells[0].barrier_s == pytest.approx(3 * 2.0)
    assert found.cells[1].barrier_s == pytest.approx(0.0)


def test_a_cell_without_a_batch_in_a_step_takes_part() -> None:
    found = run([[work(0), work(1)], [work(1)]])
    assert found.trained == [[0, 1], [0]]
    assert found.duration_s == pytest.approx(3.0)


def test_drafter_and_target_on_one_card_share_it() -> None:
    assert steady(1.0, 3.0, machine=Machine(colocated=True)) == pytest.approx(0.25)


def test_two_cores_are_shared_by_three() -> None:
    """Two targets and a drafter, all with a second of work a batch: two cores do two seconds of work a second."""
    assert steady(1.0, 1.0, targets=2, machine=Machine(cores=2)) == pytest.approx(1.0, rel=0.06)
    assert steady(2.0, 1.0, targets=2, machine=Machine(cores=2)) == pytest.approx(2 / 3, rel=0.06)


def test_pieces_of_work_on_one_core_go_on_at_the_same_rate() -> None:
    clock = Clock()
    pool, ended = Pool(clock, 1), {}
    for name, seconds in (("short", 1.0), ("long", 2.0)):
        pool.start(seconds, lambda name=name: ended.setdefault(name, clock.now))  # type: ignore[misc]
    clock.at(1.0, lambda: pool.start(0.25, lambda: ended.setdefault("late", clock.now)))
    clock.run(lambda: False)
    # Both half done at 1; three share until the late one has its quarter at 1.75, then two, then the long one is alone.
    assert ended == pytest.approx({"late": 1.75, "short": 2.25, "long": 3.25})
    assert pool.settle() == pytest.approx(3.25)


def test_crowded_cores_lose_a_share_only_while_there_are_too_few() -> None:
    clock = Clock()
    pool, ended = Pool(clock, 2, crowded=0.8), {}
    for name, seconds in (("a", 0.8), ("b", 1.6), ("c", 1.6)):
        pool.start(seconds, lambda name=name: ended.setdefault(name, clock.now))  # type: ignore[misc]
    clock.run(lambda: False)
    # Three at a rate of 2 * 0.8 / 3 until the short one ends at 1.5; the two others then have a core each.
    assert ended == pytest.approx({"a": 1.5, "b": 2.3, "c": 2.3})
    assert pool.settle() == pytest.approx(4.0)


# what must always hold

BATCH = st.tuples(
    st.integers(0, 3),
    st.integers(1, 5),
    st.floats(0.0, 0.5),
    st.floats(0.01, 3.0),
    st.floats(0.01, 3.0),
)


@st.composite
def cases(draw: Any) -> dict[str, Any]:
    cells = []
    for _ in range(draw(st.integers(1, 3))):
        batches = draw(st.lists(BATCH, min_size=1, max_size=12))
        cells.append([BatchWork(step, size, size, *costs) for step, size, *costs in sorted(batches)])
    return {
        "cells": cells,
        "targets": draw(st.integers(1, 3)),
        "num_workers": draw(st.integers(1, 3)),
        "queue_batches": draw(st.integers(1, 3)),
        "max_bytes": draw(st.integers(1, 20)),
        "dispatch": draw(st.sampled_from(["round_robin", "least_loaded", "per_worker", "per_worker_skipping"])),
        "step_work": StepWork(draw(st.floats(0, 0.3)), draw(st.floats(0, 0.3))),
        "machine": draw(st.sampled_from([Machine(), Machine(colocated=True), Machine(cores=1), Machine(cores=2)])),
    }


@settings(max_examples=60, deadline=None)
@given(cases())
def test_every_batch_is_trained_once_in_plan_order_and_all_time_is_accounted_for(case: dict[str, Any]) -> None:
    found = run(**case)
    assert found.trained == [list(range(len(works))) for works in case["cells"]]
    assert found.step_ends_s == sorted(found.step_ends_s)
    for times, works in zip(found.cells, case["cells"], strict=True):
        parts = (times.draft_s, times.wait_s, times.barrier_s, times.reduce_s, times.optimizer_s)
        assert sum(parts) == pytest.approx(times.total_s)
        drafting, serving = sum(work.draft_s for work in works), sum(work.target_s for work in works)
        assert times.draft_s >= drafting * (1 - 1e-9) and times.target_busy_s >= serving * (1 - 1e-9)
        if case["machine"] == Machine():
            assert times.draft_s == pytest.approx(drafting)
            assert times.target_busy_s == pytest.approx(serving)
    if case["machine"].cores:
        all_work = sum(w.load_s + w.target_s + w.draft_s for works in case["cells"] for w in works)
        all_work += case["step_work"].optimizer_s * len(found.step_ends_s) * len(case["cells"])
        assert found.cores_busy is not None
        assert found.cores_busy * case["machine"].cores * found.step_ends_s[-1] == pytest.approx(all_work, rel=1e-6, abs=1e-6)
    assert run(**case) == found


@settings(max_examples=60, deadline=None)
@given(cases(), st.integers(1, 3))
def test_nobody_is_faster_than_the_slowest_stage_or_the_cores(case: dict[str, Any], cores: int) -> None:
    found = run(**{**case, "machine": Machine(cores=cores)})
    works = [work for cell in case["cells"] for work in cell]
    assert found.duration_s >= sum(w.load_s + w.target_s + w.draft_s for w in works) / cores * (1 - 1e-9)
    assert found.duration_s >= max(sum(w.draft_s for w in cell) for cell in case["cells"]) * (1 - 1e-9)


@pytest.mark.parametrize("targets", [1, 2, 3])
def test_more_cores_are_never_slower(targets: int) -> None:
    cells = [[work(s, target=1.0 + (s * 7 % 5) / 5, draft=0.5 + (s * 3 % 4) / 4, load=0.05) for s in range(30)] for _ in range(2)]
    times = [run(cells, targets=targets, machine=Machine(cores=cores)).duration_s for cores in (1, 2, 3, 4, 6, 8, 64)]
    assert times == sorted(times, reverse=True)
    assert times[-1] < 0.6 * times[0]


@pytest.mark.parametrize("policy", ["round_robin", "least_loaded"])
def test_targets_are_chosen_as_the_pipeline_chooses_them(policy: Any) -> None:
    """The pipeline's own policy, asked with the same queues: nothing is taken out while all batches are dispatched."""
    tokens = [1, 2, 2, 1, 9, 3, 2, 1, 7, 4]
    with Supervisor("test", 1.0) as supervisor:
        queues: list[Channel[Any]] = [Channel(f"queue {t}", 100, supervisor, 1.0) for t in range(3)]
        choose = make_dispatch(policy, queues, 1)
        expected = []
        for count in tokens:
            expected.append(choose(0))
            queues[expected[-1]].put(object(), load=count)
    from dflash_core.simulation.cell import CellPools, SimulatedCell

    clock = Clock()
    pools = CellPools(Pool(clock, 1), [Pool(clock, 1)] * 3, Pool(clock, 1))
    settings = CellSettings(3, num_workers=1, queue_batches=100, max_bytes=PLENTY, dispatch=policy)
    cell = SimulatedCell(clock, [work(tokens=count) for count in tokens], 1, settings, pools, lambda: None, StepWork())
    cell._start_target = lambda target: None  # type: ignore[method-assign]
    cell.start()
    clock.run(lambda: False)
    placed = sorted((batch, target) for target, queue in enumerate(cell._queues) for batch in queue.items)
    assert [target for _, target in placed] == expected


# a slow reference: the same rules, time in small steps


class SmallSteps:
    """One cell, round robin, wide queues, loading takes no time; written down tick by tick and with nothing of the model's."""

    def __init__(self, works: list[BatchWork], targets: int, cores: float, max_bytes: int, step_work: StepWork) -> None:
        self.works, self.cores, self.max_bytes, self.step_work = works, cores, max_bytes, step_work
        self.target_left, self.draft_left = [w.target_s for w in works], [w.draft_s for w in works]
        self.queues: list[list[int]] = [[] for _ in range(targets)]
        self.serving: list[int | None] = [None] * targets
        self.served: set[int] = set()
        self.fed = self.trained = self.step = self.reserved = 0
        self.ending: list[float] | None = None  # seconds left of the join and of the optimizer

    def hand_over(self) -> None:
        works = self.works
        while self.fed < len(works) and (self.reserved == 0 or self.reserved + works[self.fed].num_bytes <= self.max_bytes):
            self.queues[self.fed % len(self.queues)].append(self.fed)
            self.reserved += works[self.fed].num_bytes
            self.fed += 1
        for t, queue in enumerate(self.queues):
            if self.serving[t] is None and queue:
                self.serving[t] = queue.pop(0)
        if self.ending is None and (self.trained == len(works) or works[self.trained].step > self.step):
            self.ending = [self.step_work.reduce_s, self.step_work.optimizer_s]

    def move(self, dt: float) -> None:
        joining = self.ending is not None and self.ending[0] > 0
        drafting = self.ending is None and self.trained in self.served
        active = sum(s is not None for s in self.serving) + (drafting or (self.ending is not None and not joining))
        rate = dt * min(1.0, self.cores / max(1, active))
        for t, batch in enumerate(self.serving):
            if batch is not None:
                self.target_left[batch] -= rate
                if self.target_left[batch] <= 0:
                    self.served.add(batch)
                    self.serving[t] = None
        if drafting:
            self.draft_left[self.trained] -= rate
            if self.draft_left[self.trained] <= 0:
                self.reserved -= self.works[self.trained].num_bytes
                self.trained += 1
        if self.ending is not None:
            self.ending[0 if joining else 1] -= dt if joining else rate
            if max(self.ending) <= 0:
                self.step, self.ending = self.step + 1, None

    def run(self, dt: float) -> float:
        """Seconds until the last step ends."""
        steps, ticks = 1 + max(w.step for w in self.works), 0
        while self.step < steps:
            self.hand_over()
            self.move(dt)
            ticks += 1
        return ticks * dt


@settings(max_examples=15, deadline=None)
@given(st.data(), st.integers(1, 3), st.sampled_from([1.0, 2.0, 3.0]), st.integers(2, 12))
def test_events_agree_with_small_time_steps(data: Any, targets: int, cores: float, max_bytes: int) -> None:
    seconds = st.floats(0.3, 2.0)
    count = data.draw(st.integers(4, 10))
    works = [
        BatchWork(n // 3, data.draw(st.integers(1, 4)), 1, 0.0, data.draw(seconds), data.draw(seconds)) for n in range(count)
    ]
    step_work = StepWork(0.2, 0.3)
    found = run(
        [works], targets=targets, machine=Machine(cores=cores), max_bytes=max_bytes, queue_batches=99, num_workers=99,
        step_work=step_work,
    )  # fmt: skip
    dt = 0.004
    slow = SmallSteps(works, targets, cores, max_bytes, step_work).run(dt)
    # Every hand-over may come a tick late.
    assert found.duration_s == pytest.approx(slow, abs=dt * 5 * count)
