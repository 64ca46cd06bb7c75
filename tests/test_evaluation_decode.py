"""Many prompts decoded together give what each gives alone: the same tokens in the same rounds."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from dflash_core.config import DraftConfig
from dflash_core.evaluation import decode as decode_module
from dflash_core.evaluation import greedy_decode, greedy_decode_many, speculative_decode, speculative_decode_many
from dflash_core.evaluation.decode import DraftContext
from dflash_core.evaluation.phases import PhaseClock
from dflash_core.evaluation.rows import DraftRows, why_not_together
from dflash_core.model.draft import DFlashDraft
from dflash_core.model.spec import DraftSpec
from dflash_core.model.target import FrozenTarget, read_target_shape
from tests.conftest import TINY_TARGET

B = 5
# Of very different lengths, one of a single token, two alike; the first tokens differ, by which the oracle knows them.
LENGTHS = (9, 1, 22, 4, 9)


LIMIT = 9


def random_prompts(seed: int) -> list[tuple[int, ...]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        (100 + number, *torch.randint(0, 250, (length - 1,), generator=generator).tolist())
        for number, length in enumerate(LENGTHS)
    ]


@pytest.fixture(scope="module")
def target(micro_target: Path) -> FrozenTarget:
    return FrozenTarget(micro_target, (1, 2), "float32", "sdpa", "cpu")


@pytest.fixture(scope="module")
def draft(micro_target: Path) -> DFlashDraft:
    spec = DraftSpec.build(DraftConfig(num_layers=2, block_size=B, num_taps=2), read_target_shape(micro_target), 261)
    sharp = DFlashDraft(spec).initialise(0).eval()
    with torch.no_grad():
        for parameter in sharp.parameters():  # attention far from uniform
            parameter.mul_(3.0 if parameter.ndim == 2 else 1.0)
    return sharp


class Oracle:
    """Proposals that are right for a number of tokens that differs by row and round, for both forms of decoding.

    A row is known by the draft's keys at position 0, which depend on the prompt's first token alone.
    """

    def __init__(self, target: FrozenTarget, draft: DFlashDraft, prompts: list[tuple[int, ...]], answers: list[Any]) -> None:
        self.prompts, self.answers = prompts, answers
        with torch.inference_mode():
            self.known = torch.stack([draft.context(target.features(torch.tensor([p[:1]])))[0].key[0, :, 0] for p in prompts])

    def __call__(self, first_key: torch.Tensor, length: int, anchor: int) -> list[int]:
        row = int((self.known - first_key).abs().flatten(1).sum(1).argmin())
        done, answer = length - len(self.prompts[row]), self.answers[row]
        assert answer[done] == anchor, "the anchor is the last token of the row's own text"
        rest = [*answer[done + 1 : done + B], *[0] * B][: B - 1]
        right = (length * length + row) % B
        return [token if k < right else (token + 1) % 250 for k, token in enumerate(rest)]


def use_oracle(patch: pytest.MonkeyPatch, oracle: Oracle) -> None:
    def alone(context: DraftContext, anchor: int, *_: Any) -> torch.Tensor:
        return torch.tensor(oracle(context.layers[0].key[0, :, 0], context.length, anchor))

    def together(context: DraftRows, anchors_R1: torch.Tensor, *_: Any) -> torch.Tensor:
        first_keys, lengths = context.buffers.upto(0, 1).key[:, :, 0], context.buffers.lengths
        rows = zip(first_keys, lengths, anchors_R1[:, 0].tolist(), strict=True)
        return torch.tensor([oracle(*row) for row in rows])

    patch.setattr(DraftContext, "propose", alone)
    patch.setattr(DraftRows, "propose", together)


@pytest.mark.parametrize(("end", "attention"), [("limit", "sdpa"), ("eos", "sdpa"), ("limit", "eager")])
def test_rows_that_accept_different_numbers_of_tokens(
    target: FrozenTarget, draft: DFlashDraft, monkeypatch: pytest.MonkeyPatch, end: str, attention: str
) -> None:
    """Token for token and round for round, for every size of a batch; rows end after different numbers of rounds."""
    monkeypatch.setattr(target.model.config, "_attn_implementation", attention)
    prompts = random_prompts(0)
    answers = [greedy_decode(target, prompt, LIMIT + B).tokens for prompt in prompts]
    if end == "eos":  # an early one for one row, a late one for another, none for most
        eos = (answers[0][2], answers[4][5])
        monkeypatch.setattr(target, "shape", dataclasses.replace(target.shape, eos_token_ids=eos))
    plain = [greedy_decode(target, prompt, LIMIT) for prompt in prompts]
    use_oracle(monkeypatch, Oracle(target, draft, prompts, answers))
    drafted = [speculative_decode(target, draft, prompt, LIMIT) for prompt in prompts]
    assert [d.tokens for d in drafted] == [p.tokens for p in plain]
    assert len({d.accepted for d in drafted}) >= 3 and len({n for d in drafted for n in d.accepted}) >= 3
    for batch_prompts in (2, 8):
        assert greedy_decode_many(target, prompts, LIMIT, batch_prompts) == plain
        assert speculative_decode_many(target, draft, prompts, LIMIT, batch_prompts) == drafted


@pytest.mark.parametrize("limit", [1, 2, 4])
def test_short_limits_with_the_drafts_own_proposals(target: FrozenTarget, draft: DFlashDraft, limit: int) -> None:
    prompts = random_prompts(limit)
    assert greedy_decode_many(target, prompts, limit) == [greedy_decode(target, prompt, limit) for prompt in prompts]
    drafted = [speculative_decode(target, draft, prompt, limit) for prompt in prompts]
    assert speculative_decode_many(target, draft, prompts, limit) == drafted
    assert speculative_decode_many(target, draft, [], limit) == []


def test_the_trained_tiny_target() -> None:
    """Real weights in fp32, whose logits are closer together than those of random ones, and prompts as they are evaluated."""
    target = FrozenTarget(TINY_TARGET, (1, 2), "float32", "sdpa", "cpu")
    spec = DraftSpec.build(DraftConfig(num_layers=1, block_size=4, target_layer_ids=(1, 2)), target.shape, 261)
    draft = DFlashDraft(spec).initialise(0).eval()
    tokenizer = AutoTokenizer.from_pretrained(TINY_TARGET)
    texts = ("count to 5", "copy the word hello")
    prompts = [
        tuple(tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True)["input_ids"])
        for text in texts
    ]
    plain = [greedy_decode(target, prompt, 6) for prompt in prompts]
    assert greedy_decode_many(target, prompts, 6) == plain
    drafted = speculative_decode_many(target, draft, prompts, 6)
    assert drafted == [speculative_decode(target, draft, prompt, 6) for prompt in prompts]
    assert [d.tokens for d in drafted] == [p.tokens for p in plain]


def test_the_drafts_cache_of_rows_equals_that_of_each_row(target: FrozenTarget, draft: DFlashDraft) -> None:
    """Rejected positions and padding are written over: proposals equal those of a context that never held them."""
    generator = torch.Generator().manual_seed(3)
    lengths, rounds = [6, 1, 3], [[2, 1, 4], [1, 4, 3], [4, 1, 1]]
    texts = [torch.randint(0, 250, (1, 40), generator=generator) for _ in lengths]
    with torch.inference_mode():
        features = [target.features(text) for text in texts]
        rows, alone = DraftRows(draft, 3, 40, target.device), [DraftContext(draft) for _ in lengths]
        wrong = 5 * torch.randn(3, 6, features[0].shape[-1], generator=generator)
        taken = [0, 0, 0]
        for counts in (lengths, *rounds):
            given = wrong[:, : max(*counts, 4)].clone()
            for row, count in enumerate(counts):
                piece = features[row][:, taken[row] : taken[row] + count]
                given[row, :count] = piece[0]
                alone[row].append(piece)
                taken[row] += count
            rows.append(given, counts)
            anchors = torch.tensor([[int(text[0, end])] for text, end in zip(texts, taken, strict=True)])
            together = rows.propose(anchors, target.embedding_VH, target.head_VH)
            for row, context in enumerate(alone):
                expected = context.propose(int(anchors[row]), target.embedding_VH, target.head_VH)
                assert torch.equal(together[row], expected)


def test_a_target_with_a_window_takes_prompts_one_at_a_time(
    micro_target: Path, draft: DFlashDraft, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its cache forgets and cannot be cut back row by row. One line says so, and the texts are still plain greedy's."""
    config = Qwen3Config.from_pretrained(micro_target)
    config.use_sliding_window, config.sliding_window, config.max_window_layers = True, 6, 2
    config.layer_types = ["full_attention", "full_attention", *["sliding_attention"] * 3]
    Qwen3ForCausalLM.from_pretrained(micro_target, config=config).save_pretrained(tmp_path)
    windowed = FrozenTarget(tmp_path, (1, 2), "float32", "sdpa", "cpu")
    prompts = random_prompts(1)[1:4]
    with caplog.at_level(logging.INFO):
        drafted = speculative_decode_many(windowed, draft, prompts, 4)
    lines = [record.message for record in caplog.records if record.name.startswith("dflash_core")]
    assert len(lines) == 1 and "one at a time" in lines[0] and "DynamicSlidingWindowLayer" in lines[0]
    assert drafted == [speculative_decode(windowed, draft, prompt, 4) for prompt in prompts]
    assert [d.tokens for d in drafted] == [g.tokens for g in greedy_decode_many(windowed, prompts, 4)]


def test_a_target_that_ignores_positions_or_masks_is_noticed(target: FrozenTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    assert why_not_together(target) is None
    begin = decode_module.TargetRows.begin

    def blind(rows: decode_module.TargetRows, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        positions, mask = begin(rows, count)
        return positions, torch.ones_like(mask) if mask.dtype == torch.bool else torch.zeros_like(mask)

    def misplaced(rows: decode_module.TargetRows, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        positions, mask = begin(rows, count)
        return positions + 3 * (positions > 6), mask

    for fault in (blind, misplaced):
        monkeypatch.setattr(decode_module.TargetRows, "begin", fault)
        assert "alone and together" in (why_not_together(target) or "")
    monkeypatch.setattr(target.model.config, "_attn_implementation", "flash_attention_2")
    assert "flash_attention_2" in (why_not_together(target) or "")


def test_progress_and_the_clocks_phases(target: FrozenTarget, draft: DFlashDraft) -> None:
    clock, seen = PhaseClock(target.device), []
    speculative_decode_many(target, draft, random_prompts(0), 3, 4, lambda *done: seen.append(done), clock)
    assert seen == [(4, 5), (5, 5)]
    assert set(clock.seconds) == {"prefill", "draft", "verify", "rounds"} and all(s > 0 for s in clock.seconds.values())
