"""A draft of ours, exported and loaded by the speculators library: the same states, logits, loss and gradients?

    .venv-peers/bin/python -m benchmarks.speculators_parity [--only-tiny]

Three cases, all in fp32 on the CPU, with the same tokens, anchors and weights on both sides (random weights, norms included):

- the demo's tiny target and its held-out text; speculators gets the layers that the exported ids name, from a plain
  `output_hidden_states=True` pass, ours what its own taps record, so that an id that is off by one shows;
- SmolLM2's shape with 5 layers and 5 taps, and with 2 layers and 3 taps, random features.

Prints the largest difference of the final states and of the logits, the difference of the loss as a share of it, and the
largest difference of any parameter's gradient as a share of its norm; then what speculators' block sees of its own anchor.
Ends with code 1 if states differ by more than 1e-4.

speculators divides a batch's weighted losses by the number of its supervised slots, where we divide the step's by the sum of
their weights; its loss is compared with our sum over its divisor.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.speculators_peer import (
    Batch,
    draw_anchors,
    export,
    fixed_anchors,
    load_peer,
    our_batch,
    our_trainer,
    peer_inputs,
    peer_loss,
    random_draft,
    random_verifier,
)
from benchmarks.speculators_step import ROWS
from dflash_core.config import DraftConfig
from dflash_core.model.draft import DFlashDraft, embed_blocks
from dflash_core.model.spec import DraftSpec
from dflash_core.model.target import FrozenTarget

REPOSITORY = Path(__file__).resolve().parents[1]
LIMIT = 1e-4
LENGTH, ANCHORS = 512, 32
ATTENTIONS = ("eager", "sdpa")


def peer_states(model: Any, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """Final states [A * K, D], logits [A * K, V] and its targets' tokens [A * K]."""
    with torch.no_grad(), fixed_anchors(batch.anchors_A):
        hidden, logits, targets, *_ = model._backbone_forward(**peer_inputs(batch), max_anchors=len(batch.anchors_A))
    return hidden[0], logits[0], targets[0].argmax(-1)


def compare(name: str, draft: DFlashDraft, rows: tuple[Tensor, Tensor], model: Any, batch: Batch, peer_batch: Batch) -> float:
    """Print a line of differences; returns the largest one of the states."""
    embedding_VD, head_VD = rows
    states, logits, targets = peer_states(model, peer_batch)
    block = draft.spec.block_size
    with torch.no_grad():
        anchors_RA = batch.anchors_A.unsqueeze(0)
        x_RAKD = embed_blocks(embedding_VD, batch.tokens_S[batch.anchors_A].unsqueeze(0), draft.spec)
        ours = draft(batch.features_SF.unsqueeze(0), x_RAKD, anchors_RA).flatten(0, 2)
        apart, logits_apart = (ours - states).abs().max().item(), (ours @ head_VD.T - logits).abs().max().item()

    places = (batch.anchors_A.unsqueeze(1) + torch.arange(block)).flatten()
    labels_S = batch.labels_S.index_put((places,), targets)  # overlapping blocks have the same targets
    trainer = our_trainer(draft, embedding_VD, head_VD)
    totals = trainer.begin()
    trainer.add(totals, our_batch(replace(batch, labels_S=labels_S), block))
    divisor = len(batch.anchors_A) * (block - 1)
    loss = totals.batches[0][1] / divisor
    model.zero_grad()
    other = peer_loss(model, peer_batch)
    other.backward()
    theirs = dict(model.named_parameters())
    gradients = max(
        ((p.grad / divisor - theirs[key].grad).norm() / theirs[key].grad.norm()).item() for key, p in draft.named_parameters()
    )
    loss_apart = abs(loss - other).item() / abs(other.item())
    print(f"{name:<38}{apart:>10.1e}{logits_apart:>10.1e}{loss_apart:>10.1e}{gradients:>11.1e}", flush=True)
    return apart


def tiny_target(folder: Path) -> tuple[DFlashDraft, tuple[Tensor, Tensor], Batch, Batch]:
    """Our draft for the demo's target, exported; its embedding and head; the batch by our taps and by the exported ids."""
    path = REPOSITORY / "data" / "tiny_target"
    config = DraftConfig(num_layers=3, block_size=8, target_layer_ids=(1, 2, 3))
    target = FrozenTarget(path, (1, 2, 3), "float32", "sdpa", "cpu")
    spec = DraftSpec.build(config, target.shape, mask_token_id=261)
    draft = random_draft(spec)
    rows = (target.embedding_VH.detach().clone(), target.head_VH.detach().clone())
    export(folder, draft, *rows, path)
    text = (REPOSITORY / "data" / "demo" / "held_out.jsonl").read_bytes()[:LENGTH]
    tokens = torch.tensor(list(text))
    anchors = draw_anchors(LENGTH, ANCHORS, spec.block_size, torch.Generator().manual_seed(0))
    with torch.inference_mode():
        output = target.model.get_decoder()(tokens.unsqueeze(0), use_cache=False, output_hidden_states=True).hidden_states
        last = target.model.get_decoder().layers[-1]  # the verifier's norm is applied by speculators itself
        kept: list[Tensor] = []
        hook = last.register_forward_hook(lambda _m, _a, out: kept.append(out[0] if isinstance(out, tuple) else out))
        target.model.get_decoder()(tokens.unsqueeze(0), use_cache=False)
        hook.remove()
    ids = json.loads((folder / "config.json").read_text())["aux_hidden_state_layer_ids"]
    ours = target.features(tokens.unsqueeze(0))[0].clone()
    theirs = torch.cat([output[i][0] for i in ids], dim=-1).clone()
    batch = Batch(ours, tokens, anchors, kept[0].reshape(LENGTH, -1).clone(), tokens)
    return draft, rows, batch, replace(batch, features_SF=theirs)


def sees_its_anchor(model: Any, batch: Batch) -> str:
    """Change the context at and behind the last anchor, then right before it, and look at that anchor's block."""
    anchor, block = int(batch.anchors_A[-1]), model.block_size
    before, _, _ = peer_states(model, batch)
    moved = {}
    for name, places in (("at and behind", slice(anchor, None)), ("right before", slice(anchor - 1, anchor))):
        features = batch.features_SF.clone()
        features[places] += 1.0
        after, _, _ = peer_states(model, replace(batch, features_SF=features))
        moved[name] = (after - before)[-block:].abs().max().item()
    return ", ".join(f"{name} its anchor: {value:.1e}" for name, value in moved.items())


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only-tiny", action="store_true", help="leave SmolLM2's shape out: seconds")
    shapes = {} if parser.parse_args().only_tiny else ROWS
    torch.manual_seed(0)
    print(f"speculators {version('speculators')}, torch {torch.__version__}, {torch.get_num_threads()} threads, fp32")
    print(f"{'':<38}{'states':>10}{'logits':>10}{'loss':>10}{'gradients':>11}")
    worst = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        draft, rows, batch, peer_batch = tiny_target(folder / "tiny")
        for attention in ATTENTIONS:
            model = load_peer(folder / "tiny", attention)
            worst.append(compare(f"tiny target, 3 layers, {attention}", draft, rows, model, batch, peer_batch))
        print(f"change of the last block after changing the context {sees_its_anchor(model, peer_batch)}")
        for name, spec in shapes.items():
            rows = random_verifier(folder / name / "verifier", spec)
            draft, batch = random_draft(spec), Batch.make(spec, LENGTH, ANCHORS)
            export(folder / name / "draft", draft, *rows, folder / name / "verifier")
            model = load_peer(folder / name / "draft", "eager")
            worst.append(compare(f"SmolLM2's shape, {name}, eager", draft, rows, model, batch, batch))
    fits = max(worst) <= LIMIT
    print(f"largest difference of a state {max(worst):.1e}, limit {LIMIT:.0e}: {'met' if fits else 'NOT MET'}")
    return 0 if fits else 1


if __name__ == "__main__":
    sys.exit(main())
