"""Rules that hold for the whole source: who starts threads, and that no wait is without a limit."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "dflash_core"
STARTERS = {"Thread", "Timer", "ThreadPoolExecutor", "ThreadPool", "start_new_thread", "to_thread", "run_in_executor"}
# The one place; and a process that has no supervisor: a worker's watch over its parent.
OWNERS = {"pipeline/threads.py", "processes.py"}
WAITS = {"wait", "get", "join", "acquire", "result", "wait_for"}
# Names that stand for our own channels and buffers, whose waits have the limit that they were made with.
OURS = {"queue", "ready", "_feed"}


def calls(source: str) -> Iterator[tuple[str, str, ast.Call]]:
    """Every call in a source text: the name called, the last name before the dot, and the call."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        if isinstance(node.func, ast.Attribute):
            owner = node.func.value
            before = owner.attr if isinstance(owner, ast.Attribute) else owner.id if isinstance(owner, ast.Name) else ""
            yield node.func.attr, before, node
        elif isinstance(node.func, ast.Name):
            yield node.func.id, "", node


def thread_starts(source: str) -> list[int]:
    """Lines that start a thread, or define a kind of one."""
    lines = [node.lineno for name, _, node in calls(source) if name in STARTERS]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef):
            bases = {base.attr if isinstance(base, ast.Attribute) else getattr(base, "id", "") for base in node.bases}
            lines += [node.lineno] if bases & STARTERS else []
    return sorted(lines)


def endless_waits(source: str) -> list[int]:
    """Lines with a wait that has no limit. `get` of our own channels is left out where no other kind of queue is known."""
    foreign = any(
        isinstance(node, ast.Import | ast.ImportFrom)
        and any(name.split(".")[0] in {"queue", "multiprocessing", "asyncio"} for name in _imported(node))
        for node in ast.walk(ast.parse(source))
    )
    lines = []
    for name, before, node in calls(source):
        limits = [*node.args, *(k.value for k in node.keywords if k.arg in {"timeout", "timeout_s"})]
        if name == "wait_for":  # a condition's own: the second argument is the limit; the supervisor's needs one anyway
            limits = limits if len(limits) > 1 else []
        endless = not limits or all(
            isinstance(limit, ast.Constant) and (limit.value is None or limit.value is True) for limit in limits
        )
        if name in WAITS and endless and not (name == "get" and before in OURS and not foreign):
            lines.append(node.lineno)
    return lines


def _imported(node: ast.Import | ast.ImportFrom) -> list[str]:
    return [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]


def test_threads_are_started_in_one_place() -> None:
    found = {str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py") if thread_starts(path.read_text())}
    assert found == OWNERS


@pytest.mark.parametrize("room", ["pipeline", "training"])
def test_no_wait_is_without_a_limit(room: str) -> None:
    files = list((PACKAGE / room).rglob("*.py"))
    assert len(files) > 5
    found = {f"{path.name}:{line}" for path in files for line in endless_waits(path.read_text())}
    assert found == set()


@pytest.mark.parametrize(
    "source",
    ["threading.Thread(target=f).start()", "Thread(target=f)", "with ThreadPoolExecutor(4) as pool: pass", "Timer(1, f)",
     "class Mine(threading.Thread): pass", "_thread.start_new_thread(f, ())"],
)  # fmt: skip
def test_the_rule_sees_threads(source: str) -> None:
    assert thread_starts(source) == [1]


@pytest.mark.parametrize(
    "source",
    ["event.wait()", "thread.join()", "lock.acquire()", "future.result()", "condition.wait(None)", "event.wait(timeout=None)",
     "lock.acquire(True)", "other.get()", "condition.wait_for(ready)", "import queue; queue.get()"],
)  # fmt: skip
def test_the_rule_sees_endless_waits(source: str) -> None:
    assert endless_waits(source) == [1]


@pytest.mark.parametrize(
    "source",
    ["event.wait(1.0)", "thread.join(LIMIT_S)", "queue.get()", "self._feed.get()", "import queue; q.get(timeout=0.1)",
     "values.get('key')", "', '.join(names)", "lock.acquire(timeout=2)", "s.wait_for(c, ready, 3.0, 'x')"],
)  # fmt: skip
def test_the_rule_lets_limited_waits_pass(source: str) -> None:
    assert endless_waits(source) == []
