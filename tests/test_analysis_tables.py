"""Every number of the tables against a slow and obvious computation, and the files they are read from."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_core.analysis import read_rows, reader
from dflash_core.analysis.order import (
    MIXED,
    leaning_bucket,
    run_length_rows,
    shuffled_distribution,
    shuffled_longest_runs,
    shuffled_quantiles,
)
from dflash_core.analysis.reader import last_attempts, matrix, numbers, read_stream
from dflash_core.analysis.run_tables import bucket_rows, grad_norm_rows, run_row, timestamp
from dflash_core.analysis.runs import Run, load_run, load_runs
from dflash_core.analysis.series import block_length, detrended, resampled_means, resampled_sds, running_median, spikes
from dflash_core.analysis.tables import SCHEMA_VERSION, TABLES, table_of
from dflash_core.bucketing import shortest_possible_longest_run
from dflash_core.errors import DataError, UserError
from tests.fake_runs import FakeRun, write_dataset, write_jsonl, write_run


def made(folder: Path, **planted: Any) -> Run:
    return load_run(write_run(folder / planted.get("name", "run"), FakeRun(**planted)))


def jsonl(run: Run, stream: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run.folder / "metrics" / f"{stream}.jsonl").read_text().splitlines()]


# Reading


def test_a_torn_last_line_is_skipped_and_a_broken_one_named(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    path.write_bytes(b'{"step":0,"loss":NaN}\n\n{"step":1}\n{"step":2,"lo')
    assert [row["step"] for row in read_rows(path)] == [0, 1] and math.isnan(read_rows(path)[0]["loss"])
    path.write_bytes(b'{"step":0}\n{"step":1}')  # whole, only its newline is missing
    assert [row["step"] for row in read_rows(path)] == [0, 1]
    path.write_bytes(b'{"step":0}\n{"step":\n{"step":2}\n')
    with pytest.raises(DataError, match=r"steps.jsonl, row 2: not JSON"):
        read_rows(path)
    path.write_bytes(b'{"step":0}\n[1]\n')
    with pytest.raises(DataError, match=r"steps.jsonl, row 2: not a JSON object"):
        read_rows(path)
    with pytest.raises(DataError, match=r"absent.jsonl: cannot be read"):
        read_rows(tmp_path / "absent.jsonl")


VALUES = st.none() | st.floats(width=64) | st.integers(-(2**40), 2**40)
ROWS = st.lists(
    st.fixed_dictionaries(
        {"step": st.integers(0, 99), "time": st.floats(0, 4e9), "attempt": st.integers(0, 3)},
        optional={
            "loss": VALUES,
            "clipped": st.booleans() | st.none(),
            "bucket_counts": st.lists(st.integers(0, 9)) | st.none(),
            "note": st.text(st.characters(codec="utf-8", exclude_categories=["Cs"])),
            "own": st.floats(allow_nan=False),
        },
    ),
    min_size=1,
)


@settings(max_examples=60, deadline=None)
@given(ROWS)
def test_the_fast_reader_equals_the_slow_one(rows: list[dict[str, Any]]) -> None:
    data = "".join(json.dumps(row) + "\n" for row in rows).encode()
    slow = reader._typed(reader._table_of_rows(reader._rows_of(data, Path("x")), "steps"), "steps")
    fast = reader._parse(data, Path("x"), "steps")
    known = [name for name in slow.column_names if name != "note"]  # of other fields Arrow guesses the type
    assert set(slow.column_names) == set(fast.column_names)
    pd.testing.assert_frame_equal(fast.select(known).to_pandas(), slow.select(known).to_pandas(), check_dtype="own" not in known)


def test_wrong_types_are_one_readable_error(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", FakeRun(num_steps=4))
    path = folder / "metrics" / "steps.jsonl"
    path.write_text('{"step": 0, "loss": "low"}\n')
    with pytest.raises(DataError, match=r"steps.jsonl: a field has values of another type") as error:
        load_run(folder)
    assert "\n" not in str(error.value)


def test_the_last_attempt_of_a_step_counts(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", FakeRun(num_steps=10))
    steps, batches = (
        [json.loads(x) for x in (folder / "metrics" / f"{s}.jsonl").read_text().splitlines()] for s in ("steps", "batches")
    )
    # Killed after step 9, resumed at 6, killed again after the first batches of step 8.
    again = [{**row, "attempt": 1, "loss": 9.0} for row in steps if 6 <= row["step"] < 8]
    again_batches = [{**row, "attempt": 1, "loss_sum": -1.0} for row in batches if 6 <= row["step"] < 8 or row["seq_no"] == 32]
    write_jsonl(folder / "metrics" / "steps.jsonl", steps + again)
    write_jsonl(folder / "metrics" / "batches.jsonl", batches + again_batches)
    run = load_run(folder)
    assert run.num_attempts == 2
    assert numbers(run.steps, "step").tolist() == list(range(10))
    assert [value == 9.0 for value in numbers(run.steps, "loss")] == [False] * 6 + [True, True, False, False]
    assert numbers(run.batches, "seq_no").tolist() == [*range(33), *range(36, 40)]
    assert (numbers(run.batches, "loss_sum")[24:33] == -1.0).all()


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3)), max_size=30))
def test_last_attempts_equals_the_obvious_filter(pairs: list[tuple[int, int]]) -> None:
    table = reader._typed(reader._table_of_rows([{"step": s, "attempt": a} for s, a in pairs], "steps"), "steps")
    expected = [(s, a) for s, a in pairs if a == max(b for t, b in pairs if t == s)]
    kept = last_attempts(table)
    assert list(zip(kept["step"].to_pylist(), kept["attempt"].to_pylist(), strict=True)) == expected


def test_compaction_when_a_run_has_ended_and_again_when_its_log_has_grown(tmp_path: Path) -> None:
    living = write_run(tmp_path / "living", FakeRun(num_steps=6, state="running"))
    load_run(living)
    assert not list((living / "metrics").glob("*.parquet"))
    folder = write_run(tmp_path / "ended", FakeRun(num_steps=6))
    load_run(folder)
    path = folder / "metrics" / "steps.parquet"
    table = pq.read_table(path)
    assert (
        table.schema.metadata[b"dflash.schema"] == b"steps"
        and table.schema.metadata[b"dflash.schema_version"] == str(SCHEMA_VERSION).encode()
    )
    assert str(table.schema.field("time").type) == "timestamp[us, tz=UTC]" and len(table) == 6
    before = path.stat().st_mtime_ns
    assert read_stream(folder, "steps", compact=True).equals(table.replace_schema_metadata(None))
    assert path.stat().st_mtime_ns == before
    with (folder / "metrics" / "steps.jsonl").open("a") as file:
        file.write(json.dumps({"run_id": "ended", "attempt": 0, "step": 6, "time": 1.77e9, "loss": 1.0}) + "\n")
    assert len(read_stream(folder, "steps", compact=True)) == 7 == len(pq.read_table(path))
    (folder / "metrics" / "steps.jsonl").unlink()  # the log was put away, the table remains
    assert len(load_run(folder).steps) == 7
    path.write_bytes(b"PAR1 broken")
    with pytest.raises(DataError, match=r"steps.parquet: not a readable Parquet file"):
        load_run(folder)


@pytest.mark.parametrize("missing", ["manifest.json", "config.yaml", "metrics/steps.jsonl", "metrics/batches.jsonl"])
def test_a_missing_file_is_named_in_one_line(tmp_path: Path, missing: str) -> None:
    folder = write_run(tmp_path / "run", FakeRun(num_steps=4))
    (folder / missing).unlink()
    with pytest.raises(UserError, match=missing.replace(".", r"\.")) as error:
        load_run(folder)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "text"), [("manifest.json", "{"), ("config.yaml", "a: [1"), ("config.yaml", "- 1"), ("manifest.json", "3")]
)
def test_a_damaged_document_is_named_in_one_line(tmp_path: Path, name: str, text: str) -> None:
    folder = write_run(tmp_path / "run", FakeRun(num_steps=4))
    (folder / name).write_text(text)
    with pytest.raises(DataError, match=name) as error:
        load_run(folder)
    assert "\n" not in str(error.value)


def test_a_run_without_optional_streams_is_read(tmp_path: Path) -> None:
    run = made(tmp_path, num_steps=6, evals=False, stats=False)
    (run.folder / "provenance.json").unlink()
    (run.folder / "metrics" / "events.jsonl").unlink()
    row = run_row(load_run(run.folder), np.random.default_rng(0))
    assert row["acceptance_length"] is None and row["lossless"] is None and row["git_commit"] is None


# Order


def naive_runs(buckets: list[int]) -> list[tuple[int, int]]:
    return [(bucket, len(list(part))) for bucket, part in groupby(buckets)]


@pytest.mark.parametrize("order", ["diverse", "shuffle", "grouped", "sorted"])
def test_run_lengths_at_three_levels(tmp_path: Path, order: str) -> None:
    run = made(tmp_path, order=order, num_steps=30, num_cells=2)
    batches = jsonl(run, "batches")
    rows = run_length_rows(run)

    def table(level: str) -> dict[tuple[int | None, int], int]:
        return {(row["bucket"], row["run_length"]): row["count"] for row in rows if row["level"] == level}

    def counted(runs: list[tuple[int, int]]) -> dict[tuple[int, int], int]:
        return {pair: runs.count(pair) for pair in set(runs)}

    assert table("flat") == counted(naive_runs([b["bucket"] for b in batches]))
    cells = [naive_runs([b["bucket"] for b in batches if b["cell"] == cell]) for cell in (0, 1)]
    assert table("cell") == counted(cells[0] + cells[1])
    leaning = list(naive_leaning(batches))
    assert table("step") == {(None if b == MIXED else b, n): c for (b, n), c in counted(naive_runs(leaning)).items()}
    assert leaning == leaning_bucket(run).tolist()
    if order in ("grouped", "sorted"):
        assert leaning.count(MIXED) <= 3
    if order == "diverse":
        assert leaning.count(MIXED) >= 27


def naive_leaning(batches: list[dict[str, Any]]) -> Iterator[int]:
    share = {bucket: sum(b["bucket"] == bucket for b in batches) / len(batches) for bucket in range(6)}
    for _, part in groupby(batches, key=lambda b: b["step"]):
        buckets = [b["bucket"] for b in part]
        excess = {bucket: buckets.count(bucket) - share[bucket] * len(buckets) for bucket in range(6)}
        most = max(excess, key=lambda bucket: excess[bucket])
        yield most if excess[most] > 1 + 1e-9 or buckets.count(most) == len(buckets) else MIXED


def test_order_columns_of_runs(tmp_path: Path) -> None:
    rows = {
        order: run_row(made(tmp_path, name=order, order=order), np.random.default_rng(0))
        for order in ("diverse", "shuffle", "sorted")
    }
    for order, row in rows.items():
        buckets = [
            json.loads(line)["bucket"] for line in (tmp_path / order / "metrics" / "batches.jsonl").read_text().splitlines()
        ]
        lengths = [length for _, length in naive_runs(buckets)]
        half = len(buckets) // 2
        assert row["longest_run"] == max(lengths) and row["mean_run"] == pytest.approx(np.mean(lengths))
        assert row["longest_run_in_epoch"] == max(n for part in (buckets[:half], buckets[half:]) for _, n in naive_runs(part))
        assert row["shortest_possible_longest_run"] == 2 == shortest_possible_longest_run(np.bincount(buckets[:half]))
    assert rows["diverse"]["longest_run_in_epoch"] == 2 < rows["shuffle"]["longest_run"] < rows["sorted"]["longest_run"]
    assert rows["diverse"]["prefix_deviation"] < rows["shuffle"]["prefix_deviation"] < rows["sorted"]["prefix_deviation"]
    assert rows["diverse"]["step_share_sd"] < rows["shuffle"]["step_share_sd"]
    low, median, high = (rows["shuffle"][f"shuffled_longest_run_{name}"] for name in ("p05", "median", "p95"))
    assert low <= median <= high and low <= rows["shuffle"]["longest_run_in_epoch"] <= high + 3


def test_shuffling_reference_agrees_with_slow_permutations() -> None:
    buckets = np.repeat([0, 1, 2], [30, 50, 120])
    halves = [buckets[::2], buckets[1::2]]
    fast = shuffled_longest_runs(halves, np.random.default_rng(1))
    rng = np.random.default_rng(2)
    slow = [max(n for half in halves for _, n in naive_runs(rng.permutation(half).tolist())) for _ in range(400)]
    assert len(fast) == 200 and abs(float(fast.mean()) - float(np.mean(slow))) < 4 * np.std(slow) * (1 / 200 + 1 / 400) ** 0.5
    assert shuffled_longest_runs([np.zeros(7, dtype=np.int64)], rng).tolist() == [7] * 200


@pytest.mark.parametrize("counts", [(30, 50, 120), (400, 400, 300, 300, 200, 2400), (60, 3940), (2000, 2000)])
def test_the_formula_for_shuffled_runs_agrees_with_permutations(counts: tuple[int, ...]) -> None:
    epochs = [np.repeat(np.arange(len(counts)), counts)] * 2
    drawn = np.concatenate([shuffled_longest_runs(epochs, np.random.default_rng(seed)) for seed in range(5)])
    below = shuffled_distribution(epochs)
    assert (np.diff(below) >= 0).all() and below[-1] == pytest.approx(1)
    for quantile in (0.05, 0.5, 0.95):
        at = int(np.searchsorted(below, quantile))
        # As often as it says, within four standard errors of 1000 draws and what taking gaps for independent costs.
        slack = 4 * (quantile * (1 - quantile) / 1000) ** 0.5 + 0.02
        assert (drawn < at).mean() - slack <= quantile <= (drawn <= at).mean() + slack
    assert shuffled_quantiles([np.zeros(5000, dtype=np.int64)], (0.5,), np.random.default_rng(0)) == [5000.0]
    # One batch among many leaves two gaps, one of which holds at least half: independent gaps would not know.
    lonely = np.repeat([0, 1], [1, 3999])
    assert shuffled_quantiles([lonely], (0.05,), np.random.default_rng(0))[0] >= 2000


# The other tables


def test_run_row_sums_and_means(tmp_path: Path) -> None:
    run = made(tmp_path, num_steps=40)
    row, steps = run_row(run, np.random.default_rng(0)), jsonl(run, "steps")
    assert row["num_tokens"] == sum(s["num_tokens"] for s in steps) and row["num_steps"] == 40 and row["num_batches"] == 160
    assert row["final_loss"] == pytest.approx(np.mean([s["loss"] for s in steps[-4:]]))
    assert row["grad_norm_p95"] == pytest.approx(np.quantile([s["grad_norm"] for s in steps], 0.95))
    assert row["anchors_per_s"] == pytest.approx(sum(s["num_anchors"] for s in steps) / 20.0)
    assert (row["data_wait_share"], row["target_wait_share"], row["draft_share"]) == pytest.approx((0.04, 0.2, 0.7))
    assert row["padding_efficiency"] == pytest.approx(row["num_tokens"] / sum(s["num_padded_tokens"] for s in steps))
    assert row["created"].isoformat() == "2026-01-02T03:04:05+00:00"
    assert table_of("runs", [row]).num_rows == 1


def test_bucket_stats_agree_with_a_loop(tmp_path: Path) -> None:
    run = made(tmp_path, num_steps=20)
    batches = jsonl(run, "batches")
    batches[3]["loss_sum"] = math.nan
    write_jsonl(run.folder / "metrics" / "batches.jsonl", batches)
    rows = bucket_rows(load_run(run.folder))
    assert [row["bucket"] for row in rows] == sorted({b["bucket"] for b in batches})
    for row in rows:
        part = [b for b in batches if b["bucket"] == row["bucket"]]
        finite = [b for b in part if not math.isnan(b["loss_sum"])]
        assert row["num_batches"] == len(part) and row["batch_share"] == pytest.approx(len(part) / 80)
        assert row["mean_loss"] == pytest.approx(sum(b["loss_sum"] for b in finite) / sum(b["weight_sum"] for b in finite))
        assert row["padding_efficiency"] == pytest.approx(
            sum(b["num_tokens"] for b in part) / sum(b["num_padded_tokens"] for b in part)
        )
        assert row["max_seq_len"] == max(b["max_seq_len"] for b in part)
    assert sum(row["token_share"] for row in rows) == pytest.approx(1)


def test_grad_norms_count_spikes_clips_and_diverged_steps(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", FakeRun(order="shuffle", num_steps=90))
    steps = [json.loads(line) for line in (folder / "metrics" / "steps.jsonl").read_text().splitlines()]
    for step in (40, 70):
        steps[step]["grad_norm"] = 9.0
    steps[50] |= {"grad_norm": math.inf, "loss": math.nan, "skipped": True}
    steps[51] |= {"grad_norm": None, "loss": None, "skipped": True}
    write_jsonl(folder / "metrics" / "steps.jsonl", steps)
    run = load_run(folder)
    rows = {row["group"]: row for row in grad_norm_rows(run, 6.0)}
    norms = [s["grad_norm"] for s in steps if s["grad_norm"] is not None and math.isfinite(s["grad_norm"])]
    total = rows["all"]
    assert (total["num_steps"], total["num_nonfinite"], total["num_spikes"], total["max"]) == (90, 2, 2, 9.0)
    assert total["p75"] == pytest.approx(np.quantile(norms, 0.75)) and total["mean"] == pytest.approx(np.mean(norms))
    assert total["clip_share"] == pytest.approx(np.mean([s["clipped"] for s in steps]))
    thirds = [rows[name] for name in ("long_share_low", "long_share_mid", "long_share_high") if name in rows]
    assert sum(row["num_steps"] for row in thirds) == 90 and len(thirds) >= 2
    assert all(a["long_share_high"] < b["long_share_low"] for a, b in pairwise(thirds))
    row = run_row(run, np.random.default_rng(0))
    assert row["num_skipped"] == 2 and math.isfinite(row["final_loss"]) and math.isfinite(row["loss_sd_detrended"])


def test_a_run_that_diverged_for_good_has_a_nan_loss_and_still_has_its_tables(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", FakeRun(num_steps=12))
    steps = [json.loads(line) | {"loss": math.nan, "grad_norm": math.nan} for line in (folder / "metrics" / "steps.jsonl").open()]
    write_jsonl(folder / "metrics" / "steps.jsonl", steps)
    run = load_run(folder)
    assert math.isnan(run_row(run, np.random.default_rng(0))["final_loss"])
    assert grad_norm_rows(run, 6.0)[0]["p50"] is None and grad_norm_rows(run, 6.0)[0]["num_nonfinite"] == 12


def test_matrix_pads_short_lists_and_nulls(tmp_path: Path) -> None:
    rows = [
        {"step": 0, "bucket_counts": [1, 2]},
        {"step": 1},
        {"step": 2, "bucket_counts": []},
        {"step": 3, "bucket_counts": [5, 6, 7]},
    ]
    table = reader._typed(reader._table_of_rows(rows, "steps"), "steps")
    nan = math.nan
    np.testing.assert_equal(matrix(table, "bucket_counts"), [[1, 2, nan], [nan] * 3, [nan] * 3, [5, 6, 7]])
    assert matrix(table.slice(1, 2), "bucket_counts").shape == (2, 0)
    np.testing.assert_equal(matrix(table.slice(3), "bucket_counts"), [[5, 6, 7]])
    assert matrix(table.slice(0, 0), "bucket_counts").shape == (0, 0)


def test_times_from_text_and_seconds() -> None:
    assert timestamp("2026-01-02T04:04:05+01:00") == timestamp(1767323045.0) == timestamp("2026-01-02T03:04:05Z")
    assert timestamp(None) is None and timestamp("yesterday-ish") is None


def test_a_row_with_a_column_too_many_is_refused() -> None:
    row = dict.fromkeys(TABLES["run_lengths"].names)
    with pytest.raises(ValueError, match="extra"):
        table_of("run_lengths", [{**row, "extra": 1}])


# Series


def ar1(n: int, rho: float, rng: np.random.Generator) -> np.ndarray:
    noise = rng.normal(size=n + 50)
    values = np.zeros(n + 50)
    for i in range(1, n + 50):
        values[i] = rho * values[i - 1] + noise[i]
    return values[50:]


def test_block_length_grows_with_autocorrelation() -> None:
    rng = np.random.default_rng(0)
    mean = [np.mean([block_length(ar1(800, rho, rng)) for _ in range(10)]) for rho in (0.0, 0.5, 0.9)]
    assert mean[0] < 6 < mean[1] < mean[2] < 800 / 3
    assert block_length(np.ones(100)) == 1 and block_length(np.arange(5.0)) == 1


def test_intervals_cover_the_truth_where_independent_resampling_would_not() -> None:
    rng = np.random.default_rng(3)
    covered = {"mean": 0, "sd": 0, "naive": 0}
    for _ in range(150):
        values = ar1(400, 0.7, rng)
        mean, sd = resampled_means(values, rng, 300), resampled_sds(values, rng, 300)
        assert mean is not None and sd is not None
        low, high = np.quantile(mean, [0.025, 0.975])
        covered["mean"] += low <= 0 <= high
        low, high = np.quantile(sd, [0.025, 0.975])
        covered["sd"] += low <= 1 / (1 - 0.49) ** 0.5 <= high
        covered["naive"] += abs(values.mean()) <= 1.96 * values.std() / 400**0.5
    assert covered["mean"] >= 0.90 * 150 and covered["sd"] >= 0.85 * 150 and covered["naive"] <= 0.70 * 150


def test_block_sums_bootstrap_equals_drawing_whole_blocks_to_scale() -> None:
    values = ar1(100, 0.5, np.random.default_rng(5))
    length = block_length(values)
    blocks = -(-100 // length)
    starts = np.random.default_rng(7).integers(0, 100, size=(50, blocks))
    slow = np.stack([np.concatenate([np.take(values, range(s, s + length), mode="wrap") for s in row]) for row in starts])
    fast = resampled_means(values, np.random.default_rng(7), 50)
    assert fast is not None and length > 1
    mean = slow.mean(axis=1)
    np.testing.assert_allclose((fast - fast.mean()) / fast.std(), (mean - mean.mean()) / mean.std(), atol=1e-9)
    assert fast.mean() == pytest.approx(values.mean()) and fast.std() > mean.std()
    assert resampled_means(values[:19], np.random.default_rng(0)) is None


def test_of_a_long_series_longer_blocks_are_drawn_and_the_interval_stays() -> None:
    values = ar1(6000, 0.5, np.random.default_rng(5))
    mean, sd = resampled_means(values, np.random.default_rng(1)), resampled_sds(values, np.random.default_rng(1))
    assert mean is not None and mean.std() == pytest.approx(2 / 6000**0.5, rel=0.2)  # the truth: 1 / (1 - 0.5) / sqrt(n)
    assert sd is not None and sd.std() == pytest.approx((1.333 * (1 + 0.25) / (1 - 0.25) / 2 / 6000) ** 0.5, rel=0.2)


def test_running_median_and_detrending_by_hand() -> None:
    np.testing.assert_allclose(running_median(np.array([5.0, 1, 2, 9, np.nan]), 3), [3, 2, 2, 5.5, 9])
    line = np.linspace(10, 0, 300)
    assert np.abs(detrended(line)[31:-31]).max() < 1e-12


def test_spikes_against_a_falling_norm() -> None:
    rng = np.random.default_rng(0)
    norm = 5 * np.exp(-np.arange(400) / 60) + 0.5 + rng.normal(0, 0.02, 400)
    assert spikes(norm, 8.0)[0].sum() <= 4  # the steep start is no spike, as it would be against one global median
    norm[[200, 300]] += 1.0
    norm[250] = np.inf
    found, mad = spikes(norm, 8.0)
    assert set(np.flatnonzero(found)) >= {200, 300} and not found[250] and 0.005 < mad < 0.05
    constant = np.ones(50)
    constant[20] = 1.0005
    assert not spikes(constant, 6.0)[0].any()
    assert not spikes(np.full(4, np.nan), 6.0)[0].any()


def test_runs_of_one_name_are_told_apart_by_their_ids(tmp_path: Path) -> None:
    dataset = write_dataset(tmp_path / "dataset")
    folders = [write_run(tmp_path / f"{n}", FakeRun(name=name, num_steps=20), dataset) for n, name in enumerate("aab")]
    found = load_runs(folders)
    assert [run.name for run in found] == [found[0].run_id, found[1].run_id, "b"] and found[0].run_id != found[1].run_id
