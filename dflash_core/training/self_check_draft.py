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

# Where anchors stand: more of them than share one attention call on a CPU (`group_size`), with neighbours whose blocks
# overlap. A GPU takes its sparse kernel only for many queries, whose tiles have 128 places: there the row is longer.
CPU_CONTEXT, CPU_ANCHORS = 24, (1, 2, 3, 5, 6, 9, 10, 11, 15, 20)
GPU_CONTEXT, GPU_ANCHORS = 320, tuple(sorted({*range(3, 318, 9), *range(4, 318, 9)}))
# Documents of the packed row and the distance of their anchors, the first at position 1.
CPU_DOCUMENTS, CPU_ANCHOR_STEP = (7, 12, 5), 3
GPU_DOCUMENTS, GPU_ANCHOR_STEP = (90, 150, 70), 4
# What other sums of the same numbers may differ by, as a share of the norm: about 1e-6 in fp32. A GPU may multiply fp32
# matrices in a shorter format. A wrong position or key shows as 1e-2 and more in fresh weights.
SAME_FP32 = {"cpu": 1e-4, "cuda": 5e-3}
SAME_BF16 = 5e-2
# The reference is a loop over single numbers; it compares as many layers as about this many of its operations allow.
REFERENCE_OPERATIONS = 80_000
REFERENCE_ANCHOR, REFERENCE_SLOTS = 3, 4
# Weights do not know of the window: a shorter one than is trained with, so that it cuts something off the short row.
REFERENCE_WINDOW = 3
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

    def blocks(self, num_anchors: int, num_slots: int | None = None, *, others: bool = False) -> Tensor:
        """Blocks [1, A, K, D] of random tokens: of masks alone, a slot that takes another's place would not be noticed.

        `others` have no token in common with those without it: a slot that gets the token it had cannot move anything.
        """
        shape = (1, num_anchors, num_slots or self.draft.spec.block_size)
        half = self.draft.spec.vocab_size // 2
        tokens = torch.randint(0, half, shape, generator=self._generator) + (half if others else 0)
        return functional.embedding(tokens.to(self.device), self._embedding_VD)

    def row(self, num_slots: int | None = None) -> _Row:
        """A row of one sequence."""
        context, anchors = (CPU_CONTEXT, CPU_ANCHORS) if self.device.type == "cpu" else (GPU_CONTEXT, GPU_ANCHORS)
        anchors_1A = torch.tensor([anchors], device=self.device)
        return _Row(self.features(context), self.blocks(len(anchors), num_slots), anchors_1A)

    def packed_row(self) -> _Row:
        """A row of three documents."""
        on_cpu = self.device.type == "cpu"
        lengths, step = (CPU_DOCUMENTS, CPU_ANCHOR_STEP) if on_cpu else (GPU_DOCUMENTS, GPU_ANCHOR_STEP)
        starts = [sum(lengths[:n]) for n in range(len(lengths))]
        places = [(start + a, start) for start, length in zip(starts, lengths, strict=True) for a in range(1, length, step)]
        ids = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
        positions = torch.cat([torch.arange(length) for length in lengths])
        anchors, of_anchor = torch.tensor(places).T
        documents = Documents(*(x.unsqueeze(0).to(self.device) for x in (ids, positions, of_anchor)))
        features = self.features(sum(lengths))
        return _Row(features, self.blocks(len(places)), anchors.unsqueeze(0).to(self.device), documents)

    def final(self, row: _Row) -> Tensor:
        """Final states [A, K, D] as a training step computes them, in fp32; with gradients on, which may choose the kernel.

        Raises:
            TrainingError: they are not finite.
        """
        windows = None
        if row.documents is not None:  # as in DraftTrainer.add
            windows = context_windows(row.anchors_1A.cpu(), row.documents.starts_RA.cpu(), group_size(self.device))
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.compute == torch.bfloat16):
            final: Tensor = self.draft(row.features_1SF, row.x_1AKD, row.anchors_1A, row.documents, windows)
        if not bool(torch.isfinite(final).all()):
            raise TrainingError("the draft's states are not finite; the weights that training begins with are unusable")
        return final[0].detach().float()


class _Movement:
    """By how much the states of a row's blocks move when some of its inputs are others."""

    def __init__(self, probe: DraftProbe, row: _Row) -> None:
        self._probe, self.row, self.before = probe, row, probe.final(row)
        # The device's own repetition: 0 where it repeats itself to the bit. Beyond that nothing hidden may move anything.
        self.noise = float((probe.final(row) - self.before).abs().max())
        self._limit = 4 * self.noise + 1e-7 * float(self.before.abs().max())

    def by_slot(self, row: _Row) -> Tensor:
        """Largest movement in each slot [A, K], 0 where it is no more than the device's own."""
        apart_AK = (self._probe.final(row) - self.before).abs().amax(dim=2)
        return apart_AK * (apart_AK > self._limit)

    def with_context(self, other_1SF: Tensor, where: slice) -> Tensor:
        """Movement [A, K] with the context of `where` from another row."""
        features = self.row.features_1SF.clone()
        features[:, where] = other_1SF[:, where]
        return self.by_slot(self.row._replace(features_1SF=features))


def check_leaks(probe: DraftProbe) -> Figures:
    """A block sees the context strictly before its anchor and its own slots in both directions, and nothing else.

    Returns `leak_rerun_difference`, by how much the device's own repetition differs.
    """
    movement = _Movement(probe, probe.row())
    probed = movement.row.anchors_1A.shape[1] // 2  # with neighbours on either side
    a = int(movement.row.anchors_1A[0, probed])
    other = probe.features(movement.row.features_1SF.shape[1])
    leak = float(movement.with_context(other, slice(a, None))[: probed + 1].max())
    if leak > 0:
        at_anchor = float(movement.with_context(other, slice(a, a + 1))[: probed + 1].max()) > 0
        where = "at its anchor, whose state tells the next token" if at_anchor else "behind its anchor"
        raise TrainingError(f"a block sees the context {where} (its states move by {leak:.1e}); {FAULT}")
    if not float(movement.with_context(other, slice(a - 1, a))[probed].max()) > 0:
        raise TrainingError(f"a block does not see the context right before its anchor; {FAULT}")
    _check_slots(probe, movement, probed)
    return {"leak_rerun_difference": movement.noise}


def _check_slots(probe: DraftProbe, movement: _Movement, probed: int) -> None:
    """Other slots reach the probed block alone, and there every slot next to them."""
    other = probe.blocks(movement.row.x_1AKD.shape[1], others=True)
    x = movement.row.x_1AKD.clone()
    x[:, probed] = other[:, probed]
    moved_AK = movement.by_slot(movement.row._replace(x_1AKD=x))
    moved_AK[probed] = 0.0
    if float(moved_AK.max()) > 0:
        raise TrainingError(f"a block sees the slots of another block (its states move by {float(moved_AK.max()):.1e}); {FAULT}")
    x = movement.row.x_1AKD.clone()
    x[:, probed, 1] = other[:, probed, 1]
    moved = movement.by_slot(movement.row._replace(x_1AKD=x))[probed].tolist()
    if not moved[0]:
        raise TrainingError(f"a slot does not see the slot behind it in its own block: the draft is causal; {FAULT}")
    if not all(moved[2:3]):
        raise TrainingError(f"a slot does not see the slot before it in its own block; {FAULT}")


def check_packed(probe: DraftProbe) -> Figures:
    """Documents of a packed row do not see each other, and one computes the same wherever it stands in a row.

    Returns `packed_difference` from the document alone in its row, as a share of the norm.
    """
    movement = _Movement(probe, row := probe.packed_row())
    assert row.documents is not None
    begin, end = (int(place) for place in (row.documents.ids_RS[0] == 1).nonzero()[[0, -1], 0])
    inside = slice(begin, end + 1)
    own = row.documents.starts_RA[0] == begin
    features, x = probe.features(row.features_1SF.shape[1]), probe.blocks(row.x_1AKD.shape[1])
    features[:, inside], x[:, own] = row.features_1SF[:, inside], row.x_1AKD[:, own]
    leak = float(movement.by_slot(row._replace(features_1SF=features, x_1AKD=x))[own].max())
    if leak > 0:
        raise TrainingError(
            f"the documents of a packed row see each other in the draft (its states move by {leak:.1e}); {FAULT}; until it is"
            f" mended use bucketing.strategy: padded"
        )
    alone = _Row(row.features_1SF[:, inside], row.x_1AKD[:, own], row.anchors_1A[:, own] - begin)
    apart = share_apart(movement.before[own], probe.final(alone))
    if not apart <= probe.same:
        raise TrainingError(
            f"a document of a packed row gets other states than alone ({apart:.1e} of their norm): its positions do not count"
            f" from its own start, or it misses a part of its context; {FAULT}"
        )
    return {"packed_difference": apart}


def check_reference(probe: DraftProbe) -> Figures:
    """The fast path agrees in fp32 with the slow reference, which writes out positions, visibility and softmax by itself.

    The reference puts the context at 0 to a - 1 and slot k of anchor a at a + k; another position of either turns the
    rotary angles and shows. It runs on the CPU for one block, over as many of the first layers as it has time for.

    Returns `reference_difference` as a share of the norm, and `reference_layers`.
    """
    count = _affordable_layers(probe.draft)
    part = first_layers(probe.draft, count)
    if part.spec.sliding_window is not None:
        part.spec = replace(part.spec, sliding_window=min(part.spec.sliding_window, REFERENCE_WINDOW))
    row = probe.row(min(REFERENCE_SLOTS, probe.draft.spec.block_size))
    features, x = row.features_1SF.float(), row.x_1AKD.float()
    block = row.anchors_1A[0].tolist().index(REFERENCE_ANCHOR)
    with torch.no_grad():
        fast = part(features, x, row.anchors_1A)[0, block].cpu()
        slow_part = part if probe.device.type == "cpu" else _on_cpu(part)
        slow = reference_block(slow_part, features[0, :REFERENCE_ANCHOR].cpu(), x[0, block].cpu(), REFERENCE_ANCHOR)
    apart = share_apart(fast, slow)
    if not apart <= SAME_FP32.get(probe.device.type, 5e-3):
        raise TrainingError(
            f"the draft's fast path differs from the plain reference by {apart:.1e} of its norm: positions (context s at s, slot"
            f" k of anchor a at a + k), keys or norms are not what serving computes; {FAULT}"
        )
    return {"reference_difference": apart, "reference_layers": count}


def _affordable_layers(draft: DFlashDraft) -> int:
    """The reference rotates one number after the other: about ten operations for each half of each head and position."""
    spec = draft.spec
    heads = (REFERENCE_ANCHOR + REFERENCE_SLOTS) * spec.num_kv_heads + REFERENCE_SLOTS * spec.num_heads
    return max(1, min(spec.num_layers, REFERENCE_OPERATIONS // (heads * spec.head_dim * 5)))


def first_layers(draft: DFlashDraft, count: int) -> DFlashDraft:
    """A draft of the first `count` layers that shares their weights."""
    part = copy.copy(draft)
    part._modules = {**draft._modules, "layers": nn.ModuleList(list(draft.layers)[:count])}
    changes: dict[str, Any] = {"num_layers": count}
    if "layer_types" in draft.spec.as_dict():
        changes["layer_types"] = draft.spec.as_dict()["layer_types"][:count]
    part.spec = replace(draft.spec, **changes)
    return part


def _on_cpu(part: DFlashDraft) -> DFlashDraft:
    own = DFlashDraft(part.spec)
    own.load_state_dict({name: tensor.detach().cpu() for name, tensor in part.state_dict().items()})
    return own
