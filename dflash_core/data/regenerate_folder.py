"""The folder of finished answers, and how a dataset that is made from its files learns where they come from.

    manifest.json       who answered and how, what from, counts, the parts with their digests
    part-NNNNN.jsonl    answered rows in the order of the input
    errors.jsonl        rows without an answer: file, row, why, and whether they failed or could not be asked

`find_answers` looks for the manifest beside each file that a dataset is made from.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from dflash_core.data.files import TakenFile
from dflash_core.data.regenerate_log import AnswerLog, row_key
from dflash_core.data.turns import BadRow
from dflash_core.errors import DataError
from dflash_core.provenance import digest_file, read_json, write_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

log = logging.getLogger(__name__)
SCHEMA_VERSION = 1
KIND = "answers"
MANIFEST, ERRORS = "manifest.json", "errors.jsonl"
ROWS_PER_PART = 50_000
# What a dataset's manifest repeats of the answers'.
TOLD = ("name", "made_by", "sampling", "thinking", "template_variables", "created", "num_answered", "num_failed", "num_cut")
THINKING = "enable_thinking"


class _Writer:
    """Parts of at most so many rows, and the errors."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._part: IO[bytes] | None = None
        self._errors = (folder / ERRORS).open("wb")
        self.sizes: list[int] = []

    def add(self, kind: str, line: bytes) -> None:
        if kind != "A":
            self._errors.write(line)
            return
        if self._part is None or self.sizes[-1] == ROWS_PER_PART:
            self._end_part()
            self._part = (self._folder / f"part-{len(self.sizes):05d}.jsonl").open("wb")
            self.sizes.append(0)
        self._part.write(line)
        self.sizes[-1] += 1

    def _end_part(self) -> None:
        if self._part is not None:
            self._part.close()

    def close(self) -> None:
        self._end_part()
        self._errors.close()


def write_answers(folder: Path, answers: AnswerLog, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Fill `folder` (emptied first) from the log; returns the manifest, which is written last.

    Raises:
        DataError: no row was answered; the first row's trouble is named.
    """
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    counts = dict.fromkeys(("num_rows", "num_answered", "num_failed", "num_passing", "num_skipped"), 0)
    sums = dict.fromkeys(("num_cut", "num_ended_early", "num_answers", "num_prompt_tokens", "num_answer_tokens"), 0)
    first_trouble: dict[str, Any] | None = None
    writer = _Writer(folder)
    try:
        for kind, line in answers.entries():
            value = json.loads(line)
            counts["num_rows"] += 1
            counts[{"A": "num_answered", "F": "num_failed", "S": "num_skipped"}[kind]] += 1
            if kind == "A":
                sums["num_cut"] += value["finish_reason"] == "length"
                sums["num_ended_early"] += "ended_early" in value
                for key in ("num_answers", "num_prompt_tokens", "num_answer_tokens"):
                    sums[key] += value[key] or 0
            else:
                counts["num_passing"] += bool(value.get("passing"))
                first_trouble = first_trouble or value
                line = json.dumps({"kind": "skipped" if kind == "S" else "failed", **value}, ensure_ascii=False).encode() + b"\n"
            writer.add(kind, line)
    finally:
        writer.close()
    if not counts["num_answered"]:
        raise DataError(_nothing(facts, counts, first_trouble))
    names = [f"part-{number:05d}.jsonl" for number in range(len(writer.sizes))]
    parts = [
        {"name": name, "num_rows": size, "sha256": digest_file(folder / name)}
        for name, size in zip(names, writer.sizes, strict=True)
    ]
    manifest = {"schema_version": SCHEMA_VERSION, "kind": KIND, **facts, **counts, **sums, "parts": parts}
    write_json(folder / MANIFEST, manifest)
    return manifest


def _nothing(facts: Mapping[str, Any], counts: Mapping[str, int], trouble: Mapping[str, Any] | None) -> str:
    files = ", ".join(str(item["path"]) for item in facts["files"])
    if trouble is None:
        return f"{files}: no rows"
    why = f"{trouble['reason']} ({trouble['detail']})" if trouble["detail"] else str(trouble["reason"])
    return (
        f"{files}: no row was answered; {counts['num_failed']} failed and {counts['num_skipped']} cannot be asked,"
        f" the first: {trouble['file']}: row {trouble['row']}: {why}"
    )


def read_answers(folder: Path) -> dict[str, Any] | None:
    """The manifest of a folder of answers; None if it is none."""
    try:
        manifest = read_json(folder / MANIFEST)
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(manifest, dict) or manifest.get("kind") != KIND or manifest.get("schema_version") != SCHEMA_VERSION:
        return None
    return manifest if isinstance(manifest.get("parts"), list) else None


def is_whole(folder: Path, manifest: Mapping[str, Any]) -> bool:
    """Whether the parts are there as they were written."""
    paths = [(folder / str(part["name"]), part["sha256"]) for part in manifest["parts"]]
    return all(path.is_file() and digest_file(path) == digest for path, digest in paths)


def take_over(folder: Path, manifest: Mapping[str, Any], answers: AnswerLog) -> None:
    """Put the answered rows of a finished folder into an empty log, so that only the others are asked again."""
    numbers = {item["path"]: number for number, item in enumerate(manifest["files"])}
    for part in manifest["parts"]:
        with (folder / part["name"]).open("rb") as lines:
            for line in lines:
                value = json.loads(line)
                answers.add(row_key(numbers[value["file"]], value["row"]), "A", value)
    with (folder / ERRORS).open("rb") as lines:
        for line in lines:
            value = json.loads(line)
            if value.pop("kind") == "skipped":
                answers.add(row_key(numbers[value["file"]], value["row"]), "S", value)


# ---- the dataset's side ----


def find_answers(files: Sequence[TakenFile]) -> list[dict[str, Any]]:
    """Where the answers in some local files come from, as the manifests beside them say: one entry for each folder.

    `changed` names files that are not what was written there; a file that no manifest knows is not mentioned.
    """
    found: dict[Path, dict[str, Any]] = {}
    manifests: dict[Path, dict[str, Any] | None] = {}
    for file in files:
        if file.stamp is None:  # not on this machine
            continue
        path = Path(file.url.removeprefix("file://"))
        if path.parent not in manifests:
            manifests[path.parent] = read_answers(path.parent)
        manifest = manifests[path.parent]
        digests = {} if manifest is None else {part["name"]: part["sha256"] for part in manifest["parts"]}
        if manifest is None or path.name not in digests:
            continue
        entry = found.setdefault(
            path.parent, {"folder": str(path.parent), **{key: manifest.get(key) for key in TOLD}, "changed": []}
        )
        if file.identity != f"sha256:{digests[path.name]}":
            entry["changed"].append(path.name)
            log.warning("%s: changed since its answers were made (%s)", path, path.parent / MANIFEST)
    return list(found.values())


def check_mode(
    answers: Iterable[Mapping[str, Any]], tokenizer: PreTrainedTokenizerFast, template_variables: Mapping[str, bool | int | str]
) -> None:
    """Make sure that a dataset shows answers in the mode in which they were made, by rendering a prompt both ways.

    Raises:
        DataError: the chat template makes another prompt of it (thinking on or off, as a rule).
    """
    from dflash_core.data.chat_template import ChatTemplate  # loads transformers

    template = str(tokenizer.get_chat_template())

    def prompt(variables: Mapping[str, Any]) -> str:
        question = [{"role": "user", "content": "a"}]
        found = ChatTemplate(template, {**tokenizer.special_tokens_map, **variables})
        try:
            return found.text(question, None, generation_prompt=True)
        except BadRow as error:
            return str(error)

    for entry in answers:
        made_with = dict(entry.get("template_variables") or {})
        if made_with != dict(template_variables) and prompt(made_with) != prompt(template_variables):
            raise DataError(
                f"{entry['folder']}: the answers were made with the template variables {made_with}, data.template_variables"
                f" is {dict(template_variables)}, and the prompts differ; a drafter must be trained in the mode that is served"
            )
