"""Pictures of Prefect's pages for the documentation: the forms of deployments, and the newest artifacts.

    python -m benchmarks.flows_screenshots $(dflash server url) docs/img [--submit]

Needs Chromium, and `dflash serve` on that server. `--submit` presses the button of `experiment`'s form, says which run that
has started, and waits until it is no longer due: it has to begin.
"""

from __future__ import annotations

import argparse
import base64
import json
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.report_browser import WINDOW_HEIGHT, Browser, find_chromium

MAX_BYTES = 150_000
WIDTH = 1280
LEFT = 256  # where the pages' own side bar ends
PATIENCE_S = 120.0
FORMS = ("experiment", "sweep")  # the others look like the first
ARTIFACTS = ("comparison", "retraining")  # how their keys begin
# Where a workspace lies says nothing to a reader.
SHORTEN = """document.querySelectorAll("code").forEach(one => {
  one.innerText = one.innerText.replace(/^.*\\/workspace\\//, "workspace/");
})"""
SUBMIT = "[...document.querySelectorAll('button')].find(one => one.innerText.trim() === 'Submit')"
FILLED = f"{SUBMIT} && document.querySelector('form textarea')?.value.endsWith('.yaml')"


class Pages(Browser):
    """A browser with one tab, whose pages draw themselves and are ready when they show something."""

    def __enter__(self) -> Pages:
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self.session: str = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime"):
            self._call(f"{domain}.enable", self.session)
        self._resize(WINDOW_HEIGHT)
        scheme = [{"name": "prefers-color-scheme", "value": "light"}]
        self._call("Emulation.setEmulatedMedia", self.session, features=scheme)
        return self

    def open(self, url: str, ready: str) -> None:
        """Go to a page; returns when the expression `ready` is true of it."""
        self._call("Page.navigate", self.session, url=url)
        self.wait(ready)
        time.sleep(1.0)  # what moves into place

    def wait(self, expression: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not self.value(expression):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{expression}: never true; the page says: {self.value('document.body.innerText')}")
            time.sleep(0.2)

    def value(self, expression: str) -> Any:
        return self._evaluate(expression, self.session)

    def picture(self, scale: float) -> bytes:
        """All of the page without its side bar, as PNG."""
        height = int(self.value("document.querySelector('.app-router-view__view').scrollHeight"))
        self._resize(height)  # the page scrolls inside itself: what lies below the window is not drawn
        time.sleep(1.0)
        clip = {"x": LEFT, "y": 0, "width": WIDTH - LEFT, "height": height, "scale": scale}
        shot = self._call("Page.captureScreenshot", self.session, format="png", clip=clip)
        self._resize(WINDOW_HEIGHT)
        return base64.b64decode(shot["data"])

    def _resize(self, height: int) -> None:
        size = {"width": WIDTH, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self._call("Emulation.setDeviceMetricsOverride", self.session, **size)


def ask(api: str, path: str, **body: Any) -> Any:
    """What Prefect's API answers."""
    request = urllib.request.Request(f"{api}/{path}", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.load(answer)


def pages(api: str) -> Iterator[tuple[str, str, str]]:
    """Name, address and sign of readiness of each page that there is."""
    site = api.removesuffix("/api")
    deployments = {one["name"]: one["id"] for one in ask(api, "deployments/filter")}
    for name in FORMS:
        yield f"flows-form-{name}", f"{site}/deployments/deployment/{deployments[name]}/run", FILLED
    artifacts = ask(api, "artifacts/filter", sort="CREATED_DESC")
    for start in ARTIFACTS:
        found = next((one for one in artifacts if (one["key"] or "").startswith(f"{start}-")), None)
        if found:
            yield (
                f"flows-{start}",
                f"{site}/artifacts/artifact/{found['id']}",
                "!!document.querySelector('.app-router-view__view table')",
            )


def submit(browser: Pages, api: str, form: str) -> None:
    """Press the form's button, and wait until its run has begun."""
    before = {one["id"] for one in ask(api, "flow_runs/filter")}
    browser.open(form, FILLED)
    browser.value(f"{SUBMIT}.click()")
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        new = [one for one in ask(api, "flow_runs/filter") if one["id"] not in before]
        if new and new[0]["state"]["type"] not in ("SCHEDULED", "PENDING"):
            print(f"started {new[0]['name']}: {new[0]['state']['name']}, {json.dumps(new[0]['parameters'])}")
            return
        time.sleep(0.5)
    raise TimeoutError("no run has begun")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("api", help="address of the server's API, as `dflash server url` says it")
    parser.add_argument("out", type=Path, help="folder of the pictures")
    parser.add_argument(
        "--scale", type=float, default=0.75, help="pixels of a picture per pixel of the page; default: %(default)g"
    )
    parser.add_argument("--submit", action="store_true", help="press the button of the experiment's form, too")
    given = parser.parse_args()
    chromium = find_chromium()
    if chromium is None:
        parser.exit(2, "error: Chromium is not installed\n")
    given.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as profile, Pages(chromium, Path(profile)) as browser:
        for number, (name, url, ready) in enumerate(pages(given.api)):
            browser.open(url, ready)
            browser.value(SHORTEN)
            path, shot = given.out / f"{name}.png", browser.picture(given.scale)
            path.write_bytes(shot)
            print(f"{path}: {len(shot):,} bytes{', MORE THAN WANTED' if len(shot) > MAX_BYTES else ''}")
            if given.submit and number == 0:
                submit(browser, given.api, url)


if __name__ == "__main__":
    main()
