"""One batch for a draft of ours and for its export, loaded by the speculators library: shared by the two comparisons.

speculators draws its anchors at random inside its forward pass; `fixed_anchors` puts given ones there. Its targets are the
argmax of the verifier's logits, which it computes from the verifier's last states; they are taken as the labels of our batch.

Shapes: S sequence, A anchors, K slots, D hidden, F = taps x D, V vocabulary; one row.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from dflash_core.config import TrainConfig
from dflash_core.export.speculators import write_speculators
from dflash_core.model.anchors import default_gamma, slot_weights
from dflash_core.model.draft import DFlashDraft
from dflash_core.model.spec import DraftSpec
from dflash_core.pipeline import Loaded
from dflash_core.records import BatchShape, PlannedBatch
from dflash_core.training.collate import DraftBatch
from dflash_core.training.distributed import CellGroup
from dflash_core.training.loop import DraftTrainer
from dflash_core.training.target_loop import Ready


@dataclass(frozen=True)
class Batch:
    """What both sides get: one row of S tokens, all supervised, whose anchors have a whole block behind them."""

    features_SF: Tensor
    tokens_S: Tensor
    anchors_A: Tensor
    last_states_SD: Tensor
    labels_S: Tensor

    @classmethod
    def make(cls, spec: DraftSpec, length: int, num_anchors: int, seed: int = 0) -> Batch:
        """Random features and tokens. The labels are random, too: `head_targets` has those of speculators."""
        generator = torch.Generator().manual_seed(seed)
        width = len(spec.target_layer_ids) * spec.hidden_size
        return cls(
            torch.randn(length, width, generator=generator),
            torch.randint(spec.vocab_size, (length,), generator=generator),
            draw_anchors(length, num_anchors, spec.block_size, generator),
            torch.randn(length, spec.hidden_size, generator=generator),
            torch.randint(spec.vocab_size, (length,), generator=generator),
        )


def draw_anchors(length: int, num_anchors: int, block_size: int, generator: torch.Generator) -> Tensor:
    """Sorted places with context before them and a whole block inside the row: [A]."""
    places = torch.randperm(length - block_size - 1, generator=generator)[:num_anchors] + 1
    return places.sort().values


def random_draft(spec: DraftSpec, seed: int = 0) -> DFlashDraft:
    """A draft whose norms are not all 1, so that a norm in the wrong place shows."""
    draft = DFlashDraft(spec).initialise(seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in draft.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
    return draft


def random_verifier(folder: Path, spec: DraftSpec, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Write what speculators reads of a verifier (config, embedding, head, final norm); returns embedding and head [V, D]."""
    generator = torch.Generator().manual_seed(seed)
    scale = spec.hidden_size**-0.5
    rows = {
        name: torch.empty(spec.vocab_size, spec.hidden_size).normal_(0.0, scale, generator=generator)
        for name in ("model.embed_tokens.weight", "lm_head.weight")
    }
    folder.mkdir(parents=True)
    save_file({**rows, "model.norm.weight": torch.ones(spec.hidden_size)}, folder / "model.safetensors")
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": spec.num_target_layers}
    (folder / "config.json").write_text(json.dumps(config))
    return rows["model.embed_tokens.weight"], rows["lm_head.weight"]


def export(folder: Path, draft: DFlashDraft, embedding_VD: Tensor, head_VD: Tensor, verifier: Path) -> None:
    """Our draft in the peer's format."""
    config = json.loads((verifier / "config.json").read_text())
    write_speculators(folder, draft, embedding_VD, head_VD, str(verifier), config)


def load_peer(folder: Path, attention: str) -> Any:
    """The exported draft as speculators' own model, with the attention that its `--draft-attn-impl` would choose."""
    from loguru import logger
    from transformers.utils import logging as transformers_logging

    logger.remove()
    logger.add(sys.stderr, level="ERROR")
    transformers_logging.disable_progress_bar()
    logging.disable(logging.WARNING)
    from speculators.models.dflash import DFlashDraftModel, DFlashSpeculatorConfig

    config = DFlashSpeculatorConfig.from_pretrained(folder)
    # Hugging Face keeps this choice out of config files; the library's trainer sets it in the same way.
    config.transformer_layer_config._attn_implementation = attention
    return DFlashDraftModel.from_pretrained(folder, config=config, dtype=torch.float32)


@contextmanager
def fixed_anchors(anchors_A: Tensor) -> Iterator[None]:
    """speculators takes these anchors instead of drawing some."""
    from speculators.models.dflash import core

    drawn = core.select_anchors
    core.select_anchors = lambda *_: (anchors_A, torch.ones_like(anchors_A, dtype=torch.bool))
    try:
        yield
    finally:
        core.select_anchors = drawn


def peer_inputs(batch: Batch) -> dict[str, Tensor]:
    """Arguments of speculators' forward pass: a packed row with one document."""
    return {
        "hidden_states": batch.features_SF.unsqueeze(0),
        "input_ids": batch.tokens_S.unsqueeze(0),
        "loss_mask": torch.ones(1, len(batch.tokens_S), dtype=torch.long),
        "verifier_last_hidden_states": batch.last_states_SD.unsqueeze(0),
        "document_ids": torch.zeros(1, len(batch.tokens_S), dtype=torch.long),
    }


def peer_loss(model: Any, batch: Batch) -> Tensor:
    """Its training loss: cross-entropy with the fixed decay, by its eager functions (the fused ones need Triton)."""
    from speculators.losses import resolve_loss_config

    with fixed_anchors(batch.anchors_A):
        _, loss, _ = model(
            **peer_inputs(batch),
            loss_config=resolve_loss_config("ce", "eager"),
            gamma=default_gamma(model.block_size),
            max_anchors=len(batch.anchors_A),
        )
    return loss


def our_trainer(draft: DFlashDraft, embedding_VD: Tensor, head_VD: Tensor) -> DraftTrainer:
    """The trainer of a run on a CPU."""
    return DraftTrainer(draft, embedding_VD, head_VD, TrainConfig(), num_steps=1, num_buckets=1, group=CellGroup())


def our_batch(batch: Batch, block_size: int) -> Ready:
    """The same row as it comes from a target loop."""
    places_AK = batch.anchors_A.unsqueeze(1) + torch.arange(block_size)
    labels_AK = batch.labels_S[places_AK]
    labels_AK[:, 0] = 0
    weights_K = torch.from_numpy(slot_weights(block_size, default_gamma(block_size)))
    payload = DraftBatch(
        batch.tokens_S.unsqueeze(0),
        batch.anchors_A.unsqueeze(0),
        batch.tokens_S[batch.anchors_A].unsqueeze(0),
        labels_AK.unsqueeze(0),
        weights_K.expand(1, len(batch.anchors_A), -1).contiguous(),
    )
    length, anchors = len(batch.tokens_S), len(batch.anchors_A)
    shape = BatchShape(0, 1, length, length, length, anchors, anchors * (block_size - 1))
    planned = PlannedBatch(0, 0, 0, 0, 0, 0, (0,), ends_step=True)
    return Ready(Loaded(planned, shape, payload, 0), batch.features_SF.unsqueeze(0), 0.0, 0.0, 0.0)
