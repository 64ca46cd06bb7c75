"""The page in a real browser: nothing on the console, nothing from the network, and room for everything at any width."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pandas as pd
import psutil
import pytest

from dflash_core.analysis.build_report import build_report
from dflash_core.analysis.report import to_html
from tests.fake_runs import FakeRun, write_dataset, write_run
from tests.report_browser import Browser, find_chromium
from tests.report_fakes import analysed, content, with_everything

CHROMIUM = find_chromium()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine (apt-get install chromium)"),
]
LONG_NAME = "a-run-with-quite-a-long-name-that-goes-on"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report with every section and every plot."""
    root = tmp_path_factory.mktemp("page")
    dataset = write_dataset(root / "dataset")
    histogram, bins = (pd.read_parquet(dataset / f"{name}.parquet") for name in ("length_histogram", "length_bins"))

    def drift(streams: dict[str, list[dict[str, object]]]) -> None:
        for number, row in enumerate(streams["batches"]):
            row["target"] = int(number % 3 == 0)

    fakes = (FakeRun(num_steps=60), FakeRun(name=LONG_NAME, order="shuffle", num_steps=60, plants=(drift,), state="running"))
    runs = analysed([write_run(root / fake.name, fake) for fake in fakes])
    made = with_everything(runs, histogram, bins)
    path = root / "report.html"
    path.write_text(to_html(build_report(replace(made, differences=["target: one has a, other has b"]))))
    return path


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    assert CHROMIUM is not None
    with Browser(CHROMIUM, tmp_path_factory.mktemp("profile")) as found:
        yield found


@pytest.mark.parametrize(("width", "dark"), [(390, False), (390, True), (1280, False), (1280, True)])
def test_the_page_is_whole_quiet_and_fits(browser: Browser, page: Path, width: int, dark: bool) -> None:
    seen = browser.look(page.as_uri(), width, dark=dark)
    assert seen.faults(page.as_uri(), width) == []
    assert seen.requests.count(page.as_uri()) == 1
    assert seen.measured["background"] == ("rgb(18, 22, 28)" if dark else "rgb(246, 247, 249)")
    drawn = {plot["id"].removeprefix("plot-") for plot in seen.measured["plots"]}
    assert {"loss", "grad_norm", "loss_parts", "positions_0", "progress_loss", "waits", "dispatch_0", "shares_0"} <= drawn


# Each place of the page with what is put there instead, and the faults that must be reported then.
BROKEN: dict[str, tuple[dict[str, str], list[str]]] = {
    "loud": (
        {
            "draw();\n": 'draw();\nconsole.error("said"); queueMicrotask(() => { throw new Error("thrown"); });\n',
            # What a policy forbids is not asked for; the planted request has to get past it.
            "img-src data: blob:": "img-src *",
            "<main>": '<main><img src="http://127.0.0.1:9/planted.png"><div style="width: 700px">wide</div>',
            "<h2>Findings": "<h4>Findings",
            '"y":1.02': '"y":0.5',
        },
        [
            "console: said",
            "console: Error: thrown",
            "request: http://127.0.0.1:9/planted.png",
            "px wide, the window has 390",
            "headings skip a level",
            "plot-loss: the legend lies on the plot",
        ],
    ),
    "narrow": ({"</style>": "#plot-loss svg { width: 90px; }</style>"}, ["plot-loss: no room"]),
    "not drawn": (
        {"draw();\n": "throw 1;\n", "<main>": '<main><img src="http://127.0.0.1:9/planted.png">'},
        ["the plots were not drawn", "Content Security Policy"],
    ),
}


@pytest.fixture(scope="module")
def small_page(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A report with one plot."""
    folder = tmp_path_factory.mktemp("small")
    run = analysed([write_run(folder / "a", FakeRun(num_steps=30)), write_run(folder / "b", FakeRun(name="b", num_steps=30))])
    report = build_report(content(run))
    return to_html(replace(report, plots=[replace(report.plots[0], plots=report.plots[0].plots[:1])]))


@pytest.mark.parametrize("name", BROKEN)
def test_a_fault_in_the_page_is_seen(browser: Browser, small_page: str, tmp_path: Path, name: str) -> None:
    changes, expected = BROKEN[name]
    text = small_page
    for before, after in changes.items():
        assert before in text
        text = text.replace(before, after, 1)
    broken = tmp_path / "broken.html"
    broken.write_text(text)
    faults = browser.look(broken.as_uri(), 390).faults(broken.as_uri(), 390)
    assert [fault for fault in expected if not any(fault in one for one in faults)] == [], faults


HOLDER = """
import sys, time
from pathlib import Path
from tests.report_browser import Browser, find_chromium
browser = Browser(find_chromium(), Path(sys.argv[1]))
browser._call("Browser.getVersion")
print(browser.pid, flush=True)
time.sleep(60)
"""


def test_the_browser_ends_with_a_process_that_is_killed(tmp_path: Path) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path / "profile")],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[1],
    )
    assert holder.stdout is not None
    try:
        pid = int(holder.stdout.readline())
        os.kill(holder.pid, signal.SIGKILL)
        holder.wait(timeout=10)
        deadline = time.monotonic() + 30
        while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline, "the browser is still there"
            time.sleep(0.05)
    finally:
        holder.kill()
        holder.wait(timeout=10)
        holder.stdout.close()
