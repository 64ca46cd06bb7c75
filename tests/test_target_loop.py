"""The target loop as a thread, and in whole runs: what it checks, counts and refuses."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from dflash_core import experiment as root
from dflash_core.errors import ConfigError, StageError
from dflash_core.model.documents import Documents
from dflash_core.model.target import FrozenTarget
from dflash_core.pipeline import Channel, Loaded, ReorderBuffer, Supervisor
from dflash_core.records import BatchShape, PlannedBatch
from dflash_core.training import target_loop
from dflash_core.training.run_folder import RunFolder
from dflash_core.training.target_loop import Ready, run_target
from tests.test_target_check import make_batch, random_tokens
from tests.test_training_run import losses, rows, start, train, weights

PACKED = "bucketing.strategy=packed"
Event = tuple[str, int, dict[str, Any]]


class StandIn:
    """What a target loop asks of a target, without a model."""

    device, layer_ids = torch.device("cpu"), (3, 5)
    shape: Any = SimpleNamespace(hidden_size=4, pad_token_id=256)

    def __init__(self, answer: Callable[[Tensor], Any]) -> None:
        self.answer = answer

    def features(self, tokens: Tensor, should_stop: object, documents: Documents | None, /) -> Any:
        return self.answer(tokens)


def ones(tokens: Tensor) -> Tensor:
    return torch.ones(*tokens.shape, 8)


def serve(target: Any, count: int = 3, number: int = 2) -> tuple[list[Ready], list[Event]]:
    """Run a target loop over `count` batches of two rows to its end; returns what it made ready, and its events."""
    events: list[Event] = []
    with Supervisor("test") as supervisor:
        queue: Channel[Loaded] = Channel("queue", count, supervisor, 5.0)
        ready: ReorderBuffer[Ready] = ReorderBuffer("ready", 0, supervisor, 5.0)
        for n in range(count):
            planned = PlannedBatch(10 + n, n, 0, 7, 0, 0, (0, 1), False)
            queue.put(Loaded(planned, BatchShape(0, 2, 12, 12, 6, 2, 2), make_batch(random_tokens(2, 6, seed=n)), 1))
        queue.close()
        supervisor.start("target", run_target, target, number, queue, ready, supervisor, lambda *a, **f: events.append((*a, f)))
        try:
            return [ready.get()[0] for _ in range(count)], events
        except StageError:
            raise
        except Exception:
            supervisor.check()  # what stopped the loop
            raise


def test_the_first_batch_alone_is_checked(micro_target: Path) -> None:
    """And with it no hook, no flag and no comparison stays behind for the batches that follow."""
    target = FrozenTarget(micro_target, (1, 2), "float32", "sdpa", "cpu", "bfloat16")
    compared: list[int] = []
    real = target.hidden_states
    target.hidden_states = lambda tokens: (compared.append(tokens.numel()), real(tokens))[1]  # type: ignore[method-assign,func-returns-value]
    ready, events = serve(target)
    assert compared == [6] and len(ready) == 3
    assert [item.features_RSF.dtype for item in ready] == [torch.bfloat16] * 3
    [(kind, step, fields)] = events
    assert (kind, step, fields["target"], fields["device"], fields["seq_no"]) == ("target_checked", 7, 2, "cpu", 10)
    assert fields["dtype"] == "bfloat16" and 0 < fields["largest_difference"] < 4e-3
    assert fields["tap_rms"] == pytest.approx(
        [float(x.float().square().mean().sqrt()) for x in ready[0].features_RSF.chunk(2, -1)]
    )
    ran: list[int] = []
    for n, layer in enumerate(target.model.get_decoder().layers):
        layer.register_forward_pre_hook(lambda *_, n=n: ran.append(n))
    target.features(random_tokens(1, 4))
    assert ran == [0, 1, 2]


def test_the_check_is_not_in_the_measured_time_of_the_batch(micro_target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The simulator takes its costs from these times. On this clock time passes in the check alone."""
    now = [100.0]
    monkeypatch.setattr(target_loop, "time", SimpleNamespace(monotonic=lambda: now[0]))
    target = FrozenTarget(micro_target, (1, 2), "float32", "sdpa", "cpu")
    real = target.hidden_states
    target.hidden_states = lambda tokens: (now.append(now.pop() + 50.0), real(tokens))[1]  # type: ignore[method-assign,func-returns-value]
    ready, _ = serve(target, 2)
    assert [item.target_forward_s for item in ready] == [0.0, 0.0] and now == [150.0]


def late(good: Callable[[Tensor], Any], bad: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
    """Good for the first batch, bad for the ones that follow."""
    calls: list[int] = []
    return lambda tokens: (calls.append(1), good(tokens) if len(calls) == 1 else bad(tokens))[1]  # type: ignore[func-returns-value]


@pytest.mark.parametrize(
    ("answer", "batch", "said"),
    [
        (lambda _: None, 10, "the target gave NoneType instead of captured states"),
        (lambda tokens: ones(tokens)[..., :4], 10, r"captured states are \[2, 6, 4\], expected \[2, 6, 8\]"),
        (lambda tokens: ones(tokens) * torch.tensor([1.0] * 4 + [0.0] * 4), 10, "captured states of layer 5 are all zero"),
        (late(ones, lambda _: None), 11, "the target gave NoneType instead of captured states"),
        (late(ones, lambda tokens: ones(tokens)[:, :5]), 11, r"captured states are \[2, 5, 8\], expected \[2, 6, 8\]"),
    ],
)
def test_garbage_stops_the_run_and_names_target_and_batch(answer: Callable[[Tensor], Any], batch: int, said: str) -> None:
    with pytest.raises(StageError, match=rf"^stage 'target 2', batch {batch}: ValueError: {said}"):
        serve(StandIn(answer))


def test_a_batch_that_is_not_finite_is_left_to_the_skip_guard_and_the_next_one_is_checked() -> None:
    """Which batch comes first depends on the topology and on where a resume begins; what happens to it must not."""
    states = iter([math.nan, 1.0, 1.0])
    ready, events = serve(StandIn(lambda tokens: ones(tokens) * next(states)))
    assert len(ready) == 3
    [(kind, _, fields)] = events
    assert (kind, fields["seq_no"]) == ("target_checked", 11)


def test_a_stand_in_is_served_without_a_comparison() -> None:
    ready, events = serve(StandIn(ones))
    [(kind, _, fields)] = events
    assert len(ready) == 3 and kind == "target_checked" and fields["tap_rms"] == pytest.approx([1.0, 1.0])


def test_splits_are_events_and_a_batch_that_cannot_be_split_ends_the_run() -> None:
    def one_row(tokens: Tensor) -> Tensor:
        if len(tokens) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return ones(tokens)

    ready, events = serve(StandIn(one_row), 2)
    assert [tuple(item.features_RSF.shape) for item in ready] == [(2, 6, 8)] * 2
    splits = [(step, fields) for kind, step, fields in events if kind == "out_of_memory"]
    sizes = {"rows": 2, "sequences": 2, "tokens": 12, "parts": 2}
    assert splits == [(7, {"target": 2, "device": "cpu", "seq_no": 10 + n, **sizes}) for n in range(2)]

    def none(_: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(StageError, match=r"^stage 'target 2', batch 10: .*a single sequence of 6 tokens, .*data\.max_length"):
        serve(StandIn(none))


def test_a_run_writes_what_was_checked_by_each_target(micro_experiment: Path) -> None:
    overrides = ("target.feature_dtype=bfloat16", "topology.targets_per_cell=2", "train.max_steps=3")
    run_dir = train(micro_experiment, "cast", *overrides)
    checked = {row["target"]: row for row in rows(run_dir, "events") if row["kind"] == "target_checked"}
    assert sorted(checked) == [0, 1]
    taps = RunFolder(run_dir).read_manifest()["identity"]
    assert taps["target.feature_dtype"] == "bfloat16"
    for row in checked.values():
        assert (row["dtype"], row["device"], row["cell"], len(row["taps"])) == ("bfloat16", "cpu", 0, 2)
        assert all(rms > 0 for rms in row["tap_rms"]) and row["compared_taps"] == row["taps"]
        assert 0 < row["largest_difference"] < 4e-3
    assert len(losses(run_dir)) == 3


def test_decoding_rounds_the_states_as_training_did(micro_experiment: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few = ("evaluate.max_prompts=1", "evaluate.max_new_tokens=4", "evaluate.untrained_prompts=0")
    run_dir = train(micro_experiment, "cast", "target.feature_dtype=bfloat16", "train.max_steps=1", *few)
    seen: set[torch.dtype] = set()
    real = FrozenTarget.step_rows

    def spy(self: FrozenTarget, *args: Any) -> tuple[Tensor, Tensor]:
        logits, features = real(self, *args)
        seen.add(features.dtype)
        return logits, features

    monkeypatch.setattr(FrozenTarget, "step_rows", spy)
    assert root.evaluate_run(run_dir)["lossless"]
    assert seen == {torch.bfloat16}


def test_wrong_taps_stop_a_run_before_its_first_step(micro_experiment: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hooks one layer too early crash nothing by themselves."""
    real = FrozenTarget._make_hook
    layers: dict[int, int] = {}

    def shifted(self: FrozenTarget, tap: int, layer: int) -> Any:
        layers[tap] = layer
        if tap == 0:  # on the layer before
            self.model.get_decoder().layers[layer - 1].register_forward_hook(real(self, tap, layer))
            return lambda *_: None
        return real(self, tap, layer)

    monkeypatch.setattr(FrozenTarget, "_make_hook", shifted)
    run_dir = start(micro_experiment, "shifted", "train.self_checks=false")  # they would find it earlier
    with pytest.raises(
        StageError, match=r"captured states of layer 1 are not its own: the output of layer 0 is closer"
    ) as caught:
        root.train_run(root.load_experiment(run_dir / "config.yaml"), run_dir)
    assert caught.value.stage.startswith("target") and caught.value.batch is not None
    assert not (run_dir / "metrics" / "steps.jsonl").exists()


@pytest.mark.parametrize("strategy", [pytest.param((), marks=pytest.mark.slow), (PACKED,)])
def test_a_run_that_is_short_of_memory_trains_the_same(
    micro_experiment: Path, monkeypatch: pytest.MonkeyPatch, strategy: tuple[str, ...]
) -> None:
    """Up to rounding; with every batch that was split in the events."""
    short = ("train.max_steps=4", *strategy)
    plenty = train(micro_experiment, "plenty", *short)
    assert not [row for row in rows(plenty, "events") if row["kind"] == "out_of_memory"]
    real = FrozenTarget.features

    def tight(self: FrozenTarget, tokens: Tensor, should_stop: Any = None, documents: Documents | None = None) -> Tensor:
        if tokens.numel() > 260:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return real(self, tokens, should_stop, documents)

    monkeypatch.setattr(FrozenTarget, "features", tight)
    run_dir = train(micro_experiment, "tight", *short)
    assert losses(run_dir) == pytest.approx(losses(plenty), rel=1e-5)
    for name, tensor in weights(run_dir).items():  # Adam divides small gradients by small ones
        torch.testing.assert_close(tensor, weights(plenty)[name], rtol=1e-2, atol=1e-4)
    sizes = {row["seq_no"]: row for row in rows(run_dir, "batches")}
    splits = [row for row in rows(run_dir, "events") if row["kind"] == "out_of_memory" and row["seq_no"] in sizes]
    assert {row["seq_no"] for row in splits} == {n for n, row in sizes.items() if row["num_padded_tokens"] > 260} != set()
    assert all(row["tokens"] > 260 and row["parts"] == 2 and row["step"] == sizes[row["seq_no"]]["step"] for row in splits)


def test_a_sequence_that_does_not_fit_ends_the_run_with_the_key_to_change(
    micro_experiment: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(FrozenTarget, "features", full)
    run_dir = start(micro_experiment, "full", "train.scale_features=false")  # which would run the target before
    with pytest.raises(StageError, match=r"stage 'target 0', batch \d+: .*does not fit; lower data\.max_length or bucketing"):
        root.train_run(root.load_experiment(run_dir / "config.yaml"), run_dir)
    assert RunFolder(run_dir).read_manifest()["state"] == "failed"


def test_an_attention_implementation_that_cannot_be_used_stops_before_training(
    micro_experiment: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dflash_core.model.target_loading.find_spec", lambda _: None)
    run_dir = start(micro_experiment, "flash", "target.attn_implementation=flash_attention_2")
    with pytest.raises(ConfigError, match=r"^target\.attn_implementation: flash_attention_2 needs the package flash-attn"):
        root.train_run(root.load_experiment(run_dir / "config.yaml"), run_dir)
    assert RunFolder(run_dir).read_manifest()["state"] == "failed" and not (run_dir / "metrics").exists()
