"""Answers without a server, and what a dataset that is made from answers knows about them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dflash_core.data import load_tokenizer, prepare_dataset, read_prompts
from dflash_core.data.template import ChatEncoder
from dflash_core.errors import ConfigError, DataError
from dflash_core.experiment import ExperimentConfig
from dflash_core.experiment_regenerate import regenerate
from tests.conftest import TINY_TARGET, write_corpus
from tests.fake_server import fake_server
from tests.test_regenerate_server import errors, experiment, rows, write_prompts


def here(files: Path, target: Path, **settings: Any) -> ExperimentConfig:
    config = experiment(files, None, **{"max_new_tokens": 12, **settings})
    return config.model_copy(update={"target": config.target.model_copy(update={"path": str(target)})})


def greedy_texts(target_folder: Path, file: Path, limit: int) -> list[str]:
    """What the evaluation's plain form decodes for the same prompts, one at a time."""
    from dflash_core.evaluation import greedy_decode
    from dflash_core.model.target import FrozenTarget

    tokenizer = load_tokenizer(target_folder)
    target = FrozenTarget(target_folder, (0,), "float32", "sdpa", "cpu")
    found = []
    for prompt in read_prompts(file, tokenizer, 100):
        tokens = greedy_decode(target, prompt.input_ids, limit).tokens
        ended = tokens[-1] in target.shape.eos_token_ids
        found.append(tokenizer.decode(tokens[:-1] if ended else tokens))
    return found


@pytest.mark.parametrize(("count", "limit"), [(4, 6), pytest.param(24, 64, marks=pytest.mark.slow)])
def test_greedy_answers_are_those_of_the_evaluation(home: Path, tmp_path: Path, count: int, limit: int) -> None:
    path = write_prompts(tmp_path / "p.jsonl", count)
    result = regenerate(here(path, TINY_TARGET, max_new_tokens=limit, concurrency=3))
    assert [row["messages"][-1]["content"] for row in rows(result)] == greedy_texts(TINY_TARGET, path, limit)
    assert result["made_by"]["kind"] == "process" and result["made_by"]["dtype"] == "float32"
    assert result["num_answer_tokens"] == sum(row["num_answer_tokens"] for row in rows(result)) > 0
    assert {row["finish_reason"] for row in rows(result)} <= {"stop", "length"}
    assert regenerate(here(path, TINY_TARGET, max_new_tokens=limit))["reused"]


def test_conversations_go_turn_by_turn_and_bad_prompts_are_noted(home: Path, tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    lines: list[dict[str, Any]] = [
        {
            "messages": [
                {"role": "user", "content": "def a():"},
                {"role": "assistant", "content": "x"},
                {"role": "user", "content": "b"},
            ]
        },
        {"prompt": "<|end|> breaks out"},
        {"prompt": "long " * 600},
        {"messages": [{"role": "user", "content": "a"}, {"role": "tool", "content": "b"}]},
        {"prompt": "def c(self):"},
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    result = regenerate(here(path, TINY_TARGET, max_new_tokens=8, concurrency=3))
    assert [row["row"] for row in rows(result)] == [1, 5]
    assert [(error["row"], error["reason"]) for error in errors(result)] == [
        (2, "special token in content"),
        (3, "over-long"),
        (4, "template refuses"),
    ]
    first = rows(result)[0]
    assert first["num_answers"] == 2 or first["ended_early"] == "length"


def test_what_is_drawn_depends_on_the_row_and_not_on_its_neighbours() -> None:
    from dflash_core.evaluation.answers import answer_many
    from dflash_core.model.target import FrozenTarget

    target = FrozenTarget(TINY_TARGET, (0,), "float32", "sdpa", "cpu")
    encoder = ChatEncoder(load_tokenizer(TINY_TARGET))
    from dflash_core.data import Message

    prompts = [tuple(encoder.encode_prompt([Message("user", f"def f{i}({'x' * i}):")]).tolist()) for i in range(3)]

    def drawn(chosen: list[int], batch: int, seeds: list[int], temperature: float = 1.0) -> list[tuple[int, ...]]:
        return answer_many(target, [prompts[i] for i in chosen], 6, temperature=temperature, seeds=seeds, batch_prompts=batch)

    together = drawn([0, 1, 2], 2, [10, 11, 12])
    alone = [drawn([i], 1, [10 + i])[0] for i in range(3)]
    assert together == alone
    assert drawn([0, 0], 2, [1, 2])[0] != drawn([0, 0], 2, [1, 2])[1]
    nearly_greedy = drawn([0, 1], 2, [1, 2], 1e-4)
    assert nearly_greedy == drawn([0, 1], 2, [1, 2], 0.0)
    assert all(len(tokens) <= 6 for tokens in together)


def test_too_many_new_tokens_for_the_target(home: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"regenerate\.max_new_tokens: 99999 do not fit"):
        regenerate(here(write_prompts(tmp_path / "p.jsonl", 1), TINY_TARGET, max_new_tokens=99999))


def test_no_files(home: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"regenerate\.files names no file"):
        regenerate(experiment([], None))
    with pytest.raises(DataError, match="no such file"):
        regenerate(experiment(tmp_path / "none.jsonl", None))


# ---- the dataset ----


def prepared(config: ExperimentConfig, files: list[str], folder: Path, **data: Any) -> dict[str, Any]:
    settings = config.data.model_copy(update={"files": tuple(files), "num_workers": 1, **data})
    return prepare_dataset(settings, load_tokenizer(TINY_TARGET), target="tiny", folder=folder)


def test_a_dataset_knows_where_its_answers_come_from(home: Path, tmp_path: Path) -> None:
    plain = tmp_path / "plain.jsonl"
    turns = [{"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}]
    plain.write_text("".join(json.dumps({"messages": turns}) + "\n" for _ in range(4)))
    with fake_server() as server:
        config = experiment(write_corpus(tmp_path / "corpus.jsonl", 12), server.url, thinking=False, max_new_tokens=77)
        result = regenerate(config)
    files = [f"{result['path']}/part-*.jsonl", str(plain)]
    manifest = prepared(config, files, tmp_path / "dataset")
    (answers,) = manifest["answers"]
    assert answers["thinking"] is False and answers["template_variables"] == {"enable_thinking": False}
    assert answers["made_by"]["model"] == "tiny" and answers["sampling"] == {"temperature": 0.0, "max_new_tokens": 77}
    assert answers["folder"] == result["path"] and answers["changed"] == [] and manifest["num_sequences"] == 16
    assert json.loads((tmp_path / "dataset" / "manifest.json").read_text())["answers"] == [answers]
    assert prepared(config, files, tmp_path / "dataset")["reused"]
    with (Path(result["path"]) / "part-00000.jsonl").open("a") as file:
        file.write(json.dumps({"messages": [{"role": "user", "content": "u"}, {"role": "assistant", "content": "more"}]}) + "\n")
    manifest = prepared(config, files, tmp_path / "dataset")
    assert manifest["answers"][0]["changed"] == ["part-00000.jsonl"] and manifest["num_sequences"] == 17
    assert "answers" not in prepared(config, [str(plain)], tmp_path / "other")


def test_answers_of_another_mode_are_no_data(home: Path, tmp_path: Path) -> None:
    target = tmp_path / "thinker"
    target.mkdir()
    for file in TINY_TARGET.iterdir():
        (target / file.name).symlink_to(file)
    template = (TINY_TARGET / "chat_template.jinja").read_text()
    (target / "chat_template.jinja").unlink()
    opening = (
        "{%- if add_generation_prompt -%}<|assistant|>"
        "{%- if enable_thinking is defined and not enable_thinking -%}<n>{%- endif -%}"
    )
    (target / "chat_template.jinja").write_text(template.replace("{%- if add_generation_prompt -%}<|assistant|>", opening))
    with fake_server() as server:
        config = experiment(write_corpus(tmp_path / "corpus.jsonl", 3), server.url, thinking=True)
        config = config.model_copy(update={"target": config.target.model_copy(update={"path": str(target)})})
        result = regenerate(config)
    tokenizer = load_tokenizer(target)
    for variables, fits in (({}, True), ({"enable_thinking": True}, True), ({"enable_thinking": False}, False)):
        data = config.data.model_copy(
            update={"files": (f"{result['path']}/part-*.jsonl",), "template_variables": variables, "num_workers": 1}
        )
        if fits:  # what the template makes of it is what counts
            assert prepare_dataset(data, tokenizer, target="t", folder=tmp_path / "d")["answers"][0]["thinking"] is True
        else:
            with pytest.raises(DataError, match=r"made with the template variables \{'enable_thinking': True\}.*prompts differ"):
                prepare_dataset(data, tokenizer, target="t", folder=tmp_path / "d")


def test_a_folder_that_holds_something_else_stays(home: Path, tmp_path: Path) -> None:
    (home / "answers" / "made").mkdir(parents=True)
    (home / "answers" / "made" / "mine.txt").write_text("mine")
    with fake_server() as server, pytest.raises(DataError, match="holds no answers; move it away"):
        regenerate(experiment(write_prompts(tmp_path / "p.jsonl", 1), server.url))
    assert (home / "answers" / "made" / "mine.txt").read_text() == "mine"


def test_damaged_parts_are_made_anew(home: Path, tmp_path: Path) -> None:
    path = write_prompts(tmp_path / "p.jsonl", 3)
    with fake_server() as server:
        result = regenerate(experiment(path, server.url))
        part = Path(result["path"]) / "part-00000.jsonl"
        whole = part.read_bytes()
        part.write_bytes(whole[:50])
        assert not regenerate(experiment(path, server.url))["reused"] and part.read_bytes() == whole
