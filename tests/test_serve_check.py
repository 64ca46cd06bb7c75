"""The serving check: what passes, what does not, and that nothing is needed from vLLM to say so.

The real thing (marked slow) runs only where `make serve-check` has installed vLLM.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
import types
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
SERVING_PYTHON = ROOT / ".venv-serving/bin/python"
sys.path.insert(0, str(ROOT / "benchmarks"))

import serve_check  # noqa: E402
import serve_check_compare as comparing  # noqa: E402
import serve_check_ours as counting  # noqa: E402
import serve_check_vllm as serving  # noqa: E402

from dflash_core.errors import DataError, TrainingError, UserError  # noqa: E402
from tests.test_training_run import train  # noqa: E402

LIMITS = comparing.Limits(tolerance=0.05, minimum=1.0, prompts=2)


def request_of(*rounds: list[int], block_size: int = 4) -> dict[str, Any]:
    """A request with one prompt per list of rounds; texts are made up, and both our decodings agree."""
    prompts = [
        {"id": f"p{i}", "prompt": [1], "tokens": [i, 7, 9], "plain_tokens": [i, 7, 9], "accepted": kept, "accepted_whole": kept}
        for i, kept in enumerate(rounds)
    ]
    return {"block_size": block_size, "prompts": prompts, "max_new_tokens": 3, "eos_token_ids": [99]}


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
    assert (result.equal_texts, result.judged.equal, result.judged.rounds) == (2, 2, comparing.Rounds(4, 0))
    assert (result.other, result.corrected) == (None, False)
    assert len(comparing.remarks(result)) == 1 and "all rounds are the same in 2 of 2 prompts" in comparing.remarks(result)[0]


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


def test_a_last_round_is_counted_whole_on_both_sides_and_shown_cut_and_left_out() -> None:
    # The first answer ends with an end token, two tokens before vLLM's last round; the second at the limit.
    request = request_of([3, 1], [0, 2])
    request["prompts"][0] |= {"tokens": [5, 1, 2, 3, 4, 6, 99], "plain_tokens": [5, 1, 2, 3, 4, 6, 99], "accepted_whole": [3, 3]}
    served = served_of(request, [[3, 3], [0, 2]])
    result = comparing.compare(request, served, served, LIMITS)
    assert result.failures == ()
    assert result.ours == result.theirs == comparing.Figures(4, 8, (3, 3, 2))
    assert result.ours_cut == result.judged.cut == comparing.Figures(4, 6, (3, 2, 1))
    assert result.ours_inner == result.judged.inner == comparing.Figures(2, 3, (1, 1, 1))
    lines = comparing.table(result)
    assert any(
        line.startswith("| a last round counted up to the end token (`dflash evaluate`) | 2.500 | 2.500 |") for line in lines
    )
    assert any(line.startswith("| without each request's last round | 2.500 | 2.500 |") for line in lines)


@pytest.mark.parametrize(
    ("rounds", "tokens", "expected"),
    [
        ([3, 3], [5, 1, 2, 3, 4, 6, 99], [3, 1]),  # 1 + 4 tokens before the last round, 2 of it in the text
        ([3, 3], [5, 1, 2, 3, 4, 6, 7], [3, 3]),  # ended at the limit: our loop counts the round whole too
        ([3], [5, 99], [0]),
        ([2], [5, 1, 2, 99], [2]),  # the target's own token is the end token
        ([], [99], []),
    ],
)
def test_cut_at_the_end_token(rounds: list[int], tokens: list[int], expected: list[int]) -> None:
    assert comparing.cut_at_end(rounds, tokens, [99]) == expected


def test_rounds_are_compared_where_they_begin() -> None:
    # Begin at 1 5 7 8 and at 1 5 8: the second round differs, the one at 7 has no counterpart, those at 8 meet again.
    assert comparing.count_rounds([[3, 1, 0, 2]], [[3, 2, 2]]) == comparing.Rounds(common=3, different=1)
    assert comparing.count_rounds([[0], []], [[1], []]) == comparing.Rounds(1, 1)


@pytest.mark.parametrize("as_shipped", [False, True])
def test_a_vllm_that_misreads_the_drafter_is_judged_corrected_or_as_it_comes(as_shipped: bool) -> None:
    request = request_of([2, 2], [1, 3])
    served = served_of(request, [[0, 0], [0, 0]]) | {"corrected": served_of(request, [[2, 2], [1, 3]])}
    limits = comparing.Limits(0.05, 1.0, 2, as_shipped=as_shipped)
    result = comparing.compare(request, served, served, limits)
    assert (result.failures == (), result.corrected) == (not as_shipped, not as_shipped)
    assert result.other is not None
    lengths = (result.theirs.acceptance_length, result.other.figures.acceptance_length)
    assert lengths == ((1.0, 3.0) if as_shipped else (3.0, 1.0))
    text = "\n".join([*comparing.table(result), *comparing.remarks(result)])
    assert ("| the same with vLLM corrected | 3.000 | 3.000 |" in text) == as_shipped
    assert ("| the same with vLLM as it comes | 3.000 | 1.000 |" in text) != as_shipped
    assert "2 of 2 rounds that begin at the same token" in text and "0 of 4 rounds" in text


def test_texts_of_a_corrected_vllm_must_be_equal_too() -> None:
    request = request_of([1], [1])
    served = served_of(request, [[1], [1]])
    served["corrected"] = served | {"tokens": [[0, 7, 9], [1, 7, 8]]}
    result = comparing.compare(request, served, served, LIMITS)
    assert result.equal_texts == 1
    assert result.failures == (
        "1 of 2 texts differ between our draft-verify loop and vLLM with the drafter, corrected: p1 (token 2 of 3 and 3)",
    )


def test_a_vllm_without_rounds_is_still_compared_by_its_counters() -> None:
    request = request_of([1], [1])
    served = served_of(request, [[1], [1]]) | {"rounds": [None, None]}
    result = comparing.compare(request, served, served, LIMITS)
    assert result.failures == () and result.judged.rounds is None and result.judged.inner is None
    assert comparing.remarks(result) == ["Round by round: vLLM published no rounds."]


@pytest.mark.parametrize("end", ["eos", "limit"])
def test_our_last_round_is_counted_whole(micro_target: Path, monkeypatch: pytest.MonkeyPatch, end: str) -> None:
    import torch

    from dflash_core.config import DraftConfig
    from dflash_core.evaluation import decode, greedy_decode, speculative_decode
    from dflash_core.model.draft import DFlashDraft
    from dflash_core.model.spec import DraftSpec
    from dflash_core.model.target import FrozenTarget, read_target_shape

    target = FrozenTarget(micro_target, (1, 2), "float32", "sdpa", "cpu")
    spec = DraftSpec.build(DraftConfig(num_layers=1, block_size=5, num_taps=2), read_target_shape(micro_target), 261)
    draft = DFlashDraft(spec).initialise(0).eval()
    # A prompt whose answer has a token for the first time within its second block.
    answers = ((prompt, greedy_decode(target, prompt, 12).tokens) for prompt in ((7, 8, first) for first in range(24, 250)))
    prompt, answer, place = next(
        (prompt, answer, i) for prompt, answer in answers for i in range(6, 10) if answer[i] not in answer[:i]
    )

    def right(context: decode.DraftContext, *_: object) -> torch.Tensor:
        done = context.length - len(prompt)
        return torch.tensor(answer[done + 1 : done + 5])

    monkeypatch.setattr(decode.DraftContext, "propose", right)
    if end == "eos":  # within the second block, behind which the draft is right to its end
        monkeypatch.setattr(target, "shape", dataclasses.replace(target.shape, eos_token_ids=(answer[place],)))
    decoded = speculative_decode(target, draft, prompt, 40 if end == "eos" else place + 1)
    assert decoded.tokens == answer[: place + 1]
    assert decoded.accepted == ((4, place - 6) if end == "eos" else (4, 4))
    assert counting.whole_rounds(target, draft, prompt, decoded) == [4, 4]
    assert counting.whole_rounds(target, draft, prompt, decode.Decoded(answer[:1], (), 0)) == []


def fake_vllm(monkeypatch: pytest.MonkeyPatch, rows: bool) -> Any:
    """A vLLM whose RMS norm takes a row of weights per layer, or the first for all; returns its drafter."""

    def rms_norm(out: Any, x: Any, weight: Any, epsilon: float) -> None:
        if weight.ndim == 2:
            weight = weight[:, None, None] if rows else weight[0]
        out.copy_(x * (x.square().mean(-1, keepdim=True) + epsilon).rsqrt() * weight)

    class DFlashQwen3Model:
        def _normalize_context_k(self, keys: Any) -> Any:
            raise AssertionError("not corrected")

    modules: dict[str, Any] = {
        name: types.ModuleType(name)
        for name in ("vllm", "vllm._custom_ops", "vllm.model_executor", "vllm.model_executor.models",
                     "vllm.model_executor.models.qwen3_dflash")
    }  # fmt: skip
    modules["vllm._custom_ops"].rms_norm = rms_norm
    modules["vllm"]._custom_ops = modules["vllm._custom_ops"]
    modules["vllm.model_executor.models.qwen3_dflash"].DFlashQwen3Model = DFlashQwen3Model
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    return DFlashQwen3Model


@pytest.mark.parametrize("rows", [True, False])
def test_a_norm_that_reads_one_layers_weights_is_noticed_and_corrected(monkeypatch: pytest.MonkeyPatch, rows: bool) -> None:
    import torch

    drafter = fake_vllm(monkeypatch, rows)
    assert serving.norm_misread() is not rows
    serving.correct_norm()
    model = drafter()
    model._k_norm_weights, model._rms_norm_eps = torch.rand(3, 8) + 0.5, 1e-6
    keys = torch.randn(3, 5, 2, 8)
    expected = torch.nn.functional.rms_norm(keys, (8,), eps=1e-6) * model._k_norm_weights[:, None, None]
    assert torch.allclose(model._normalize_context_k(keys), expected, atol=1e-6)


@pytest.mark.parametrize(("mode", "misread"), [("speculative", True), ("speculative", False), ("plain", True)])
def test_prompts_are_decoded_again_where_vllm_misreads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, misread: bool
) -> None:
    done: list[str] = []
    (tmp_path / "request.json").write_text(json.dumps({"cache": "c", "threads": 1}))
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(serving, "check_torch", lambda: None)
    monkeypatch.setattr(serving, "load", lambda request, speculative: None)
    monkeypatch.setattr(serving, "norm_misread", lambda: misread)
    monkeypatch.setattr(serving, "correct_norm", lambda: done.append("correct"))
    monkeypatch.setattr(serving, "decode", lambda engine, request: done.append("decode") or {"tokens": len(done)})
    monkeypatch.setattr(serving, "PACKAGES", ("torch",))
    serving.main(str(tmp_path / "request.json"), mode, str(tmp_path / "result.json"))
    result = json.loads((tmp_path / "result.json").read_text())
    twice = misread and mode == "speculative"
    assert done == (["decode", "correct", "decode"] if twice else ["decode"])
    assert (result["tokens"], result.get("corrected")) == (1, {"tokens": 3} if twice else None)


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
    draft = DFlashDraft(spec)
    for layer in draft.layers:  # of an untrained drafter they are all the same, and a norm that takes the wrong ones is right
        torch.nn.init.uniform_(layer.self_attn.k_norm.weight, 0.2, 3.0)  # type: ignore[union-attr, arg-type]
    save_draft(tmp_path / "draft", spec, draft.state_dict())
    given = ["--experiment", str(experiment), "--draft", str(tmp_path / "draft"), "--prompts", "2", "--max-new-tokens", "12",
             "--threads", "1", "--out", str(tmp_path)]  # fmt: skip
    assert serve_check.check(serve_check.parse(given)) == 0
    request = json.loads((tmp_path / "home/serving/draft/request.json").read_text())
    served = json.loads((tmp_path / "home/serving/draft/speculative.json").read_text())
    assert served.get("corrected", served)["rounds"] == [item["accepted_whole"] for item in request["prompts"]]
    assert "**Passed.**" in next(tmp_path.glob("*-serving-tiny-target.md")).read_text()


def test_a_run_is_exported_afresh_with_what_its_training_was(micro_experiment: Path, tmp_path: Path) -> None:
    from dflash_core.model.weights import load_draft

    run_dir = train(micro_experiment, "served", "train.max_steps=2")
    subject = serve_check.subject_of_run(run_dir, tmp_path / "work")
    assert load_draft(subject.draft).spec.block_size == subject.config.draft.block_size
    assert subject.training["steps"] == 2 and subject.training["complete"] and subject.training["anchors"] > 0
