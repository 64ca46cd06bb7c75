"""Batches that do not fit into memory: split between rows or documents, again and again, and put together again."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dflash_core.errors import TrainingError
from dflash_core.model import target as target_module
from dflash_core.model.documents import Documents
from dflash_core.model.target import FrozenTarget
from dflash_core.training.collate import DraftBatch
from dflash_core.training.split_batch import Split, features_in_parts, is_out_of_memory, lengths_in_use
from tests.test_target_check import make_batch, random_tokens

PAD = 256
CPU = torch.device("cpu")
CPU_MESSAGE = (
    "[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"
)


class SmallTarget:
    """Runs out of memory above a number of tokens. A state is the token and its place in its sequence: anything
    that is put together wrongly shows."""

    def __init__(self, most_tokens: int, error: Exception | None = None) -> None:
        self.most_tokens, self.error = most_tokens, error or torch.OutOfMemoryError("CUDA out of memory. Tried 2 GiB")
        self.tried: list[tuple[int, ...]] = []

    def __call__(self, tokens: Tensor, should_stop: object, documents: Documents | None, /) -> Tensor:
        self.tried.append(tuple(tokens.shape))
        if tokens.numel() > self.most_tokens:
            raise self.error
        places = torch.arange(tokens.shape[1]).expand(tokens.shape) if documents is None else documents.positions_RS
        if documents is not None:
            assert documents.ids_RS.shape == tokens.shape and int(documents.ids_RS[0, 0]) == 0
            assert torch.equal((documents.positions_RS == 0).cumsum(1) - 1, documents.ids_RS)
        return torch.stack([tokens, places], dim=-1).float()


def padded(lengths: tuple[int, ...]) -> DraftBatch:
    """Rows of random tokens, none of which is padding."""
    tokens = random_tokens(len(lengths), max(lengths))
    for row, length in zip(tokens, lengths, strict=True):
        row[length:] = PAD
    return make_batch(tokens)


def packed(lengths: tuple[int, ...]) -> DraftBatch:
    return make_batch(random_tokens(1, sum(lengths)), lengths)


def run(target: SmallTarget, batch: DraftBatch) -> tuple[Tensor, list[Split]]:
    splits: list[Split] = []
    return features_in_parts(target, batch, None, CPU, PAD, splits.append), splits


def whole(batch: DraftBatch) -> Tensor:
    return run(SmallTarget(10**9), batch)[0]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 12), min_size=1, max_size=9), st.integers(12, 60))
def test_parts_put_together_equal_the_whole_batch(lengths: list[int], most: int) -> None:
    """Every real position has the state it has in the whole batch; no part is larger than what fits; nothing is done twice."""
    for batch in (padded(tuple(lengths)), packed(tuple(lengths))):
        target = SmallTarget(most)
        features, splits = run(target, batch)
        expected = whole(batch)
        real = batch.tokens_RS != PAD
        assert features.shape == expected.shape and features.dtype == expected.dtype
        assert torch.equal(features[real], expected[real])
        fitted = [rows * columns for rows, columns in target.tried if rows * columns <= most]
        assert len(fitted) == len(splits) + 1 and all(split.num_tokens > most for split in splits)
        if batch.documents is not None or not splits:
            assert sum(fitted) == batch.tokens_RS.numel()
        else:
            assert int(real.sum()) <= sum(fitted) <= batch.tokens_RS.numel()


def test_a_padded_batch_is_split_between_rows_and_parts_are_as_short_as_their_rows() -> None:
    batch = padded((20, 18, 5, 4))
    target = SmallTarget(40)
    features, splits = run(target, batch)
    assert target.tried == [(4, 20), (2, 20), (2, 5)]
    assert splits == [Split(num_rows=4, num_documents=4, num_tokens=80, num_parts=2)]
    assert torch.equal(features[:2], whole(batch)[:2]) and torch.equal(features[2:, :5], whole(batch)[2:, :5])
    assert not features[2:, 5:].any()  # padding, which nobody reads: not what happened to be in memory


def test_splits_are_nested() -> None:
    target = SmallTarget(20)
    _, splits = run(target, padded((20, 18, 5, 4)))
    assert target.tried == [(4, 20), (2, 20), (1, 20), (1, 18), (2, 5)]
    assert [(split.num_rows, split.num_tokens) for split in splits] == [(4, 80), (2, 40)]


def test_a_packed_row_is_split_between_documents_where_both_parts_are_closest_in_size() -> None:
    target = SmallTarget(25)
    _, splits = run(target, packed((3, 20, 4, 9, 2, 7)))
    assert target.tried == [(1, 45), (1, 23), (1, 22)]
    assert splits == [Split(num_rows=1, num_documents=6, num_tokens=45, num_parts=2)]
    target = SmallTarget(20)
    _, splits = run(target, packed((3, 20, 4, 9, 2, 7)))
    assert target.tried == [(1, 45), (1, 23), (1, 3), (1, 20), (1, 22), (1, 13), (1, 9)]
    assert [split.num_documents for split in splits] == [6, 2, 4]


def test_a_batch_that_fits_is_given_as_it_is() -> None:
    target = SmallTarget(80)
    features, splits = run(target, padded((20, 18, 5, 4)))
    assert target.tried == [(4, 20)] and splits == []
    assert torch.equal(features, whole(padded((20, 18, 5, 4))))  # padding as well


@pytest.mark.parametrize(
    ("batch", "said"),
    [
        (padded((20, 30, 5)), "a single sequence of 30 tokens, from a batch of 90,"),
        (packed((4, 30, 2)), "a single document of 30 tokens, from a batch of 36,"),
    ],
)
def test_a_sequence_that_does_not_fit_alone_ends_the_run_and_says_what_to_change(batch: DraftBatch, said: str) -> None:
    with pytest.raises(TrainingError, match=f"^out of memory on cpu: {said} does not fit") as caught:
        run(SmallTarget(25), batch)
    assert "data.max_length or bucketing.token_budget" in str(caught.value) and "CUDA out of memory" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_other_errors_are_not_mistaken_for_a_lack_of_memory() -> None:
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory."))
    assert is_out_of_memory(RuntimeError(CPU_MESSAGE)) and is_out_of_memory(MemoryError())
    assert is_out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate(handle)"))
    assert not is_out_of_memory(RuntimeError("boom")) and not is_out_of_memory(ValueError("out of memory"))
    for error in (RuntimeError("boom"), ValueError("shape")):
        target = SmallTarget(5, error)
        with pytest.raises(type(error), match=str(error)):
            run(target, padded((4, 4)))
        assert len(target.tried) == 1
    _, splits = run(SmallTarget(5, RuntimeError(CPU_MESSAGE)), padded((4, 4)))
    assert len(splits) == 1


def test_the_cpus_own_error_is_one_of_them() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)


def test_features_that_do_not_fit_as_a_whole_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class Part(Tensor):
        def new_zeros(self, *_: object, **__: object) -> Tensor:  # type: ignore[override]
            raise torch.OutOfMemoryError("no room")

    target = SmallTarget(8)
    small = target.__call__
    with pytest.raises(TrainingError, match=r"captured states of its 12 tokens do not fit on cpu; lower bucketing\.token_budget"):
        features_in_parts(lambda *args: small(*args).as_subclass(Part), padded((6, 6)), None, CPU, PAD, lambda _: None)


def test_memory_is_given_back_before_the_next_attempt_and_after_the_errors_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    """While the error is handled, its traceback keeps what the failed pass had allocated."""
    freed: list[bool] = []
    monkeypatch.setattr(torch.cuda, "device", lambda _: torch.inference_mode())
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: freed.append(sys.exc_info()[0] is None))
    batch, target = padded((4, 4)), SmallTarget(5)
    features_in_parts(target, batch, None, torch.device("cuda"), PAD, lambda _: None)
    assert freed == [True]


def test_lengths_in_use_end_with_the_last_token_or_anchor() -> None:
    """A real token may be the padding's: what an anchor needs is never cut off."""
    batch = padded((7, 3, 5))
    assert lengths_in_use(batch, PAD) == [7, 3, 5]
    batch.tokens_RS[0, 4:] = PAD
    batch.tokens_RS[1] = PAD
    batch.anchors_RA[0, 0] = 6
    assert lengths_in_use(batch, PAD) == [6, 1, 5]


@pytest.mark.parametrize("kind", ["padded", "packed"])
def test_split_features_of_a_real_target_agree_with_the_whole(
    micro_target: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Not to the bit: products of other shapes sum in another order."""
    target = FrozenTarget(micro_target, (1, 2), "float32", "sdpa", "cpu")
    batch = padded((40, 37, 11, 9, 5)) if kind == "padded" else packed((40, 37, 11, 9, 5))
    expected = target.features(batch.tokens_RS, None, batch.documents)
    tried: list[int] = []

    def tight(tokens: Tensor, should_stop: None, documents: Documents | None, /) -> Tensor:
        tried.append(tokens.numel())
        if tokens.numel() > 45:
            raise torch.OutOfMemoryError
        return target.features(tokens, should_stop, documents)

    for most in (16, 512):  # documents one by one, and in runs of several
        monkeypatch.setitem(target_module.TOKENS_PER_RUN, "cpu", most)
        features = features_in_parts(tight, batch, None, CPU, target.shape.pad_token_id, lambda _: None)
        real = batch.tokens_RS != target.shape.pad_token_id
        torch.testing.assert_close(features[real], expected[real], rtol=1e-5, atol=1e-5 * float(expected.abs().max()))
    assert len(tried) > 6


def test_a_pass_inside_of_a_split_can_be_given_up(micro_target: Path) -> None:
    target = FrozenTarget(micro_target, (1, 2), "float32", "sdpa", "cpu")
    first = True

    def tight(tokens: Tensor, should_stop: object, documents: Documents | None, /) -> Tensor:
        nonlocal first
        if first:
            first = False
            raise torch.OutOfMemoryError
        return target.features(tokens, lambda: True, documents)

    with pytest.raises(target_module.ForwardAbandoned):
        features_in_parts(tight, padded((9, 9)), None, CPU, PAD, lambda _: None)
