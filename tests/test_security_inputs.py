"""Inputs that try something: code in a model folder, pickles, YAML tags, bombs, links where files should be."""

from __future__ import annotations

import gzip
import json
import pickle
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from dflash_core import experiment as root
from dflash_core.data import Dataset, load_tokenizer
from dflash_core.errors import ConfigError, DataError
from dflash_core.model.target_loading import load_causal_lm
from dflash_core.model.target_shape import read_target_shape
from dflash_core.model.warm_start import check_initial_draft
from dflash_core.training.retention import by_step, remove
from tests.conftest import REPOSITORY

SOURCES = [path for folder in ("dflash_core", "flows") for path in sorted((REPOSITORY / folder).rglob("*.py"))]
FORBIDDEN = {
    r"trust_remote_code\s*=\s*(?!False)": "code that comes with a model must never run",
    r"torch\.load\((?!.*weights_only=True)": "without weights_only=True a pickle runs what it holds",
    r"yaml\.(load_all|full_load|unsafe_load|Loader|FullLoader|UnsafeLoader)\b": "these build objects",
    r"yaml\.load\((?!.*_UniqueKeyLoader)": "the loader must be a safe one",
    r"\b0\.0\.0\.0\b|--host[\"',= ]+(?![\"',= ]|127\.0\.0\.1)": "what listens must listen on loopback only",
    r"\b(pickle|marshal|shelve|dill|joblib)\.(load|loads|open)\((?!tokenizer\), settings\))": "they run what they read",
    r"\b(os\.system|shell\s*=\s*True|eval\(|exec\()": "no shell, no code out of texts",
}


def test_the_sources_hold_nothing_that_runs_what_comes_in() -> None:
    assert len(SOURCES) > 80
    found = [
        f"{path.relative_to(REPOSITORY)}:{number}: {line.strip()} ({why})"
        for path in SOURCES
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        for pattern, why in FORBIDDEN.items()
        if re.search(pattern, line) and not re.search(r"model\.eval\(|\.eval\(\)", line)
    ]
    assert found == []


@pytest.mark.parametrize(
    "line",
    [
        "x = f(trust_remote_code=True)",
        "torch.load(path)",
        "yaml.load(t, Loader=yaml.Loader)",
        'run("--host", "::")',
        "pickle.loads(x)",
    ],
)
def test_the_search_would_find_it(line: str) -> None:
    assert any(re.search(pattern, line) for pattern in FORBIDDEN)


PLANTED = (
    "from pathlib import Path\nPath({marker!r}).write_text('ran')\nfrom transformers import Qwen3Config as Own\nOwnLM = Own\n"
)


@pytest.mark.parametrize("model_type", ["qwen3", "my_own_model"])
def test_code_that_comes_with_a_target_does_not_run(micro_target: Path, tmp_path: Path, model_type: str) -> None:
    folder, marker = tmp_path / "target", tmp_path / "ran"
    shutil.copytree(micro_target, folder)
    (folder / "own.py").write_text(PLANTED.format(marker=str(marker)))
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": model_type, "auto_map": {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.OwnLM"}}
    (folder / "config.json").write_text(json.dumps(config))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["auto_map"] = {"AutoTokenizer": ["own.Own", "own.Own"]}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    for load in (read_target_shape, load_tokenizer, lambda path: load_causal_lm(path, "float32", "sdpa", _cpu())):
        try:
            load(folder)
        except ConfigError as error:
            assert str(error).startswith(("target.path: ", str(folder))) and "\n" not in str(error)
        else:
            # A class of transformers itself is there for it.
            assert model_type == "qwen3" or load is load_tokenizer
    assert not marker.exists()


def _cpu() -> Any:
    import torch

    return torch.device("cpu")


class _Planted:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.marker,))


def test_a_pickle_of_weights_is_refused_and_not_read(micro_target: Path, tmp_path: Path) -> None:
    folder, marker = tmp_path / "target", tmp_path / "ran"
    shutil.copytree(micro_target, folder)
    for path in folder.glob("*.safetensors"):
        path.unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(_Planted(marker)))
    with pytest.raises(ConfigError, match=r"target\.path: .*holds no weights in safetensors files"):
        load_causal_lm(folder, "float32", "sdpa", _cpu())
    assert not marker.exists()


def test_a_pickled_draft_is_refused_and_not_read(micro_experiment: Path, tmp_path: Path) -> None:
    folder, marker = tmp_path / "draft", tmp_path / "ran"
    folder.mkdir()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(_Planted(marker)))
    with pytest.raises(ConfigError) as caught:
        check_initial_draft(folder, root.draft_spec(root.load_experiment(micro_experiment)))
    assert str(folder) in str(caught.value) and "\n" not in str(caught.value)
    assert not marker.exists()


@pytest.mark.parametrize(
    "tag", ["!!python/object/apply:os.system ['touch {marker}']", "!!python/name:os.system", "!!python/object:x.Y {}"]
)
def test_yaml_builds_no_objects(micro_experiment: Path, tmp_path: Path, tag: str) -> None:
    marker = tmp_path / "ran"
    tag = tag.replace("{marker}", str(marker))
    with pytest.raises(ConfigError, match="the value is not YAML: could not determine a constructor"):
        root.load_experiment(micro_experiment, [f"description={tag}"])
    with micro_experiment.open("a") as file:
        file.write(f"description: {tag}\n")
    with pytest.raises(ConfigError, match="not YAML: could not determine a constructor") as caught:
        root.load_experiment(micro_experiment)
    assert "\n" not in str(caught.value) and not marker.exists()


def test_aliases_that_multiply_do_not_eat_the_memory(micro_experiment: Path) -> None:
    """The billion laughs: small in YAML, and shared objects in Python; what is checked must not unfold them."""
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 30)]
    with micro_experiment.open("a") as file:
        file.write("\n".join(lines) + "\n")
    with pytest.raises(ConfigError, match="unknown key"):
        root.load_experiment(micro_experiment)


BOMB = """
import sys
from dflash_core.data.sources import expand_files, read_chunks
rows = longest = 0
for chunk in read_chunks(expand_files([sys.argv[1]])[0], 4096, 8 << 20):
    rows += chunk.num_rows
    longest = max(longest, max(len(line) for _, line in chunk.data))
# Not getrusage: its maximum is at least what the process that started this one had.
[peak] = [line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM:")]
print(rows, longest, peak)
"""


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["gz", "zst"])
def test_a_bomb_is_read_in_bounded_memory(tmp_path: Path, ending: str) -> None:
    """A file of a few MB that unfolds to 2 GiB without a line end: one row that is too long, and the row behind it."""
    import pyarrow as pa

    path, piece = tmp_path / f"bomb.jsonl.{ending}", b"a" * (1 << 24)
    with gzip.open(path, "wb", 1) if ending == "gz" else pa.CompressedOutputStream(str(path), "zstd") as file:
        for _ in range(128):
            file.write(piece)
        file.write(b'\n{"text": "behind it"}\n')
    assert path.stat().st_size < 20e6
    done = subprocess.run([sys.executable, "-c", BOMB, str(path)], capture_output=True, text=True, timeout=100, check=True)
    rows, longest, peak_kib = map(int, done.stdout.split())
    assert (rows, longest) == (2, len('{"text": "behind it"}\n'))
    assert peak_kib < 1 << 20  # half of what it unfolds to; the longest row that is taken in has a quarter GiB


def prepared(path: Path) -> Path:
    return Path(root.prepare(root.load_experiment(path))["path"])


def test_a_part_that_is_a_link_is_no_part(micro_experiment: Path, tmp_path: Path) -> None:
    folder = prepared(micro_experiment)
    fingerprint = Dataset.open(folder).fingerprint
    part = next((folder / "tokens").glob("part-*.arrow"))
    part.rename(tmp_path / "elsewhere.arrow")
    part.symlink_to(tmp_path / "elsewhere.arrow")
    with pytest.raises(DataError, match="is a symbolic link"):
        Dataset.open(folder)
    assert Dataset.open(prepared(micro_experiment)).fingerprint == fingerprint  # made anew
    assert not part.is_symlink() and (tmp_path / "elsewhere.arrow").is_file()


def test_links_among_what_an_earlier_job_left_are_removed_and_not_followed(micro_experiment: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "keep.txt").write_text("mine")
    config = root.load_experiment(micro_experiment)
    tokens = root.workspace() / "datasets" / f".{config.data.name}.building" / "tokens"
    tokens.mkdir(parents=True)
    (tokens / "folder").symlink_to(outside)
    (tokens / "part-x-00000.json").symlink_to(outside / "keep.txt")
    folder = prepared(micro_experiment)
    assert (outside / "keep.txt").read_text() == "mine"
    assert not any(path.is_symlink() for path in folder.rglob("*"))


def test_a_checkpoint_that_is_a_link_is_removed_as_a_link(tmp_path: Path) -> None:
    outside, checkpoints = tmp_path / "outside", tmp_path / "checkpoints"
    outside.mkdir()
    checkpoints.mkdir()
    (outside / "state.json").write_text("{}")
    (checkpoints / "step-000004").symlink_to(outside)
    (found,) = by_step(checkpoints)
    remove(found)
    assert (outside / "state.json").exists() and not found.exists()


def test_the_config_of_a_run_is_plain_yaml(micro_experiment: Path) -> None:
    config = root.load_experiment(micro_experiment)
    root.prepare(config)
    text = (root.create_run(config, "plain") / "config.yaml").read_text()
    assert "!!" not in text and yaml.safe_load(text)["name"] == "micro"
