"""The check of a target's first batch: each way in which taps go wrong without a crash is injected, and must be noticed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from dflash_core.model.target import FrozenTarget, HiddenStates
from dflash_core.training import target_check
from dflash_core.training.collate import DraftBatch
from dflash_core.training.target_check import check_first_batch, check_shape, check_values, compare_taps, sequence_to_compare
from tests.conftest import TINY_TARGET
from tests.test_packed_model import documents_of

H = 32


def make_batch(tokens_RS: Tensor, lengths: tuple[int, ...] | None = None) -> DraftBatch:
    """A batch of the given tokens, packed where document lengths are given; its anchors stand at place 0."""
    anchors = torch.zeros(len(tokens_RS), 1, dtype=torch.long)
    slots = torch.zeros(len(tokens_RS), 1, 4)
    documents = None if lengths is None else documents_of(lengths, ((0,),))
    return DraftBatch(tokens_RS, anchors, tokens_RS.gather(1, anchors), slots.long(), slots, documents)


def random_tokens(rows: int, length: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 250, (rows, length), generator=torch.Generator().manual_seed(seed))


def padded_batch(target: FrozenTarget) -> DraftBatch:
    tokens = random_tokens(3, 20)
    tokens[0, 13:] = target.shape.pad_token_id
    return make_batch(tokens)


BATCHES: dict[str, Callable[[FrozenTarget], DraftBatch]] = {
    "padded": padded_batch,
    "packed": lambda _: make_batch(random_tokens(1, 31), (9, 1, 14, 7)),
}


def features_of(target: FrozenTarget, batch: DraftBatch) -> Tensor:
    return target.features(batch.tokens_RS, None, batch.documents)


@pytest.mark.parametrize("kind", BATCHES)
@pytest.mark.parametrize("feature_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("taps", [(1, 2), (0, 4)])
def test_a_good_target_passes_with_its_figures(
    micro_target: Path, taps: tuple[int, ...], dtype: str, feature_dtype: str, kind: str
) -> None:
    """Layer 4 is the last one, whose output is compared behind the final norm."""
    target = FrozenTarget(micro_target, taps, dtype, "sdpa", "cpu", feature_dtype)
    batch = BATCHES[kind](target)
    features = features_of(target, batch)
    found = check_first_batch(target, batch, features)
    assert (found["dtype"], found["taps"], found["compared_taps"]) == (feature_dtype, list(taps), list(taps))
    assert found["num_compared_tokens"] == (13 if kind == "padded" else 14)
    expected = [float(features[..., i * H : (i + 1) * H].float().square().mean().sqrt()) for i in range(len(taps))]
    assert found["tap_rms"] == pytest.approx(expected, rel=1e-4)
    # Far below the tolerance, so that it has room where rounding is worse: more layers, other kernels.
    limit = target_check.MODEL_TOLERANCE[target.model.dtype] + target_check.CAST_TOLERANCE[target.feature_dtype]
    assert found["largest_difference"] < (limit / 2 if dtype == "bfloat16" else limit / 1.5)
    if (dtype, feature_dtype) == ("float32", "float32"):
        assert found["largest_difference"] < 1e-5


def hooked(folder: Path, hooks: tuple[int, ...], named: tuple[int, ...], dtype: str) -> FrozenTarget:
    """A target whose hooks stand elsewhere than its ids say."""
    target = FrozenTarget(folder, hooks, dtype, "sdpa", "cpu")
    target.layer_ids = named
    return target


@pytest.mark.parametrize("kind", BATCHES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("hooks", "named", "said"),
    [
        ((0, 1), (1, 2), "of layer 1 are not its own: the output of layer 0 is closer"),  # off by one, too early
        ((2, 3), (1, 2), "of layer 1 are not its own: the output of layer 2 is closer"),  # too late
        ((1, 3), (1, 2), "of layer 2 are not its own: the output of layer 3 is closer"),  # in one tap alone
        ((1, 3), (1, 4), "of layer 4 are not its own: the output of layer 3 is closer"),  # named as the last layer
        ((1, 4), (1, 3), "of layer 3 "),  # hooked at the last layer, whose output is nowhere among the hidden states
    ],
)
def test_taps_at_another_layer_are_refused(
    micro_target: Path, hooks: tuple[int, ...], named: tuple[int, ...], said: str, dtype: str, kind: str
) -> None:
    target = hooked(micro_target, hooks, named, dtype)
    batch = BATCHES[kind](target)
    with pytest.raises(ValueError, match=said):
        check_first_batch(target, batch, features_of(target, batch))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_off_by_one_is_refused_in_a_trained_model_too(dtype: str) -> None:
    """Its layers change the states less than random ones do."""
    tokens = random_tokens(1, 60)
    compare_taps(target := FrozenTarget(TINY_TARGET, (1, 2, 4), dtype, "sdpa", "cpu"), tokens, target.features(tokens))
    target = hooked(TINY_TARGET, (0, 1, 3), (1, 2, 4), dtype)
    with pytest.raises(ValueError, match="the output of layer 0 is closer"):
        compare_taps(target, tokens, target.features(tokens))


def swap(features: Tensor) -> Tensor:
    return torch.cat([features[..., H:], features[..., :H]], dim=-1)


def without_values(features: Tensor, tap: int, value: float) -> Tensor:
    changed = features.clone()
    changed[..., tap * H : (tap + 1) * H] = value
    return changed


def one_nan(features: Tensor) -> Tensor:
    changed = features.clone()
    changed[-1, -1, -1] = torch.nan
    return changed


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (swap, "of layer 1 are not its own: the output of layer 2 is closer"),
        (lambda f: f.bfloat16(), "captured states are bfloat16, expected float32"),
        (lambda f: f.bfloat16().float(), "of layer 1 differ from the model's own"),  # a cast there and back
        (lambda f: f * 1.001, "of layer 1 differ from the model's own"),
        (lambda f: f.roll(1, dims=1), "of layer 1 "),  # shifted by a token
        (lambda f: f.flip(0), "of layer 1 "),  # the rows in another order
        (lambda f: without_values(f, 0, 0.0), "of layer 1 are all zero"),
        (lambda f: without_values(f, 1, 0.0), "of layer 2 are all zero"),
        (lambda f: without_values(f, 1, torch.inf), "of layer 2 are not finite"),
        (one_nan, "of layer 2 are not finite"),  # in the last number of the batch, which is not compared
    ],
)
def test_damaged_states_are_refused(micro_target: Path, damage: Callable[[Tensor], Tensor], said: str) -> None:
    target = FrozenTarget(micro_target, (1, 2), "float32", "sdpa", "cpu")
    batch = padded_batch(target)
    with torch.inference_mode():
        damaged = damage(features_of(target, batch))
    with pytest.raises(ValueError, match=said):
        check_first_batch(target, batch, damaged)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_cast_that_was_dropped_is_refused(micro_target: Path, dtype: str) -> None:
    """The states come as the model has them, and other ones are configured."""
    other = "bfloat16" if dtype == "float32" else "float32"
    target = FrozenTarget(micro_target, (1, 2), dtype, "sdpa", "cpu", other)
    batch = padded_batch(target)
    plain = FrozenTarget(micro_target, (1, 2), dtype, "sdpa", "cpu")
    with pytest.raises(ValueError, match=f"captured states are {dtype}, expected {other}"):
        check_first_batch(target, batch, features_of(plain, batch))


def test_a_last_layer_whose_norm_is_not_known_is_left_out(micro_target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dflash_core.model.target.FINAL_NORMS", ("no_such_norm",))
    target = FrozenTarget(micro_target, (1, 4), "float32", "sdpa", "cpu")
    batch = padded_batch(target)
    found = check_first_batch(target, batch, features_of(target, batch))
    assert (found["taps"], found["compared_taps"], len(found["tap_rms"])) == ([1, 4], [1], 2)


def test_a_model_whose_last_state_is_a_plain_output_needs_no_norm(micro_target: Path) -> None:
    """Models of which transformers does not tie the last hidden state to the norm's output."""
    target = FrozenTarget(micro_target, (1, 4), "float32", "sdpa", "cpu")
    tokens = random_tokens(1, 9)
    features = target.features(tokens)
    known = target.hidden_states(tokens)
    assert isinstance(known.final_norm, nn.Module) and known.last_is_known
    untied = HiddenStates((*known.states[:-1], features[..., H:]), None, last_is_known=True)
    target.hidden_states = lambda _: untied  # type: ignore[method-assign]
    assert list(compare_taps(target, tokens, features)) == [1, 4]
    target.hidden_states = lambda _: known  # type: ignore[method-assign]
    assert list(compare_taps(target, tokens, features)) == [1, 4]


def test_layers_that_do_nothing_are_no_fault(micro_target: Path) -> None:
    """Their states are those of the layer before them, so that both are equally close."""
    target = FrozenTarget(micro_target, (1, 2), "float32", "sdpa", "cpu")
    with torch.no_grad():
        for layer in target.model.get_decoder().layers[1:3]:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    tokens = random_tokens(1, 9)
    assert list(compare_taps(target, tokens, target.features(tokens)).values()) == [0.0, 0.0]


def test_what_is_compared_is_one_real_sequence_of_bounded_length(micro_target: Path) -> None:
    target = FrozenTarget(micro_target, (1,), "float32", "sdpa", "cpu")
    pad = target.shape.pad_token_id
    assert sequence_to_compare(padded_batch(target), pad) == (0, 13)
    assert sequence_to_compare(make_batch(random_tokens(2, 400)), pad) == (0, 256)
    assert sequence_to_compare(make_batch(random_tokens(1, 31), (9, 1, 14, 7)), pad) == (10, 24)
    assert sequence_to_compare(make_batch(random_tokens(1, 310), (9, 301)), pad) == (9, 265)
    asked: list[int] = []
    real = target.hidden_states
    target.hidden_states = lambda tokens: (asked.append(tokens.numel()), real(tokens))[1]  # type: ignore[method-assign,func-returns-value]
    batch = make_batch(random_tokens(2, 400))
    check_first_batch(target, batch, features_of(target, batch))
    assert asked == [256]


def test_shapes_are_checked() -> None:
    tokens = torch.zeros(2, 5, dtype=torch.long)
    check_shape(torch.ones(2, 5, 6), tokens, 6)
    for bad in (torch.ones(2, 5, 8), torch.ones(2, 4, 6), torch.ones(1, 5, 6), torch.ones(10, 6)):
        with pytest.raises(ValueError, match=r"captured states are \[.*\], expected \[2, 5, 6\]"):
            check_shape(bad, tokens, 6)
    with pytest.raises(ValueError, match=r"the target gave NoneType instead of captured states \[2, 5, 6\]"):
        check_shape(None, tokens, 6)


def test_unusable_states_are_refused_tap_by_tap() -> None:
    good = torch.cat([torch.full((2, 5, 3), 3.0), torch.full((2, 5, 3), -4.0)], dim=-1)
    assert check_values(good, (1, 7)) == pytest.approx([3.0, 4.0])
    zero = good.clone()
    zero[..., 3:] = 0
    with pytest.raises(ValueError, match="captured states of layer 7 are all zero"):
        check_values(zero, (1, 7))
    with pytest.raises(ValueError, match="captured states of layer 1 are not finite"):
        check_values(good / 0, (1, 7))
