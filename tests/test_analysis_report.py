"""Comparisons and the report as a whole: planted differences appear, absent ones do not, and the page is safe and alone."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
from plotly.offline import get_plotlyjs

from dflash_core.analysis import SCHEMA_VERSION, analyze_runs
from dflash_core.analysis.plots import log_ticks, thin
from dflash_core.analysis.plots.order import length_plot
from dflash_core.analysis.summary import number
from dflash_core.analysis.tables import TABLES
from dflash_core.config import AnalyzeConfig
from dflash_core.errors import DataError, UserError
from tests.fake_runs import FakeRun, write_dataset, write_jsonl, write_run

CONFIG = AnalyzeConfig()


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A shuffled and a diverse run of 300 steps; cluster-dependent loss and norm are planted in both."""
    root = tmp_path_factory.mktemp("compared")
    dataset = write_dataset(root / "dataset")
    folders = [
        write_run(root / order, FakeRun(name=order, order=order, num_steps=300, seed=1), dataset)
        for order in ("shuffle", "diverse")
    ]
    return root, analyze_runs(folders, root / "report", CONFIG)


def read(root: Path, name: str) -> pd.DataFrame:
    frame: pd.DataFrame = pq.read_table(root / "report" / f"{name}.parquet").to_pandas()
    return frame


MAY_BE_EMPTY = ("findings", "loss_parts", "run_positions", "waits", "group_comparisons")


def test_tables_are_versioned_sorted_compressed_and_counted(compared: tuple[Path, dict[str, Any]]) -> None:
    root, manifest = compared
    assert {p.name for p in (root / "report").iterdir()} == {f"{n}.parquet" for n in TABLES} | {
        "report.html",
        "report.md",
        "manifest.json",
    }
    for name, schema in TABLES.items():
        file = pq.ParquetFile(root / "report" / f"{name}.parquet")
        assert file.schema_arrow.metadata[b"dflash.schema"] == name.encode()
        assert file.schema_arrow.metadata[b"dflash.schema_version"] == str(SCHEMA_VERSION).encode()
        assert file.schema_arrow.remove_metadata().equals(schema)
        assert file.metadata.row_group(0).column(0).compression == "ZSTD"
        assert file.metadata.num_rows == manifest["num_rows"][name]
        assert file.metadata.num_rows > 0 or name in MAY_BE_EMPTY
    assert json.loads((root / "report" / "manifest.json").read_text()) == json.loads(json.dumps(manifest))
    assert all(Path(path).is_file() for path in manifest["paths"].values())


def test_the_planted_difference_of_order_appears(compared: tuple[Path, dict[str, Any]]) -> None:
    root, manifest = compared
    rows = read(root, "comparisons").set_index("metric")
    assert set(rows["run_a"]) == {"shuffle"} and set(rows["run_b"]) == {"diverse"}
    np.testing.assert_allclose(rows["difference"], rows["value_b"] - rows["value_a"])
    for metric in ("loss_sd_detrended", "grad_norm_sd_detrended"):
        row = rows.loc[metric]
        assert row["ci_low"] <= row["difference"] <= row["ci_high"] < 0
        assert row["effect_kind"] == "log ratio" and row["effect_size"] == pytest.approx(
            math.log(row["value_b"] / row["value_a"])
        )
    assert rows.loc["grad_norm_mean", "ci_low"] < 0 < rows.loc["grad_norm_mean", "ci_high"]
    assert rows.loc["grad_norm_mean", "effect_kind"] == "standardised difference"
    assert rows.loc["longest_run_in_epoch", "value_b"] == 2 < rows.loc["longest_run_in_epoch", "value_a"] and math.isnan(
        rows.loc["longest_run", "ci_low"]
    )
    text = "\n".join(manifest["summary"])
    assert "They differ in bucketing.order (shuffle, diverse)." in text
    assert re.search(
        r"diverse: inside an epoch, the longest run of batches from one bucket is 2, which is the shortest possible", text
    )
    assert re.search(r"shuffle: inside an epoch, the longest run .* is \d+, the shortest possible is 2;", text)
    assert re.search(r"loss scatter around its trend, shuffle -> diverse: [^;]*\)\.", text)
    assert re.search(r"shuffle -> diverse, no difference that stands out .*: .*gradient norm, mean ", text)
    assert [row["name"] for row in manifest["comparison"]] == ["shuffle", "diverse"]


def test_equal_runs_show_no_difference_and_the_report_repeats_itself(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / f"seed{seed}", FakeRun(name=f"seed{seed}", num_steps=200, seed=seed)) for seed in (1, 2)]
    first = analyze_runs(folders, tmp_path / "a", CONFIG)
    analyze_runs(folders, tmp_path / "b", CONFIG)
    rows = pq.read_table(tmp_path / "a" / "comparisons.parquet")
    assert rows.equals(pq.read_table(tmp_path / "b" / "comparisons.parquet"))
    frame = (
        rows.to_pandas().set_index("metric").loc[["final_loss", "loss_sd_detrended", "grad_norm_mean", "grad_norm_sd_detrended"]]
    )
    assert ((frame["ci_low"] < 0) & (frame["ci_high"] > 0)).all()
    (line,) = (line for line in first["summary"] if "no difference that stands out" in line)
    named = ("final loss", "loss scatter around its trend", "gradient norm, mean", "gradient norm scatter around its trend")
    assert all(name in line for name in named)


class Loads(HTMLParser):
    """Collects what a page would fetch, and its texts."""

    def __init__(self) -> None:
        super().__init__()
        self.urls: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        urls = [value or "" for name, value in attrs if name in ("src", "href", "srcset", "action", "data", "poster")]
        self.urls += [url for url in urls if not url.startswith("#")]  # a place in the page itself


def test_the_page_loads_nothing_and_has_the_plots(compared: tuple[Path, dict[str, Any]]) -> None:
    root, _ = compared
    page = (root / "report" / "report.html").read_text()
    parser = Loads()
    parser.feed(page)
    assert parser.urls == ["data:,"]
    assert "default-src 'none'" in page and page.count(get_plotlyjs()) == 1
    own = page.replace(get_plotlyjs(), "")
    assert not re.search(r"https?://|@import|url\(", own)
    figures = json.loads(re.search(r"const figures = (\{.*\});", own)[1])  # type: ignore[index]
    expected = {
        "lengths",
        "run_lengths",
        "run_lengths_step",
        "loss",
        "grad_norm",
        "acceptance_over_training",
        "queue_0",
        "queue_1",
    }
    assert expected <= set(figures) and {"prefix_survival", "conditional_acceptance"} <= set(figures)
    for figure in figures.values():
        below = figure["layout"].get("xaxis2", figure["layout"]["xaxis"])
        assert below["title"]["text"] and figure["layout"]["yaxis"]["title"]["text"]
    assert figures["grad_norm"]["layout"]["yaxis"]["type"] == "log"
    assert any("R* = 2" in note["text"] for note in figures["run_lengths"]["layout"]["annotations"])
    assert len(figures["lengths"]["layout"]["shapes"]) == 5  # boundaries between six buckets
    assert "prefers-color-scheme: dark" in own and 'name="viewport"' in own
    order = [own.index(f"<h2>{title}</h2>") for title in ("Summary", "Findings", "In figures", "Runs", "Comparisons", "Buckets")]
    assert order == sorted(order) and order[3] < own.index('class="plots"') < order[4]


def test_texts_of_a_run_cannot_become_page_or_script(tmp_path: Path) -> None:
    evil = "</script><script>alert(1)</script><img src=x onerror=alert(2)>|a*b*"
    fake = FakeRun(name=evil, num_steps=30, manifest={"target": evil, "dataset": evil})
    folders = [write_run(tmp_path / "evil", fake), write_run(tmp_path / "other", replace(fake, name="other", order="shuffle"))]
    analyze_runs(folders, tmp_path / "report", CONFIG)
    page = (tmp_path / "report" / "report.html").read_text().replace(get_plotlyjs(), "")
    parser = Loads()
    parser.feed(page)
    assert parser.tags.count("script") == 2 and "img" not in parser.tags and parser.urls == ["data:,"]
    assert "<script>alert" not in page and "&lt;script&gt;alert" in page
    figures = re.search(r"const figures = (.*);", page)[1]  # type: ignore[index]
    assert "<" not in figures
    names = [trace.get("name", "") for trace in json.loads(figures)["loss"]["data"]]
    assert any("&lt;/script" in name for name in names)  # plotly reads names as HTML
    markdown = (tmp_path / "report" / "report.md").read_text()
    assert "<img" not in markdown and r"\|a\*b\*" in markdown


def test_markdown_has_the_comparison_as_well_formed_tables(compared: tuple[Path, dict[str, Any]]) -> None:
    root, manifest = compared
    text = (root / "report" / "report.md").read_text()
    for block in re.findall(r"(?:^\|.*\n)+", text, flags=re.MULTILINE):
        widths = {len(re.findall(r"(?<!\\)\|", line)) for line in block.splitlines()}
        assert len(widths) == 1
    assert "| loss scatter around its trend (nats)" in text.replace("**", "") and "**" in text
    assert "longest bucket run in an epoch / shortest possible" in text and text.count("\n- ") >= len(manifest["summary"]) - 1


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"manifest": {"dataset_fingerprint": "beef"}}, "dataset_fingerprint: a has f00d, b has beef"),
        ({"manifest": {"target": "big"}}, "target: a has tiny_target, b has big"),
        ({"config": {"bucketing.token_budget": 4096}}, "bucketing.token_budget: a has 2048, b has 4096"),
        ({"config": {"bucketing.batches_per_step": 2}}, "bucketing.batches_per_step: a has 4, b has 2"),
        ({"config": {"train.loss": "dpace"}}, "train.loss: a has cross_entropy, b has dpace"),
        ({"config": {"train.loss_gamma": 4.0}}, "train.loss_gamma: a has None, b has 4.0"),
    ],
)
def test_runs_that_are_not_comparable_are_refused_unless_asked(tmp_path: Path, change: dict[str, Any], named: str) -> None:
    folders = [
        write_run(tmp_path / "a", FakeRun(name="a", num_steps=20)),
        write_run(tmp_path / "b", FakeRun(name="b", num_steps=20, **change)),
    ]
    with pytest.raises(UserError, match=re.escape(named) + ".*--allow-different"):
        analyze_runs(folders, tmp_path / "report", CONFIG)
    assert not (tmp_path / "report").exists()
    manifest = analyze_runs(folders, tmp_path / "report", AnalyzeConfig(allow_different=True))
    assert manifest["differences"] == [named] and named in manifest["summary"][0]
    page = (tmp_path / "report" / "report.html").read_text()
    assert page.index("Not comparable as they are") < page.index("<h2>Summary")
    assert "Not comparable as they are" in (tmp_path / "report" / "report.md").read_text()


def test_user_errors_name_what_is_wrong(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", FakeRun(num_steps=10))
    with pytest.raises(UserError, match="no run folders"):
        analyze_runs([], tmp_path / "report", CONFIG)
    with pytest.raises(UserError, match="absent: no such run folder"):
        analyze_runs([tmp_path / "absent"], tmp_path / "report", CONFIG)
    with pytest.raises(UserError, match="run run is already given"):
        analyze_runs([run, run], tmp_path / "report", CONFIG)
    with pytest.raises(UserError, match="nowhere: no such dataset folder"):
        analyze_runs([run], tmp_path / "report", CONFIG, dataset_dir=tmp_path / "nowhere")
    dataset = write_dataset(tmp_path / "dataset")
    (dataset / "length_bins.parquet").write_bytes(b"no")
    with pytest.raises(DataError, match=r"length_bins\.parquet: not a readable Parquet file"):
        analyze_runs([run], tmp_path / "report", CONFIG, dataset_dir=dataset)
    assert not (tmp_path / "report").exists()


def test_a_failure_half_way_leaves_nothing_that_looks_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = write_run(tmp_path / "run", FakeRun(num_steps=10))
    analyze_runs([run], tmp_path / "report", CONFIG)
    assert (tmp_path / "report" / "manifest.json").exists()

    def full(path: Path, data: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("dflash_core.analysis.analyze.write_atomically", full)
    with pytest.raises(OSError, match="No space"):
        analyze_runs([run], tmp_path / "report", CONFIG)
    assert not (tmp_path / "report" / "manifest.json").exists()


def test_one_short_running_run_and_many_runs_have_a_report(tmp_path: Path) -> None:
    alone = write_run(tmp_path / "alone", FakeRun(num_steps=1, state="running", evals=False, stats=False))
    manifest = analyze_runs([alone], tmp_path / "one", CONFIG)
    assert manifest["num_rows"]["comparisons"] == 0 and manifest["summary"][0].startswith("One run: diverse (1 step, running)")
    assert "the run does not name its dataset" in (tmp_path / "one" / "report.md").read_text()
    many = [write_run(tmp_path / f"r{i}", FakeRun(name=f"r{i}", num_steps=12, seed=i)) for i in range(8)]
    manifest = analyze_runs(many, tmp_path / "many", CONFIG)
    assert manifest["num_rows"]["comparisons"] == 28 * 22
    assert "Queue depths are shown for 6 of 8 runs" in (tmp_path / "many" / "report.md").read_text()
    assert (
        len(manifest["summary"]) == 3
        and "is the shortest possible in 8 of 8 runs: r0, r1, r2, r3 and 4 more" in manifest["summary"][1]
    )


def test_a_diverged_run_has_a_report(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / name, FakeRun(name=name, num_steps=40)) for name in ("good", "bad")]
    steps = [json.loads(line) for line in (folders[1] / "metrics" / "steps.jsonl").open()]
    for row in steps:
        row |= {"loss": math.nan, "grad_norm": math.inf, "skipped": True}
    write_jsonl(folders[1] / "metrics" / "steps.jsonl", steps)
    manifest = analyze_runs(folders, tmp_path / "report", CONFIG)
    assert "bad: the non-finite guard left out 40 of 40 steps." in manifest["summary"]
    final = pq.read_table(tmp_path / "report" / "comparisons.parquet").to_pandas().set_index("metric").loc["final_loss"]
    assert math.isnan(final["value_b"]) and math.isnan(final["difference"])


def test_numbers_for_people() -> None:
    shown = [number(value) for value in (None, True, 3, 12345, 0.12345, 1234.5, 999.9, 1e-7, math.nan, math.inf, "x")]
    assert shown == ["–", "yes", "3", "12,345", "0.123", "1,234", "1,000", "1e-07", "nan", "inf", "x"]


def test_thinning_keeps_every_extreme_and_log_ticks_label_one_decade() -> None:
    y = np.random.default_rng(0).normal(size=20_000)
    y[777], y[15_001], y[3] = 50.0, -50.0, np.nan
    x, kept = thin(np.arange(20_000.0), y, 400)
    assert len(x) <= 400 and {50.0, -50.0} <= set(kept) and (np.diff(x) > 0).all()
    assert log_ticks([np.array([0.3, 1.8, np.nan, 0.0])]) == [0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50]
    assert log_ticks([np.array([0.001, 100.0])])[:3] == [0.001, 0.01, 0.1] and log_ticks([np.array([])]) == [1.0]


def test_the_length_plot_stacks_the_largest_sources_and_joins_the_rest() -> None:
    rows = [(source, lower, size) for size, source in enumerate("abcdefghi", start=1) for lower in (0, 8)]
    bins = pd.DataFrame(
        {
            "source": [source for source, _, _ in rows],
            "lower": [lower for _, lower, _ in rows],
            "upper": [lower + 8 for _, lower, _ in rows],
            "num_sequences": [size for _, _, size in rows],
        }
    )
    figure = length_plot(bins, pd.DataFrame({"upper": [8, 16]})).figure
    drawn = {trace.name: list(trace.y) for trace in figure.data}
    assert drawn == {"i": [9, 9], "h": [8, 8], "g": [7, 7], "f": [6, 6], "e": [5, 5], "d": [4, 4], "other sources": [6, 6]}
    assert figure.layout.barmode == "stack" and len(figure.layout.shapes) == 1
