"""Encoding many texts with known parts is the same as encoding each of them, whatever the tokenizer's added tokens do."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from dflash_core.data import pieces
from dflash_core.data.pieces import PieceEncoder
from tests.test_data_tokenizer import CHATML, SPECIAL, merging_tokenizer, prefix_space_tokenizer

ADDED = {
    "plain": [
        AddedToken("<|end|>x", normalized=False),
        AddedToken("<|", normalized=False),
        AddedToken("assistant", normalized=True),
    ],
    "takes space on the left": [AddedToken("[left]", lstrip=True, normalized=False)],
    "takes space on the right": [AddedToken("[right]", rstrip=True, normalized=False)],
    "only as a word": [AddedToken("[word]", single_word=True, normalized=False)],
}
WORDS = [*SPECIAL, "<|", "|>", "assistant", "[left]", "[right]", "[word]", " ", "\n", "a", "the answer", "def f(x):", "é", "<"]


@cache
def tokenizer(kind: str) -> PreTrainedTokenizerFast:
    made = PreTrainedTokenizerFast(tokenizer_object=merging_tokenizer(CHATML).backend_tokenizer)
    made.add_tokens(ADDED[kind])
    return made


@settings(max_examples=60, deadline=None)
@pytest.mark.parametrize("kind", ADDED)
@given(texts=st.lists(st.lists(st.sampled_from(WORDS), max_size=12).map("".join), max_size=6))
def test_reference_each_text_is_encoded_as_the_tokenizer_does_it_alone(kind: str, texts: list[str]) -> None:
    encoder, backend = PieceEncoder(tokenizer(kind)), tokenizer(kind).backend_tokenizer
    expected = [backend.encode(text, add_special_tokens=False).ids for text in texts]
    assert encoder.encode(texts) == expected
    assert encoder.encode(texts) == expected, "known parts are the same again"


def test_texts_that_begin_with_a_space_of_the_tokenizers_own_are_encoded_alike() -> None:
    made = prefix_space_tokenizer(CHATML)
    texts = ["a<|end|>b", "b", "<|user|>a b<|end|>"]
    assert PieceEncoder(made).encode(texts) == [made.backend_tokenizer.encode(t, add_special_tokens=False).ids for t in texts]


def test_what_comes_again_is_not_encoded_again_and_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "MOST_KNOWN", 8)
    encoder = PieceEncoder(tokenizer("plain"))

    class Counting:
        asked: list[str] = []  # noqa: RUF012 - one test's own

        def encode_batch_fast(self, texts: list[str], add_special_tokens: bool) -> object:
            self.asked += texts
            return tokenizer("plain").backend_tokenizer.encode_batch_fast(texts, add_special_tokens=add_special_tokens)

    encoder._backend = Counting()
    for n in range(5):
        encoder.encode([f"<|user|>header<|end|>{n}<|end|>", "header"])
    assert encoder._backend.asked == ["header", "0", "1", "2", "3", "4"]
    for n in range(100):
        encoder.encode([f"{n}"] * 2)
        assert len(encoder._known) <= 9
    long = "x" * 300
    encoder._known.clear()
    encoder.encode([long])
    assert not encoder._known, "long texts are not remembered"
