"""Loading tokenizers, their digests, the mask id; and the small tokenizers that the other data tests use."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from dflash_core.data import chat_template_digest, load_tokenizer, mask_token_id, tokenizer_digest
from dflash_core.errors import ConfigError

SPECIAL = ["<|pad|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<|mask|>"]
MARKED = (
    "{%- for m in messages -%}{%- if m['role'] == 'assistant' -%}"
    "<|assistant|>{%- generation -%}{{ m['content'] }}<|end|>{%- endgeneration -%}"
    "{%- elif m['role'] in ['system', 'user'] -%}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>"
    "{%- else -%}{{ raise_exception('no role ' ~ m['role']) }}{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"
)
CHATML = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>\n' + m['content'] + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
CHATML_MARKED = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>\n' }}{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] + '<|end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ m['content'] + '<|end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
# Inserts an empty think block, but only into the last answer, so that every further turn rewrites the one before.
THINKING = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>\n' }}"
    "{% if m['role'] == 'assistant' and loop.last %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    "{{ m['content'] + '<|end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
TRAINING_TEXT = ["def f(x):\n    return x\n\n\nassistant\n\nThe answer is 42.\n", "user\n\n\n  a\nb\n  c\n\n"] * 20


def wrap(tokenizer: Tokenizer, template: str | None) -> PreTrainedTokenizerFast:
    tokenizer.add_special_tokens(SPECIAL)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|pad|>",
        eos_token="<|end|>",
        mask_token="<|mask|>",
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = template
    return fast


@cache
def byte_tokenizer(template: str = MARKED) -> PreTrainedTokenizerFast:
    """One token per byte, id = byte; ids 256 and up are SPECIAL."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = iter(range(0x100, 0x200))
    tokenizer = Tokenizer(models.BPE(vocab={chr(b if b in printable else next(moved)): b for b in range(256)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return wrap(tokenizer, template)


@cache
def end_adding_tokenizer(adds_end: bool) -> PreTrainedTokenizerFast:
    """The byte tokenizer, which puts a special token in front of each text and, if asked for, the end token behind it."""
    fast = byte_tokenizer(MARKED + " ").backend_tokenizer
    tokenizer = Tokenizer.from_str(fast.to_str())
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|system|> $A <|end|>" if adds_end else "<|system|> $A", special_tokens=[("<|system|>", 257), ("<|end|>", 260)]
    )
    return wrap(tokenizer, MARKED)


@cache
def merging_tokenizer(template: str) -> PreTrainedTokenizerFast:
    """A byte-level BPE without word boundaries: it merges across line breaks, so also across a header and an answer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        TRAINING_TEXT, trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, show_progress=False)
    )
    return wrap(tokenizer, template)


@cache
def prefix_space_tokenizer(template: str) -> PreTrainedTokenizerFast:
    """Puts a space in front of every text, as older SentencePiece tokenizers do."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always", split=False)
    alphabet = [chr(c) for c in range(32, 127)] + ["\n", "▁"]
    tokenizer.train_from_iterator(
        TRAINING_TEXT, trainers.BpeTrainer(vocab_size=150, initial_alphabet=alphabet, show_progress=False)
    )
    return wrap(tokenizer, template)


def test_a_saved_tokenizer_is_the_same_when_loaded_and_however_it_is_loaded(tmp_path: Path) -> None:
    saved = byte_tokenizer()
    saved.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    loaded = load_tokenizer(tmp_path)
    auto = AutoTokenizer.from_pretrained(str(tmp_path), local_files_only=True)
    assert tokenizer_digest(loaded) == tokenizer_digest(saved) == tokenizer_digest(auto)
    assert chat_template_digest(loaded) == chat_template_digest(saved)


def test_the_tiny_target_loads_and_has_what_a_target_needs() -> None:
    folder = Path(__file__).parents[1] / "data" / "tiny_target"
    tokenizer = load_tokenizer(folder)
    vocab_size = json.loads((folder / "config.json").read_text())["vocab_size"]
    assert tokenizer.convert_ids_to_tokens(mask_token_id(tokenizer, None, vocab_size, str(folder))) == "<|mask|>"
    assert tokenizer("é", add_special_tokens=False)["input_ids"] == list("é".encode())
    assert tokenizer_digest(tokenizer) == tokenizer_digest(AutoTokenizer.from_pretrained(str(folder), local_files_only=True))


def test_digests_tell_tokenizers_apart_and_ignore_the_last_call(tmp_path: Path) -> None:
    byte, merging = byte_tokenizer(MARKED), merging_tokenizer(MARKED)
    before = tokenizer_digest(byte)
    byte("some text", truncation=True, max_length=3, padding="max_length")
    assert tokenizer_digest(byte) == before
    assert tokenizer_digest(merging) != before
    byte.save_pretrained(tmp_path)
    other_mask = load_tokenizer(tmp_path)
    other_mask.mask_token = "<|system|>"
    assert tokenizer_digest(other_mask) != before
    assert tokenizer_digest(byte_tokenizer(CHATML)) == before
    assert chat_template_digest(byte_tokenizer(CHATML)) != chat_template_digest(byte)


def test_a_folder_without_a_usable_tokenizer_gives_one_line_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere: no such folder \(target.path\)$"):
        load_tokenizer(tmp_path / "nowhere")
    no_template = tmp_path / "no_template"
    byte_tokenizer().save_pretrained(no_template)
    (no_template / "chat_template.jinja").unlink()
    with pytest.raises(ConfigError, match=r"no_template: the tokenizer has no chat template$"):
        load_tokenizer(no_template)
    damaged = tmp_path / "damaged"
    byte_tokenizer().save_pretrained(damaged)
    text = (damaged / "tokenizer.json").read_text()
    (damaged / "tokenizer.json").write_text(text[: len(text) // 2])
    empty = tmp_path / "empty"
    empty.mkdir()
    for folder in (damaged, empty):
        with pytest.raises(ConfigError, match=f"{folder.name}: the tokenizer cannot be loaded") as caught:
            load_tokenizer(folder)
        assert "\n" not in str(caught.value)


def test_code_in_a_target_folder_is_not_executed(tmp_path: Path) -> None:
    byte_tokenizer().save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    settings |= {"tokenizer_class": "Custom", "auto_map": {"AutoTokenizer": ["evil.Custom", "evil.Custom"]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'w').close()\nclass Custom: pass\n")
    with pytest.raises(ConfigError, match="cannot be loaded"):
        load_tokenizer(tmp_path)
    assert not (tmp_path / "executed").exists()


def test_mask_token_id_prefers_the_configured_id() -> None:
    tokenizer = byte_tokenizer()
    assert mask_token_id(tokenizer, None, 262, "t") == 261
    assert mask_token_id(tokenizer, 257, 262, "t") == 257
    assert mask_token_id(tokenizer, 263, 264, "t") == 263, "an unused row beyond the tokenizer is what most targets have"


@pytest.mark.parametrize(
    ("configured", "vocab_size", "text"),
    [(256, 262, "padding"), (260, 262, "end"), (262, 262, "not a row"), (None, 261, "not a row")],
)
def test_mask_token_id_refuses_rows_that_mean_something_or_do_not_exist(
    configured: int | None, vocab_size: int, text: str
) -> None:
    with pytest.raises(ConfigError, match=rf"^models/x: target\.mask_token_id .*{text}"):
        mask_token_id(byte_tokenizer(), configured, vocab_size, "models/x")


def test_a_target_without_mask_token_names_target_and_key() -> None:
    bare = PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer().backend_tokenizer, eos_token="<|end|>")
    with pytest.raises(ConfigError, match=r"models/x: .*no mask token.*target\.mask_token_id"):
        mask_token_id(bare, None, 262, "models/x")


def test_importing_the_package_is_cheap_and_loading_a_plain_tokenizer_needs_no_torch(tmp_path: Path) -> None:
    byte_tokenizer().save_pretrained(tmp_path)
    code = (
        "import sys, pathlib, dflash_core.data as data\n"
        "assert not {'torch', 'transformers', 'pandas'} & set(sys.modules), 'import'\n"
        "tokenizer = data.load_tokenizer(pathlib.Path(sys.argv[1]))\n"
        "data.ChatEncoder(tokenizer).encode_prompt([data.Message('user', 'x')])\n"
        "assert 'torch' not in sys.modules, 'load'\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
