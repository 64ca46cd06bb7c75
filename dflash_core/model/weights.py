"""Drafts on disk: a folder with `config.json` and `model.safetensors` in the z-lab / Hugging Face format.

Checkpoints and exports hold the same folder, so that what is trained is what is served.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from dflash_core.errors import DataError
from dflash_core.model.draft import DFlashDraft
from dflash_core.model.spec import DraftSpec
from dflash_core.provenance import write_atomically, write_json

CONFIG_FILE, WEIGHTS_FILE = "config.json", "model.safetensors"
FORMATS = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


def save_draft(folder: Path, spec: DraftSpec, tensors: dict[str, Tensor]) -> None:
    """Write the two files of a draft. `tensors` is a state dict on the CPU, all of one number format."""
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    write_atomically(folder / WEIGHTS_FILE, save(contiguous, metadata={"format": "pt"}))
    write_json(folder / CONFIG_FILE, draft_config(spec, tensors))


def draft_config(spec: DraftSpec, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """The content of `config.json`."""
    return spec.to_hf_config(str(next(iter(tensors.values())).dtype).removeprefix("torch."))


def weight_pieces(tensors: dict[str, Tensor]) -> Iterator[bytes | memoryview]:
    """The content of `model.safetensors` piece by piece, byte for byte what `save_draft` writes.

    The library's `save` copies everything and holds the interpreter lock while it does: training would stand still for
    seconds per GB. Here the pieces are the tensors' own memory. Format: the length of the header as 8 bytes, the header (JSON,
    padded with spaces to a multiple of 8), the tensors without gaps, in the order of their names.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in sorted(tensors):
        tensor = tensors[name]
        start, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": FORMATS[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for name in sorted(tensors):
        yield tensors[name].contiguous().view(-1).view(torch.uint8).numpy().data


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
