"""One training that is killed again and again, started by a command or by a deployment: what test_kill_flows.py is made of."""

from __future__ import annotations

import json
import signal
import subprocess
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from dflash_core import experiment as root
from dflash_core.training.checkpoint import newest_checkpoint
from flows import child, server
from tests.harness.bench import assert_whole, last_attempts, rows
from tests.serve_place import ENDED, PATIENCE_S, Place, below, processes, wait_for, words_of

SOME_STEPS = 3


@dataclass(frozen=True)
class Case:
    """One kill, and what may come of it.

    Attributes:
        where: `direct`, by `python -m flows.train`, or `served`, by a deployment under `flows.serve`.
        whom: `flow`, `supervisor` and `training` (torchrun where there are two cells), `rank`; of a deployment also
            `serve`, its `serve-supervisor` and the `runner`; the `server`; and `server and flow`, as when a machine dies.
        states: of the run folder afterwards.
        shown: states of the flow run, once the next command has started.
        code: how the command ends; None where a deployment has none.
    """

    where: str
    whom: str
    number: signal.Signals
    states: tuple[str, ...]
    shown: tuple[str, ...]
    code: int | None = None
    cells: int = 1

    def __str__(self) -> str:
        return f"{self.where}-{self.cells}-{self.whom}-{self.number.name}"

    @property
    def ends_serve(self) -> bool:
        return self.whom in ("serve", "serve-supervisor", "runner")

    @property
    def kills_server(self) -> bool:
        return "server" in self.whom.split(" and ")

    @property
    def goes_on(self) -> bool:
        """Whether nothing of it stops the training: a server that dies comes back before anybody misses it."""
        return self.whom == "server"


class Matrix:
    """The run, and whatever trains it at the moment."""

    def __init__(self, place: Place) -> None:
        self.place, self.seed = place, 0
        self.command: subprocess.Popen[bytes] | None = None
        self.flow_run: str | None = None  # of a deployment
        self.under_way: tuple[str, int] | None = None
        self.run_dir: Path | None = None
        self.seen: list[str] = []  # what was killed, for the message of a failure

    # -- starting ---------------------------------------------------------------------------------------------------

    def going(self, where: str, cells: int) -> None:
        """Have the run trained by this kind of command; it has made some steps and has many left."""
        is_another = self.under_way != (where, cells) or not self.trains()
        if self.under_way is not None and is_another and not self.is_complete():
            self.end_in_good_order()
        if self.run_dir is not None and self.num_trained() > 0.6 * self.place.num_steps:
            self.finish(where, cells)
        if self.under_way is None:
            self.start(where, cells)

    def start(self, where: str, cells: int, until_end: bool = False) -> None:
        """Start the command, and wait for some steps of a new attempt, or for its end."""
        before = -1 if self.run_dir is None else root.run_attempt(self.run_dir)
        changes = (f"train.seed={self.seed}", f"topology.cells={cells}")
        known = set(self.place.run_dirs())
        if where == "direct":
            words = [word for change in changes for word in ("--set", change)]
            self.command = self.place.python("-m", "flows.train", "micro.yaml", *words, out=self.place.folder / "direct.out")
        else:
            self.flow_run = self.place.run_quickly("train", *changes)
        self.under_way = (where, cells)
        if self.run_dir is None:
            wait_for(lambda: set(self.place.run_dirs()) - known)
            [self.run_dir] = set(self.place.run_dirs()) - known
            wait_for(lambda: (self.run_dir / "manifest.json").exists())  # type: ignore[operator]
        if until_end:
            wait_for(lambda: root.run_state(self.run_dir) == "completed")  # type: ignore[arg-type]
        else:
            wait_for(lambda: len(self.rows_of(before + 1)) >= SOME_STEPS or not self.goes_on())
            assert len(self.rows_of(before + 1)) >= SOME_STEPS, self.said()

    def goes_on(self) -> bool:
        """Whether the command, or the deployment's run, has not ended yet."""
        if self.command is not None:
            return self.command.poll() is None
        return self.flow_run is not None and self.place.state(self.flow_run) not in ENDED

    def trains(self) -> bool:
        return bool(self.place.trainings())

    def is_complete(self) -> bool:
        return self.run_dir is not None and root.run_state(self.run_dir) == "completed"

    def end_in_good_order(self) -> None:
        """Whatever trains is asked to stop, so that another command can have the node."""
        if self.command is not None:
            self.command.terminate()
            self.command.wait(PATIENCE_S)
        elif self.flow_run is not None and self.goes_on():
            self.place.cancel(self.flow_run)
            wait_for(lambda: not self.goes_on())
        wait_for(lambda: not self.place.trainings())
        self.command = self.flow_run = self.under_way = None

    def finish(self, where: str, cells: int) -> Path:
        """Train the run to its end, check it, and have the next start make another one; returns the finished run."""
        if self.under_way is None:
            self.start(where, cells, until_end=True)
        wait_for(lambda: not self.goes_on())
        if self.command is not None:
            assert self.command.wait() == 0, self.said()
        elif self.flow_run is not None:
            assert self.place.state(self.flow_run) == "COMPLETED", self.said()
        self.command = self.flow_run = self.under_way = None
        assert self.run_dir is not None
        assert_complete(self.run_dir, self.place.num_steps)
        done, self.run_dir, self.seed = self.run_dir, None, self.seed + 1
        return done

    # -- killing ----------------------------------------------------------------------------------------------------

    def flow(self) -> psutil.Process:
        if self.command is not None:
            return psutil.Process(self.command.pid)
        assert self.flow_run is not None
        tags = self.place.flow_run(self.flow_run)["tags"]
        [tag] = [tag for tag in tags if tag.startswith("process:")]
        return psutil.Process(int(tag.split(":")[1]))

    def victim(self, whom: str) -> psutil.Process:
        """The process that a case names."""
        if whom == "server":
            running = server.find(self.place.home)
            assert running is not None
            return psutil.Process(running.pid)
        if whom in ("serve", "serve-supervisor", "runner"):
            assert self.place.serving is not None
            found = psutil.Process(self.place.serving.pid)
            for _ in range(("serve", "serve-supervisor", "runner").index(whom)):
                [found] = [one for one in found.children() if "flows.serve" in words_of(one)]
            return found
        flow = self.flow()
        if whom == "flow":
            return flow
        [supervisor] = [one for one in flow.children() if any(word.endswith("child.py") for word in words_of(one))]
        if whom == "supervisor":
            return supervisor
        [training] = supervisor.children()
        if whom == "training":
            return training
        [rank] = [one for one in below(training.pid) if one in self.place.trainings() and one.environ().get("RANK") == "1"]
        return rank

    def kill_server(self, case: Case) -> None:
        """A server that dies: the training does not notice, the flow is shown again by the one that takes its place."""
        assert self.run_dir is not None
        before, trained = self.victim("server"), self.num_trained()
        address = server.find(self.place.home)
        training = {one.pid for one in self.place.trainings()}
        self.seen.append(str(case))
        child.send(before, case.number)
        wait_for(lambda: (now := server.find(self.place.home)) is not None and now.pid != before.pid)
        now = server.find(self.place.home)
        assert now is not None and address is not None and now.url == address.url, "who uses the server knows no other address"
        [run] = self.earlier_runs()[:1]
        shown = self.place.state(run)
        assert shown in case.shown or (shown == "COMPLETED" and self.is_complete())
        wait_for(lambda: self.num_trained() > trained)
        # On a fast machine it is at its end before the server is back; then the next start looks how the flow ended.
        assert ({one.pid for one in self.place.trainings()} == training and self.goes_on()) or self.is_complete()

    def kill(self, case: Case) -> None:
        """Send the signal; afterwards nobody may be left but the server and, if it was not meant, an idle `serve`."""
        assert self.run_dir is not None
        idle = self.idle_processes(case)
        victims = [self.victim(whom) for whom in case.whom.split(" and ")]
        self.seen.append(str(case))
        for victim in victims:
            child.send(victim, case.number)
        if self.command is not None:
            assert self.command.wait(PATIENCE_S) == case.code, self.said()
        wait_for(lambda: {one.pid for one in self.left(case)} <= idle)
        if case.ends_serve and self.place.serving is not None:
            self.place.serving.wait(PATIENCE_S)
        assert root.run_state(self.run_dir) in case.states
        assert_whole(self.run_dir, killed=True)
        self.under_way = None

    def left(self, case: Case) -> list[psutil.Process]:
        """What runs in the workspace; of a server that was killed, and is used by `serve`, not the one that takes its place."""
        if case.kills_server and self.place.serving is not None:
            return self.place.below_serve() if server.find(self.place.home) else processes(self.place.home)
        return processes(self.place.home)

    def idle_processes(self, case: Case) -> set[int]:
        """Who may be left: what was there before the run was started."""
        running = server.find(self.place.home)
        assert running is not None
        stays = set() if case.kills_server else {running.pid, *(one.pid for one in below(running.pid))}
        if self.place.serving is not None and not case.ends_serve:
            stays |= {self.victim(whom).pid for whom in ("serve", "serve-supervisor", "runner")}
        return stays

    def go_on(self, case: Case) -> None:
        """The same command again: it goes on where the state was saved, and what was killed is not under way for Prefect."""
        assert self.run_dir is not None
        before = rows(self.run_dir, "steps")
        attempt, manifest = root.run_attempt(self.run_dir), self.place.manifest(self.run_dir)
        self.command = self.flow_run = None
        if case.ends_serve:
            self.place.serve()
        self.start(case.where, case.cells)
        [_, *earlier] = self.earlier_runs()
        now = rows(self.run_dir, "steps")
        assert now[: len(before)] == before, "rows that were there are gone"
        assert root.run_attempt(self.run_dir) == attempt + 1
        first, last = now[len(before)]["step"], before[-1]["step"]
        if manifest["state"] == "stopped":
            assert first == manifest["num_steps"] == last + 1, "an orderly end saves the last step"
        else:
            assert last - self.checkpoint_every() <= first <= last + 1
        assert earlier
        wait_for(lambda: all(self.place.state(run) in ENDED for run in earlier))
        assert self.place.state(earlier[0]) in case.shown, self.place.flow_run(earlier[0])["state"]

    def earlier_runs(self) -> list[str]:
        """All flow runs so far, the latest first."""
        found = self.place.ask("flow_runs/filter", sort="START_TIME_DESC")
        return [run["id"] for run in found]

    def checkpoint_every(self) -> int:
        assert self.run_dir is not None
        return int(root.load_experiment(self.run_dir / "config.yaml").train.checkpoint_every)

    def num_trained(self) -> int:
        return len({row["step"] for row in rows(self.run_dir, "steps")}) if self.run_dir is not None else 0

    def rows_of(self, attempt: int) -> list[dict[str, Any]]:
        if self.run_dir is None:
            return []
        return [row for row in rows(self.run_dir, "steps") if row["attempt"] >= attempt]

    def said(self) -> str:
        """For the message of a failure."""
        log = self.run_dir / "logs" / "train.log" if self.run_dir is not None else None
        texts = [path.read_text()[-4000:] for path in (self.place.folder / "direct.out", log) if path and path.exists()]
        serve = [self.place.said()[-4000:]] if (self.place.folder / "serve.out").exists() else []
        return "\n----\n".join([json.dumps(self.seen), *texts, *serve])


def assert_complete(run_dir: Path, num_steps: int) -> None:
    """Every step was trained, and none twice but those that a kill took back; the last state is that of the last step."""
    manifest = json.loads((run_dir / "manifest.json").read_text())
    assert (manifest["state"], manifest["num_steps"]) == ("completed", num_steps)
    assert_whole(run_dir, killed=True)
    found = rows(run_dir, "steps")
    assert [row["step"] for row in last_attempts(found)] == list(range(num_steps))
    by_attempt: dict[int, list[int]] = {}
    for row in found:
        by_attempt.setdefault(row["attempt"], []).append(row["step"])
    for steps in by_attempt.values():
        assert steps == list(range(steps[0], steps[0] + len(steps))), "an attempt leaves no step out"
    assert max(Counter(row["step"] for row in found).values()) <= len(by_attempt)
    newest = newest_checkpoint(run_dir / "checkpoints")
    assert newest is not None and newest[1]["next_step"] == num_steps
