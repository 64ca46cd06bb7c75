"""The table of names in docs/metrics.md is that of the code. `python -m tests.test_metrics_docs` writes it anew."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from dflash_core.evaluation.acceptance import Acceptance, Evaluation
from dflash_core.evaluation.walk import SlotAccuracy, Walk
from dflash_core.experiment_evaluation import _speed_values
from dflash_core.metrics.panels import EVAL_METRICS, NAME_SPACES, PANELS, panel_table

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "metrics.md"
BEGIN, END = "<!-- names -->\n", "<!-- end of names -->\n"


def parts() -> tuple[str, str, str]:
    before, _, rest = DOCUMENT.read_text(encoding="utf-8").partition(BEGIN)
    table, _, after = rest.partition(END)
    return before, table, after


def test_the_documented_names_are_those_of_the_code() -> None:
    assert parts()[1] == panel_table(), "docs/metrics.md is stale: run python -m tests.test_metrics_docs"


def test_every_name_lies_in_a_name_space_and_has_unit_and_meaning() -> None:
    names = [panel.name for panel in PANELS]
    assert len(set(names)) == len(names) and {name.split("/")[0] for name in names} == set(NAME_SPACES)
    assert all(panel.unit and panel.meaning and "|" not in panel.meaning for panel in PANELS)
    for name in ("batch/bucket_share/{}", "batch/mean_seq_len", "batch/max_seq_len", "batch/sequences_per_batch"):
        assert name in names
    for name in ("padding_efficiency", "current_run", "longest_run"):
        assert f"batch/{name}" in names
    for name in (
        "depth/target_{}",
        "data_wait_s",
        "target_wait_s",
        "put_wait_s/target_{}",
        "get_wait_s/target_{}",
        "budget_wait_s",
    ):
        assert f"queue/{name}" in names


def evaluated_metrics() -> Iterator[str]:
    part = Acceptance(3, 9, [(1, 2), (0, 1)])
    measured = Evaluation({"all": part}, (), (), (), (), 1.0, bootstrap_samples=10)
    walked = Walk({"all": part}, {"all": SlotAccuracy([1, 1], [2, 2])}, 0.0)
    yield from (row["metric"] for row in measured.rows("trained", 1) + walked.rows("training", 1))
    one = dict.fromkeys(("plain_s_per_token", "speculative_s_per_token", "speedup"), 1.0)
    yield from _speed_values({"target_forwards_saved": 1.0, "single": one, "batched": one})


def test_every_metric_of_an_evaluation_is_documented() -> None:
    assert set(evaluated_metrics()) == set(EVAL_METRICS)


if __name__ == "__main__":
    first, _, last = parts()
    DOCUMENT.write_text(first + BEGIN + panel_table() + END + last, encoding="utf-8")
