"""Keys and passwords that were planted must be found nowhere after a real run."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import pytest

from dflash_core import experiment as root
from dflash_core.errors import ConfigError
from dflash_core.redaction import secret_in, without_secrets
from flows import command, serve, server, watch_data
from flows.secret_blocks import key_from_block

PLANTED = {
    "WANDB_API_KEY": "0123456789abcdefplantedwandb0123456789ab",
    "PREFECT_API_KEY": "pnu_plantedPrefect0123456789abcdef",
    "HF_TOKEN": "hf_plantedHuggingFaceToken0123456789",
    "AWS_SECRET_ACCESS_KEY": "planted/Aws+Secret0123456789ABCDEFGHIJKLM",
    "OUR_SERVER_KEY": "planted-server-key-0123456789",
}
IN_ARGV = "sk-plantedOnTheCommandLine0123456789"


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    for name, value in PLANTED.items():
        monkeypatch.setenv(name, value)
    return [*PLANTED.values(), IN_ARGV, "plantedPassword"]


def files_with(folder: Path, texts: list[str]) -> list[str]:
    """Files below a folder (and names of files) that hold one of the texts; also in UTF-16, as some formats store it."""
    found = []
    for path in sorted(folder.rglob("*")):
        content = path.read_bytes() if path.is_file() else b""
        if any(t in path.name or t.encode() in content or t.encode("utf-16-le") in content for t in texts):
            found.append(str(path))
    return found


def test_the_search_finds_what_is_there(tmp_path: Path, planted: list[str]) -> None:
    (tmp_path / "a.bin").write_bytes(b"\0\1" + planted[0].encode() + b"\2")
    assert files_with(tmp_path, planted) == [str(tmp_path / "a.bin")]


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("https://me:plantedPassword@example.org/x.jsonl", "a password in a URL"),
        ("s3://:plantedPassword@bucket/x.jsonl", "a password in a URL"),
        ("https://me:planted@plantedPassword@example.org/x.jsonl", "a password in a URL"),
        (f"x {IN_ARGV}", "what looks like a key"),
        (PLANTED["OUR_SERVER_KEY"], "what the environment variable OUR_SERVER_KEY holds"),
        ("https://me.blob.core.windows.net/c/x.jsonl?sv=2024-11-04&sig=plantedPassword%2B0123%3D", "a key in a URL"),
        ("gs://b/x?X-Goog-Signature=plantedPassword0123&X-Goog-Expires=60", "a key in a URL"),
        ("https://example.org/x.jsonl?token=plantedPassword", "a key in a URL"),
        ("https://example.org/x.jsonl?key=plantedPassword", "a key in a URL"),
        ("https://example.org/x.jsonl?tokens=7&design=plain&page=2", None),
        ("sftp://me@example.org/x.jsonl", None),
        ("https://example.org/a:b@c/x.jsonl", None),
        ("max_new_tokens: 64, mask_token_id=3", None),
    ],
)
def test_secrets_are_told_from_other_texts(planted: list[str], text: str, kind: str | None) -> None:
    assert secret_in(text) == kind
    shown = without_secrets(text)
    assert not any(secret in shown for secret in planted)
    assert (shown == text) == (kind is None)


def test_a_key_that_is_assigned_is_hidden_and_settings_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    assert without_secrets("--api-key=abc wandb.api_key: abc") == "--api-key=*** wandb.api_key: ***"
    plain = "train.lr=3 regenerate.api_key_env=OUR_KEY target.mask_token_id=7 regenerate.max_new_tokens=64"
    assert without_secrets(plain) == plain
    monkeypatch.setenv("A_TOKEN", "short")  # would be found in ordinary words
    monkeypatch.setenv("SSH_KEY", "/home/me/.ssh/id")  # tells where a key lies, and is none
    assert without_secrets("a short word in /home/me/.ssh/id") == "a short word in /home/me/.ssh/id"


@pytest.mark.parametrize(
    "override",
    [
        "data.files=['https://me:plantedPassword@example.org/x.jsonl']",
        "data.held_out=ftp://me:plantedPassword@example.org/x.jsonl",
        "regenerate.base_url=http://me:plantedPassword@127.0.0.1/v1",
        f"regenerate.api_key_env={IN_ARGV}",
        f"description={PLANTED['OUR_SERVER_KEY']}",
        f"data.template_variables={{{PLANTED['HF_TOKEN']}: 1}}",
        f"runs=[{{name: a, set: {{description: {IN_ARGV}}}}}]",
        f"train.lr={IN_ARGV}",  # wrong anyway, and the error shows the value
        f"{IN_ARGV}=1",
        f"description={{{IN_ARGV}",
        IN_ARGV,
    ],
)
def test_an_experiment_with_a_secret_is_one_line_without_it(
    micro_experiment: Path, planted: list[str], override: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        root.load_experiment(micro_experiment, [override])
    assert not any(secret in str(caught.value) for secret in planted)
    assert command.main("train", [str(micro_experiment), "--set", override]) == 2  # before any server is started
    shown = capsys.readouterr()
    assert shown.err.startswith("error: ") and not any(secret in shown.err + shown.out for secret in planted)


@pytest.mark.parametrize("main", [server.main, serve.main, watch_data.main], ids=["server", "serve", "watch-data"])
def test_the_error_of_a_command_shows_no_secret(
    main: Callable[[list[str]], int],
    micro_experiment: Path,
    tmp_path: Path,
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("PREFECT_API_URL", "http://me:plantedPassword@127.0.0.1:9/api")
    monkeypatch.setenv("DFLASH_CONFINE", "0")
    (tmp_path / "arrived").mkdir()
    (tmp_path / "arrived" / "week.jsonl").write_text("{}\n")
    words = {
        server.main: ["start"],
        serve.main: [str(micro_experiment)],
        watch_data.main: [str(tmp_path / "arrived"), "--once", "--settle", "0.1"],
    }
    previous = signal.getsignal(signal.SIGTERM)  # which these commands have raise
    try:
        assert main(words[main]) != 0
    finally:
        signal.signal(signal.SIGTERM, previous)
    shown = capsys.readouterr()
    assert "error: PREFECT_API_URL: " in shown.err and "plantedPassword" not in shown.err + shown.out


@pytest.mark.slow
def test_a_real_run_records_no_secret(
    micro_experiment: Path, home: Path, planted: list[str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    argv = ["dflash", "train", "x.yaml", "--set", f"some.api_key={IN_ARGV}", "https://me:plantedPassword@example.org/x"]
    monkeypatch.setattr(sys, "argv", argv)
    config = root.load_experiment(
        micro_experiment, ["metrics.wandb=offline", "train.max_steps=4", "regenerate.api_key_env=OUR_SERVER_KEY"]
    )
    root.prepare(config)
    root.plan(config)
    run_dir = root.create_run(config, "planted")
    root.train_run(root.load_experiment(run_dir / "config.yaml"), run_dir)
    root.evaluate_run(run_dir)
    root.analyze(config, [run_dir])
    assert (run_dir / "provenance.json").is_file() and list((run_dir / "wandb").rglob("*.wandb"))
    assert (home / "reports" / "micro" / "report.html").is_file()
    assert files_with(home, planted) == []
    shown = capfd.readouterr()
    assert not any(secret in shown.out + shown.err for secret in planted)


class Block:
    """Stands in for a Secret block; `loaded` are the names that were asked for."""

    loaded: ClassVar[list[str]] = []

    @classmethod
    def load(cls, name: str) -> Block:
        cls.loaded.append(name)
        if name != "our-server-key":
            raise ValueError(f"Unable to find block document named {name}")
        return cls()

    def get(self) -> str:
        return "from the block"


def test_a_key_comes_from_a_secret_block_where_the_environment_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    from prefect.blocks import system

    monkeypatch.setattr(system, "Secret", Block)
    monkeypatch.setattr(Block, "loaded", [])
    monkeypatch.delenv("OUR_SERVER_KEY", raising=False)
    with pytest.raises(ZeroDivisionError), key_from_block("OUR_SERVER_KEY"):
        assert os.environ["OUR_SERVER_KEY"] == "from the block"
        raise ZeroDivisionError
    assert "OUR_SERVER_KEY" not in os.environ  # children that are started later do not get it
    for name in (None, "NOT_THERE"):
        with key_from_block(name):
            assert "NOT_THERE" not in os.environ
    monkeypatch.setenv("OUR_SERVER_KEY", "own")
    with key_from_block("OUR_SERVER_KEY"):
        assert os.environ["OUR_SERVER_KEY"] == "own"
    assert Block.loaded == ["our-server-key", "not-there"]
