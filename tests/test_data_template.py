"""Ids and loss masks: supervised is what the target itself wrote, token for token, and nothing else."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from dflash_core.data import BadRow, ChatEncoder, Conversation, Encoded, Message
from tests.test_data_tokenizer import (
    CHATML,
    CHATML_MARKED,
    MARKED,
    THINKING,
    byte_tokenizer,
    merging_tokenizer,
    prefix_space_tokenizer,
)

TOKENIZERS = {
    "byte, marks": lambda: byte_tokenizer(MARKED),
    "byte, prefixes": lambda: byte_tokenizer(CHATML),
    "merging, marks": lambda: merging_tokenizer(CHATML_MARKED),
    "merging, prefixes": lambda: merging_tokenizer(CHATML),
}
contents = st.text(st.sampled_from("ab \n<|>end{}é€😀\u2028\t0"), min_size=1, max_size=12).filter(
    lambda t: t.strip() and "<|end|>" not in t
)
turns = st.lists(st.tuples(st.sampled_from(["system", "user", "assistant"]), contents), max_size=4).map(
    lambda given: tuple(Message(*turn) for turn in [*given, ("user", "q"), ("assistant", "\n\n a")])
)


def talk(*messages: tuple[str, str], finish_reason: str | None = None) -> Conversation:
    return Conversation("id", "source", tuple(Message(*message) for message in messages), finish_reason, "x.jsonl", 1)


def encode(tokenizer: PreTrainedTokenizerFast, conversation: Conversation) -> Encoded:
    encoder = ChatEncoder(tokenizer)
    return encoder.encode(encoder.render(conversation))[0]


def decode(tokenizer: PreTrainedTokenizerFast, ids: np.ndarray) -> str:
    return str(tokenizer.decode(ids.tolist(), skip_special_tokens=False))


def supervised_runs(encoded: Encoded) -> list[np.ndarray]:
    edges = np.flatnonzero(np.diff(np.concatenate([[0], encoded.loss_mask.astype(np.int8), [0]])))
    return [encoded.input_ids[start:end] for start, end in edges.reshape(-1, 2)]


def test_golden_ids_and_mask_of_a_small_conversation() -> None:
    encoded = encode(
        byte_tokenizer(MARKED), talk(("system", "s"), ("user", "é"), ("assistant", "ok"), ("user", "u"), ("assistant", "!"))
    )
    system, user, assistant, end = 257, 258, 259, 260
    expected = [system, 115, end, user, 0xC3, 0xA9, end, assistant, 111, 107, end, user, 117, end, assistant, 33, end]
    assert encoded.input_ids.tolist() == expected
    assert encoded.loss_mask.astype(int).tolist() == [0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 0, 0, 0, 0, 1, 1]
    assert (encoded.input_ids.dtype, encoded.loss_mask.dtype) == (np.int32, np.bool_)


@pytest.mark.parametrize("kind", TOKENIZERS)
@settings(max_examples=40, deadline=None)
@given(messages=turns)
def test_supervised_tokens_are_the_answers_with_their_end_tokens(kind: str, messages: tuple[Message, ...]) -> None:
    tokenizer = TOKENIZERS[kind]()
    encoded = encode(tokenizer, talk(*messages))
    answers = [message.content for message in messages if message.role == "assistant"]
    assert [decode(tokenizer, run) for run in supervised_runs(encoded)] == [answer + "<|end|>" for answer in answers]
    whole = tokenizer.apply_chat_template([message._asdict() for message in messages], tokenize=False)
    assert decode(tokenizer, encoded.input_ids) == whole


@pytest.mark.parametrize("kind", TOKENIZERS)
@settings(max_examples=30, deadline=None)
@given(messages=turns)
def test_what_stands_before_an_answer_is_the_prompt_that_serving_would_send(kind: str, messages: tuple[Message, ...]) -> None:
    tokenizer = TOKENIZERS[kind]()
    first = next(index for index, message in enumerate(messages) if message.role == "assistant")
    encoded = encode(tokenizer, talk(*messages[: first + 1]))
    prompt = (
        tokenizer.apply_chat_template([m._asdict() for m in messages[:first]], add_generation_prompt=True)["input_ids"]
        if first
        else None
    )
    start = int(encoded.loss_mask.argmax())
    assert prompt is None or encoded.input_ids[:start].tolist() == list(prompt)
    assert prompt is None or ChatEncoder(tokenizer).encode_prompt(messages[:first]).tolist() == list(prompt)


@settings(max_examples=40, deadline=None)
@given(messages=turns)
def test_reference_transformers_own_mask_where_no_token_can_straddle(messages: tuple[Message, ...]) -> None:
    tokenizer = byte_tokenizer(MARKED)
    encoded = encode(tokenizer, talk(*messages))
    slow = tokenizer.apply_chat_template([m._asdict() for m in messages], return_dict=True, return_assistant_tokens_mask=True)
    assert encoded.input_ids.tolist() == slow["input_ids"]
    assert encoded.loss_mask.astype(int).tolist() == slow["assistant_masks"]


@settings(max_examples=40, deadline=None)
@given(messages=turns, cut=st.booleans())
def test_marks_and_prefixes_agree_on_the_same_format(messages: tuple[Message, ...], cut: bool) -> None:
    conversation = talk(*messages, finish_reason="length" if cut else "stop")
    by_marks, by_prefixes = (encode(merging_tokenizer(template), conversation) for template in (CHATML_MARKED, CHATML))
    assert np.array_equal(by_marks.input_ids, by_prefixes.input_ids)
    assert np.array_equal(by_marks.loss_mask, by_prefixes.loss_mask)


def test_the_merging_tokenizer_does_merge_across_the_edge_when_the_whole_text_is_encoded() -> None:
    """Without this the tests above would not touch the case that they are for."""
    tokenizer = merging_tokenizer(CHATML)
    conversation = talk(("user", "q"), ("assistant", "\n\na"))
    whole = tokenizer.apply_chat_template([m._asdict() for m in conversation.messages])["input_ids"]
    assert encode(tokenizer, conversation).input_ids.tolist() != list(whole)


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_a_cut_answer_ends_the_sequence_without_an_end_token(kind: str) -> None:
    tokenizer = TOKENIZERS[kind]()
    encoded = encode(
        tokenizer, talk(("user", "q"), ("assistant", "one"), ("user", "r"), ("assistant", "two "), finish_reason="length")
    )
    assert [decode(tokenizer, run) for run in supervised_runs(encoded)] == ["one<|end|>", "two "]
    assert encoded.loss_mask[-1]
    complete = encode(tokenizer, talk(("user", "q"), ("assistant", "one"), ("user", "r"), ("assistant", "two ")))
    assert len(complete.input_ids) > len(encoded.input_ids)


def test_an_empty_think_block_that_the_template_inserts_is_not_supervised() -> None:
    tokenizer = byte_tokenizer(THINKING.replace("loop.last", "true"))
    for answer in ("a", "think", "think>", "end", "<think>\n\n</think>\n\na", "\nassistant"):
        encoded = encode(tokenizer, talk(("user", "q"), ("assistant", answer), ("user", answer), ("assistant", answer)))
        assert [decode(tokenizer, run) for run in supervised_runs(encoded)] == [f"{answer}<|end|>"] * 2


def test_a_template_that_rewrites_history_is_refused_where_it_does() -> None:
    encoder = ChatEncoder(byte_tokenizer(THINKING))
    single = talk(("user", "q"), ("assistant", "a"))
    assert encoder.render(single)[0].text.endswith("a<|end|>\n")
    with pytest.raises(BadRow, match=r"^template rewrites history \(message 2\)$"):
        encoder.render(talk(*single.messages, ("user", "r"), ("assistant", "b")))
    summary = "{% for m in messages %}<|user|>{{ messages | length }}{{ m['content'] }}<|end|>{% endfor %}"
    with pytest.raises(BadRow, match="template rewrites history"):
        ChatEncoder(byte_tokenizer(summary)).render(single)


def one_answer(template: str, answer: str, **more: str) -> str:
    tokenizer = byte_tokenizer(template)
    encoded = encode(tokenizer, talk(("user", "q"), ("assistant", answer), **more))
    return "|".join(decode(tokenizer, run) for run in supervised_runs(encoded))


def test_templates_that_trim_or_space_answers_keep_their_end_token() -> None:
    trimming = CHATML.replace("m['content']", "m['content'].strip()")
    assert one_answer(trimming, " \na b \n") == "a b<|end|>"
    assert one_answer(CHATML.replace("m['content']", "m['content'].rstrip()"), " a ") == " a<|end|>"
    spacing = CHATML.replace("'<|end|>\n'", "'\n <|end|>\n'")
    assert one_answer(spacing, "a") == "a\n <|end|>"
    assert one_answer(spacing, "a", finish_reason="length") == "a"
    end_outside = MARKED.replace("<|end|>{%- endgeneration -%}", "{%- endgeneration -%}<|end|>")
    assert one_answer(end_outside, "a") == "a<|end|>"
    newline_inside = CHATML_MARKED.replace("'<|end|>' }}{% endgeneration %}{{ '\n' }}", "'<|end|>\n' }}{% endgeneration %}")
    assert newline_inside != CHATML_MARKED
    assert one_answer(newline_inside, "a") == "a<|end|>"


def test_what_an_author_marked_before_the_content_is_supervised() -> None:
    channel = MARKED.replace("{%- generation -%}", "{%- generation -%}<final>")
    assert one_answer(channel, "a") == "<final>a<|end|>"


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        (
            MARKED.replace("m['content'] }}<|end|>{%- endg", "m['content'] | upper }}<|end|>{%- endg"),
            "template alters the answer (answer 1)",
        ),
        (
            MARKED.replace("<|end|>{%- endgeneration", "{%- endgeneration"),
            "no end-of-turn token (answer 1: no special token follows it)",
        ),
        ("{% for m in messages %}" + MARKED + "{% endfor %}", "template marks do not fit (2 generation marks for 1 answers)"),
        ("{{ messages[5].content }}", "template refuses (list object has no element 5)"),
        ("{{ raise_exception('first\nsecond') }}", "template refuses (first second)"),
    ],
)
def test_templates_that_cannot_be_masked_are_refused_with_a_reason(template: str, problem: str) -> None:
    with pytest.raises(BadRow) as caught:
        ChatEncoder(byte_tokenizer(template)).render(talk(("user", "q"), ("assistant", "abc")))
    assert str(caught.value) == problem


def test_an_answer_repeated_by_the_user_is_not_taken_for_the_answer() -> None:
    upper = MARKED.replace("m['content'] }}<|end|>{%- endg", "m['content'] | upper }}<|end|>{%- endg")
    with pytest.raises(BadRow, match="template alters the answer"):
        ChatEncoder(byte_tokenizer(upper)).render(talk(("user", "q"), ("assistant", "abc"), ("user", "abc")))


@pytest.mark.parametrize("role", ["system", "user", "assistant"])
@pytest.mark.parametrize("token", ["<|end|>", "<|mask|>", "<|assistant|>"])
def test_content_cannot_smuggle_special_tokens_in(role: str, token: str) -> None:
    messages = [("system", "s"), ("user", "q"), ("assistant", "a")]
    messages = [(name, f"x{token}y") if name == role else (name, text) for name, text in messages]
    number = [name for name, _ in messages].index(role) + 1
    for template in (MARKED, CHATML):
        encoder = ChatEncoder(byte_tokenizer(template))
        with pytest.raises(BadRow) as caught:
            encoder.render(talk(*messages))
        assert str(caught.value) == f"special token in content (message {number}, character 2: {token})"
        if role != "assistant":
            with pytest.raises(BadRow, match="special token in content"):
                encoder.encode_prompt([Message(*message) for message in messages[:2]])


def test_a_truncation_stored_in_the_tokenizer_file_does_not_shorten_anything() -> None:
    tokenizer = byte_tokenizer(MARKED)
    tokenizer.backend_tokenizer.enable_truncation(4)
    assert one_answer(MARKED, "x" * 50) == "x" * 50 + "<|end|>"


def test_a_tokenizer_that_adds_a_space_encodes_the_whole_text_and_masks_by_offsets() -> None:
    tokenizer = prefix_space_tokenizer(CHATML)
    conversation = talk(("user", "some question"), ("assistant", "The answer is 42."), ("user", "more"), ("assistant", "a b"))
    assert "\na" in tokenizer.get_vocab(), "the last answer's first letter must be able to merge with the line break before it"
    encoded = encode(tokenizer, conversation)
    whole = tokenizer.apply_chat_template([m._asdict() for m in conversation.messages])["input_ids"]
    assert encoded.input_ids.tolist() == list(whole)
    runs = ["".join(tokenizer.convert_ids_to_tokens(run.tolist())).replace("▁", " ") for run in supervised_runs(encoded)]
    assert runs == ["The answer is 42.<|end|>", " b<|end|>"], "a token that straddles the edge is not supervised"


@settings(max_examples=20, deadline=None)
@given(st.lists(turns, min_size=1, max_size=5))
def test_a_batch_encodes_like_its_members(conversations: list[tuple[Message, ...]]) -> None:
    encoder = ChatEncoder(merging_tokenizer(CHATML))
    rendered = [encoder.render(talk(*messages))[0] for messages in conversations]
    for single, together in zip((encoder.encode([item])[0] for item in rendered), encoder.encode(rendered), strict=True):
        assert np.array_equal(single.input_ids, together.input_ids) and np.array_equal(single.loss_mask, together.loss_mask)
