"""Headless Chromium without a driver: its own protocol over two pipes, so there is no port and nothing else to install.

Chromium ends by itself when the pipes close, so it does not outlive a process that is killed.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage", "--disable-extensions", "--hide-scrollbars",
    "--remote-debugging-pipe",
)  # fmt: skip
# Chromium talks over the descriptors 3 and 4.
LAUNCHER = "import os, sys; os.dup2(int(sys.argv[1]), 3); os.dup2(int(sys.argv[2]), 4); os.execv(sys.argv[3], sys.argv[3:])"
TIMEOUT_S = 60.0
WINDOW_HEIGHT = 900
CHROMIUM_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")

# What is looked at in a page that has been drawn. A plot's surface is where the data are; a legend must not lie on it.
MEASURE = """(() => {
  const plots = [...document.querySelectorAll(".plot")].map(box => {
    const svg = box.querySelector("svg.main-svg"), size = svg ? svg.getBoundingClientRect() : { width: 0, height: 0 };
    const legend = box.querySelector(".legend"), area = box.querySelector(".nsewdrag");
    const low = legend ? legend.getBoundingClientRect() : null;
    const inner = area ? area.getBoundingClientRect() : { top: 0, height: 0 };
    const frame = box.closest("figure").getBoundingClientRect();
    return { id: box.id, width: size.width, height: size.height, area: inner.height, right: size.right - frame.right,
      covered: low ? low.bottom - inner.top : -1, wide: low ? low.right - frame.right : -1,
      label: box.getAttribute("aria-label") };
  });
  const levels = [...document.querySelectorAll("h1,h2,h3,h4")].map(head => Number(head.tagName[1]));
  const first = document.querySelector("h2.free"), top = first ? Math.round(first.getBoundingClientRect().top + scrollY) : 0;
  return { scroll: document.documentElement.scrollWidth, inner: innerWidth, plots, levels, plots_top: top,
    background: getComputedStyle(document.body).backgroundColor };
})()"""


def find_chromium() -> str | None:
    return next((path for path in map(shutil.which, CHROMIUM_NAMES) if path), None)


@dataclass
class Page:
    """What a page did: errors on the console, what it asked the network for, and what was measured once it was drawn."""

    drawn: bool = False
    errors: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    measured: dict[str, Any] = field(default_factory=dict)
    screenshot: bytes = b""

    def faults(self, url: str, width: int) -> list[str]:
        """What is wrong with it, a line each."""
        found = [f"console: {error}" for error in self.errors]
        found += [f"request: {request}" for request in self.requests if request != url and not request.startswith("data:")]
        if not self.drawn:
            return [*found, "the plots were not drawn"]
        if max(self.measured["scroll"], self.measured["inner"]) > width:
            found.append(f"{self.measured['scroll']} px wide, the window has {width}")
        if any(after > before + 1 for before, after in zip([0, *self.measured["levels"]], self.measured["levels"], strict=False)):
            found.append(f"headings skip a level: {self.measured['levels']}")
        for plot in self.measured["plots"]:
            if plot["width"] < 200 or plot["height"] < 150 or plot["area"] < 60:
                found.append(f"{plot['id']}: no room: {plot}")
            if plot["covered"] > 1 or plot["wide"] > 1 or plot["right"] > 1:
                found.append(f"{plot['id']}: the legend lies on the plot or leaves the page: {plot}")
            if not plot["label"]:
                found.append(f"{plot['id']}: no label")
        return found if self.measured["plots"] else [*found, "no plots"]


class Browser:
    """One Chromium with a profile of its own; leaving the context ends it with all its processes."""

    def __init__(self, executable: str, profile: Path) -> None:
        to_read, self._write = (_high(end) for end in os.pipe())
        self._read, to_write = (_high(end) for end in os.pipe())
        command = [sys.executable, "-c", LAUNCHER, str(to_read), str(to_write), executable, *FLAGS, f"--user-data-dir={profile}"]
        try:
            self._process = subprocess.Popen(
                command,
                pass_fds=(to_read, to_write),
                process_group=0,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        finally:
            os.close(to_read)
            os.close(to_write)
        self._buffer, self._last_id = b"", 0
        self._events: list[dict[str, Any]] = []

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    def close(self) -> None:
        for end in (self._write, self._read):
            with contextlib.suppress(OSError):
                os.close(end)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=5)
        with contextlib.suppress(ProcessLookupError):  # what is left of the group, also when the browser itself has ended
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(timeout=10)

    def look(
        self, url: str, width: int, *, dark: bool = False, picture: tuple[int, int] | None = None, scale: float = 1.0
    ) -> Page:
        """Open a page of this width in a tab of its own, wait until it has drawn its plots, and measure it.

        Args:
            picture: take one, from this pixel of the page's height to that one.
            scale: pixels of the picture per pixel of the page.
        """
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self._events.clear()
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._call(f"{domain}.enable", session)
        size = {"width": width, "height": WINDOW_HEIGHT, "deviceScaleFactor": 1, "mobile": False}
        self._call("Emulation.setDeviceMetricsOverride", session, **size)
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self._call("Emulation.setEmulatedMedia", session, features=scheme)
        self._call("Page.navigate", session, url=url)
        page = Page(drawn=self._wait_until_drawn(session))
        if page.drawn:
            page.measured = self._evaluate(MEASURE, session)
        if picture:
            clip = {"x": 0, "y": picture[0], "width": width, "height": picture[1] - picture[0], "scale": scale}
            shot = self._call("Page.captureScreenshot", session, format="png", captureBeyondViewport=True, clip=clip)
            page.screenshot = base64.b64decode(shot["data"])
        for event in self._events:
            self._note(page, event)
        self._call("Target.closeTarget", targetId=target)
        return page

    def _wait_until_drawn(self, session: str) -> bool:
        """False where an error or the time limit came first."""
        deadline = time.monotonic() + TIMEOUT_S
        while time.monotonic() < deadline:
            if self._evaluate('document.documentElement?.dataset.drawn === "yes"', session):
                return True
            if any(event["method"] == "Runtime.exceptionThrown" for event in self._events):
                return False
            time.sleep(0.05)
        return False

    def _evaluate(self, expression: str, session: str) -> Any:
        return self._call("Runtime.evaluate", session, expression=expression, returnByValue=True)["result"].get("value")

    @staticmethod
    def _note(page: Page, event: dict[str, Any]) -> None:
        method, params = event["method"], event["params"]
        if method == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            page.errors.append(str((details.get("exception") or {}).get("description") or details["text"]))
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            page.errors.append(" ".join(str(one.get("value", one.get("description"))) for one in params["args"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            page.errors.append(params["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            page.requests.append(params["request"]["url"])

    def _call(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        self._last_id += 1
        message: dict[str, Any] = {"id": self._last_id, "method": method, "params": params}
        if session:
            message["sessionId"] = session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._write, data) :]
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            answer = self._receive(deadline)
            if answer.get("id") == self._last_id:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                result: dict[str, Any] = answer["result"]
                return result
            if "method" in answer:
                self._events.append(answer)

    def _receive(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError("the browser does not answer")
            data = os.read(self._read, 1 << 20)
            if not data:
                raise RuntimeError("the browser has ended")
            self._buffer += data
        message, self._buffer = self._buffer.split(b"\0", 1)
        answer: dict[str, Any] = json.loads(message)
        return answer


def _high(end: int) -> int:
    """The descriptor under a number that cannot be 3 or 4."""
    moved = fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10)
    os.close(end)
    return moved
