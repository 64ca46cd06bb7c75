"""Drafts on disk: a folder with `config.json` and `model.safetensors` in the z-lab / Hugging Face format.

Checkpoints and exports hold the same folder, so that what is trained is what is served.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from dflash_core.errors import DataError
from dflash_core.model.draft import DFlashDraft
from dflash_core.model.spec import DraftSpec
from dflash_core.provenance import write_atomically, write_json

CONFIG_FILE, WEIGHTS_FILE = "config.json", "model.safetensors"


def save_draft(folder: Path, spec: DraftSpec, tensors: dict[str, Tensor]) -> None:
    """Write the two files of a draft. `tensors` is a state dict on the CPU, all of one number format."""
    dtype = str(next(iter(tensors.values())).dtype).removeprefix("torch.")
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    write_atomically(folder / WEIGHTS_FILE, save(contiguous, metadata={"format": "pt"}))
    write_json(folder / CONFIG_FILE, spec.to_hf_config(dtype))


def load_draft(folder: Path) -> DFlashDraft:
    """Read a draft into fp32, in evaluation mode.

    Raises:
        DataError: a file is missing or damaged, or tensors are missing, left over or of another shape.
    """
    try:
        config = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
        tensors = load_file(folder / WEIGHTS_FILE)
    except (OSError, ValueError, SafetensorError) as error:
        raise DataError(f"{folder}: not a readable draft ({error})") from None
    draft = DFlashDraft(DraftSpec.from_hf_config(config, str(folder / CONFIG_FILE)))
    try:
        draft.load_state_dict({name: tensor.to(torch.float32) for name, tensor in tensors.items()})
    except RuntimeError as error:
        first_lines = " ".join(str(error).split())[:300]
        raise DataError(f"{folder / WEIGHTS_FILE}: tensors do not fit the config: {first_lines}") from None
    return draft.eval()
