"""Drafts on disk: a folder with `config.json` and `model.safetensors` in the z-lab / Hugging Face format.

Checkpoints and exports hold the same folder, so that what is trained is what is served. Published drafters of many GB come
in several files with an index; those are read, too.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from dflash_core.errors import DataError
from dflash_core.model.draft import DFlashDraft
from dflash_core.model.spec import DraftSpec
from dflash_core.model.weight_files import WEIGHTS_FILE, weight_files
from dflash_core.provenance import write_atomically, write_json

log = logging.getLogger(__name__)
CONFIG_FILE = "config.json"
FORMATS = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
# Copies of the target's frozen rows that some published files carry; a draft here always takes the target's own.
TARGETS_TENSORS = frozenset({"embed_tokens.weight", "lm_head.weight", "model.embed_tokens.weight", "model.lm_head.weight"})


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


def tensor_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Names and shapes of all tensors of a draft, from the headers of its files alone; raises DataError."""
    shapes: dict[str, tuple[int, ...]] = {}
    try:
        for path in weight_files(folder):
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - not a mapping
                    shapes[name] = tuple(file.get_slice(name).get_shape())
    except (OSError, ValueError, SafetensorError) as error:
        raise DataError(f"{folder}: not a readable draft ({error})") from None
    return shapes


def expected_shapes(spec: DraftSpec) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a draft's tensors as the published format has them (docs/field.md 1, 'Export')."""
    hidden, wide, head = spec.hidden_size, spec.intermediate_size, spec.head_dim
    queries, keys = spec.num_heads * head, spec.num_kv_heads * head
    shapes = {
        "fc.weight": (hidden, len(spec.target_layer_ids) * hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    layer = {
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "self_attn.q_norm": (head,),
        "self_attn.k_norm": (head,),
        "mlp.gate_proj": (wide, hidden),
        "mlp.up_proj": (wide, hidden),
        "mlp.down_proj": (hidden, wide),
    }
    for i in range(spec.num_layers):
        shapes.update({f"layers.{i}.{part}.weight": shape for part, shape in layer.items()})
    return shapes


def check_tensors(folder: Path, spec: DraftSpec) -> None:
    """Compare names and shapes in the files with what `spec` needs; reads headers only.

    Copies of the target's own embedding and head are left aside, with a line in the log.

    Raises:
        DataError: a file is missing or damaged, or tensors are missing, left over or of another shape; they are named.
    """
    found, expected = tensor_shapes(folder), expected_shapes(spec)
    if aside := sorted(TARGETS_TENSORS & set(found)):
        log.info("%s: %s not read; the target's own are used", folder, " and ".join(aside))
    missing = sorted(expected.keys() - found.keys())
    left_over = sorted(found.keys() - expected.keys() - TARGETS_TENSORS)
    problems = [f"{what} {_some(names)}" for what, names in (("missing", missing), ("left over", left_over)) if names]
    if problems:
        raise DataError(f"{folder}: tensors do not fit the config: {'; '.join(problems)}")
    for name, shape in expected.items():
        if found[name] != shape:
            raise DataError(f"{folder}: tensor {name} is {list(found[name])}, the config says {list(shape)}")


def _some(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def read_draft_tensors(folder: Path, spec: DraftSpec) -> dict[str, Tensor]:
    """The tensors of a draft as they are stored, without copies of the target's; raises DataError."""
    check_tensors(folder, spec)
    tensors: dict[str, Tensor] = {}
    try:
        for path in weight_files(folder):
            with safe_open(path, framework="pt") as file:
                names = set(file.keys()) - TARGETS_TENSORS
                tensors.update({name: file.get_tensor(name) for name in sorted(names)})
    except (OSError, ValueError, SafetensorError) as error:
        raise DataError(f"{folder}: not a readable draft ({error})") from None
    for name, tensor in tensors.items():
        if tensor.dtype not in FORMATS:
            kind = str(tensor.dtype).removeprefix("torch.")
            raise DataError(f"{folder}: tensor {name} is {kind}; a draft is read from {', '.join(_names(FORMATS))}")
    return tensors


def _names(dtypes: dict[torch.dtype, str]) -> list[str]:
    return [str(dtype).removeprefix("torch.") for dtype in dtypes]


def read_config(folder: Path) -> dict[str, Any]:
    """The content of `config.json`; raises DataError where there is no such file or it is no JSON object."""
    path = folder / CONFIG_FILE
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{folder}: not a readable draft ({error})") from None
    if not isinstance(config, dict):
        raise DataError(f"{path}: holds a {type(config).__name__}, not keys and values")
    return config


def read_spec(folder: Path) -> DraftSpec:
    """The shape of the draft in `folder`, from its `config.json`.

    Raises:
        DataError, ConfigError: as `load_draft`.
    """
    return DraftSpec.from_hf_config(read_config(folder), str(folder / CONFIG_FILE))


def load_draft(folder: Path) -> DFlashDraft:
    """Read a draft into fp32, in evaluation mode.

    Raises:
        DataError: a file is missing or damaged, or tensors are missing, left over or of another shape.
        ConfigError: `config.json` lacks a key, or describes another network than the one that is built here.
    """
    spec = read_spec(folder)
    tensors = read_draft_tensors(folder, spec)
    draft = DFlashDraft(spec)
    draft.load_state_dict({name: tensor.to(torch.float32) for name, tensor in tensors.items()})
    return draft.eval()
