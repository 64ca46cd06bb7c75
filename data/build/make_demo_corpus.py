"""Writes the demo corpus: prompts from the standard library's headers, answers by the tiny target itself.

    python data/build/make_demo_corpus.py --target data/tiny_target --out data/demo

On-policy data is what drafters are trained on: the answers are greedy decodings of the very model that will later be
sped up, loops and mistakes included. Answers are cut at a length drawn per prompt from three groups, so that lengths
spread from a few dozen tokens to over a thousand and about half of all tokens sit in the longest ones, as in the
incident this project grew out of. A cut answer says `finish_reason: length`; no end-of-turn token belongs behind it.
"""

from __future__ import annotations

import argparse
import json
import random
from dataclasses import dataclass
from pathlib import Path

import torch
from stdlib_corpus import Pair, standard_library_pairs
from transformers import AutoModelForCausalLM, AutoTokenizer

# Share of the conversations, and range of the most new tokens, of each group.
GROUPS = {"short": (0.55, 16, 160), "medium": (0.25, 160, 500), "long": (0.20, 760, 1000)}
HEADER_BYTES = (30, 400)
BATCH = 48


@dataclass(frozen=True)
class Request:
    source: str
    prompt: str
    max_new_tokens: int


def usable_headers(pairs: list[Pair]) -> list[str]:
    """Distinct headers of a useful length, plain ASCII, so that cutting at a byte never splits a character."""
    seen = dict.fromkeys(p.header for p in pairs)
    return [h for h in seen if HEADER_BYTES[0] <= len(h) <= HEADER_BYTES[1] and h.isascii()]


def draw_requests(headers: list[str], count: int, rng: random.Random) -> list[Request]:
    requests = []
    for source, (share, low, high) in GROUPS.items():
        for _ in range(round(count * share)):
            requests.append(Request(source, headers.pop(), rng.randint(low, high)))
    return requests


@torch.inference_mode()
def answer(model: torch.nn.Module, tokenizer, requests: list[Request]) -> list[tuple[str, str]]:
    """Greedy answers and finish reasons of requests of similar length, decoded side by side."""
    conversations = [[{"role": "user", "content": r.prompt}] for r in requests]
    batch = tokenizer.apply_chat_template(
        conversations, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
    )
    longest = max(r.max_new_tokens for r in requests)
    out = model.generate(
        input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], max_new_tokens=longest, do_sample=False
    )
    results = []
    for request, row in zip(requests, out[:, batch["input_ids"].shape[1] :].tolist(), strict=True):
        row = row[: request.max_new_tokens]
        finished = tokenizer.eos_token_id in row
        if finished:
            row = row[: row.index(tokenizer.eos_token_id)]
        results.append((tokenizer.decode(row), "stop" if finished else "length"))
    return results


def usable(text: str, tokenizer) -> bool:
    """Text that comes back byte for byte: no special token, no broken character, not empty."""
    special = tokenizer.get_added_vocab()
    return bool(text.strip()) and "�" not in text and not any(token in text for token in special)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, default=Path("data/tiny_target"))
    parser.add_argument("--out", type=Path, default=Path("data/demo"))
    parser.add_argument("--conversations", type=int, default=640)
    parser.add_argument("--held-out", type=int, default=48)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.target, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(args.target, dtype=torch.float32).eval()
    rng = random.Random(args.seed)
    headers = usable_headers(standard_library_pairs())
    rng.shuffle(headers)
    held_out = draw_requests(headers, args.held_out, rng)
    requests = sorted(draw_requests(headers, args.conversations, rng), key=lambda r: r.max_new_tokens)
    rows = []
    for start in range(0, len(requests), BATCH):
        part = requests[start : start + BATCH]
        for request, (text, reason) in zip(part, answer(model, tokenizer, part), strict=True):
            if usable(text, tokenizer):
                messages = [{"role": "user", "content": request.prompt}, {"role": "assistant", "content": text}]
                rows.append({"source": request.source, "messages": messages, "finish_reason": reason})
        print(f"{min(start + BATCH, len(requests))} of {len(requests)} answered", flush=True)
    rng.shuffle(rows)
    args.out.mkdir(parents=True, exist_ok=True)
    with (args.out / "train.jsonl").open("w") as file:
        for i, row in enumerate(rows):
            file.write(json.dumps({"id": f"demo-{i:04d}", **row}) + "\n")
    rng.shuffle(held_out)
    with (args.out / "held_out.jsonl").open("w") as file:
        for i, request in enumerate(held_out):
            messages = [{"role": "user", "content": request.prompt}]
            file.write(json.dumps({"id": f"held-out-{i:03d}", "source": request.source, "messages": messages}) + "\n")
    print(f"{len(rows)} conversations, {len(held_out)} held-out prompts")


if __name__ == "__main__":
    main()
