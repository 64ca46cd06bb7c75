"""What a flow's command says and ends with when Prefect's server is lost, and what `serve` refuses before it starts anything."""

from __future__ import annotations

import argparse
import signal
from pathlib import Path

import httpx
import pytest

from dflash_core.errors import ConfigError, DFlashError, StoppedBySignal, TrainingError, UserError
from flows import command, console, serve


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command line changes neither the signals nor the loggers of this process."""
    monkeypatch.setattr(command, "raise_on_sigterm", lambda: None)
    monkeypatch.setattr(console, "show_our_lines", lambda: None)


def lost(cause: BaseException | None) -> Exception:
    """The error of Prefect's client, raised while it was to tell the server of `cause`."""
    error = httpx.ConnectError("All connection attempts failed")
    between = ValueError("in between")
    between.__context__ = cause
    error.__context__ = between if cause is not None else None
    return error


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (UserError("no such key"), 2, "error: no such key"),
        (TrainingError("diverged"), 3, "error: diverged"),
        (StoppedBySignal("stopped, saved"), 4, "error: stopped, saved"),
        (lost(StoppedBySignal("stopped, saved")), 4, "error: stopped, saved"),
        (lost(TrainingError("diverged")), 3, "error: diverged"),
        (lost(None), 3, "error: Prefect's server does not answer any more (All connection attempts failed); what was done is"),
        (lost(KeyError("x")), 3, "error: Prefect's server does not answer any more"),
        (KeyboardInterrupt(), 128 + signal.SIGINT, "error: interrupted; run the same command again"),
        (command.Terminated(), 128 + signal.SIGTERM, "error: ended by SIGTERM; run the same command again"),
        (ZeroDivisionError("x"), 1, "error: unexpected ZeroDivisionError: x"),
    ],
)
def test_every_end_is_one_line_and_its_exit_code(
    quiet: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
    code: int,
    line: str,
) -> None:
    def end(_stage: str, _arguments: argparse.Namespace) -> None:
        raise error

    monkeypatch.setattr(command, "_run", end)
    assert command.main("train", ["x.yaml"]) == code
    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith(line) and said.err.count("\n") == 1


def asked(path: Path) -> argparse.Namespace:
    return argparse.Namespace(experiments=[str(path)], schedule=None, timezone="UTC")


def test_serve_refuses_what_its_runs_would_be_refused_for(micro_experiment: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A deployment's runs are confined; a `serve` whose every run fails would be found out on Monday at three."""
    monkeypatch.delenv("DFLASH_CONFINE", raising=False)
    monkeypatch.delenv("DFLASH_ALLOWED_PATHS", raising=False)
    with pytest.raises(ConfigError, match=r"^experiment: .*micro.yaml: leads outside .*; DFLASH_ALLOWED_PATHS adds some$"):
        serve._check(asked(micro_experiment))
    monkeypatch.setenv("DFLASH_ALLOWED_PATHS", str(micro_experiment.parent))
    with pytest.raises(DFlashError, match=r"^target.path: .* leads outside"):
        serve._check(asked(micro_experiment))
    monkeypatch.setenv("DFLASH_CONFINE", "0")
    serve._check(asked(micro_experiment))
