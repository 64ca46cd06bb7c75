"""The z-lab / Hugging Face format, which vLLM (`"method": "dflash"`), SGLang (`DFLASH`) and the reference code read.

`config.json` and `model.safetensors`; no embedding and no head, which are the target's (docs/field.md 1, 'Export'). What
vLLM 0.32 does with the keys, and so why they are all written:

- `is_causal: false` comes before everything else; without it, sliding layers are causal.
- `rope_theta` at the top becomes `rope_parameters`; without it, the base is 1,000,000, whatever was trained. Nothing else
  about the target's rotation is written: a target with scaled (llama3, yarn) or partial rotation or mrope has a draft that
  was trained with plain rotation of the whole head at the target's base, and is served so.
- `max_position_embeddings` sizes the table of angles, so it is the target's.
- `dflash_config.target_layer_ids` count from 0; vLLM adds 1 itself.
- `draft_vocab_size` and `target_hidden_size` are left out: absent, they are `vocab_size` and `hidden_size`.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import Tensor

from dflash_core.model.draft import DFlashDraft
from dflash_core.model.weight_files import WEIGHTS_FILE
from dflash_core.model.weights import CONFIG_FILE, draft_config, weight_pieces


def write_zlab(folder: Path, draft: DFlashDraft, dtype: torch.dtype) -> None:
    """Write the two files of a draft into a folder that is there, with all tensors in `dtype`."""
    tensors: dict[str, Tensor] = {name: tensor.to("cpu", dtype) for name, tensor in draft.state_dict().items()}
    with (folder / WEIGHTS_FILE).open("xb") as file:
        for piece in weight_pieces(tensors):
            file.write(piece)
    text = json.dumps(draft_config(draft.spec, tensors), indent=2, sort_keys=True) + "\n"
    (folder / CONFIG_FILE).write_text(text, encoding="utf-8")
