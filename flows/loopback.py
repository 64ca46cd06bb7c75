"""Ports of this machine, and whether a Prefect server answers at an address."""

from __future__ import annotations

import socket
import time
import urllib.error
import urllib.parse
import urllib.request

from dflash_core.errors import UserError


def free_port(preferred: int, patience_s: float = 0.0) -> int:
    """A free port of 127.0.0.1: the preferred one if it is free or becomes so within `patience_s`; 0 prefers none."""
    deadline = time.monotonic() + patience_s
    while True:
        try:
            return _bound(preferred)
        except OSError:
            if time.monotonic() >= deadline:
                return _bound(0)
        time.sleep(0.02)


def _bound(port: int) -> int:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", port))
        return int(probe.getsockname()[1])


def healthy(url: str, timeout_s: float) -> bool:
    """Whether a server on this machine says that it is well."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # loopback never goes through a proxy
    try:
        with opener.open(f"{url}/health", timeout=timeout_s) as answer:
            return bool(answer.status == 200 and answer.read(64).strip() == b"true")
    except (OSError, ValueError):  # refused, timed out, not HTTP
        return False


def check_address(url: str) -> None:
    """Raise UserError for a PREFECT_API_URL that holds a password, or is no address; neither is shown.

    Prefect's client can use such an address in part: it loses its events, and shows the password in its warnings.
    """
    if "@" in url:
        raise UserError(
            "PREFECT_API_URL: holds a password; take out what stands before the @, and set PREFECT_API_AUTH_STRING=user:password"
        )
    try:
        parts = urllib.parse.urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        usable = False
    if not usable:
        raise UserError("PREFECT_API_URL: not an address such as http://host:4200/api")


def check_reachable(url: str, timeout_s: float) -> None:
    """Raise UserError if nobody answers at the user's own PREFECT_API_URL."""
    try:
        urllib.request.urlopen(f"{url.rstrip('/')}/health", timeout=timeout_s).close()  # noqa: S310 - the user's own address
    except urllib.error.HTTPError:
        return  # somebody answers; whether the key is right is for Prefect to say
    except (OSError, ValueError) as error:
        raise UserError(f"PREFECT_API_URL: no server answers at {url} ({error})") from error
