"""Answers from a server, and everything that a server can do wrong. The real one is in `test_regenerate_real.py`."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from dflash_core.data import regenerate_client, regenerate_tally
from dflash_core.data.regenerate_tally import ServerError
from dflash_core.errors import ConfigError, DataError
from dflash_core.experiment import ExperimentConfig
from dflash_core.experiment_regenerate import regenerate
from tests.conftest import REPOSITORY, TINY_TARGET
from tests.fake_server import RESET, Reply, Script, completion, echo, fake_server

KEY = "planted-key-0123456789"


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(regenerate_client, "FIRST_PAUSE_S", 0.01)


def write_prompts(path: Path, count: int) -> Path:
    path.write_text("".join(json.dumps({"id": f"id-{i}", "prompt": f"question {i}"}) + "\n" for i in range(count)))
    return path


def experiment(files: Path | list[Path], url: str | None, **settings: Any) -> ExperimentConfig:
    names = [str(file) for file in (files if isinstance(files, list) else [files])]
    values = {"files": names, "base_url": url, "retries": 2, "timeout_s": 20.0, "concurrency": 4, **settings}
    data = {"name": "made", "files": ["unused.jsonl"], "max_length": 512, **values.pop("data", {})}
    return ExperimentConfig.model_validate(
        {"name": "made", "target": {"path": str(TINY_TARGET)}, "data": data, "topology": {"device": "cpu"}, "regenerate": values}
    )


def rows(result: dict[str, Any]) -> list[dict[str, Any]]:
    folder = Path(result["path"])
    return [json.loads(line) for part in result["parts"] for line in (folder / part["name"]).read_text().splitlines()]


def errors(result: dict[str, Any]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (Path(result["path"]) / "errors.jsonl").read_text().splitlines()]


def test_rows_come_in_the_order_of_the_input_and_requests_are_bounded(home: Path, tmp_path: Path) -> None:
    draw = random.Random(1)

    def script(body: dict[str, Any], number: int) -> Reply:
        return Reply(body=echo(body, number).body, wait_s=draw.uniform(0, 0.03))

    with fake_server(script) as server:
        result = regenerate(experiment(write_prompts(tmp_path / "p.jsonl", 40), server.url))
        assert server.most == 4 and len(server.asked) == 40
        assert server.asked[0] == {
            "model": "tiny",
            "messages": server.asked[0]["messages"],
            "max_tokens": 1024,
            "temperature": 0.0,
        }
    assert [row["messages"][-1]["content"] for row in rows(result)] == [f"to question {i}" for i in range(40)]
    assert (result["num_answered"], result["num_failed"], result["num_answer_tokens"]) == (40, 0, 120)
    assert result["made_by"]["listed"] == {"id": "tiny", "owned_by": "test"}
    with fake_server() as server:  # finished: the server is not even looked for
        assert regenerate(experiment(tmp_path / "p.jsonl", server.url))["reused"] and not server.headers


@pytest.mark.parametrize("fault", [Reply(429, {"error": {"message": "slow down"}}), Reply(500, b"<html>"), Reply(408), RESET])
def test_what_passes_is_tried_again(home: Path, tmp_path: Path, fault: Reply | str) -> None:
    def script(body: dict[str, Any], number: int) -> Reply | str:
        return fault if number in (0, 1, 4) else echo(body, number)

    with fake_server(script) as server:
        result = regenerate(experiment(write_prompts(tmp_path / "p.jsonl", 6), server.url, concurrency=1))
        assert len(server.asked) == 9 and sum(result["made_by"]["retried"].values()) == 3
    assert [row["id"] for row in rows(result)] == [f"id-{i}" for i in range(6)] and not errors(result)


def test_retry_after_is_obeyed(home: Path, tmp_path: Path) -> None:
    times: list[float] = []

    def script(body: dict[str, Any], number: int) -> Reply:
        times.append(time.monotonic())
        return Reply(429, b"", {"Retry-After": "1"}) if number == 0 else echo(body, number)

    with fake_server(script) as server:
        regenerate(experiment(write_prompts(tmp_path / "p.jsonl", 1), server.url))
    assert times[1] - times[0] >= 1.0


@pytest.mark.parametrize(
    ("value", "expected"),
    [("3", 3.0), ("-5", 0.0), ("nan", None), ("Wed, 21 Oct 2015 07:28:00 GMT", 0.0), ("soon", None), (None, None)],
)
def test_forms_of_retry_after(value: str | None, expected: float | None) -> None:
    assert regenerate_client._retry_after_s(value) == expected


ROW_FAULTS = {
    "refused": (Reply(400, {"object": "error", "message": "prompt too long"}), 400, "prompt too long"),
    "not JSON": (Reply(200, b"<html>hello</html>"), 200, "not a JSON object"),
    "another object": (Reply(200, {"choices": []}), 200, "not a chat completion"),
    "content of another type": (Reply(200, completion(["a"])), 200, "content is not a text"),  # type: ignore[arg-type]
    "aborted": (Reply(200, completion("half", "abort")), 200, "abort"),
    "nothing": (Reply(200, completion(None)), None, "the target said nothing"),
    "special token": (Reply(200, completion("a <|end|> b")), None, "<|end|>"),
    "surrogate": (Reply(200, rb'{"choices":[{"finish_reason":"stop","message":{"content":"\ud800"}}]}'), None, "character 1"),
    "ever failing": (Reply(503, {"detail": "busy"}), 503, "busy (3 tries)"),
}


@pytest.mark.parametrize("fault", ROW_FAULTS)
def test_a_row_that_fails_is_noted_and_the_job_goes_on(home: Path, tmp_path: Path, fault: str) -> None:
    reply, status, text = ROW_FAULTS[fault]

    def script(body: dict[str, Any], number: int) -> Reply:
        return reply if body["messages"][-1]["content"] == "question 2" else echo(body, number)

    with fake_server(script) as server:
        result = regenerate(experiment(write_prompts(tmp_path / "p.jsonl", 5), server.url))
        num_asked = len(server.asked)
    assert [row["id"] for row in rows(result)] == ["id-0", "id-1", "id-3", "id-4"]
    (error,) = errors(result)
    assert (error["kind"], error["row"], error["id"], error["status"]) == ("failed", 3, "id-2", status)
    assert error["file"].endswith("p.jsonl") and text in error["detail"]
    assert num_asked == (7 if fault == "ever failing" else 5)


def test_rows_that_cannot_be_asked_are_noted(home: Path, tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "a"}\nnot json\n{"text": "plain"}\n\n{"prompt": "b", "finish_reason": "length"}\n')
    with fake_server() as server:
        result = regenerate(experiment(path, server.url))
    assert [row["row"] for row in rows(result)] == [1, 5] and result["num_skipped"] == 2
    assert [(error["kind"], error["row"], error["reason"]) for error in errors(result)] == [
        ("skipped", 2, "not JSON"),
        ("skipped", 3, "plain text"),
    ]


def test_failures_that_can_pass_are_asked_again_by_the_next_call(home: Path, tmp_path: Path) -> None:
    broken = True

    def script(body: dict[str, Any], number: int) -> Reply:
        content = body["messages"][-1]["content"]
        return Reply(503, b"") if broken and content == "question 1" else echo(body, number)

    path = write_prompts(tmp_path / "p.jsonl", 4)
    with fake_server(script) as server:
        first = regenerate(experiment(path, server.url))
        broken = False
        server.asked.clear()
        second = regenerate(experiment(path, server.url))
        assert server.contents() == ["question 1"]
    assert first["num_failed"] == 1 and second["num_failed"] == 0
    assert [row["id"] for row in rows(second)] == [f"id-{i}" for i in range(4)]


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (Reply(401, {"error": {"message": f"bad key {KEY}"}}), r"the server refuses the key"),
        (Reply(404, {"message": "The model `tiny` does not exist."}), r"model 'tiny'.*does not exist"),
        (Reply(302, b"", {"Location": "/elsewhere"}), r"redirection \(302\)"),
    ],
)
def test_what_is_the_same_for_all_rows_ends_the_job_at_once(home: Path, tmp_path: Path, reply: Reply, message: str) -> None:
    with fake_server(lambda *_: reply) as server:
        with pytest.raises(ConfigError, match=message):
            regenerate(experiment(write_prompts(tmp_path / "p.jsonl", 50), server.url, concurrency=1))
        assert len(server.asked) == 1
    assert not (home / "answers" / "made").exists()


def test_a_job_in_which_everything_fails_ends_and_says_why(home: Path, tmp_path: Path) -> None:
    path = write_prompts(tmp_path / "p.jsonl", 60)
    with fake_server(lambda *_: Reply(400, {"detail": "no such parameter"})) as server:
        with pytest.raises(ServerError, match=r"20 rows in a row have failed.*no such parameter"):
            regenerate(experiment(path, server.url))
        assert len(server.asked) <= 24
        server.script, server.asked[:] = echo, []
        assert len(rows(regenerate(experiment(path, server.url)))) == 60  # what failed is asked again


def test_few_rows_that_all_fail_make_no_folder(home: Path, tmp_path: Path) -> None:
    with (
        fake_server(lambda *_: Reply(400, b"no")) as server,
        pytest.raises(DataError, match=r"no row was answered; 2 failed.*row 1: .*400 no"),
    ):
        regenerate(experiment(write_prompts(tmp_path / "p.jsonl", 2), server.url))
    assert not (home / "answers" / "made").exists()


def test_a_server_that_goes_away_ends_the_job_and_the_next_one_goes_on(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_prompts(tmp_path / "p.jsonl", 12)
    with fake_server() as server:
        url = server.url
        monkeypatch.setattr(regenerate_tally.Tally, "_show", lambda tally: dead.append(1) if tally.num_answered >= 5 else None)
        dead: list[int] = []
        server.script = lambda body, number: RESET if dead else echo(body, number)

        async def gone(self: regenerate_client.AnswerClient, method: str, path: str, body: Any) -> dict[str, Any]:
            if dead and method == "GET":
                raise regenerate_client._Passing(None, "connection: refused", lost=True)
            return await once(self, method, path, body)

        once = regenerate_client.AnswerClient._once
        monkeypatch.setattr(regenerate_client.AnswerClient, "_once", gone)
        with pytest.raises(ServerError, match=r"the server is gone \(connection"):
            regenerate(experiment(path, url, concurrency=1))
    monkeypatch.undo()
    monkeypatch.setenv("DFLASH_HOME", str(home))
    with fake_server() as server:  # another port: the same job
        result = regenerate(experiment(path, server.url, concurrency=1))
        assert server.contents() == [f"question {i}" for i in range(5, 12)]
    assert [row["id"] for row in rows(result)] == [f"id-{i}" for i in range(12)]


def test_no_server_at_all(home: Path, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # not listening
        url = f"http://127.0.0.1:{taken.getsockname()[1]}/v1"
        with pytest.raises(ServerError, match=r"no server of the target \(connection.*3 tries"):
            regenerate(experiment(write_prompts(tmp_path / "p.jsonl", 2), url))


def test_a_slow_answer_ends_at_the_limit(home: Path, tmp_path: Path) -> None:
    def script(body: dict[str, Any], number: int) -> Reply:
        return Reply(body=echo(body, number).body, wait_s=0.6 if number == 0 else 0.0)

    with fake_server(script) as server:
        result = regenerate(experiment(write_prompts(tmp_path / "p.jsonl", 1), server.url, timeout_s=0.3))
    assert result["made_by"]["retried"] == {"timeout": 1} and result["num_answered"] == 1


@pytest.mark.parametrize(
    ("models", "model", "message"),
    [((), None, "serves none"), (("a", "b"), None, "serves a, b"), (("a",), "b", "does not serve 'b'; it serves a")],
)
def test_which_model(home: Path, tmp_path: Path, models: tuple[str, ...], model: str | None, message: str) -> None:
    with fake_server(models=models) as server, pytest.raises(ConfigError, match=message):
        regenerate(experiment(write_prompts(tmp_path / "p.jsonl", 1), server.url, model=model))


def test_another_model_does_not_go_on_with_the_answers(home: Path, tmp_path: Path) -> None:
    path = write_prompts(tmp_path / "p.jsonl", 30)
    answered = iter(range(100))

    def script(body: dict[str, Any], number: int) -> Reply:
        return echo(body, number) if next(answered) < 3 else Reply(401, b"")

    with fake_server(script) as server, pytest.raises(ConfigError, match="refuses the key"):
        regenerate(experiment(path, server.url, concurrency=1))
    with fake_server(models=("other",)) as server, pytest.raises(DataError, match="model was 'tiny' and is 'other'"):
        regenerate(experiment(path, server.url))


def test_the_key_is_sent_and_stands_nowhere(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("THE_KEY", KEY)

    def script(body: dict[str, Any], number: int) -> Reply:  # servers write back what they were sent
        text = f"{'x' * 280} {KEY}"
        return Reply(400, {"error": text}) if number == 0 else Reply(503, {"error": text}) if number < 4 else echo(body, number)

    caplog.set_level("DEBUG")
    with fake_server(script) as server:
        result = regenerate(experiment(write_prompts(tmp_path / "p.jsonl", 4), server.url, concurrency=1, api_key_env="THE_KEY"))
        assert all(headers["Authorization"] == f"Bearer {KEY}" for headers in server.headers)
        server.script = lambda *_: Reply(401, {"error": KEY})
        with pytest.raises(ConfigError) as caught:
            regenerate(experiment(tmp_path / "p.jsonl", server.url, api_key_env="THE_KEY", temperature=1.0))
    assert result["num_failed"] == 2 and result["num_answered"] == 2
    written = "".join(path.read_text(errors="replace") for path in home.rglob("*") if path.is_file())
    for text in (written, caplog.text, str(caught.value), json.dumps(result)):
        assert KEY[:8] not in text
    assert "***" in written
    monkeypatch.setenv("THE_KEY", "two words")
    with pytest.raises(ConfigError, match="THE_KEY holds cannot be sent") as caught:
        regenerate(experiment(tmp_path / "p.jsonl", server.url, api_key_env="THE_KEY"))
    assert "two words" not in str(caught.value)
    with pytest.raises(ConfigError, match="NO_KEY is not set"):
        regenerate(experiment(tmp_path / "p.jsonl", server.url, api_key_env="NO_KEY"))


def test_a_proxy_is_not_asked_for_this_machine(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:1")
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    with fake_server() as server:
        assert regenerate(experiment(write_prompts(tmp_path / "p.jsonl", 1), server.url))["num_answered"] == 1


@pytest.mark.parametrize("url", ["ftp://a/v1", "http://", "http://u:p@h/v1", "http://h/v1?key=1", "http://h:port/v1", "h:8000"])
def test_addresses_that_are_refused(home: Path, tmp_path: Path, url: str) -> None:
    with pytest.raises(ConfigError, match=r"^regenerate\.base_url: "):
        regenerate(experiment(write_prompts(tmp_path / "p.jsonl", 1), url))


def test_reasoning_tools_and_thinking_are_passed_and_kept(home: Path, tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    path.write_text(
        json.dumps({"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}], "tools": tools})
    )
    with fake_server(lambda *_: Reply(body=completion("so", reasoning_content=None, reasoning=None))) as server:
        result = regenerate(experiment(path, server.url, thinking=False, data={"template_variables": {"style": "short"}}))
        body = server.asked[0]
    assert body["chat_template_kwargs"] == {"style": "short", "enable_thinking": False} and body["tools"] == tools
    assert result["thinking"] is False and rows(result)[0]["tools"] == tools and rows(result)[0]["messages"][0]["content"] == "s"
    with pytest.raises(ConfigError, match="enable_thinking: True"):
        regenerate(experiment(path, "http://127.0.0.1:1", thinking=False, data={"template_variables": {"enable_thinking": True}}))


@pytest.mark.parametrize("key", ["reasoning", "reasoning_content", None])
def test_what_the_target_thought_is_kept_apart_and_sent_back(home: Path, tmp_path: Path, key: str | None) -> None:
    from dflash_core.data.template import ChatEncoder

    def script(body: dict[str, Any], number: int) -> Reply:
        return Reply(body=completion("so", **{key: "why"}) if key else completion("<think>why</think>so"))

    path = tmp_path / "p.jsonl"
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "old"}, {"role": "user", "content": "b"}]
    path.write_text(json.dumps({"messages": turns}))
    with pytest.MonkeyPatch.context() as patch, fake_server(script) as server:
        patch.setattr(ChatEncoder, "render", lambda *_: [])  # the tiny target's template has no reasoning
        result = regenerate(experiment(path, server.url))
        sent = server.asked[1]["messages"][1]
    assert sent == {"role": "assistant", "content": "so", "reasoning_content": "why", "reasoning": "why"}
    kept = {"role": "assistant", "content": "so", "reasoning_content": "why"}
    assert rows(result)[0]["messages"] == [turns[0], kept, turns[2], kept]


COMMAND = """
import sys
from dflash_core.data import regenerate_client
from dflash_core.cli import main
sys.argv = ["dflash", "regenerate", sys.argv[1]]
main()
"""


def start(config: ExperimentConfig, folder: Path) -> subprocess.Popen[str]:
    path = folder / "e.json"
    path.write_text(config.model_dump_json())
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, "-c", COMMAND, str(path)]
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_job_that_is_ended_at_any_moment_goes_on(home: Path, tmp_path: Path, number: signal.Signals) -> None:
    path = write_prompts(tmp_path / "p.jsonl", 30)
    script: Script = lambda body, number: Reply(body=echo(body, number).body, wait_s=0.02 if number < 12 else 30.0)  # noqa: E731
    with fake_server(script) as server:
        config = experiment(path, server.url, concurrency=3)
        child = start(config, tmp_path)
        deadline = time.monotonic() + 60
        while len(server.asked) < 15 and time.monotonic() < deadline:
            time.sleep(0.02)
        began = time.monotonic()
        child.send_signal(number)
        _, err = child.communicate(timeout=60)
        took = time.monotonic() - began
        if number == signal.SIGINT:
            assert (
                child.returncode == 130 and "run the same command again to go on" in err and err.endswith("error: interrupted\n")
            )
            assert took < 20  # far from the 30 s of the requests that were under way
        server.release.set()
        server.script, server.asked[:] = echo, []
        result = regenerate(config)
        assert sorted(server.contents()) == sorted(f"question {i}" for i in range(12, 30))
    assert [row["messages"][-1]["content"] for row in rows(result)] == [f"to question {i}" for i in range(30)]
    assert [file.name for file in (home / "answers").iterdir() if not file.name.endswith(".lock")] == ["made"]
