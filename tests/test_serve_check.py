"""The serving check: what passes, what does not, and that nothing is needed from vLLM to say so.

The real thing (marked slow) runs only where `make serve-check` has installed vLLM.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
SERVING_PYTHON = ROOT / ".venv-serving/bin/python"
sys.path.insert(0, str(ROOT / "benchmarks"))

import serve_check  # noqa: E402
import serve_check_compare as comparing  # noqa: E402
import serve_check_vllm as serving  # noqa: E402

from dflash_core.errors import DataError, TrainingError, UserError  # noqa: E402

LIMITS = comparing.Limits(tolerance=0.05, minimum=1.0, prompts=2)


def request_of(*rounds: list[int], block_size: int = 4) -> dict[str, Any]:
    """A request with one prompt per list of rounds; texts are made up, and both our decodings agree."""
    prompts = [
        {"id": f"p{i}", "prompt": [1], "tokens": [i, 7, 9], "plain_tokens": [i, 7, 9], "accepted": kept}
        for i, kept in enumerate(rounds)
    ]
    return {"block_size": block_size, "prompts": prompts, "max_new_tokens": 3}


def served_of(request: dict[str, Any], rounds: list[list[int]]) -> dict[str, Any]:
    """What vLLM would write if it had kept these numbers of draft tokens, with the request's own texts."""
    flat = [kept for one in rounds for kept in one]
    per_position = [sum(kept >= k for kept in flat) for k in range(1, request["block_size"])]
    counters = {"num_drafts": len(flat), "num_accepted_tokens": sum(flat), "accepted_per_position": per_position}
    return {"tokens": [item["tokens"] for item in request["prompts"]], "rounds": rounds, "counters": counters}


def test_equal_figures_and_texts_pass() -> None:
    request = request_of([3, 0, 1], [2])
    served = served_of(request, [[3, 0, 1], [2]])
    result = comparing.compare(request, served, served, LIMITS)
    assert result.failures == ()
    assert result.ours.acceptance_length == result.theirs.acceptance_length == 1 + 6 / 4
    assert result.ours.survival() == [3 / 4, 2 / 4, 1 / 4]
    assert (result.equal_texts, result.equal_rounds) == (2, 2)


@pytest.mark.parametrize(("kept", "passes"), [(95, True), (105, True), (89, False), (111, False)])
def test_five_percent_of_our_acceptance_length_are_allowed(kept: int, passes: bool) -> None:
    # 100 drafts, 100 tokens kept: ours is 2.0, so vLLM may be between 1.9 and 2.1.
    request = request_of([1] * 50, [1] * 50)
    theirs = [2] * max(0, kept - 100) + [1] * (min(kept, 200 - kept)) + [0] * max(0, 100 - kept)
    served = served_of(request, [theirs[:50], theirs[50:]])
    assert served["counters"]["num_accepted_tokens"] == kept
    failures = comparing.compare(request, served, served, LIMITS).failures
    assert (failures == ()) == passes
    if not passes:
        assert f"vLLM counts {1 + kept / 100:.3f}, we 2.000" in failures[0]


def test_acceptance_below_the_minimum_and_too_few_prompts_are_named() -> None:
    request = request_of([1], [0])
    served = served_of(request, [[1], [0]])
    failures = comparing.compare(request, served, served, comparing.Limits(0.05, minimum=2.0, prompts=32)).failures
    assert failures == ("2 prompts; at least 32 are asked for", "acceptance length: vLLM counts 1.500; at least 2 is asked for")


@pytest.mark.parametrize("side", ["plain", "speculative", "ours"])
def test_a_text_that_differs_fails_and_is_named_with_the_place(side: str) -> None:
    request = request_of([1], [1])
    plain, speculative = served_of(request, [[1], [1]]), served_of(request, [[1], [1]])
    other = [1, 8, 9]
    if side == "ours":
        request["prompts"][1]["plain_tokens"] = other
    else:
        {"plain": plain, "speculative": speculative}[side]["tokens"] = [[0, 7, 9], other]
    result = comparing.compare(request, plain, speculative, LIMITS)
    assert result.equal_texts == 1
    name = {"plain": "vLLM plain greedy", "speculative": "vLLM with the drafter", "ours": "our plain greedy"}[side]
    assert result.failures == (f"1 of 2 texts differ between our draft-verify loop and {name}: p1 (token 1 of 3 and 3)",)


def test_a_text_that_is_cut_short_is_unequal() -> None:
    assert comparing.unequal(["a"], [[1, 2, 3]], [[1, 2]]) == ["a (token 2 of 3 and 2)"]


@pytest.mark.parametrize("key", ["num_drafts", "num_accepted_tokens", "accepted_per_position"])
def test_a_missing_counter_is_an_error_not_a_pass(key: str) -> None:
    request = request_of([1], [1])
    served = served_of(request, [[1], [1]])
    del served["counters"][key]
    with pytest.raises(comparing.Incomparable, match=key):
        comparing.compare(request, served, served, LIMITS)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_drafts": 0}, "drafted nothing"),
        ({"accepted_per_position": [2, 0]}, "2 positions of a draft that has 3"),
        ({"accepted_per_position": [2, 1, 0]}, "contradict each other"),
    ],
)
def test_counters_that_make_no_sense_are_an_error(change: dict[str, Any], message: str) -> None:
    request = request_of([1], [1])
    served = served_of(request, [[1], [1]])
    served["counters"] |= change
    with pytest.raises(comparing.Incomparable, match=message):
        comparing.compare(request, served, served, LIMITS)


def test_the_last_round_of_each_request_is_shown_apart() -> None:
    # vLLM also counts what it kept behind an end token; only last rounds differ then.
    request = request_of([3, 1], [0, 0])
    served = served_of(request, [[3, 3], [0, 2]])
    result = comparing.compare(request, served, served, comparing.Limits(10.0, 1.0, 2))
    assert result.ours_inner == result.theirs_inner == comparing.Figures(2, 3, (1, 1, 1))
    assert any(
        line.startswith("| the same without each request's last round | 2.500 | 2.500 |") for line in comparing.table(result)
    )


def test_a_vllm_without_rounds_is_still_compared_by_its_counters() -> None:
    request = request_of([1], [1])
    served = served_of(request, [[1], [1]]) | {"rounds": [None, None]}
    result = comparing.compare(request, served, served, LIMITS)
    assert result.failures == () and result.equal_rounds is None and result.theirs_inner is None


def test_counters_are_differences() -> None:
    def engine(drafts: int, kept: int) -> Any:
        metrics = [
            SimpleNamespace(name="vllm:spec_decode_num_drafts", value=drafts),
            SimpleNamespace(name="vllm:spec_decode_num_accepted_tokens", value=kept),
            SimpleNamespace(name="vllm:spec_decode_num_accepted_tokens_per_pos", values=[kept, 0]),
            SimpleNamespace(name="vllm:num_requests_running", value=4),
        ]
        return SimpleNamespace(get_metrics=lambda: metrics)

    before, after = serving.counters(engine(3, 2)), serving.counters(engine(10, 7))
    expected = {"num_drafts": 7, "num_accepted_tokens": 5, "accepted_per_position": [5, 0]}
    assert serving.difference(after, before) == expected
    assert serving.difference(after, {})["num_drafts"] == 10


def test_a_prompt_that_does_not_fit_the_target_is_named() -> None:
    shape = SimpleNamespace(max_position_embeddings=100)
    assert serve_check.model_length([("a", 10), ("b", 40)], 32, 8, shape) == 88
    assert serve_check.model_length([("b", 58)], 32, 8, shape) == 100
    with pytest.raises(DataError, match="prompt b: 61 tokens"):
        serve_check.model_length([("a", 10), ("b", 61)], 32, 8, shape)


def test_a_missing_environment_is_one_line_that_says_what_builds_it(tmp_path: Path) -> None:
    given = serve_check.parse([str(tmp_path), "--python", str(tmp_path / "python")])
    with pytest.raises(UserError, match="`make serve-check` builds it"):
        serve_check.check(given)


@pytest.mark.parametrize("arguments", [[], ["--draft", "x"], ["run", "--prompts", "0"]])
def test_arguments_that_make_no_sense_are_refused(arguments: list[str]) -> None:
    with pytest.raises(UserError):
        serve_check.parse(arguments)


@pytest.fixture
def fake_serving(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The serving half replaced by a few lines of Python."""
    (tmp_path / "benchmarks").mkdir()
    monkeypatch.setattr(serve_check, "ROOT", tmp_path)

    def write(code: str, limit_s: float = 30.0) -> dict[str, Any]:
        (tmp_path / "benchmarks/serve_check_vllm.py").write_text(code)
        return serve_check.serve(Path(sys.executable), tmp_path, "plain", limit_s)

    return write


def test_a_crash_shows_the_last_lines_and_the_exit_code(fake_serving: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(TrainingError, match="exit code 7"):
        fake_serving("import sys; print('engine core died'); sys.exit(7)")
    assert "engine core died" in capsys.readouterr().err


def test_an_end_without_a_result_is_a_failure_also_if_an_old_result_lies_there(fake_serving: Any, tmp_path: Path) -> None:
    (tmp_path / "plain.json").write_text("{}")
    with pytest.raises(TrainingError, match="exit code 0"):
        fake_serving("")


def test_the_time_limit_ends_the_serving_half_and_its_children(
    fake_serving: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # The half rings the alarm itself once its child runs, so that a busy machine does not matter.
    code = f"""
import os, pathlib, signal, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
pathlib.Path({str(tmp_path / "pid")!r}).write_text(str(child.pid))
print("loading", flush=True)
os.kill({os.getpid()}, signal.SIGALRM)
time.sleep(60)
"""
    with pytest.raises(TrainingError, match=r"was ended after 100 s \(--time-limit\)"):
        fake_serving(code, 100.0)
    assert "loading" in capsys.readouterr().err
    status = Path(f"/proc/{(tmp_path / 'pid').read_text()}/stat")
    assert not status.exists() or status.read_text().split()[2] == "Z"


def test_the_alarm_rings_and_is_taken_back() -> None:
    before = signal.getsignal(signal.SIGALRM)
    with pytest.raises(serve_check.TimeIsUp), serve_check.time_limit(0.05):
        time.sleep(30)
    assert signal.getsignal(signal.SIGALRM) == before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_the_serving_half_imports_nothing_of_ours() -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-c", "import runpy, sys; runpy.run_path(sys.argv[1]); print(*sys.modules)",
         str(ROOT / "benchmarks/serve_check_vllm.py")], capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    assert not {"dflash_core", "torch", "vllm"} & set(done.stdout.split())


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(not SERVING_PYTHON.exists(), reason=".venv-serving is not there; `make serve-check` builds it")
def test_an_untrained_drafter_in_the_real_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from dflash_core.experiment import load_experiment
    from dflash_core.experiment_data import draft_spec
    from dflash_core.model.draft import DFlashDraft
    from dflash_core.model.weights import save_draft

    monkeypatch.setenv("DFLASH_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(ROOT)
    experiment = ROOT / "flows/experiments/demo.yaml"
    spec = draft_spec(load_experiment(experiment))
    torch.manual_seed(0)
    save_draft(tmp_path / "draft", spec, DFlashDraft(spec).state_dict())
    given = ["--experiment", str(experiment), "--draft", str(tmp_path / "draft"), "--prompts", "2", "--max-new-tokens", "12",
             "--threads", "1", "--out", str(tmp_path)]  # fmt: skip
    assert serve_check.check(serve_check.parse(given)) == 0
    request = json.loads((tmp_path / "home/serving/draft/request.json").read_text())
    served = json.loads((tmp_path / "home/serving/draft/speculative.json").read_text())
    assert served["rounds"] == [item["accepted"] for item in request["prompts"]]
    assert "**Passed.**" in next(tmp_path.glob("*-serving-tiny-target.md")).read_text()
