"""Self-checks of the draft as it is trained: who sees what, at which positions, and what it computes.

All of them run the forward pass that training runs, on the drafter's own device and in its number format, over one short
row of random context and blocks of random tokens. The weights are those that training begins with. What may not be seen
is changed and nothing may move, to the bit where the device repeats itself to the bit; what must be seen is changed by the
same amount and something has to move, so that a draft that sees nothing cannot pass.

Shapes: R rows, S context positions, A anchors, K slots of a block, D hidden, F feature width.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from dflash_core.errors import TrainingError
from dflash_core.model.documents import Documents, context_windows
from dflash_core.model.draft import DFlashDraft, group_size
from dflash_core.model.reference import reference_block
from dflash_core.training.loop import DraftTrainer
from dflash_core.training.self_check_report import Figures, share_apart

CONTEXT = 24
# More than the anchors that share one attention call on a CPU (`group_size`), some of them neighbours whose blocks overlap.
ANCHORS = (1, 2, 5, 6, 9, 10, 11, 15, 20)
PROBED = 5  # in the middle, with a neighbour on either side
# Documents of the packed row, and the anchors of each by position inside the document.
DOCUMENTS = (7, 12, 5)
DOCUMENT_ANCHORS = ((1, 4), (3, 4, 8), (2,))
# What other sums of the same numbers may differ by, as a share of the norm: about 1e-6 in fp32. A GPU may multiply fp32
# matrices in a shorter format. A wrong position or key shows as 1e-2 and more in fresh weights.
SAME_FP32 = {"cpu": 1e-4, "cuda": 5e-3}
SAME_BF16 = 5e-2
# The reference is a loop over single numbers; it compares as many layers as about this many of its operations allow.
REFERENCE_OPERATIONS = 80_000
REFERENCE_ANCHOR, REFERENCE_CONTEXT, REFERENCE_SLOTS = 3, 5, 4
FAULT = "this is a fault of the draft's attention, not of the configuration; nothing that is trained so can be served"


class _Row(NamedTuple):
    """Inputs of one forward pass over a single row."""

    features_1SF: Tensor
    x_1AKD: Tensor
    anchors_1A: Tensor
    documents: Documents | None = None


class DraftProbe:
    """Random rows for a trainer's draft, and the forward pass that training runs over them."""

    def __init__(self, trainer: DraftTrainer) -> None:
        self.draft, self.device = trainer.draft, trainer.device
        self.compute = torch.bfloat16 if trainer.config.compute_dtype == "bfloat16" else torch.float32
        self._embedding_VD = trainer._embedding_VD  # what the trainer's own blocks are made of
        self._generator = torch.Generator().manual_seed(0)
        self.same = SAME_BF16 if self.compute == torch.bfloat16 else SAME_FP32.get(self.device.type, 5e-3)

    def features(self, length: int) -> Tensor:
        """Random context [1, S, F]. The draft norms it, so that its size does not matter."""
        width = self.draft.fc.in_features
        return torch.randn(1, length, width, generator=self._generator).to(self.device, self.compute)

    def blocks(self, num_anchors: int, num_slots: int | None = None) -> Tensor:
        """Blocks [1, A, K, D] of random tokens: of masks alone, a slot that takes another's place would not be noticed."""
        shape = (1, num_anchors, num_slots or self.draft.spec.block_size)
        tokens = torch.randint(0, self.draft.spec.vocab_size, shape, generator=self._generator)
        return functional.embedding(tokens.to(self.device), self._embedding_VD)

    def row(self) -> _Row:
        """A row of one sequence."""
        return _Row(self.features(CONTEXT), self.blocks(len(ANCHORS)), torch.tensor([ANCHORS], device=self.device))

    def packed_row(self) -> _Row:
        """A row of three documents."""
        starts = [sum(DOCUMENTS[:n]) for n in range(len(DOCUMENTS))]
        places = [start + a for start, own in zip(starts, DOCUMENT_ANCHORS, strict=True) for a in own]
        of_anchor = [start for start, own in zip(starts, DOCUMENT_ANCHORS, strict=True) for _ in own]
        ids = torch.arange(len(DOCUMENTS)).repeat_interleave(torch.tensor(DOCUMENTS))
        positions = torch.cat([torch.arange(length) for length in DOCUMENTS])
        documents = Documents(*(x.unsqueeze(0).to(self.device) for x in (ids, positions, torch.tensor(of_anchor))))
        anchors_1A = torch.tensor([places], device=self.device)
        return _Row(self.features(sum(DOCUMENTS)), self.blocks(len(places)), anchors_1A, documents)

    def final(self, row: _Row) -> Tensor:
        """Final states [A, K, D] as a training step computes them, in fp32; with gradients on, which may choose the kernel.

        Raises:
            TrainingError: they are not finite.
        """
        windows = None
        if row.documents is not None:  # as in DraftTrainer.add
            windows = context_windows(row.anchors_1A.cpu(), row.documents.starts_RA.cpu(), group_size(self.device))
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.compute == torch.bfloat16):
            final = self.draft(row.features_1SF, row.x_1AKD, row.anchors_1A, row.documents, windows)
        if not bool(torch.isfinite(final).all()):
            raise TrainingError("the draft's states are not finite; the weights that training begins with are unusable")
        return final[0].detach().float()


def check_leaks(probe: DraftProbe) -> Figures:
    """A block sees the context strictly before its anchor and its own slots in both directions, and nothing else.

    Returns `leak_rerun_difference`, by how much the device's own repetition differs.
    """
    row, a = probe.row(), ANCHORS[PROBED]
    before = probe.final(row)
    noise = float((probe.final(row) - before).abs().max())
    limit = 4 * noise + 1e-7 * float(before.abs().max())

    def moved(changed: _Row) -> list[float]:
        """By how much each block moves."""
        apart: list[float] = (probe.final(changed) - before).abs().amax(dim=(1, 2)).tolist()
        return [x if x > limit else 0.0 for x in apart]

    other = probe.features(CONTEXT)
    leaks = moved(row._replace(features_1SF=_mixed(row.features_1SF, other, slice(a, None))))
    if any(leaks[: PROBED + 1]):
        at_anchor = moved(row._replace(features_1SF=_mixed(row.features_1SF, other, slice(a, a + 1))))
        where = "at its anchor, whose state tells the next token" if any(at_anchor[: PROBED + 1]) else "behind its anchor"
        raise TrainingError(f"a block sees the context {where} (its states move by {max(leaks[: PROBED + 1]):.1e}); {FAULT}")
    seen = moved(row._replace(features_1SF=_mixed(row.features_1SF, other, slice(a - 1, a))))
    if not seen[PROBED]:
        raise TrainingError(f"a block does not see the context right before its anchor; {FAULT}")
    _check_blocks(probe, row, before, limit)
    return {"leak_rerun_difference": noise}


def _check_blocks(probe: DraftProbe, row: _Row, before: Tensor, limit: float) -> None:
    other = probe.blocks(len(ANCHORS))
    x = row.x_1AKD.clone()
    x[:, PROBED] = other[:, PROBED]
    apart = (probe.final(row._replace(x_1AKD=x)) - before).abs().amax(dim=(1, 2))
    apart[PROBED] = 0.0
    if float(apart.max()) > limit:
        raise TrainingError(f"a block sees the slots of another block (its states move by {float(apart.max()):.1e}); {FAULT}")
    x = row.x_1AKD.clone()
    x[:, PROBED, 1] = other[:, PROBED, 1]
    slots = (probe.final(row._replace(x_1AKD=x)) - before).abs().amax(dim=2)[PROBED]
    if not float(slots[0]) > limit:
        raise TrainingError(f"a slot does not see the slots behind it in its own block: the draft is causal; {FAULT}")
    if len(slots) > 2 and not float(slots[2]) > limit:
        raise TrainingError(f"a slot does not see the slots before it in its own block; {FAULT}")


def _mixed(features: Tensor, other: Tensor, where: slice) -> Tensor:
    """`features` with the positions of `where` from `other`."""
    changed = features.clone()
    changed[:, where] = other[:, where]
    return changed


def check_packed(probe: DraftProbe) -> Figures:
    """Documents of a packed row do not see each other, and one computes the same wherever it stands in a row.

    Returns `packed_difference` from the document alone in its row, as a share of the norm.
    """
    row = probe.packed_row()
    assert row.documents is not None
    before = probe.final(row)
    noise = float((probe.final(row) - before).abs().max())
    limit = 4 * noise + 1e-7 * float(before.abs().max())
    begin, end = DOCUMENTS[0], DOCUMENTS[0] + DOCUMENTS[1]
    first = len(DOCUMENT_ANCHORS[0])
    own = slice(first, first + len(DOCUMENT_ANCHORS[1]))
    features, x = probe.features(sum(DOCUMENTS)), probe.blocks(before.shape[0])
    features[:, begin:end], x[:, own] = row.features_1SF[:, begin:end], row.x_1AKD[:, own]
    others = probe.final(row._replace(features_1SF=features, x_1AKD=x))
    leak = float((others - before)[own].abs().max())
    if leak > limit:
        raise TrainingError(
            f"the documents of a packed row see each other in the draft (its states move by {leak:.1e}); {FAULT}; until it is"
            f" mended use bucketing.strategy: padded"
        )
    alone_row = _Row(row.features_1SF[:, begin:end], row.x_1AKD[:, own], row.anchors_1A[:, own] - begin)
    apart = share_apart(before[own], probe.final(alone_row))
    if not apart <= probe.same:
        raise TrainingError(
            f"a document of a packed row gets other states than alone ({apart:.1e} of their norm): its positions do not count"
            f" from its own start, or it misses a part of its context; {FAULT}"
        )
    return {"packed_difference": apart}


def check_reference(probe: DraftProbe) -> Figures:
    """The fast path agrees in fp32 with the slow reference, which writes out positions, visibility and softmax by itself.

    The reference puts the context at 0 to a - 1 and slot k of anchor a at a + k; another position of either turns the
    rotary angles and shows. It runs on the CPU, over as many of the first layers as it has time for.

    Returns `reference_difference` as a share of the norm, and `reference_layers`.
    """
    count = _affordable_layers(probe.draft)
    part = first_layers(probe.draft, count)
    slots = min(REFERENCE_SLOTS, probe.draft.spec.block_size) if probe.device.type == "cpu" else probe.draft.spec.block_size
    features, x = probe.features(REFERENCE_CONTEXT).float(), probe.blocks(1, slots).float()
    anchors = torch.tensor([[REFERENCE_ANCHOR]], device=probe.device)
    with torch.no_grad():
        fast = part(features, x, anchors)[0, 0]
        slow_part = part if probe.device.type == "cpu" else _on_cpu(part)
        slow = reference_block(slow_part, features[0].cpu(), x[0, 0].cpu(), REFERENCE_ANCHOR)
    apart = share_apart(fast.cpu(), slow)
    if not apart <= SAME_FP32.get(probe.device.type, 5e-3):
        raise TrainingError(
            f"the draft's fast path differs from the plain reference by {apart:.1e} of its norm: positions (context s at s, slot"
            f" k of anchor a at a + k), keys or norms are not what serving computes; {FAULT}"
        )
    return {"reference_difference": apart, "reference_layers": count}


def _affordable_layers(draft: DFlashDraft) -> int:
    """The reference rotates one number after the other: about ten operations for each half of each head and position."""
    spec = draft.spec
    heads = (REFERENCE_CONTEXT + REFERENCE_SLOTS) * spec.num_kv_heads + REFERENCE_SLOTS * spec.num_heads
    return max(1, min(spec.num_layers, REFERENCE_OPERATIONS // (heads * spec.head_dim * 5)))


def first_layers(draft: DFlashDraft, count: int) -> DFlashDraft:
    """A draft of the first `count` layers that shares their weights."""
    part = copy.copy(draft)
    layers = nn.ModuleList(list(draft.layers)[:count])
    object.__setattr__(part, "_modules", {**draft._modules, "layers": layers})
    changes: dict[str, Any] = {"num_layers": count}
    if getattr(draft.spec, "layer_types", None):
        changes["layer_types"] = tuple(draft.spec.layer_types[:count])  # type: ignore[attr-defined]
    object.__setattr__(part, "spec", replace(draft.spec, **changes))
    return part


def _on_cpu(part: DFlashDraft) -> DFlashDraft:
    own = DFlashDraft(part.spec)
    own.load_state_dict({name: tensor.detach().cpu() for name, tensor in part.state_dict().items()})
    return own
