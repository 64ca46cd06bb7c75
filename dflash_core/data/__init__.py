"""Conversations in many formats become a dataset folder of token sequences, which the pipeline then reads.

`sources` reads files in chunks, `rows` and `turns` say what a row means, `template` turns a conversation into ids and a
loss mask, `worker` and `pool` do that in parallel, `merge` puts the parts in order, `prepare` makes the dataset folder
whose files `store` defines, `dataset` reads it back.
"""

from dflash_core.data.dataset import Dataset
from dflash_core.data.held_out import Prompt, read_prompts
from dflash_core.data.histogram import draw_histogram, write_length_histogram
from dflash_core.data.prepare import prepare_dataset
from dflash_core.data.progress import PrepareProgress
from dflash_core.data.rows import BadRow, Conversation, Message, Reject
from dflash_core.data.show import show_samples
from dflash_core.data.sources import content_identity, expand_files
from dflash_core.data.template import ChatEncoder, Encoded, Rendered
from dflash_core.data.tokenizer import chat_template_digest, load_tokenizer, mask_token_id, tokenizer_digest
from dflash_core.data.worker import has_supervised_pair

__all__ = [
    "BadRow",
    "ChatEncoder",
    "Conversation",
    "Dataset",
    "Encoded",
    "Message",
    "PrepareProgress",
    "Prompt",
    "Reject",
    "Rendered",
    "chat_template_digest",
    "content_identity",
    "draw_histogram",
    "expand_files",
    "has_supervised_pair",
    "load_tokenizer",
    "mask_token_id",
    "prepare_dataset",
    "read_prompts",
    "show_samples",
    "tokenizer_digest",
    "write_length_histogram",
]
