"""Costs from a table: operations over what a card does of them, bytes over its bandwidth, and launches, the largest counts.

Operations are multiplications and additions, 2 for each weight and token. Backward is 2 times forward where both the
weight's and the input's gradient are needed, and once where one of them is not.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dflash_core.simulation.cell import StepWork
from dflash_core.simulation.figures import CardFigures, ModelFigures
from dflash_core.simulation.workload import Shapes

FloatArray = NDArray[np.float64]
# The draft's attention on a GPU in its slower form: groups of this many blocks, each over the whole context (model/attention.py).
BLOCKS_PER_GROUP = 128
# Forward and backward of fused attention: 2 products, then 5 (scores again, and four gradients).
ATTENTION_TRAINING = 3.5
# fp32 weight and gradient and two moments (16), read and written by AdamW and by dividing, measuring and clipping gradients.
OPTIMIZER_BYTES, OPTIMIZER_TRAFFIC = 16, 44
# Slots whose logits exist at once (model/loss.py).
LOGIT_SLOTS = 1024


@dataclass(frozen=True)
class Assumptions:
    """What no data sheet says. All can be set.

    Attributes:
        peak_share: share of a card's peak that large matrix products reach in training code.
        link_share: share of a link's figure that copies and joins reach.
        launch_s: seconds that one kernel costs at least, on the device or in the launching thread.
        node_link_gb_s: from node to node, for each card, one direction, 10^9 bytes a second (400 Gb/s).
        load_s_per_token: work of a loader, seconds.
    """

    peak_share: float = 0.4
    link_share: float = 0.8
    launch_s: float = 5e-6
    node_link_gb_s: float = 50.0
    load_s_per_token: float = 1e-6


@dataclass(frozen=True)
class DraftFigures:
    """Shape of the draft; what is not here it has from the target.

    Attributes:
        num_taps, last_tap: tapped layers, and the last one's number from 0: the target stops after it.
    """

    num_layers: int
    block_size: int
    num_taps: int
    last_tap: int
    intermediate_size: int


@dataclass(frozen=True)
class Table:
    """Costs of one target and draft on one kind of card."""

    target: ModelFigures
    draft: DraftFigures
    card: CardFigures
    assumptions: Assumptions = Assumptions()

    @property
    def context_parameters(self) -> int:
        """Key and value projections of one draft layer."""
        return 2 * self.target.hidden_size * self.target.num_kv_heads * self.target.head_dim

    @property
    def fc_parameters(self) -> int:
        return self.draft.num_taps * self.target.hidden_size**2

    @property
    def layer_parameters(self) -> int:
        """Weights of one draft layer."""
        model = self.target
        mlp = 3 * model.hidden_size * self.draft.intermediate_size
        return 2 * model.hidden_size * model.num_heads * model.head_dim + self.context_parameters + mlp

    @property
    def trainable(self) -> int:
        """Weights that are trained; norms are left out."""
        return self.fc_parameters + self.draft.num_layers * self.layer_parameters

    @property
    def feature_bytes(self) -> int:
        """Tapped states of one token in bf16."""
        return self.draft.num_taps * self.target.hidden_size * 2

    def target_flops(self, shapes: Shapes) -> FloatArray:
        """Forward to the last tap; causal attention costs half of its square."""
        layers, model = self.draft.last_tap + 1, self.target
        attention = 2.0 * model.num_heads * model.head_dim * shapes.squares
        flops: FloatArray = layers * (2.0 * model.layer_parameters * shapes.padded_tokens + attention)
        return flops

    def draft_flops(self, shapes: Shapes) -> FloatArray:
        """Forward and backward of a batch."""
        model, draft = self.target, self.draft
        slots = shapes.blocks * draft.block_size
        # fc: no gradient of its input, the features. Keys and values of the context: all three products.
        context = shapes.padded_tokens * (4.0 * self.fc_parameters + 6.0 * draft.num_layers * self.context_parameters)
        layers = slots * 6.0 * draft.num_layers * self.layer_parameters
        group = np.minimum(shapes.blocks / shapes.rows, BLOCKS_PER_GROUP) * draft.block_size
        seen = draft.block_size * shapes.block_reach + slots * group
        attention = ATTENTION_TRAINING * 4.0 * draft.num_layers * model.num_heads * model.head_dim * seen
        # The frozen head: forward, and the gradient of its input in the same pass.
        head = shapes.labelled * 4.0 * model.vocab_size * model.hidden_size
        flops: FloatArray = context + layers + attention + head
        return flops

    def target_s(self, shapes: Shapes) -> FloatArray:
        """Seconds of a target for each batch: operations, reading all weights once, or some 15 launches a layer."""
        layers = self.draft.last_tap + 1
        read = 2.0 * layers * self.target.layer_parameters / (self.card.bandwidth_gb_s * 1e9)
        busy: FloatArray = np.maximum(self.target_flops(shapes) / self._speed, max(read, 15 * layers * self.assumptions.launch_s))
        return busy

    def draft_s(self, shapes: Shapes, *, colocated: bool) -> FloatArray:
        """Seconds of the drafter for each batch; apart from its targets it also copies the features over the link."""
        launches = (40 * self.draft.num_layers + 60) * self.assumptions.launch_s
        busy = np.asarray(np.maximum(self.draft_flops(shapes) / self._speed, launches), dtype=np.float64)
        return busy if colocated else busy + shapes.padded_tokens * self.feature_bytes / self._link(1)

    def load_s(self, shapes: Shapes) -> FloatArray:
        return np.asarray(shapes.padded_tokens * self.assumptions.load_s_per_token, dtype=np.float64)

    def step_work(self, num_cells: int, num_nodes: int) -> StepWork:
        """The join of fp32 gradients as a ring, 2 (n - 1) / n of their bytes over each link, and AdamW."""
        ring = 2.0 * (num_cells - 1) / num_cells * 4.0 * self.trainable / self._link(num_nodes)
        hops = 2e-5 * float(np.ceil(np.log2(num_cells))) if num_cells > 1 else 0.0
        copies = 4.0 * 4.0 * self.trainable / (self.card.bandwidth_gb_s * 1e9) if num_cells > 1 else 0.0
        return StepWork(ring + hops + copies, OPTIMIZER_TRAFFIC * self.trainable / (self.card.bandwidth_gb_s * 1e9))

    @property
    def _speed(self) -> float:
        return self.card.tflops * 1e12 * self.assumptions.peak_share

    def _link(self, num_nodes: int) -> float:
        gb_s = self.card.link_gb_s if num_nodes == 1 else min(self.card.link_gb_s, self.assumptions.node_link_gb_s)
        return gb_s * 1e9 * self.assumptions.link_share

    def memory_terms(self, shapes: Shapes, in_flight: int, num_cells: int) -> dict[str, dict[str, float]]:
        """What the card of a target, of a drafter, and one that is both need, by what takes it, in 10^9 bytes.

        Kept for the backward pass, of each slot and layer: 20 bytes for each unit of the hidden width, 14 of the queries', 12
        of the keys' and 8 of the MLP's, counted under autocast with hooks on saved tensors (tests/test_simulation_costs.py);
        the mask, 2 bytes for each key of its group of anchors; and, for each group, the context's keys and values, repeated for
        all heads. Logits exist in pieces, of which
        the largest counts; features are there twice. Fragmentation is not in it.

        Args:
            in_flight: bytes in flight, all of which may be features on the targets' cards.
        """
        model, draft = self.target, self.draft
        queries, keys = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
        slots = shapes.blocks * draft.block_size
        a_slot = 20 * model.hidden_size + 14 * queries + 12 * keys + 8 * draft.intermediate_size
        blocks = shapes.blocks / shapes.rows
        context = 4.0 * np.ceil(blocks / BLOCKS_PER_GROUP) * shapes.padded_tokens * queries
        seen = shapes.padded_tokens / shapes.rows + np.minimum(blocks, BLOCKS_PER_GROUP) * draft.block_size
        kept = draft.num_layers * float((slots * (a_slot + 2.0 * seen) + context).max())
        joined = 8.0 * self.trainable if num_cells > 1 else 0.0  # the flat buffer, and gradients cut out of it
        training = {
            "weights, gradients and moments of the draft": (OPTIMIZER_BYTES + 2) * self.trainable,  # and its copy in bf16
            "joining gradients": joined,
            "kept activations": kept,
            "logits": 3.0 * 4.0 * LOGIT_SLOTS * model.vocab_size,
            "features": 2.0 * float(shapes.padded_tokens.max()) * self.feature_bytes,
        }
        serving = {"weights of the target": 2.0 * model.parameters, "bytes in flight": float(in_flight)}
        rows = {"embedding and head": 2.0 * model.vocab_size * model.hidden_size * (1 if model.tied else 2)}
        places = {"target": serving, "drafter": {**training, **rows}, "colocated": {**serving, **training}}
        return {place: {name: size / 1e9 for name, size in terms.items()} for place, terms in places.items()}

    def memory_gb(self, shapes: Shapes, in_flight: int, num_cells: int) -> dict[str, float]:
        """The sums of `memory_terms`."""
        return {place: sum(terms.values()) for place, terms in self.memory_terms(shapes, in_flight, num_cells).items()}


# The key to lower for each term of `Table.memory_terms`.
LOWER = {
    "weights, gradients and moments of the draft": "draft.num_layers or draft.intermediate_size",
    "joining gradients": "draft.num_layers or draft.intermediate_size",
    "kept activations": "train.num_anchors, bucketing.max_sequences or bucketing.token_budget",
    "logits": "target.path (a smaller vocabulary)",
    "features": "bucketing.token_budget",
    "weights of the target": "target.path (a smaller target)",
    "bytes in flight": "prefetch.max_bytes",
    "embedding and head": "target.path (a smaller vocabulary)",
}


def too_much(table: Table, shapes: Shapes, in_flight: int, num_cells: int, *, colocated: bool) -> str | None:
    """Why a layout does not fit its cards, with the largest term and the key to lower; None where it fits.

    Args:
        shapes: some batches, of which the largest count.
        in_flight: see `Table.memory_terms`.
    """
    needs, card = table.memory_terms(shapes, in_flight, num_cells), table.card
    for place in ("colocated",) if colocated else ("target", "drafter"):
        total = sum(needs[place].values())
        if total > card.memory_gb:
            whose = "target and drafter on one card need" if place == "colocated" else f"a {place}'s card needs"
            largest = max(needs[place], key=lambda name: needs[place][name])
            return (
                f"{whose} {total:.1f} GB, the {card.name} has {card.memory_gb:.1f}; {needs[place][largest]:.1f} are"
                f" {largest}: lower {LOWER[largest]}"
            )
    return None
