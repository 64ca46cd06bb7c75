"""Training that begins with the weights of a drafter there is: an export, a checkpoint, or a published z-lab drafter.

What decides whether the weights mean the same here is compared before anything is trained: their shapes, the target they
were made for (as far as its figures tell), the tapped layers, the mask token and the rotary base. With another mask token
every slot would begin from an embedding that the weights have never seen, and the experiment file can name theirs, so that
is refused, too. Weights do not depend on block size, window, epsilon or the longest position: these may differ, with a line
in the log.
"""

from __future__ import annotations

import logging
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from dflash_core.errors import ConfigError, UserError
from dflash_core.model.draft import DFlashDraft
from dflash_core.model.spec import DraftSpec
from dflash_core.model.weights import check_tensors, load_draft, read_spec

log = logging.getLogger(__name__)
KEY = "draft.init_from"
# Figures that must agree, and the key of the experiment that sets ours; None: the target's own figure.
MUST_AGREE: dict[str, str | None] = {
    "hidden_size": None,
    "num_heads": None,
    "num_kv_heads": None,
    "head_dim": None,
    "vocab_size": None,
    "num_target_layers": None,
    "rope_theta": None,
    "num_layers": "draft.num_layers",
    "intermediate_size": "draft.intermediate_size",
    "target_layer_ids": "draft.target_layer_ids",
    "mask_token_id": "target.mask_token_id",
}


def check_initial_draft(folder: Path, spec: DraftSpec) -> list[str]:
    """Whether training of a draft of this shape can begin with the weights in `folder`; reads config and headers only.

    Returns:
        What differs and may, such as `block_size: 16 there, 8 here`.

    Raises:
        ConfigError: one line with the folder, the key and the difference.
    """
    if not folder.is_dir():
        raise ConfigError(f"{KEY}: {folder}: no such folder (a run that has a checkpoint is resumed without it, by --run-dir)")
    try:
        theirs = read_spec(folder)
        allowed = _compare(folder, asdict(theirs), asdict(spec))
        check_tensors(folder, theirs)
    except UserError as error:
        text = str(error)
        raise ConfigError(text if text.startswith(KEY) else f"{KEY}: {text}") from None
    return allowed


def _compare(folder: Path, theirs: dict[str, Any], ours: dict[str, Any]) -> list[str]:
    if not theirs["num_target_layers"]:  # some published files do not say
        theirs = {**theirs, "num_target_layers": ours["num_target_layers"]}
    different = [name for name in ours if theirs[name] != ours[name]]
    if refused := [name for name in MUST_AGREE if name in different]:
        name, key = refused[0], MUST_AGREE[refused[0]]
        value = _plain(theirs[name])
        mend = f"set {key}: {value}" if key else "it was made for another target"
        more = f"; {', '.join(refused[1:])} differ, too" if len(refused) > 1 else ""
        raise ConfigError(f"{KEY}: {folder}: {name} is {value} there and {_plain(ours[name])} here ({mend}){more}")
    return [f"{name}: {_plain(theirs[name])} there, {_plain(ours[name])} here" for name in different]


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


@torch.no_grad()
def start_from(draft: DFlashDraft, folder: Path) -> None:
    """Replace all weights of `draft`, in place, by those in `folder`; a file in bf16 is read into fp32.

    Raises:
        ConfigError: they do not fit (`check_initial_draft`), or are not all finite.
    """
    for difference in check_initial_draft(folder, draft.spec):
        log.warning("%s: %s: %s; weights do not depend on it", KEY, folder, difference)
    try:
        tensors = load_draft(folder).state_dict()
    except UserError as error:
        raise ConfigError(f"{KEY}: {error}") from None
    for name, tensor in tensors.items():
        if not bool(torch.isfinite(tensor).all()):
            raise ConfigError(f"{KEY}: {folder}: tensor {name} holds numbers that are not finite")
    draft.load_state_dict(tensors)
    log.info("training begins with the weights in %s", folder)
