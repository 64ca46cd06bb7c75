"""Answers in shards are the answers of one process, whoever answers which row when, and however often that ends early."""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_core.data import regenerate_client, regenerate_server, regenerate_shards
from dflash_core.data.regenerate_log import AnswerLog, row_key
from dflash_core.data.regenerate_shards import (
    FlowGoneError,
    LeaseWatch,
    ShardProgress,
    kept_lease,
    lease_path,
    shard_log,
    shard_logs,
    shard_of,
)
from dflash_core.data.replace_folder import folder_lock, shared_building
from dflash_core.errors import ConfigError, DataError
from dflash_core.experiment import ExperimentConfig
from dflash_core.experiment_regenerate import AnswerJob, regenerate
from dflash_core.experiment_regenerate_shards import answer_shard, plan_answers, put_together, running
from tests.conftest import TINY_TARGET
from tests.fake_server import FakeServer, Reply, echo, fake_server
from tests.test_regenerate_run import here
from tests.test_regenerate_server import errors, experiment, rows, write_prompts

# What differs between two makings of the same answers.
OF_ITS_OWN = ("created", "path", "reused")


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(regenerate_client, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(regenerate_server, "LOOK_EVERY_S", 0.02)
    monkeypatch.setattr(regenerate_shards, "LOOK_EVERY_S", 0.02)


def in_shards(config: ExperimentConfig, num_shards: int) -> dict[str, Any]:
    """What the flow does, one shard after the other and the last one first."""
    shards = plan_answers(config, num_shards)
    assert json.loads(json.dumps(shards)) == shards
    with running(shards):
        done = [answer_shard(shard) for shard in reversed(shards)]
    return put_together(config, done[::-1])


def contents(folder: Path) -> dict[str, Any]:
    """Every file of a folder of answers; of the manifest what does not tell when it was made."""
    found: dict[str, Any] = {path.name: path.read_bytes() for path in folder.iterdir()}
    manifest = json.loads(found.pop("manifest.json"))
    return {**found, "manifest": {key: value for key, value in manifest.items() if key not in OF_ITS_OWN}}


def left_beside(folder: Path) -> list[str]:
    """What is left of an unfinished job beside the folder."""
    return sorted(path.name for path in folder.parent.iterdir() if path.name not in (folder.name, f".{folder.name}.lock"))


def moody(body: dict[str, Any], number: int) -> Reply:
    """One row is refused, and one fails for a passing reason however often it is asked."""
    content = body["messages"][-1]["content"]
    if content == "question 3":
        return Reply(400, {"message": "too long"})
    return Reply(503, {"message": "busy"}) if content == "question 7" else echo(body, number)


def write_inputs(folder: Path) -> list[Path]:
    """Two files: prompts, among them one that cannot be read, and conversations."""
    first = write_prompts(folder / "p.jsonl", 17)
    with first.open("a") as file:
        file.write('{"messages": 3}\nnot json\n')
    talk = [
        {"role": "user", "content": "talk"},
        {"role": "assistant", "content": "old"},
        {"role": "user", "content": "on"},
        {"role": "assistant", "content": "old"},
    ]
    second = folder / "q.jsonl"
    second.write_text("".join(json.dumps({"messages": talk[: 2 + 2 * (i % 2)], "source": f"s{i % 3}"}) + "\n" for i in range(9)))
    return [first, second]


def test_the_folder_is_the_one_that_comes_out_without_shards(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = write_inputs(tmp_path)
    with fake_server(moody) as server:
        config = experiment(files, server.url, thinking=False, retries=1, concurrency=5)
        alone = regenerate(config)
        expected = contents(Path(alone["path"]))
        asked = sorted(server.contents())
        for num_shards in (1, 3, 50):
            monkeypatch.setenv("DFLASH_HOME", str(tmp_path / f"shards-{num_shards}"))
            server.asked.clear()
            made = in_shards(config, num_shards)
            assert contents(Path(made["path"])) == expected and not made["reused"] and made.keys() == alone.keys()
            assert sorted(server.contents()) == asked  # nothing twice, nothing left out
            assert left_beside(Path(made["path"])) == []
    assert made["made_by"]["retried"] == {"503": 1} and made["thinking"] is False
    assert (made["num_answered"], made["num_failed"], made["num_skipped"]) == (24, 2, 2)


def test_what_is_finished_is_not_planned_and_what_may_pass_is_asked_again(home: Path, tmp_path: Path) -> None:
    files = write_inputs(tmp_path)
    with fake_server(moody) as server:
        config = experiment(files, server.url, retries=0)
        in_shards(config, 3)
        server.asked.clear()
        server.script = echo
        again = in_shards(config, 2)
        assert sorted(server.contents()) == ["question 3", "question 7"] and again["num_failed"] == 0
        assert plan_answers(config, 4) == [] and regenerate(config)["reused"]


@pytest.mark.parametrize(("count", "limit", "temperature"), [(4, 6, 0.0), pytest.param(24, 32, 1.0, marks=pytest.mark.slow)])
def test_a_target_in_the_shards_answers_as_one_in_this_process(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int, limit: int, temperature: float
) -> None:
    """Greedy, and drawn: what is drawn depends on the row alone."""
    path = write_prompts(tmp_path / "p.jsonl", count)
    config = here(path, TINY_TARGET, max_new_tokens=limit, temperature=temperature, concurrency=3)
    expected = contents(Path(regenerate(config)["path"]))
    assert expected["manifest"]["made_by"]["kind"] == "process"
    monkeypatch.setenv("DFLASH_HOME", str(tmp_path / "shards"))
    assert contents(Path(in_shards(config, 2)["path"])) == expected


def test_all_shards_together_have_so_many_requests_under_way(home: Path, tmp_path: Path) -> None:
    now, most, lock, full = [0], [0], threading.Lock(), threading.Event()

    def slow(body: dict[str, Any], number: int) -> Reply:
        with lock:
            now[0] += 1
            most[0] = max(most[0], now[0])
            if now[0] == 5:
                full.set()
        assert full.wait(30)  # the first ones wait for each other
        time.sleep(0.01)
        with lock:  # before the answer is sent, which lets the next one come
            now[0] -= 1
        return echo(body, number)

    with fake_server(slow) as server:
        config = experiment(write_prompts(tmp_path / "p.jsonl", 60), server.url, concurrency=5)
        shards = plan_answers(config, 3)
        assert [shard["concurrency"] for shard in shards] == [2, 2, 1]
        with running(shards), ThreadPoolExecutor(3) as pool:
            done = list(pool.map(answer_shard, shards))
        assert most == [5]
        assert put_together(config, done)["num_answered"] == 60
        assert len(plan_answers(config.model_copy(update={"data": config.data.model_copy(update={"name": "b"})}), 8)) == 5


def interrupted(server: FakeServer, after: int) -> Callable[[dict[str, Any], int], Reply]:
    """A server that breaks down for good after so many answers."""

    def script(body: dict[str, Any], number: int) -> Reply:
        return echo(body, number) if number < after else Reply(401, {"message": "key withdrawn"})

    return script


@pytest.mark.parametrize("then", [0, 2, 5])
def test_a_job_that_ended_early_goes_on_with_any_number_of_shards(home: Path, tmp_path: Path, then: int) -> None:
    """0: without shards."""
    with fake_server() as server:
        config = experiment(write_prompts(tmp_path / "p.jsonl", 40), server.url, concurrency=3)
        server.script = interrupted(server, 12)
        for shard in (shards := plan_answers(config, 3)):
            with running(shards), pytest.raises(ConfigError, match="refuses the key"):
                answer_shard(shard)
            server.script = interrupted(server, len(server.asked) + 4)  # each shard gets some answers
        kept = 12 + 4 + 4
        assert len(shard_logs(Path(shards[0]["log"]))) == 3
        server.asked.clear()
        server.script = echo
        made = regenerate(config) if then == 0 else in_shards(config, then)
        assert len(server.asked) == 40 - kept
    assert [row["id"] for row in rows(made)] == [f"id-{i}" for i in range(40)] and not errors(made)
    assert left_beside(Path(made["path"])) == []


def test_a_shard_that_is_made_twice_asks_nothing_twice(home: Path, tmp_path: Path) -> None:
    with fake_server() as server:
        config = experiment(write_prompts(tmp_path / "p.jsonl", 12), server.url)
        shards = plan_answers(config, 2)
        with running(shards):
            done = [answer_shard(shard) for shard in (*shards, *shards)]
            twice = pytest.raises(DataError, match=r"shard-00001\.log: another process writes to it")
            with AnswerLog(_with_shard_log(shards[1]), {"digest": shards[1]["digest"], "model": "tiny"}), twice:
                answer_shard(shards[1])  # two at the same time
        assert len(server.asked) == 12 and put_together(config, done[:2])["num_answered"] == 12


def test_a_row_that_no_shard_has_ended_is_not_passed_over(home: Path, tmp_path: Path) -> None:
    with fake_server() as server:
        config = experiment(write_prompts(tmp_path / "p.jsonl", 12), server.url)
        shards = plan_answers(config, 2)
        with running(shards):
            done = answer_shard(shards[0])
        with pytest.raises(DataError, match=r"p\.jsonl: row \d+: no shard has answered it; start again to go on"):
            put_together(config, [done])
        assert not (home / "answers" / "made").exists()
        assert in_shards(config, 2)["num_answered"] == len(server.asked) == 12


def test_shards_and_a_plain_job_exclude_each_other(home: Path, tmp_path: Path) -> None:
    with fake_server() as server:
        config = experiment(write_prompts(tmp_path / "p.jsonl", 4), server.url)
        shards = plan_answers(config, 2)
        folder = Path(shards[0]["folder"])
        with running(shards):
            with shared_building(folder):  # as each shard holds it
                for job in (lambda: regenerate(config), lambda: plan_answers(config, 2), lambda: put_together(config, [])):
                    with pytest.raises(DataError, match="another process"):
                        job()
            with folder_lock(folder), pytest.raises(DataError, match="another process"):
                answer_shard(shards[0])
            regenerate(config)  # got in between
            asked = len(server.asked)
            with pytest.raises(DataError, match="ended or begun anew since its shards were planned; start again"):
                answer_shard(shards[0])
            assert len(server.asked) == asked == 4


def test_a_server_that_changes_its_model_between_shards_is_one_line(home: Path, tmp_path: Path) -> None:
    with fake_server() as server:
        config = experiment(write_prompts(tmp_path / "p.jsonl", 6), server.url)
        shards = plan_answers(config, 2)
        server.models = ["another"]
        with running(shards), pytest.raises(DataError, match="model was 'tiny' and is 'another'"):
            _with_shard_log(shards[0])
            answer_shard(shards[0])
        assert not server.asked


def _with_shard_log(shard: dict[str, Any]) -> Path:
    """The log of a shard that has begun."""
    path = shard_log(Path(shard["log"]), shard["number"])
    AnswerLog(path, {"digest": shard["digest"], "model": shard["model"]}).close()
    return path


def test_a_file_that_changes_between_plan_and_shard_is_one_line(home: Path, tmp_path: Path) -> None:
    first, second = write_inputs(tmp_path)
    with fake_server() as server:
        shards = plan_answers(experiment([first, second], server.url), 2)
        write_prompts(second, 3)
        with running(shards), pytest.raises(DataError, match=r"q\.jsonl: the file changed since the shards were planned"):
            answer_shard(shards[0])


def test_a_shard_runs_in_another_folder_with_another_workspace(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on another node: only paths that the plan holds count, and rows name files as they were given."""
    shutil.copytree(TINY_TARGET, tmp_path / "tiny")
    monkeypatch.chdir(tmp_path)
    config = here(write_prompts(Path("p.jsonl"), 3), Path("tiny"), max_new_tokens=5)
    shards = plan_answers(config, 1)
    (tmp_path / "elsewhere").mkdir()
    with running(shards), monkeypatch.context() as node:
        node.chdir(tmp_path / "elsewhere")
        node.delenv("DFLASH_HOME")
        done = [answer_shard(shard) for shard in shards]
        assert list((tmp_path / "elsewhere").iterdir()) == []
    made = put_together(config, done)
    assert {row["file"] for row in rows(made)} == {"p.jsonl"} and made["made_by"]["model"] == "tiny"


# ---- the flow is there, or it is not ----


def test_shards_end_when_the_flow_does(home: Path, tmp_path: Path) -> None:
    with fake_server(lambda body, number: Reply(body=echo(body, number).body, wait_s=60.0 if number > 3 else 0.0)) as server:
        config = experiment(write_prompts(tmp_path / "p.jsonl", 20), server.url, concurrency=2)
        shards = plan_answers(config, 1)
        with ThreadPoolExecutor(1) as pool:
            with running(shards):
                future = pool.submit(answer_shard, shards[0])
                deadline = time.monotonic() + 30
                while len(server.asked) < 5:
                    assert time.monotonic() < deadline
                    time.sleep(0.01)
            with pytest.raises(FlowGoneError, match="the flow has ended; what this shard answered is kept"):
                future.result(timeout=30)
        with pytest.raises(FlowGoneError):
            answer_shard(shards[0])  # one that comes late, too
        server.release.set()
        server.asked.clear()
        assert in_shards(config, 1)["num_answered"] == 20 and len(server.asked) == 16


def test_a_lease_that_is_not_renewed_runs_out(tmp_path: Path) -> None:
    now = 0.0
    path = tmp_path / "lease"
    path.write_text("1")
    watch = LeaseWatch(path, 60.0, lambda: now)
    watch()
    now = 59.0
    watch()
    path.write_text("2")
    now = 61.0
    watch()
    now = 120.0
    watch()
    now = 122.0
    with pytest.raises(FlowGoneError, match="gives no sign any more"):
        watch()


def test_a_lease_is_renewed_while_the_flow_runs_and_goes_with_it(tmp_path: Path) -> None:
    path, renewed = tmp_path / "lease", threading.Event()
    with pytest.raises(ZeroDivisionError), kept_lease(path, renewed.set, every_s=0.01):
        first = path.read_text()
        assert renewed.wait(30) and path.read_text() != first
        raise ZeroDivisionError
    assert not path.exists()


def test_progress_counts_each_line_once(tmp_path: Path) -> None:
    log = tmp_path / ".made.0.log"
    progress = ShardProgress([shard_log(log, 0), shard_log(log, 1)], 1e9)
    with AnswerLog(shard_log(log, 1), {"digest": "d"}) as one:
        for number, kind in enumerate("AAFS"):
            one.add(number, kind, {})  # type: ignore[arg-type]
        with one.path.open("ab") as file:
            file.write(b"9\tA\t{")  # half a line
        for _ in range(2):
            progress.look()
            assert (progress.num_answered, progress.num_failed) == (2, 1)
        with one.path.open("ab") as file:
            file.write(b"}\n")
        progress.look()
        assert (progress.num_answered, progress.num_failed) == (3, 1)


# ---- shares ----

ENTRIES = st.lists(st.tuples(st.integers(0, 9), st.sampled_from("ASF")), max_size=8)


@given(st.integers(1, 10_000), st.integers(0, 50), st.integers(0, 10**6))
def test_a_row_has_one_shard(num_shards: int, file: int, row: int) -> None:
    assert 0 <= shard_of(row_key(file, row), num_shards) < num_shards


@settings(max_examples=25)
@given(st.integers(2, 64), st.integers(0, 5), st.integers(0, 10**6), st.integers(1, 64))
def test_shares_are_even_also_of_every_nth_row(num_shards: int, file: int, first: int, step: int) -> None:
    """A period in the data, such as the turns of a few sources, does not fall on one shard."""
    counts = [0] * num_shards
    for place in range(200 * num_shards):
        counts[shard_of(row_key(file, first + place * step), num_shards)] += 1
    assert max(counts) <= 260 and min(counts) >= 140


@settings(max_examples=25)
@given(ENTRIES, ENTRIES)
def test_what_a_shard_has_is_taken_into_the_log(
    tmp_path_factory: pytest.TempPathFactory, before: list[tuple[int, str]], added: list[tuple[int, str]]
) -> None:
    folder, job = tmp_path_factory.mktemp("logs"), {"digest": "d"}
    for path, entries in ((folder / "own", before), (folder / "shard", added)):
        with AnswerLog(path, job) as log:
            for number, (key, kind) in enumerate(entries):
                log.add(key, kind, {"n": f"{path.name} {number}"})  # type: ignore[arg-type]
    settled = {key for key, kind in before if kind != "F"}
    expected = {key: (kind, f"own {number}") for number, (key, kind) in enumerate(before)}
    for key, (kind, text) in {key: (kind, f"shard {number}") for number, (key, kind) in enumerate(added)}.items():
        if kind != "F" or key not in settled:
            expected[key] = (kind, text)
    with AnswerLog(folder / "own", job) as own, AnswerLog(folder / "shard", job) as shard:
        for _ in range(2):  # again, after a kill between taking in and deleting
            own.take_in(shard)
            assert [(kind, json.loads(line)["n"]) for kind, line in own.entries()] == [expected[key] for key in sorted(expected)]
        assert set(own.done.tolist()) >= settled and own.ended.tolist() == sorted(expected)


def test_names_beside_the_folder_are_of_the_job(home: Path, tmp_path: Path) -> None:
    job = AnswerJob.of(experiment(write_prompts(tmp_path / "p.jsonl", 1), "http://127.0.0.1:9/v1"))
    paths = [shard_log(job.log_path, 3), lease_path(job.log_path)]
    assert [path.name for path in paths] == [f".made.{job.digest[:12]}.{end}" for end in ("shard-00003.log", "flow")]
