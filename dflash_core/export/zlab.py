"""Export of a checkpoint to the z-lab / Hugging Face format that vLLM, SGLang and the reference code read."""

from __future__ import annotations

from pathlib import Path

import torch

from dflash_core.errors import DataError
from dflash_core.model.weights import load_draft, save_draft


def export_checkpoint(checkpoint: Path, folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    """Write `folder/config.json` and `folder/model.safetensors`, and read them back to compare every tensor.

    Raises:
        DataError: the checkpoint cannot be read, or what was written differs from it.
    """
    draft = load_draft(checkpoint)
    tensors = {name: tensor.to(dtype) for name, tensor in draft.state_dict().items()}
    save_draft(folder, draft.spec, tensors)
    written = load_draft(folder)
    if written.spec != draft.spec:
        raise DataError(f"{folder}: the written config reads back differently")
    for name, tensor in written.state_dict().items():
        if not torch.equal(tensor, tensors[name].float()):
            raise DataError(f"{folder}: tensor {name} reads back differently")
    return folder
