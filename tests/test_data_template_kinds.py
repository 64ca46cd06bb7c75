"""Templates as real targets have them, each re-told in few lines: what is supervised, and what is history."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_core.data.chat_template import ChatTemplate
from dflash_core.data.rows import BadRow, Conversation, Message
from dflash_core.data.template import ChatEncoder, Rendered
from dflash_core.errors import ConfigError
from tests.test_data_template import decode, encode, supervised_runs, talk
from tests.test_data_tokenizer import CHATML, CHATML_MARKED, MARKED, THINKING, byte_tokenizer, end_adding_tokenizer

CALLS = (
    '{%- for c in m.tool_calls or [] -%}{{ \'\n<tool_call>\n{"name": "\' ~ c.function.name ~ \'", "arguments": \''
    " ~ (c.function.arguments | tojson) ~ '}\n</tool_call>' }}{%- endfor -%}"
)
# ChatML with tools in the manner of Hermes; only appends.
HERMES = (
    "{%- if tools -%}{{ '<|system|>\n' ~ (tools | tojson) ~ '<|end|>\n' }}{%- endif -%}"
    "{%- for m in messages -%}{%- if m.role == 'tool' -%}{{ '<|user|>\n<tool_response>' ~ m.content ~ '</tool_response>' }}"
    "{%- else -%}{{ '<|' ~ m.role ~ '|>\n' ~ m.content }}" + CALLS + "{%- endif -%}{{ '<|end|>\n' }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|assistant|>\n' }}{%- endif -%}"
)
# A default system turn, as SmolLM2 inserts it.
SMOLLM = (
    "{% for m in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|system|>\nBe nice<|end|>\n' }}{% endif %}"
    "{{'<|' + m['role'] + '|>\n' + m['content'] + '<|end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
# Llama 3: trims content, sets the system turn apart, begins the text with a token of its own.
LLAMA = (
    "{{- '<|pad|>' }}{%- if messages[0]['role'] == 'system' %}{%- set system = messages[0]['content'] | trim %}"
    "{%- set rest = messages[1:] %}{%- else %}{%- set system = '' %}{%- set rest = messages %}{%- endif %}"
    "{{- '<|system|>\n\n' + system + '<|end|>' }}{%- for m in rest %}"
    "{{- '<|' + m['role'] + '|>\n\n' + m['content'] | trim + '<|end|>' }}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|assistant|>\n\n' }}{%- endif %}"
)
# Qwen 3: shows reasoning only behind the last question, inserts an empty think block there, drops it everywhere else.
ANSWER = (
    "{%- set r = m.reasoning_content or '' -%}{%- if loop.index0 > ns.last and (loop.last or r) -%}"
    "{{ '<think>\n' ~ r.strip('\n') ~ '\n</think>\n\n' }}{%- endif -%}{{ m.content.lstrip('\n') }}" + CALLS + "{{ '<|end|>' }}"
)
QWEN = (
    "{%- set ns = namespace(open=true, last=messages|length - 1) -%}{%- for m in messages[::-1] -%}"
    "{%- if ns.open and m.role == 'user' -%}{%- set ns.open = false -%}{%- set ns.last = messages|length - loop.index -%}"
    "{%- endif -%}{%- endfor -%}{%- for m in messages -%}{%- if m.role == 'assistant' -%}"
    "{{ '<|assistant|>\n' }}[ANSWER]{{ '\n' }}"
    "{%- else -%}{{ '<|' ~ ('user' if m.role == 'tool' else m.role) ~ '|>\n' ~ m.content ~ '<|end|>\n' }}"
    "{%- endif -%}{%- endfor -%}{%- if add_generation_prompt -%}{{ '<|assistant|>\n' }}"
    "{%- if enable_thinking is defined and not enable_thinking -%}{{ '<think>\n\n</think>\n\n' }}{%- endif -%}{%- endif -%}"
)
QWEN_MARKED = QWEN.replace("[ANSWER]", "{%- generation -%}" + ANSWER + "{%- endgeneration -%}")
QWEN = QWEN.replace("[ANSWER]", ANSWER)
# The prompt opens the reasoning already, as in the thinking-only releases of Qwen 3.
QWEN_OPENED = QWEN.replace("{{ '<|assistant|>\n' }}{%- if enable", "{{ '<|assistant|>\n<think>\n' }}{%- if enable")
# DeepSeek R1: the prompt opens the reasoning, and the template cuts it out of every answer.
R1 = (
    "{%- for m in messages -%}{%- if m.role == 'assistant' -%}{{ '<|assistant|>' ~ m.content.split('</think>')[-1] ~ '<|end|>' }}"
    "{%- else -%}{{ '<|' ~ m.role ~ '|>' ~ m.content }}{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|assistant|><think>\n' }}{%- endif -%}"
)
APPENDING = {
    "marked": MARKED,
    "chatml": CHATML,
    "chatml marked": CHATML_MARKED,
    "hermes": HERMES,
    "smollm": SMOLLM,
    "llama": LLAMA,
}
REWRITING = {"thinking": THINKING, "qwen": QWEN, "qwen marked": QWEN_MARKED, "qwen opened": QWEN_OPENED, "r1": R1}


def function_call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def answer(content: str, **more: Any) -> Message:
    return Message("assistant", content, **more)


def conversation(*messages: Message, **more: Any) -> Conversation:
    return Conversation("id", "source", messages, more.pop("finish_reason", None), "x.jsonl", 1, **more)


def supervised(template: str, talked: Conversation, mode: Any = "reject", **variables: Any) -> list[list[str]]:
    """The supervised runs of every sequence, decoded from the ids."""
    tokenizer = byte_tokenizer(template)
    encoder = ChatEncoder(tokenizer, rewritten_history=mode, template_variables=variables)
    rendered = encoder.render(talked)
    encoded = encoder.encode(rendered)
    assert [decode(tokenizer, item.input_ids) for item in encoded] == [item.text for item in rendered]
    return [[decode(tokenizer, run) for run in supervised_runs(item)] for item in encoded]


Q, R = Message("user", "q"), Message("user", "r")


def test_reasoning_from_the_row_is_supervised_with_its_tags_an_empty_block_is_not() -> None:
    reasoned = conversation(Q, answer("a", reasoning="why"))
    for template in (QWEN, QWEN_MARKED):
        assert supervised(template, reasoned) == [["<think>\nwhy\n</think>\n\na<|end|>"]]
        assert supervised(template, conversation(Q, answer("a"))) == [["a<|end|>"]]
        assert supervised(template, conversation(Q, answer("a")), enable_thinking=False) == [["a<|end|>"]]
    assert supervised(QWEN_OPENED, reasoned) == [["why\n</think>\n\na<|end|>"]], "the prompt has the opening tag already"
    assert supervised(QWEN_OPENED, conversation(Q, answer("a"))) == [["a<|end|>"]]


def test_reasoning_inside_the_content_is_the_same_as_in_a_field_of_its_own() -> None:
    inside = conversation(Q, answer("<think>\nwhy\n</think>\n\na"))
    assert supervised(CHATML, inside) == [["<think>\nwhy\n</think>\n\na<|end|>"]]
    shown = QWEN_OPENED.replace("m.reasoning_content or ''", "m.content.split('</think>')[0].split('<think>')[-1]").replace(
        "m.content.lstrip('\n')", "m.content.split('</think>')[-1].lstrip('\n')"
    )
    assert supervised(shown, inside) == [["why\n</think>\n\na<|end|>"]]


def test_the_think_block_of_the_prompt_is_part_of_every_prompt() -> None:
    encoder = ChatEncoder(byte_tokenizer(QWEN), template_variables={"enable_thinking": False})
    prompt = decode(byte_tokenizer(QWEN), encoder.encode_prompt([Q]))
    assert prompt == "<|user|>\nq<|end|>\n<|assistant|>\n<think>\n\n</think>\n\n"
    assert encoder.render(conversation(Q, answer("a")))[0].text == prompt + "a<|end|>\n"


NO_END = "no end-of-turn token (answer 1: no special token follows its tool calls)"
CALLING = answer("let me see", tool_calls=(function_call("add", x=1, y="é\n"), function_call("now")))
CALLS_TEXT = (
    '\n<tool_call>\n{"name": "add", "arguments": {"x": 1, "y": "é\\n"}}\n</tool_call>'
    '\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call><|end|>'
)


@pytest.mark.parametrize("template", [HERMES, QWEN, QWEN_MARKED])
def test_tool_calls_are_supervised_and_their_results_are_not(template: str) -> None:
    result = Message("tool", "3", name="add", tool_call_id="c")
    talked = conversation(Q, CALLING, result, answer("three"), tools=({"name": "add"},))
    if template is HERMES:
        assert supervised(template, talked) == [["let me see" + CALLS_TEXT, "three<|end|>"]]
        assert '<|system|>\n[{"name": "add"}]<|end|>' in ChatEncoder(byte_tokenizer(template)).render(talked)[0].text
    else:
        assert supervised(template, talked, "each_answer") == [["let me see" + CALLS_TEXT], ["three<|end|>"]]
    bare = CALLING._replace(content="")
    assert supervised(template, conversation(Q, bare)) == [[CALLS_TEXT]] or template is not HERMES
    assert supervised(template, conversation(Q, bare))[0][0].strip() == CALLS_TEXT.strip()


def test_content_before_tool_calls_is_told_from_an_inserted_block_that_looks_like_it() -> None:
    for content in ("<", "<think>", "think", "</"):
        for template in (QWEN, QWEN_MARKED):
            assert supervised(template, conversation(Q, CALLING._replace(content=content))) == [[content + CALLS_TEXT]]
    own = "<think>\n\n</think>\n\nx"
    assert supervised(HERMES, conversation(Q, CALLING._replace(content=own))) == [[own + CALLS_TEXT]]


def test_reasoning_and_tool_calls_in_one_turn() -> None:
    for content in ("so", ""):
        both = conversation(Q, CALLING._replace(content=content, reasoning="why add"))
        assert supervised(QWEN, both) == [["<think>\nwhy add\n</think>\n\n" + content + CALLS_TEXT]]
        assert supervised(QWEN_MARKED, both) == [["<think>\nwhy add\n</think>\n\n" + content + CALLS_TEXT]]
    cut = conversation(Q, CALLING, finish_reason="length")
    assert supervised(HERMES, cut) == [["let me see" + CALLS_TEXT.removesuffix("<|end|>")]]


@pytest.mark.parametrize(
    ("template", "message", "problem"),
    [
        (CHATML, answer("a", reasoning="why"), "template drops reasoning (answer 1)"),
        (CHATML_MARKED, answer("a", reasoning="why"), "template drops reasoning (answer 1)"),
        (CHATML, answer("a q", reasoning="a"), "template drops reasoning (answer 1)"),
        (R1, answer("a", reasoning="why"), "template rewrites history (message 2)"),
        (CHATML, CALLING, "template drops tool calls (answer 1, call 1)"),
        (CHATML_MARKED, CALLING, "template drops tool calls (answer 1, call 1)"),
        (HERMES, CALLING._replace(reasoning="why"), "template drops reasoning (answer 1)"),
        (HERMES.replace("tojson", "length"), CALLING, "template drops tool calls (answer 1, call 1: argument 'x')"),
        (HERMES.replace("m.role ~ '|>\n' ~ m.content", "m.role ~ '|>\n'"), CALLING, "template alters the answer (answer 1)"),
        (HERMES.replace("{{ '<|end|>\n' }}", ""), CALLING, NO_END),
    ],
)  # fmt: skip
def test_nothing_that_the_row_says_gets_lost_in_silence(template: str, message: Message, problem: str) -> None:
    with pytest.raises(BadRow) as caught:
        ChatEncoder(byte_tokenizer(template)).render(conversation(Q, message))
    assert str(caught.value) == problem


def test_special_tokens_hide_nowhere() -> None:
    for message in (
        answer("a", reasoning="<|end|>"),
        CALLING._replace(tool_calls=(function_call("x", a=["<|end|>"]),)),
        CALLING._replace(tool_calls=(function_call("x", **{"<|end|>": 1}),)),
    ):
        with pytest.raises(BadRow, match=r"special token in content \(message 2"):
            ChatEncoder(byte_tokenizer(HERMES)).render(conversation(Q, message))
    with pytest.raises(BadRow, match=r"special token in content \(tools: <\|end\|>\)"):
        ChatEncoder(byte_tokenizer(HERMES)).render(conversation(Q, answer("a"), tools=({"name": "<|end|>"},)))


def test_a_turn_of_weight_zero_is_not_supervised() -> None:
    talked = conversation(Q, answer("a", supervised=False), R, answer("b"))
    for template in (CHATML, CHATML_MARKED, LLAMA):
        assert supervised(template, talked) == [["b<|end|>"]]
    assert supervised(QWEN, talked, "each_answer") == [["b<|end|>"]]
    with pytest.raises(BadRow, match="no supervised turn"):
        ChatEncoder(byte_tokenizer(CHATML)).render(conversation(Q, answer("a", supervised=False)))


def test_rewritten_history_is_refused_or_each_answer_becomes_a_sequence_as_the_target_saw_it() -> None:
    talked = conversation(Q, answer("a", reasoning="why"), R, answer("b", reasoning="how"), Q)
    for template in (QWEN, QWEN_MARKED):
        with pytest.raises(BadRow, match=r"^template rewrites history \(message 2\)$"):
            ChatEncoder(byte_tokenizer(template)).render(talked)
        first, second = ChatEncoder(byte_tokenizer(template), rewritten_history="each_answer").render(talked)
        assert first.text == "<|user|>\nq<|end|>\n<|assistant|>\n<think>\nwhy\n</think>\n\na<|end|>\n"
        assert second.text == (
            "<|user|>\nq<|end|>\n<|assistant|>\na<|end|>\n<|user|>\nr<|end|>\n<|assistant|>\n<think>\nhow\n</think>\n\nb<|end|>\n"
        )
        assert (first.sample_id_suffix, second.sample_id_suffix) == ("", "#2")
        thought = ["<think>\nwhy\n</think>\n\na<|end|>", "<think>\nhow\n</think>\n\nb<|end|>"]
        assert supervised(template, talked, "each_answer") == [[text] for text in thought]
        assert supervised(template, talked, "last_answer") == [thought[1:]]
        (last,) = ChatEncoder(byte_tokenizer(template), rewritten_history="last_answer").render(talked)
        assert last == Rendered(second.text, second.spans)
    cut = conversation(*talked.messages[:4], finish_reason="length")
    assert [runs[0][-7:] for runs in supervised(QWEN, cut, "each_answer")] == ["<|end|>", "ink>\n\nb"]


def test_conversations_whose_history_is_not_rewritten_stay_whole() -> None:
    talked = conversation(Q, answer("a"), R, answer("b"))
    for template in (*APPENDING.values(), THINKING.replace("loop.last", "true")):
        assert len(supervised(template, talked, "each_answer")) == len(supervised(template, talked, "last_answer")) == 1


def test_reasoning_that_the_template_cuts_out_is_put_behind_the_prompt_that_opened_it() -> None:
    talked = conversation(Q, answer("<think>\nwhy\n</think>\n\na"), R, answer("<think>\nhow\n</think>\n\nb"))
    assert supervised(R1, talked, "each_answer") == [["why\n</think>\n\na<|end|>"], ["how\n</think>\n\nb<|end|>"]]
    first, second = ChatEncoder(byte_tokenizer(R1), rewritten_history="each_answer").render(talked)
    assert first.text == "<|user|>q<|assistant|><think>\nwhy\n</think>\n\na<|end|>"
    assert second.text == "<|user|>q<|assistant|>\n\na<|end|><|user|>r<|assistant|><think>\nhow\n</think>\n\nb<|end|>"
    beside = conversation(Q, answer("a", reasoning="why"), R, answer("b", reasoning="\nhow\n"))
    first, second = ChatEncoder(byte_tokenizer(R1), rewritten_history="each_answer").render(beside)
    assert first.text == "<|user|>q<|assistant|><think>\nwhy\n</think>\n\na<|end|>"
    assert second.text.endswith("<|user|>r<|assistant|><think>\nhow\n</think>\n\nb<|end|>")
    assert supervised(R1, beside, "each_answer") == [["why\n</think>\n\na<|end|>"], ["how\n</think>\n\nb<|end|>"]]
    with pytest.raises(BadRow, match="template rewrites history"):
        supervised(R1, conversation(Q, answer("a")), "each_answer")


# ---- random conversations ----

words = st.text(st.sampled_from('ab <>/think\n{}"é€😀'), min_size=1, max_size=10).filter(
    lambda text: text.strip() == text and not text.startswith("<think>")
)
arguments = st.dictionaries(
    words, st.integers(-3, 3) | words | st.booleans() | st.none() | st.lists(words, max_size=2), max_size=2
)
calls = st.lists(st.builds(lambda name, args: function_call(name, **args), words, arguments), min_size=1, max_size=2).map(tuple)


@st.composite
def talks(draw: st.DrawFn, tools: bool, reasoning: bool) -> Conversation:
    messages = [Message("system", draw(words))] if draw(st.booleans()) else []
    for _ in range(draw(st.integers(1, 3))):
        messages.append(Message("user", draw(words)))
        if draw(st.booleans()):
            called = draw(calls) if tools and draw(st.booleans()) else ()
            thought = draw(words) if reasoning and draw(st.booleans()) else None
            said = draw(words) if not called or draw(st.booleans()) else ""
            messages.append(answer(said, tool_calls=called, reasoning=thought, supervised=draw(st.integers(0, 4)) > 0))
            if called and draw(st.booleans()):
                messages.append(Message("tool", draw(words)))
    if messages[-1].role != "assistant":
        messages.append(answer(draw(words)))
    reason = draw(st.sampled_from([None, "stop", "length"]))
    return conversation(*messages, finish_reason=reason)


def wrote(message: Message, thinks: bool, cut: bool) -> str:
    """What the target wrote in a turn, in the notation of HERMES and QWEN, told without a template."""
    written = f"<think>\n{message.reasoning.strip(chr(10))}\n</think>\n\n" if message.reasoning and thinks else ""
    written += message.content
    for item in message.tool_calls:
        name, args = item["function"]["name"], json.dumps(item["function"]["arguments"], ensure_ascii=False)
        written += f'\n<tool_call>\n{{"name": "{name}", "arguments": {args}}}\n</tool_call>'
    return written + ("" if cut else "<|end|>")


@settings(max_examples=60, deadline=None)
@given(talked=talks(tools=True, reasoning=False))
def test_supervised_is_what_the_target_wrote_where_history_stays(talked: Conversation) -> None:
    turns = [message for message in talked.messages if message.role == "assistant"]
    cut = talked.finish_reason == "length"
    expected = [wrote(m, False, cut and m is turns[-1]) for m in turns if m.supervised]
    if not expected:
        return
    assert supervised(HERMES, talked) == [expected]
    encoder = ChatEncoder(byte_tokenizer(HERMES))
    whole = byte_tokenizer(HERMES).apply_chat_template([m.for_template() for m in talked.messages], tokenize=False)
    text = encoder.render(talked)[0].text
    assert whole.startswith(text) and (cut or text == whole)


@pytest.mark.parametrize("template", [QWEN, QWEN_MARKED])
@settings(max_examples=40, deadline=None)
@given(talked=talks(tools=True, reasoning=True))
def test_supervised_is_what_the_target_wrote_where_history_is_rewritten(template: str, talked: Conversation) -> None:
    turns = [message for message in talked.messages if message.role == "assistant"]
    cut = talked.finish_reason == "length"
    expected = [wrote(m, True, cut and m is turns[-1]).strip() for m in turns if m.supervised]
    if not expected:
        return
    try:
        found = supervised(template, talked, "each_answer")
    except BadRow as error:  # reasoning ahead of tool results of the same question stays; prefixes are never refused
        pytest.fail(str(error))
    assert [run.strip() for sequence in found for run in sequence] == expected
    assert supervised(template, talked, "last_answer")[-1][-1].strip() == expected[-1]


def outcome(encoder: ChatEncoder, talked: Conversation) -> list[Rendered] | str:
    try:
        return encoder.render(talked)
    except BadRow as error:
        return str(error)


@pytest.mark.parametrize("template", APPENDING)
@settings(max_examples=40, deadline=None)
@given(talked=talks(tools=False, reasoning=False))
def test_reference_one_watched_rendering_finds_what_growing_prefixes_find(template: str, talked: Conversation) -> None:
    fast, slow = ChatEncoder(byte_tokenizer(APPENDING[template])), ChatEncoder(byte_tokenizer(APPENDING[template]))
    assert fast._template.appends_only
    slow._template.appends_only = False
    assert outcome(fast, talked) == outcome(slow, talked)
    assert outcome(fast, talked) == outcome(slow, talked), "the second conversation uses the prompt that the first found"


BEFORE = [
    "<|pad|>",
    "{%- set first = messages[0].content -%}",
    "{%- set ns = namespace(n=0) -%}",
    "{%- set rest = messages[1:] -%}",
    "{%- set last = messages[-1].content -%}",
    "{{ messages | length }}",
    "{%- macro shout(x) -%}{{ x | upper }}{%- endmacro -%}",
    "{{ add_generation_prompt }}",
    "{{ tools }}",
    "{%- if messages[0].role == 'system' -%}S{%- endif -%}",
    "{%- set messages = messages[::-1] -%}",
]
LOOPS = ["messages", "rest | default(messages)", "messages[1:]", "rest", "messages[:2]", "(messages if true else [])"]
INSIDE = [
    "{{ loop.index }}",
    "{{ loop.last }}",
    "{%- if loop.first -%}F{%- endif -%}",
    "{{ loop.length }}",
    "{{ loop.nextitem is defined }}",
    "{{ messages[0].content }}",
    "{{ messages[loop.index0].content }}",
    "{{ (messages[loop.index0 + 1] | default({})).role }}",
    "{%- if add_generation_prompt -%}G{%- endif -%}",
    "{%- for c in m.content -%}{{ c if loop.last }}{%- endfor -%}",
    "{%- for c in messages -%}{{ c.role }}{%- endfor -%}",
    "{%- if loop.index == 2 -%}{% break %}{%- endif -%}",
    "{% filter upper %}x{% endfilter %}",
    "{%- set x = m.content -%}",
    "{{ loop }}",
    "{{ tools }}",
]
AFTER = ["", "<|pad|>", "{{ x }}", "{%- if add_generation_prompt -%}{{ messages | length }}{%- endif -%}", "{{ '' }}"]
PROMPTS = [
    "<|assistant|>",
    "<|assistant|>{{ mode }}",
    "<|assistant|>{{ x }}",
    "<|assistant|>{{ tools }}",
    "<|assistant|>{{ messages[0].role }}",
]


@settings(max_examples=80, deadline=None)
@given(
    before=st.lists(st.sampled_from(BEFORE), max_size=2),
    loop=st.sampled_from(LOOPS),
    inside=st.lists(st.sampled_from(INSIDE), max_size=2),
    after=st.sampled_from(AFTER),
    prompt=st.sampled_from(PROMPTS),
    talked=talks(tools=False, reasoning=False),
)
def test_reference_no_template_is_taken_for_appending_that_is_not(
    before: list[str], loop: str, inside: list[str], after: str, prompt: str, talked: Conversation
) -> None:
    source = (
        "".join(before)
        + "{%- for m in "
        + loop
        + " -%}"
        + "".join(inside)
        + "<|{{ m.role }}|>{{ m.content }}<|end|>{%- endfor -%}"
    )
    source += after + "{%- if add_generation_prompt -%}" + prompt + "{%- endif -%}"
    template = ChatTemplate(source, {"mode": "M"})
    if not template.appends_only:
        return
    turns = [message.for_template() for message in talked.messages]
    try:
        text, _, borders = template.trace(turns, None)
        if borders is None:
            return
        prefixes = [template.text(turns[:count], None) for count in range(1, len(turns) + 1)]
        prompts = [template.text(turns[:count], None, generation_prompt=True) for count in range(1, len(turns) + 1)]
    except BadRow:
        return
    assert [text[:end] for end in borders[1:]] == prefixes
    assert len({shown[len(prefix) :] for shown, prefix in zip(prompts, prefixes, strict=True)}) == 1


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        *((template, True) for template in APPENDING.values()),
        *((template, template is R1) for template in REWRITING.values()),
        (CHATML.replace("{% for m", "{{ messages | length }}{% for m"), False),
        (CHATML.replace("{% for m in messages %}", "{% for m in messages if m.role != 'x' %}"), False),
        (CHATML.replace("'<|end|>\n' }}", "'<|end|>\n' }}{{ loop.last }}"), False),
        (CHATML.replace("{% if add", "tail{% if add"), False),
        (CHATML.replace("{{ '<|assistant|>\n' }}", "{{ '<|assistant|>\n' }}{% for m in tools %}x{% endfor %}"), False),
        (CHATML.replace("{% if add_generation_prompt %}", "{% if add_generation_prompt and messages %}"), False),
        (CHATML.replace("{% if add_generation_prompt %}", "{% if add_generation_prompt and think %}"), True),
    ],
)
def test_which_templates_are_proved_to_append(template: str, expected: bool) -> None:
    assert ChatTemplate(template, {}).appends_only is expected


def test_a_template_that_does_not_compile_is_one_line() -> None:
    with pytest.raises(ConfigError, match=r"^the target's chat template cannot be compiled \(line 2: ") as caught:
        ChatEncoder(byte_tokenizer("a\n{% for %}"))
    assert "\n" not in str(caught.value)


# ---- plain text ----


def test_plain_text_is_supervised_with_its_end_and_without_the_beginning_that_the_tokenizer_adds() -> None:
    text = "some\ntext é"
    row = Conversation("id", "s", (), None, "x", 1, text=text)
    encoded = encode(byte_tokenizer(), row)
    assert encoded.input_ids.tolist() == [*text.encode(), 260]
    assert encoded.loss_mask.all()
    for ends, expected in ((True, [257, *text.encode(), 260]), (False, [257, *text.encode(), 260])):
        encoded = encode(end_adding_tokenizer(ends), row)
        assert encoded.input_ids.tolist() == expected
        assert encoded.loss_mask.tolist() == [False] + [True] * (len(expected) - 1)
    cut = Conversation("id", "s", (), "length", "x", 1, text=text)
    assert encode(end_adding_tokenizer(False), cut).input_ids.tolist() == [257, *text.encode()]
    with pytest.raises(BadRow, match=r"special token in content \(text, character 2: <\|end\|>\)"):
        encode(byte_tokenizer(), Conversation("id", "s", (), None, "x", 1, text="a<|end|>"))


def test_texts_and_conversations_are_encoded_in_one_batch() -> None:
    encoder = ChatEncoder(end_adding_tokenizer(True))
    rows = [talk(("user", "q"), ("assistant", "a")), Conversation("id", "s", (), None, "x", 1, text="t")]
    rendered = [item for row in rows for item in encoder.render(row)]
    assert [item.input_ids.tolist() for item in encoder.encode(rendered)] == [
        encoder.encode([item])[0].input_ids.tolist() for item in rendered
    ]
