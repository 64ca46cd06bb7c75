"""Samples as a reader sees them: what is supervised stands out, and nothing is hidden."""

from __future__ import annotations

import re

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_core.data.rows import Conversation
from dflash_core.data.show import SUPERVISED_OFF, SUPERVISED_ON, show_samples
from tests.test_data_template import encode, talk
from tests.test_data_tokenizer import CHATML, MARKED, byte_tokenizer, merging_tokenizer, prefix_space_tokenizer


def shown(conversation: Conversation, colour: bool, template: str = MARKED) -> list[str]:
    tokenizer = byte_tokenizer(template)
    encoded = encode(tokenizer, conversation)
    samples = [("id-7", encoded.input_ids, encoded.loss_mask)]
    return list(show_samples(samples, tokenizer, colour=colour, sources=["web"]))


def test_without_colour_supervised_text_stands_in_brackets_special_tokens_visible() -> None:
    lines = shown(talk(("user", "é?"), ("assistant", "one\ntwo 😀"), ("user", "r"), ("assistant", "b")), colour=False)
    assert lines == [
        "--- id-7: web, 25 tokens, 15 supervised (60 %)",
        "<|user|>é?<|end|><|assistant|>⟦one",
        "two 😀<|end|>⟧<|user|>r<|end|><|assistant|>⟦b<|end|>⟧",
    ]


def test_with_colour_each_line_switches_it_on_and_off_by_itself() -> None:
    lines = shown(talk(("user", "q"), ("assistant", "one\n\ntwo")), colour=True, template=CHATML)
    on, off = SUPERVISED_ON, SUPERVISED_OFF
    assert lines[1:] == ["<|user|>", "q<|end|>", "<|assistant|>", f"{on}one{off}", "", f"{on}two<|end|>{off}", ""]
    assert all(line.count(on) == line.count(off) for line in lines)


def test_control_characters_are_made_visible_and_cannot_steer_the_terminal() -> None:
    lines = shown(talk(("user", "a\x1b[31m\tb\r"), ("assistant", "c\u202ed\x00e\u2028")), colour=False)
    assert lines[1] == r"<|user|>a\x1b[31m\tb\r<|end|><|assistant|>⟦c\u202ed\x00e\u2028<|end|>⟧"
    (header,) = list(show_samples([("a\n\x1bb", np.zeros(0, np.int32), np.zeros(0, bool))], byte_tokenizer(), colour=False))[:1]
    assert header == r"--- a␊\x1bb: 0 tokens, 0 supervised (0 %)"


def test_a_character_that_the_mask_divides_is_shown_whole() -> None:
    ids = np.array([*"a😀b".encode()], dtype=np.int32)
    for edge in range(1, 6):
        mask = np.arange(len(ids)) >= edge
        text = "".join(list(show_samples([("x", ids, mask)], byte_tokenizer(), colour=False))[1:])
        assert "\ufffd" not in text and text.replace("⟦", "").replace("⟧", "") == "a😀b"
    broken = np.array([*b"a", 0xF0, 0x9F, *b"b"], dtype=np.int32)
    lines = list(show_samples([("x", broken, np.array([0, 1, 1, 0], bool))], byte_tokenizer(), colour=False))
    assert lines[1].startswith("a⟦\ufffd") and lines[1].endswith("⟧b"), "bytes that are no character cannot be shown"


@settings(max_examples=40, deadline=None)
@given(st.text(st.sampled_from("ab \n<>éß€😀{}"), min_size=1, max_size=20), st.data())
def test_nothing_is_lost_whatever_the_mask(text: str, data: st.DataObject) -> None:
    for tokenizer in (byte_tokenizer(), merging_tokenizer(CHATML)):
        ids = np.array(tokenizer(text, add_special_tokens=False)["input_ids"], dtype=np.int32)
        mask = np.array(data.draw(st.lists(st.booleans(), min_size=len(ids), max_size=len(ids))), dtype=bool)
        plain = "\n".join(list(show_samples([("x", ids, mask)], tokenizer, colour=False))[1:])
        coloured = "\n".join(list(show_samples([("x", ids, mask)], tokenizer, colour=True))[1:])
        assert re.sub("[⟦⟧]", "", plain) == re.sub("\x1b\\[[0-9;]*m", "", coloured) == text


def test_samples_of_tokenizers_that_add_a_space_are_readable() -> None:
    tokenizer = prefix_space_tokenizer(CHATML)
    encoded = encode(tokenizer, talk(("user", "some question"), ("assistant", "The answer is 42.")))
    lines = list(show_samples([("x", encoded.input_ids, encoded.loss_mask)], tokenizer, colour=False))
    assert "⟦" in "".join(lines) and "answer is 42.<|end|>⟧" in "".join(lines)
