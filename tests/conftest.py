"""Shared fixtures: a micro target with random weights, a micro experiment, and a guard against threads left behind."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import yaml
from hypothesis import settings

# Before anything imports torch: two arithmetic threads for models this small only get in each other's way.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# A shell that starts pytest in the background lets it, and all its children, ignore SIGINT; tests that send it would hang.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The same examples every time where a change is judged; new ones, and so new finds, on every run elsewhere.
settings.register_profile("ci", derandomize=True)
if os.environ.get("CI"):
    settings.load_profile("ci")

REPOSITORY = Path(__file__).resolve().parents[1]
TINY_TARGET = REPOSITORY / "data" / "tiny_target"
# Threads of libraries that live as long as the process, by the start of their names.
LIBRARY_THREADS = (
    "asyncio_",
    "pin_memory",
    "AnyIO worker",
    "APILogWorkerThread",
    "EventsWorker",
    "GlobalEventLoopThread",
    "tqdm",
)


@pytest.fixture(autouse=True)
def own_logging() -> Iterator[None]:
    """Take back what a command line that ran in this process has done to the package's logger."""
    logger = logging.getLogger("dflash_core")
    level, handlers = logger.level, list(logger.handlers)
    yield
    logger.setLevel(level)
    logger.handlers[:] = handlers


@pytest.fixture(scope="session", autouse=True)
def no_fork_server_outlives_the_tests() -> Iterator[None]:
    """Python's fork server ends by itself some tenths of a second after its program; here it is gone before."""
    yield
    for process in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if any("multiprocessing.forkserver" in word for word in process.cmdline()):
                process.terminate()
                process.wait(timeout=10)


@pytest.fixture(autouse=True)
def no_thread_left_alive() -> Iterator[None]:
    """A test that leaves a thread of ours alive fails; it has two seconds to end it."""
    before = set(threading.enumerate())
    yield
    deadline = time.monotonic() + 2.0
    while True:
        left = [
            thread
            for thread in set(threading.enumerate()) - before
            if thread.is_alive() and not thread.name.startswith(LIBRARY_THREADS)
        ]
        if not left:
            return
        if time.monotonic() > deadline:
            pytest.fail(f"threads left alive: {[thread.name for thread in left]}")
        time.sleep(0.02)


@pytest.fixture(scope="session")
def micro_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A four-layer target with random weights and the tiny target's tokenizer: fast, and enough for exactness tests."""
    import torch
    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

    folder = tmp_path_factory.mktemp("micro_target")
    tokenizer = AutoTokenizer.from_pretrained(TINY_TARGET)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    with torch.random.fork_rng():
        torch.manual_seed(7)
        model = Qwen3ForCausalLM(config)
    with torch.no_grad():  # the default scale leaves all logits nearly equal, and ties would hide mistakes
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2:
                parameter.mul_(20.0 if "embed" in name else 6.0)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def write_corpus(path: Path, count: int = 40) -> Path:
    """Conversations whose answers run from 4 to about 200 characters."""
    rows = []
    for i in range(count):
        answer = f"answer {i} " + "abcdefghij"[: 3 + i % 7] * (1 + (i * i) % 23)
        messages = [{"role": "user", "content": f"question number {i}?"}, {"role": "assistant", "content": answer}]
        rows.append({"id": f"row-{i}", "source": "even" if i % 2 == 0 else "odd", "messages": messages})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A workspace of the test's own."""
    monkeypatch.setenv("DFLASH_HOME", str(tmp_path / "workspace"))
    return tmp_path / "workspace"


def write_micro_experiment(folder: Path, target: Path) -> Path:
    """An experiment file that trains ten small steps on `target`, with its corpus beside it."""
    corpus = write_corpus(folder / "train.jsonl")
    held_out = write_corpus(folder / "held_out.jsonl", 6)
    values = {
        "name": "micro",
        "target": {"path": str(target)},
        "data": {"name": "micro", "files": [str(corpus)], "held_out": str(held_out), "max_length": 256},
        "bucketing": {"num_buckets": 3, "token_budget": 512, "batches_per_step": 2},
        "draft": {"num_layers": 2, "block_size": 4, "num_taps": 2},
        "train": {
            "max_steps": 10,
            "lr": 3.0e-3,
            "num_anchors": 16,
            "checkpoint_every": 4,
            "self_checks": False,
            "scale_features": True,
        },
        "topology": {"device": "cpu"},
        "prefetch": {"stats_every_steps": 2, "stall_timeout_s": 20.0},
        "metrics": {"wandb": "disabled"},
        "evaluate": {"max_prompts": 4, "max_new_tokens": 24, "untrained_prompts": 1},
    }
    path = folder / "micro.yaml"
    path.write_text(yaml.safe_dump(values, sort_keys=False))
    return path


@pytest.fixture
def micro_experiment(tmp_path: Path, home: Path, micro_target: Path) -> Path:
    """An experiment file that trains ten small steps on the micro target."""
    return write_micro_experiment(tmp_path, micro_target)


@pytest.fixture
def in_repository(monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stand in the repository root, to which the shipped experiment files are relative."""
    monkeypatch.chdir(REPOSITORY)
    return REPOSITORY
