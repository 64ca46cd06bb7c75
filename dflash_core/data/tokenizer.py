"""The target's tokenizer: loading it from a folder, and digests that tell whether two tokenizers are the same.

transformers is imported inside the functions: it takes seconds, and most readers of a dataset never need it. Loading
through `AutoTokenizer` also pulls in torch (transformers reads the model's configuration), so a folder that says it
holds a plain `tokenizer.json` is loaded by the generic class directly. The result is the same object.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash_core.data.sources import one_line
from dflash_core.errors import ConfigError
from dflash_core.provenance import digest_bytes, digest_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

logger = logging.getLogger(__name__)

# What transformers 5 writes for a tokenizer that is nothing but its tokenizer.json.
GENERIC_CLASS = "TokenizersBackend"


def load_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """Load the fast tokenizer with its chat template from a Hugging Face folder; nothing is downloaded or executed.

    Raises:
        ConfigError: the folder is missing or damaged, or its tokenizer is not a fast one or has no chat template.
    """
    if not folder.is_dir():
        raise ConfigError(f"{folder}: no such folder (target.path)")
    try:
        tokenizer = _loader(folder).from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # the tokenizers library raises bare Exception for a damaged file
        raise ConfigError(f"{folder}: the tokenizer cannot be loaded ({one_line(error)})") from error
    if not getattr(tokenizer, "is_fast", False):
        raise ConfigError(f"{folder}: the target needs a fast tokenizer (tokenizer.json)")
    try:
        tokenizer.get_chat_template()
    except ValueError as error:
        raise ConfigError(f"{folder}: the tokenizer has no chat template") from error
    return tokenizer


def _loader(folder: Path) -> Any:
    try:
        settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        settings = {}
    if isinstance(settings, dict) and settings.get("tokenizer_class") == GENERIC_CLASS and "auto_map" not in settings:
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast
    from transformers import AutoTokenizer

    return AutoTokenizer


def tokenizer_digest(tokenizer: PreTrainedTokenizerFast) -> str:
    """SHA-256 of everything that turns text into ids: vocabulary, merges, normalisation, special tokens.

    Truncation and padding are left out: they are settings of the last call, not of the tokenizer.
    """
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    content["truncation"] = content["padding"] = None
    return digest_json({"tokenizer": content, "special": {k: str(v) for k, v in tokenizer.special_tokens_map.items()}})


def chat_template_digest(tokenizer: PreTrainedTokenizerFast) -> str:
    """SHA-256 of the chat template that `apply_chat_template` would use."""
    return digest_bytes(str(tokenizer.get_chat_template()).encode())


def mask_token_id(tokenizer: PreTrainedTokenizerFast, configured: int | None, vocab_size: int, target_path: str) -> int:
    """The id whose embedding stands for a masked slot: the configured one, else the tokenizer's mask token.

    It must be an existing row of the target's embedding that means nothing else; the padding and the end token do
    (docs/field.md 1, 'A block').

    Args:
        configured: `target.mask_token_id` of the experiment.
        vocab_size: rows of the target's embedding.
        target_path: name of the target in error texts.

    Raises:
        ConfigError: there is no such id, it is not a row of the embedding, or it is the padding or the end token.
    """
    key = "target.mask_token_id"
    mask = tokenizer.mask_token_id if configured is None else configured
    if mask is None:
        raise ConfigError(f"{target_path}: the tokenizer has no mask token; set {key} to an unused row of the embedding")
    mask = int(mask)
    if not 0 <= mask < vocab_size:
        raise ConfigError(f"{target_path}: {key} {mask} is not a row of the embedding (0 to {vocab_size - 1})")
    for name, taken in (("padding", tokenizer.pad_token_id), ("end", tokenizer.eos_token_id)):
        if mask == taken:
            raise ConfigError(f"{target_path}: {key} {mask} is the {name} token; choose an unused row of the embedding")
    if mask < len(tokenizer) and mask not in tokenizer.added_tokens_decoder:
        logger.warning("%s: %s %d is an ordinary token (%r)", target_path, key, mask, tokenizer.convert_ids_to_tokens(mask))
    return mask
