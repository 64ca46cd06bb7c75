"""Loads a target's weights onto a device, and says in one line which key is wrong when that cannot be done."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from dflash_core.errors import ConfigError, DataError
from dflash_core.model.weight_files import weight_files

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
KEY = "target.attn_implementation"


def load_causal_lm(folder: Path, dtype: str, attn_implementation: str, device: torch.device) -> Any:
    """A causal language model of transformers in evaluation mode, without gradients.

    Raises:
        ConfigError: the attention implementation cannot be used here or by this model, the folder holds no model that can
            be read, or the weights do not fit on the device.
    """
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    if not any(folder.glob("*.safetensors")):  # others are pickles, which run what they hold
        raise ConfigError(f"target.path: {folder} holds no weights in safetensors files; other formats are not read")
    try:
        weight_files(folder)  # transformers follows an index wherever it leads
    except DataError as error:
        raise ConfigError(f"target.path: {error}") from None
    transformers_logging.disable_progress_bar()  # a bar for one file is noise in a log
    if attn_implementation == "flash_attention_2":
        _check_flash_attention(dtype, device)
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=DTYPES[dtype],
            attn_implementation=attn_implementation,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
        )
    except (ImportError, ValueError, OSError, SafetensorError) as error:
        reason = _first_sentence(error)
        if "attention" in reason.lower():
            raise ConfigError(f"{KEY}: {attn_implementation} cannot be used for {folder}: {reason}") from None
        raise ConfigError(f"target.path: {folder} cannot be loaded: {reason}") from None
    _check_parts(model, folder)
    used = model.config._attn_implementation
    if used != attn_implementation:  # transformers falls back in silence for some models
        raise ConfigError(f"{KEY}: {attn_implementation} cannot be used for {folder}: transformers takes {used} instead")
    try:
        model = model.to(device).eval().requires_grad_(False)
        if attn_implementation == "flash_attention_2":
            _try_out(model, device)
    except torch.OutOfMemoryError as error:
        raise ConfigError(f"target.path: {folder} does not fit on {device}: {_first_sentence(error)}") from None
    return model


def _check_parts(model: Any, folder: Path) -> None:
    """Refuse a model whose layers cannot be tapped, or whose head or embedding a draft would not get as they are."""
    if not hasattr(model.get_decoder(), "layers"):
        raise ConfigError(f"target.path: {folder}: {type(model).__name__} has no list of decoder layers to tap; not supported")
    head = model.get_output_embeddings()
    if head is None or getattr(head, "bias", None) is not None:
        what = "no language-model head" if head is None else "a language-model head with a bias, which a draft would not get"
        raise ConfigError(f"target.path: {folder}: {type(model).__name__} has {what}; not supported")
    _check_embedding(model, folder)


@torch.inference_mode()
def _check_embedding(model: Any, folder: Path) -> None:
    """Refuse a model whose embedding module gives something else than its rows, such as Gemma's, which multiplies them.

    Serving engines differ in what a draft gets from such a model: vLLM multiplies behind the module and hands out plain rows,
    transformers inside it and hands out scaled ones. What is multiplied behind the module everywhere (Granite) is no matter.
    """
    embedding: Any = model.get_input_embeddings()
    ids = torch.tensor([0, len(embedding.weight) // 2, len(embedding.weight) - 1])
    given, rows = embedding(ids), embedding.weight[ids]
    if given.shape == rows.shape and torch.equal(given, rows):
        return
    factor = f"{float(given.norm() / rows.norm()):.4g} times " if given.shape == rows.shape else "something else than "
    raise ConfigError(
        f"target.path: {folder}: the embedding of {type(model).__name__} gives {factor}its rows, and serving engines differ in"
        f" which of the two a draft gets; not supported"
    )


def _check_flash_attention(dtype: str, device: torch.device) -> None:
    """Refuse what is known to fail, before any weights are read. transformers would look for a kernel on the network."""
    if find_spec("flash_attn") is None:
        raise ConfigError(f"{KEY}: flash_attention_2 needs the package flash-attn, which is not installed; use sdpa")
    if device.type != "cuda":
        raise ConfigError(f"{KEY}: flash_attention_2 needs a GPU and the target is on {device}; use sdpa")
    if dtype != "bfloat16":
        raise ConfigError(f"{KEY}: flash_attention_2 needs target.dtype: bfloat16, not {dtype}")


def _try_out(model: Any, device: torch.device) -> None:
    """Kernels refuse some GPUs and head sizes when they are first called."""
    try:
        with torch.inference_mode():
            model.get_decoder()(input_ids=torch.zeros(1, 2, dtype=torch.long, device=device), use_cache=False)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError, ImportError) as error:
        raise ConfigError(f"{KEY}: flash_attention_2 fails on {device}: {_first_sentence(error)}") from None


def _first_sentence(error: Exception) -> str:
    return " ".join(str(error).split()).split(". ")[0][:300]
