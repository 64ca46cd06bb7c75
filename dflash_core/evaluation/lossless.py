"""Where drafted and plain greedy decoding part, and whether rounding explains it.

In exact arithmetic they cannot part: every token that stays is the target's own choice. In bf16 the same logits come out
differently when a token is computed alone, in a block or in a batch, because sums are made in another order. The two texts may
then part where the two best logits are nearly equal: a near tie, and no mistake.

How near is measured at the place itself. Its logits are computed in three ways: in one pass, token by token behind a cache as
plain decoding does, and in a block behind a cache as verifying does. If they differ by at most d in any logit, the order of two
candidates can turn only where their gap is at most 2 d. A way that was not tried (a batch) rounds at least the last digit, so d
is never taken smaller than the spacing of numbers of that format at the larger candidate.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from dflash_core.evaluation.decode import Tokens
from dflash_core.model.target import FrozenTarget


@dataclass(frozen=True)
class Difference:
    """One prompt whose two texts differ.

    Attributes:
        position: index of the first new token that differs.
        plain, drafted: the two tokens there; None where a text has ended already.
        gap: plain's logit minus drafted's, as plain decoding computes them; None without two tokens.
        tolerance: the gap up to which rounding can turn their order.
        near_tie: whether the gap is within it.
    """

    id: str
    position: int
    plain: int | None
    drafted: int | None
    gap: float | None
    tolerance: float | None
    near_tie: bool

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@torch.inference_mode()
def explain_difference(
    target: FrozenTarget, prompt_id: str, prompt: Tokens, plain: Tokens, drafted: Tokens, block_size: int
) -> Difference:
    """Compare two texts that differ. Costs one forward pass for each token before the place."""
    position = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(plain, drafted, strict=False)))
    ours = plain[position] if position < len(plain) else None
    theirs = drafted[position] if position < len(drafted) else None
    if ours is None or theirs is None:
        return Difference(prompt_id, position, ours, theirs, None, None, near_tie=False)
    prefix = plain[:position]
    block = (*prompt, *prefix)[len(prompt) :][-block_size:]
    before_block = (*prompt, *prefix)[: len(prompt) + len(prefix) - len(block)]
    by_token = _logits(target, [prompt, *((token,) for token in prefix)])
    others = [_logits(target, [(*prompt, *prefix)]), _logits(target, [before_block, block] if block else [prompt])]
    rounding = max(float((logits - by_token).abs().max()) for logits in others)
    spacing = torch.finfo(target.model.dtype).eps * float(by_token[[ours, theirs]].abs().max())
    gap, tolerance = float(by_token[ours] - by_token[theirs]), 2 * max(rounding, spacing)
    return Difference(prompt_id, position, ours, theirs, gap, tolerance, near_tie=abs(gap) <= tolerance)


def _logits(target: FrozenTarget, pieces: list[Tokens]) -> Tensor:
    """The last token's logits in fp32, [V], with the tokens given to the target piece by piece."""
    cache = DynamicCache(config=target.model.config)
    for piece in pieces:
        logits, _ = target.step(torch.tensor([piece]), cache)
    return logits[0, -1].float()
