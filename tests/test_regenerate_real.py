"""A real OpenAI-compatible server: `transformers serve` on the tiny target, against the answers of this process."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import pytest

from dflash_core.data import load_tokenizer
from dflash_core.errors import ConfigError
from dflash_core.experiment_regenerate import regenerate
from dflash_core.experiment_regenerate_shards import answer_shard, plan_answers, put_together, running
from tests.conftest import REPOSITORY, TINY_TARGET
from tests.test_regenerate_run import here, prepared
from tests.test_regenerate_server import errors, experiment, rows
from tests.test_regenerate_shards import contents as folder_contents

NEEDS = [name for name in ("openai", "fastapi", "uvicorn", "accelerate") if find_spec(name) is None]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(NEEDS), reason=f"transformers serve needs {', '.join(NEEDS)}: pip install -e '.[dev]'"),
]
# transformers reads the answers of any Qwen3 as ChatML, which the tiny target does not speak, and strips white space.
RESPONSE_TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|assistant|>",
    "fields": {"content": {"close_pattern": r"<\|end\|>", "content": "text", "content_args": {"strip": False}}},
}
LIMIT = 48


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """URL and model folder of a server that lives as long as this module's tests."""
    folder = tmp_path_factory.mktemp("served") / "tiny"
    shutil.copytree(TINY_TARGET, folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "response_template": RESPONSE_TEMPLATE}))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "transformers.cli.transformers",
        "serve",
        str(folder),
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
    ]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1", "HF_HOME": str(folder.parent / "hf")}
    with (folder.parent / "server.log").open("wb") as log:
        options = ["--device", "cpu", "--dtype", "float32"]
        process = subprocess.Popen([*command, *options], stdout=log, stderr=log, env=environment)
        try:
            _wait_until_it_answers(f"http://127.0.0.1:{port}/health", process, folder.parent / "server.log")
            yield f"http://127.0.0.1:{port}/v1", folder
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait_until_it_answers(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    deadline = time.monotonic() + 90
    while True:
        try:
            with opener.open(url, timeout=5):
                return
        except OSError:
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-2000:]
            time.sleep(0.2)


def corpus(path: Path) -> Path:
    """Prompts of the demo, and conversations of several turns with a system turn."""
    lines = (REPOSITORY / "data" / "demo" / "held_out.jsonl").read_text().splitlines()[:10]
    prompts = (
        [json.loads(line)["messages"][0]["content"] for line in lines]
        if "messages" in lines[0]
        else [json.loads(line)["prompt"] for line in lines]
    )
    talks = [
        {"messages": [{"role": "user", "content": a}, {"role": "assistant", "content": "old"}, {"role": "user", "content": b}]}
        for a, b in zip(prompts[:4], prompts[4:8], strict=True)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in [*({"prompt": text} for text in prompts), *talks]))
    return path


def test_the_real_server_gives_the_answers_of_this_process(
    served: tuple[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both greedy in fp32, token for token. The server calls an answer cut whose end token is the last it was allowed."""
    url, folder = served
    path = corpus(tmp_path / "corpus.jsonl")
    monkeypatch.setenv("DFLASH_HOME", str(tmp_path / "by_server"))
    by_server = regenerate(experiment(path, url, max_new_tokens=LIMIT, thinking=False))
    assert by_server["made_by"]["model"] == str(folder) and not errors(by_server)
    theirs = rows(by_server)
    settings = experiment(path, url).data
    manifest = prepared(
        experiment(path, url), [f"{by_server['path']}/part-*.jsonl"], tmp_path / "dataset", **{"max_length": settings.max_length}
    )
    assert manifest["answers"][0]["thinking"] is False and manifest["num_sequences"] == len(theirs) - sum(
        manifest["num_rejected"].values()
    )
    monkeypatch.setenv("DFLASH_HOME", str(tmp_path / "in_shards"))
    shards = plan_answers(experiment(path, url, max_new_tokens=LIMIT, thinking=False), 3)
    with running(shards), ThreadPoolExecutor(3) as pool:  # at the same time
        done = list(pool.map(answer_shard, shards))
    made = put_together(experiment(path, url, max_new_tokens=LIMIT, thinking=False), done)
    assert folder_contents(Path(made["path"])) == folder_contents(Path(by_server["path"]))
    monkeypatch.setenv("DFLASH_HOME", str(tmp_path / "here"))
    ours = rows(regenerate(here(path, TINY_TARGET, max_new_tokens=LIMIT, thinking=False)))
    assert len(theirs) == len(ours) == 14
    tokenizer = load_tokenizer(TINY_TARGET)
    differing = []
    for a, b in zip(theirs, ours, strict=True):
        contents = [[turn["content"] for turn in row["messages"]] for row in (a, b)]
        tokens = [[tokenizer.encode(content, add_special_tokens=False) for content in side] for side in contents]
        if (
            tokens[0] != tokens[1]
            or a["num_answer_tokens"] != b["num_answer_tokens"]
            or a["num_prompt_tokens"] != b["num_prompt_tokens"]
        ):
            differing.append((a, b))
        assert a["finish_reason"] == b["finish_reason"] or (a["finish_reason"] == "length" and a["num_answer_tokens"] >= LIMIT)
    assert not differing, differing[:2]


def test_the_real_server_refuses_another_model(served: tuple[str, Path], home: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not serve 'other'"):
        regenerate(experiment(corpus(tmp_path / "corpus.jsonl"), served[0], model="other"))
