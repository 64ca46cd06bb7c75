"""Pictures of a report for the documentation: its head and its first plot, on a phone and on a desk.

    python -m benchmarks.report_screenshots workspace/reports/demo/report.html docs/img

Needs Chromium. `--from-plots` shows the plots instead of the head.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from tests.report_browser import Browser, find_chromium

MAX_BYTES = 150_000
# Width of the page, from which pixel of its height to which, scale.
PICTURES = {"report-390": (390, (0, 1300), 1.0), "report-1280": (1280, (0, 1250), 0.625)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("report", type=Path, help="report.html")
    parser.add_argument("out", type=Path, help="folder of the pictures")
    parser.add_argument("--from-plots", action="store_true", help="start at the plots instead of at the head")
    given = parser.parse_args()
    chromium = find_chromium()
    if chromium is None or not given.report.is_file():
        parser.exit(2, "error: Chromium is not installed\n" if chromium is None else f"error: {given.report}: no such file\n")
    given.out.mkdir(parents=True, exist_ok=True)
    url = given.report.resolve().as_uri()
    with tempfile.TemporaryDirectory() as profile, Browser(chromium, Path(profile)) as browser:
        for name, (width, (top, bottom), scale) in PICTURES.items():
            start = browser.look(url, width).measured["plots_top"] - 16 if given.from_plots else 0
            page = browser.look(url, width, picture=(start + top, start + bottom), scale=scale)
            faults = page.faults(url, width)
            path = given.out / f"{name}{'-plots' if given.from_plots else ''}.png"
            path.write_bytes(page.screenshot)
            size = len(page.screenshot)
            print(f"{path}: {size:,} bytes{', MORE THAN WANTED' if size > MAX_BYTES else ''}")
            for fault in faults:
                print(f"  {fault}")


if __name__ == "__main__":
    main()
