"""Self-checks of the target and of the rows that a draft gets from it: taps, batches, head, embedding, logits.

What a draft embeds and multiplies is decided by serving. vLLM 0.32 (`qwen3_dflash.py`) gives the draft the target's own
`embed_tokens` and `lm_head` modules: block tokens become plain rows of the embedding, logits are head @ state, with a scale
of 1 as long as the draft's config has no `logit_scale`, without capping. Training does the same with `FrozenTarget`'s
`embedding_VH` and `head_VH`, so that there is nothing to follow but the rows. What that means for targets that do more:

- The model multiplies embeddings behind the module (Granite's `embedding_multiplier`): every engine hands out the module, so
  the draft gets plain rows everywhere. Supported.
- The module itself multiplies (Gemma's `embed_scale`): transformers, and so the reference code of z-lab, hands a draft scaled
  rows, and vLLM, which multiplies behind its module, plain ones. One drafter cannot be right in both; such a target is refused
  when it is loaded (`target_loading`), and here once more for the rows that the trainer holds.
- Logits times a constant (Granite's `logits_scaling`, Cohere's `logit_scale`): greedy choice and labels do not change with a
  positive factor, and the draft's own scale of 1 is that of training. Supported for losses on labels. The losses against
  the target's own distribution take it from head @ state and would be given another one than the target samples from: refused.
- Capped logits (`final_logit_softcapping`), a bias, anything else that is not a factor: refused.

Shapes: B batch, S sequence, V vocabulary, H hidden size of the target.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from torch.nn import functional

from dflash_core.errors import ConfigError, TrainingError
from dflash_core.model.loss import SOFT_LOSSES
from dflash_core.model.target import PACKING_TOLERANCE, FrozenTarget
from dflash_core.model.weight_files import INDEX_FILE, WEIGHTS_FILE, indexed_files
from dflash_core.training.loop import DraftTrainer
from dflash_core.training.self_check_report import Figures, Skipped, share_apart
from dflash_core.training.target_check import check_values, compare_taps

# How far logits may be from a multiple of head @ state, as a share of their norm: the same product twice, so that only its
# rounding differs. Capping at 30 moves logits of 5 by 1 %.
LOGIT_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 5e-3}
# Rows of head and embedding that are compared: evenly spread, so that another matrix or another order is seen.
NUM_ROWS = 256
FLOATS = {"F32", "F16", "BF16"}


def check_taps(target: FrozenTarget, tokens_1S: Tensor) -> Figures:
    """The tapped states are finite, not zero, and those that the model itself calls its hidden states, on real text.

    Returns `tap_rms` and `tap_difference`, the largest one as a share of the norm (None if no tap could be compared).
    """
    features = target.taps(tokens_1S)
    try:
        rms = check_values(features, target.layer_ids)
        differences = compare_taps(target, tokens_1S, features)
    except ValueError as error:
        raise TrainingError(
            f"{error}; a draft trained on such states meets other ones when it is served (draft.target_layer_ids:"
            f" {list(target.layer_ids)}, where i is the output of decoder layer i, from 0)"
        ) from error
    return {"tap_rms": rms, "tap_difference": max(differences.values(), default=None)}


def check_batching(target: FrozenTarget, short_1S: Tensor, long_1S: Tensor, pad_token_id: int) -> Figures:
    """A sequence has the same states alone and beside a longer one, with padding behind it.

    Returns `batch_difference`, the largest one over taps as a share of the norm.
    """
    length = short_1S.shape[1]
    padded = functional.pad(short_1S, (0, long_1S.shape[1] - length), value=pad_token_id)
    together, alone = target.taps(torch.cat([padded, long_1S]))[:1, :length], target.taps(short_1S)
    by_tap = (length, len(target.layer_ids), -1)
    error_ST, norm_ST = (x.float().view(by_tap).norm(dim=-1) for x in (together - alone, alone))
    apart: list[float] = (error_ST / norm_ST.clamp(min=1e-12)).mean(dim=0).tolist()  # by token: the first ones can be huge
    worst = max(apart, key=lambda x: x if x == x else float("inf"))
    if not worst <= max(PACKING_TOLERANCE[target.model.dtype], PACKING_TOLERANCE[target.feature_dtype]):
        raise ConfigError(
            f"target.path: the states of a sequence depend on what else is in its batch, or on padding behind it (layer"
            f" {target.layer_ids[apart.index(worst)]}: {worst:.1e} of their norm); a draft cannot be trained on such a target"
        )
    return {"batch_difference": worst}


def check_embedding(target: FrozenTarget, token_ids: Tensor) -> Figures:
    """The rows that block tokens get are what the target's own embedding module gives for them."""
    ids = torch.tensor(sorted(set(token_ids.tolist())), device=target.device)
    with torch.inference_mode():
        own, rows = target.model.get_input_embeddings()(ids), target.embedding_VH[ids]
    if own.shape != rows.shape or not torch.equal(own, rows):
        factor = float(own.float().norm() / rows.float().norm()) if own.shape == rows.shape else float("nan")
        raise ConfigError(
            f"target.path: the target's input embedding does not give its rows (their size is {factor:.4g} times that of the"
            f" rows that blocks are made of); a draft would be served with other ones; not supported"
        )
    return {}


def check_head(target: FrozenTarget, folder: Path) -> Figures | Skipped:
    """A tied head is the embedding; any other one was read from the weight files, and so was the embedding."""
    head, embedding = target.head_VH, target.embedding_VH
    if head.shape != embedding.shape:
        raise ConfigError(f"target.path: {folder}: head {list(head.shape)} and embedding {list(embedding.shape)} do not fit")
    if target.shape.tie_word_embeddings and head.data_ptr() != embedding.data_ptr() and not torch.equal(head, embedding):
        raise ConfigError(
            f"target.path: {folder}: config.json says tie_word_embeddings: true, but the head that was loaded is not the"
            f" embedding; serving engines use the embedding"
        )
    files = _stored_tensors(folder)
    if files is None:
        return Skipped(f"{folder} holds no safetensors to compare head and embedding with")
    name = "embedding" if target.shape.tie_word_embeddings else "head"
    if name == "head" and not any(key.endswith("lm_head.weight") for key in files):
        raise ConfigError(
            f"target.path: {folder}: config.json says tie_word_embeddings: false, but the weight files hold no lm_head.weight, so"
            f" that the head was drawn at random; mend the config or the files"
        )
    for what, suffix, loaded in (("embedding", "embed_tokens.weight", embedding), ("head", "lm_head.weight", head)):
        if what == "head" and target.shape.tie_word_embeddings:
            continue
        _compare_with_file(what, suffix, loaded, files, folder)
    return {}


def _stored_tensors(folder: Path) -> dict[str, Path] | None:
    """File of each stored tensor by name; None where there are no safetensors."""
    path = folder / WEIGHTS_FILE  # where it is there, an index beside it is not read
    if not path.is_file():
        return indexed_files(folder) if (folder / INDEX_FILE).is_file() else None
    with safe_open(path, framework="pt") as file:
        return dict.fromkeys(file.keys(), path)


def _compare_with_file(what: str, suffix: str, loaded_VH: Tensor, files: dict[str, Path], folder: Path) -> None:
    """Compare some rows with the one stored tensor of this name; quantised ones and several of the name are left out."""
    names = [name for name in files if name == suffix or name.endswith(f".{suffix}")]
    if len(names) != 1:
        return
    rows = some_rows(len(loaded_VH))
    with safe_open(files[names[0]], framework="pt") as file:
        stored = file.get_slice(names[0])
        if stored.get_dtype() not in FLOATS:
            return
        shape = stored.get_shape()
        if shape != list(loaded_VH.shape):
            raise ConfigError(
                f"target.path: {folder}: {names[0]} is {shape} in the file and {list(loaded_VH.shape)} in the model"
            )
        wanted = torch.cat([stored[row : row + 1] for row in rows.tolist()]).to(loaded_VH.dtype)
    if not torch.equal(loaded_VH[rows.to(loaded_VH.device)].cpu(), wanted):
        raise ConfigError(
            f"target.path: {folder}: the {what} of the loaded model is not {names[0]} of the weight files; it was initialised"
            f" anew or changed while loading"
        )


def some_rows(count: int) -> Tensor:
    """At most `NUM_ROWS` row numbers from the first to the last."""
    return torch.linspace(0, count - 1, min(count, NUM_ROWS), dtype=torch.float64).round().long()


@torch.inference_mode()
def check_logits(target: FrozenTarget, tokens_1S: Tensor, loss: str) -> Figures:
    """The target's logits are its head applied to its last state, up to a positive factor.

    Returns `logit_scale`, the factor, and `logit_difference`, what it leaves unexplained, as a share of the norm.
    """
    logits, last = _logits_and_last_state(target.model, tokens_1S.to(target.device))
    ours = functional.linear(last, target.head_VH).float()
    if logits.shape != ours.shape:
        raise ConfigError(f"target.path: its logits are {list(logits.shape)}, head times last state is {list(ours.shape)}")
    scale = float((logits * ours).sum() / ours.square().sum().clamp(min=1e-12))
    apart, limit = share_apart(scale * ours, logits), LOGIT_TOLERANCE[target.model.dtype]
    if not (apart <= limit and scale > 0):
        raise ConfigError(
            f"target.path: the target's logits are not its head applied to its last state ({apart:.1e} of their norm differs): it"
            f" caps or shifts them, or its head is another one than the draft gets; not supported"
        )
    if abs(scale - 1) > limit and loss in SOFT_LOSSES:
        raise ConfigError(
            f"train.loss: {loss} compares with the target's own distribution, but the target multiplies its logits by"
            f" {scale:.4g}, which a draft's are not; use cross_entropy or dpace"
        )
    return {"logit_scale": scale, "logit_difference": apart}


def _logits_and_last_state(model: Any, ids_1S: Tensor) -> tuple[Tensor, Tensor]:
    """What the whole model gives, and what its decoder gave on the way."""
    states: list[Tensor] = []
    handle = model.get_decoder().register_forward_hook(lambda _module, _args, output: states.append(output[0]))
    try:
        logits: Tensor = model(input_ids=ids_1S, use_cache=False).logits.float()
    finally:
        handle.remove()
    return logits, states[0]


def check_trainer_rows(trainer: DraftTrainer, target: FrozenTarget) -> Figures:
    """Embedding and head that the trainer holds are the target's, in the number format of training."""
    for what, own_VD, rows_VH in (
        ("embedding", trainer._embedding_VD, target.embedding_VH),
        ("head", trainer._head_VD, target.head_VH),
    ):
        if own_VD.shape != rows_VH.shape:
            raise TrainingError(f"the draft's {what} is {list(own_VD.shape)} and the target's {list(rows_VH.shape)}")
        rows = some_rows(len(own_VD))
        own, wanted = own_VD[rows.to(own_VD.device)].cpu(), rows_VH[rows.to(rows_VH.device)].cpu().to(own_VD.dtype)
        if not torch.equal(own, wanted):
            raise TrainingError(
                f"the {what} that the draft is trained with is not the target's; it would learn {what} rows that no engine serves"
            )
    return {}
