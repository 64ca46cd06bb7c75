"""Prefect's API as the tests ask it."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from flows import server


def ask(home: Path, path: str, **body: Any) -> Any:
    """Ask the server of a workspace, as POST if there is a body; one that is busy for the moment (503) is asked again."""
    running = server.find(home)
    assert running is not None
    content = json.dumps(body).encode() if body else None
    request = urllib.request.Request(f"{running.url}/{path}", content, {"Content-Type": "application/json"})
    for attempt in range(10):
        try:
            with urllib.request.urlopen(request, timeout=20) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            if error.code != 503 or attempt == 9:
                raise
            time.sleep(0.5)
