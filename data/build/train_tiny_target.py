"""Trains the tiny target: a byte-level Qwen3 model on the standard library's own sources.

    python data/build/train_tiny_target.py --out data/tiny_target --minutes 25

The demo and the tests need a *trained* language model that installs with nothing and runs on a laptop; noise would
show neither acceptance nor length effects. One token is one byte, so that no tokenizer has to be trained; eight more
rows hold turn marks, the mask and spares. The weights are stored in bf16, which halves the file; every use loads them
back into fp32. Training stops by wall time, so the result differs from machine to machine: the copy under
`data/tiny_target/` is the one that the corpus was written with, and both are replaced together or not at all.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from pathlib import Path

import torch
from stdlib_corpus import Pair, standard_library_pairs
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

SPECIAL_TOKENS = ["<|pad|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<|mask|>", "<|spare0|>", "<|spare1|>"]
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message['role'] == 'assistant' -%}"
    "<|assistant|>{%- generation -%}{{ message['content'] }}<|end|>{%- endgeneration -%}"
    "{%- elif message['role'] in ['system', 'user'] -%}"
    "<|{{ message['role'] }}|>{{ message['content'] }}<|end|>"
    "{%- else -%}"
    "{{ raise_exception('this template has no role ' ~ message['role']) }}"
    "{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"
)
ROW_TOKENS = 512


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One id per byte (id = byte value), then the special tokens."""
    # The byte-level alphabet of GPT-2: printable bytes stand for themselves, the others move above U+0100.
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = iter(range(0x100, 0x200))
    vocab = {chr(b if b in printable else next(moved)): b for b in range(256)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL_TOKENS)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|pad|>",
        eos_token="<|end|>",
        mask_token="<|mask|>",
        clean_up_tokenization_spaces=False,
        model_max_length=2048,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def stream(tokenizer: PreTrainedTokenizerFast, pairs: list[Pair], seed: int) -> torch.Tensor:
    """Conversations in a random order as one stream of ids."""
    random.Random(seed).shuffle(pairs)
    user, assistant, end = (tokenizer.convert_tokens_to_ids(t) for t in ("<|user|>", "<|assistant|>", "<|end|>"))
    ids: list[int] = []
    for pair in pairs:
        ids += [user, *pair.header.encode(), end, assistant, *pair.body.encode(), end]
    return torch.tensor(ids, dtype=torch.long)


def rows(ids: torch.Tensor, count: int, generator: torch.Generator) -> torch.Tensor:
    starts = torch.randint(0, len(ids) - ROW_TOKENS - 1, (count,), generator=generator)
    return torch.stack([ids[s : s + ROW_TOKENS + 1] for s in starts])


@torch.inference_mode()
def held_out_loss(model: Qwen3ForCausalLM, held_out: torch.Tensor) -> float:
    """Mean loss in nats a byte over 64 rows of functions of the standard library's test suite."""
    check = rows(held_out, 64, torch.Generator().manual_seed(1))
    logits = model.eval()(input_ids=check[:, :-1]).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), check[:, 1:].flatten()).item()


def train(model: Qwen3ForCausalLM, train_ids: torch.Tensor, minutes: float, peak_lr: float, seed: int) -> None:
    """AdamW until the time is up; the learning rate follows the clock (cosine)."""
    generator = torch.Generator().manual_seed(seed)
    # Muon would need fewer steps, but its bf16 iterations are several times slower than the whole step on a CPU.
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": 0.05}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95), fused=True)
    started, step = time.monotonic(), 0
    while (done := (time.monotonic() - started) / (minutes * 60)) < 1.0:
        lr = peak_lr * min(1.0, (step + 1) / 40) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * done)))
        for group in optimizer.param_groups:
            group["lr"] = lr
        batch = rows(train_ids, 12, generator)
        logits = model(input_ids=batch[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        model.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 50 == 0:
            print(f"step {step:5d}  {done:4.0%}  loss {loss.item():.3f}  lr {lr:.2e}", flush=True)
        step += 1
    print(f"{step} steps of 12 x {ROW_TOKENS} bytes", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("data/tiny_target"))
    parser.add_argument("--minutes", type=float, default=25.0)
    parser.add_argument("--peak-lr", type=float, default=4e-3)
    parser.add_argument("--start-from", type=Path, help="folder of an earlier result to train further")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    tokenizer = byte_tokenizer()
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=6,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    if args.start_from:
        model = Qwen3ForCausalLM.from_pretrained(args.start_from, dtype=torch.float32).train()
    else:
        model = Qwen3ForCausalLM(config)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters", flush=True)
    train_ids = stream(tokenizer, standard_library_pairs(), args.seed)
    print(f"{len(train_ids):,} training bytes", flush=True)
    train(model, train_ids, args.minutes, args.peak_lr, args.seed)
    loss = held_out_loss(model, stream(tokenizer, standard_library_pairs(held_out=True), 0))
    print(f"loss on unseen functions: {loss:.3f} nats a byte", flush=True)
    model.to(torch.bfloat16).save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    (args.out / "training.json").write_text(json.dumps({"loss_on_unseen_functions_nats_a_byte": round(loss, 4)}) + "\n")


if __name__ == "__main__":
    main()
