"""Which checkpoints stay: the rule against its plain statement, and what damage may not do."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_core.config import TrainConfig
from dflash_core.training.checkpoint import CheckpointStore, Score, best_checkpoint, check_checkpoint
from dflash_core.training.retention import Retention
from tests.test_checkpoint_files import flip_in, names, snapshot_of

SCORES = st.one_of(st.none(), st.sampled_from([1.0, 1.5, 2.0, math.nan, math.inf]))
FOLDERS = st.dictionaries(st.integers(0, 40), st.tuples(st.booleans(), SCORES), max_size=12)


@settings(max_examples=300, deadline=None)
@given(FOLDERS, st.integers(1, 4), st.one_of(st.none(), st.integers(1, 6)), st.booleans())
def test_the_rule_is_its_plain_statement(
    folders: dict[int, tuple[bool, float | None]], keep_last: int, keep_every: int | None, keep_best: bool
) -> None:
    steps = sorted(folders)
    good = [step for step in steps if folders[step][0]]
    asked: list[int] = []

    def is_good(step: int) -> bool:
        asked.append(step)
        return folders[step][0]

    kept, surplus = Retention(keep_last, keep_every, keep_best).surplus(steps, is_good, lambda step: folders[step][1])
    expected = set(good[-keep_last:])
    if keep_every is not None:
        expected |= {step for step in good if step % keep_every == 0}
    scored = {step: value for step in good if (value := folders[step][1]) is not None and math.isfinite(value)}
    if keep_best and scored:
        expected.add(next(step for step in sorted(scored) if scored[step] == max(scored.values())))
    assert expected <= set(kept) and kept == sorted(kept) and surplus == sorted(surplus)
    # What is kept beyond that was never looked at: it is there for `keep_every`, and is damaged.
    assert all(not folders[step][0] and keep_every and step % keep_every == 0 for step in set(kept) - expected)
    assert not set(surplus) & set(kept)
    assert not set(surplus) & expected
    assert len(asked) == len(set(asked))  # each is read at most once
    # A damaged one that was looked at is neither kept nor to go.
    seen = {step for step in asked if not folders[step][0]}
    assert set(steps) == set(kept) | set(surplus) | seen and not seen & (set(kept) | set(surplus))


def test_it_comes_from_the_configuration() -> None:
    config = TrainConfig(keep_last=3, keep_every=100, keep_best=True)
    assert Retention.from_config(config) == Retention(3, 100, True)


def write_scored(root: Path, retention: Retention, scores: Mapping[int, Score | float | None]) -> list[int]:
    store = CheckpointStore(root, retention)
    return [store.write(snapshot_of(step, score)) for step, score in scores.items()][-1].kept


def steps_in(root: Path) -> list[int]:
    assert all(name.startswith("step-") for name in names(root))
    return sorted(int(name[5:]) for name in names(root))


def test_the_newest_every_nth_and_the_best_are_kept(tmp_path: Path) -> None:
    scores = {5: 1.0, 10: 3.0, 15: 2.0, 20: 3.0, 25: 2.5, 30: None, 35: 1.0}
    for retention, expected in (
        (Retention(2), [30, 35]),
        (Retention(1, keep_every=10), [10, 20, 30, 35]),
        (Retention(1, keep_best=True), [10, 35]),  # 20 scores the same and is newer
        (Retention(2, keep_every=15, keep_best=True), [10, 15, 30, 35]),
    ):
        root = tmp_path / str(retention)
        assert write_scored(root, retention, scores) == expected == steps_in(root)


def test_the_best_is_known_to_the_process_that_resumes(tmp_path: Path) -> None:
    retention = Retention(1, keep_best=True)
    write_scored(tmp_path, retention, {5: 1.0, 10: 3.0, 15: 2.0})
    assert write_scored(tmp_path, retention, {20: 2.5}) == [10, 20]
    assert write_scored(tmp_path, retention, {25: 3.5}) == [25]


def test_steps_are_numbers_not_texts(tmp_path: Path) -> None:
    write_scored(tmp_path, Retention(2), {4: None, 8: None, 999_999: None, 1_000_000: None})
    assert names(tmp_path) == ["step-1000000", "step-999999"]


def test_a_damaged_checkpoint_pushes_out_no_good_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_scored(tmp_path, Retention(9), {4: 1.0, 8: 1.0, 12: 9.0, 16: 1.0})
    flip_in("optimizer.pt")(tmp_path / "step-000012")
    flip_in("optimizer.pt")(tmp_path / "step-000016")
    store = CheckpointStore(tmp_path, Retention(2, keep_best=True))
    with caplog.at_level(logging.WARNING):
        # 12 and 16 do not count among the newest two; 12 has the best score, and does not count there either.
        assert store.write(snapshot_of(20, 0.5)).kept == [4, 8, 20]
        assert steps_in(tmp_path) == [4, 8, 12, 16, 20]
        assert store.write(snapshot_of(24, 0.6)).kept == [4, 20, 24]
    assert len(caplog.records) == 2  # each is read once
    # 16 went with its age; 12, which would be the best, is left for somebody to look at.
    assert steps_in(tmp_path) == [4, 12, 20, 24]
    for step in (4, 20, 24):
        check_checkpoint(tmp_path / f"step-{step:06d}")


def test_a_later_checkpoint_that_was_passed_over_does_not_push_out_new_ones(tmp_path: Path) -> None:
    write_scored(tmp_path, Retention(2), {40: None, 1_000_000: None})
    (tmp_path / "step-1000000" / "state.json").write_text("{")
    assert write_scored(tmp_path, Retention(1), {500: None}) == [500]
    assert names(tmp_path) == ["step-000500", "step-1000000"]
    assert write_scored(tmp_path, Retention(1), {300: None}) == [300]  # whole or not, a later one is none of its business
    assert names(tmp_path) == ["step-000300", "step-000500", "step-1000000"]
    # The older ones are not worth reading: what is kept by its step alone is never looked at.
    flip_in("optimizer.pt")(tmp_path / "step-000500")
    assert write_scored(tmp_path, Retention(1, keep_every=500), {600: None}) == [500, 600]


def measured(value: float, on: str = "some prompts") -> Score:
    return Score(value, f"acceptance_length on {on}")


def test_only_scores_of_one_kind_are_compared(tmp_path: Path) -> None:
    """An estimate, or a figure of other prompts, says nothing about a measured one, however high it is."""
    keep = Retention(1, keep_best=True)
    assert write_scored(tmp_path / "a", keep, {5: 9.0, 10: measured(2.0), 15: measured(1.5)}) == [10, 15]
    assert write_scored(tmp_path / "b", keep, {5: measured(2.0), 10: measured(1.5), 15: 9.0}) == [5, 15]
    others = {5: measured(3.0, "other prompts"), 10: measured(1.5), 15: measured(1.2)}
    assert write_scored(tmp_path / "c", keep, others) == [10, 15]


def test_the_best_checkpoint_is_whole_measured_and_the_older_of_equals(tmp_path: Path) -> None:
    def best(root: Path) -> tuple[str, float] | None:
        found = best_checkpoint(root)
        return found and (found[0].name, found[1]["score"])

    assert best(tmp_path) is None
    write_scored(tmp_path, Retention(9), {4: None, 5: math.nan})
    assert best(tmp_path) is None
    write_scored(tmp_path, Retention(9), {10: 9.0, 15: 1.0})
    assert best(tmp_path) == ("step-000010", 9.0)
    write_scored(tmp_path, Retention(9), {20: measured(2.0), 25: measured(2.0), 30: measured(3.0), 35: 8.0})
    assert best(tmp_path) == ("step-000030", 3.0)
    flip_in("model.safetensors")(tmp_path / "step-000030")
    assert best(tmp_path) == ("step-000020", 2.0)
    (tmp_path / "step-000020" / "state.json").write_text("{")
    assert best(tmp_path) == ("step-000025", 2.0)
