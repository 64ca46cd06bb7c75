"""Conversations in JSONL files become a dataset folder of token sequences, which the pipeline then reads.

`sources` reads and checks rows, `template` turns a conversation into ids and a loss mask, `prepare` writes the dataset
folder whose files `store` defines, `dataset` reads it back.
"""

from dflash_core.data.dataset import Dataset
from dflash_core.data.held_out import Prompt, read_prompts
from dflash_core.data.histogram import draw_histogram, write_length_histogram
from dflash_core.data.prepare import prepare_dataset
from dflash_core.data.progress import PrepareProgress
from dflash_core.data.sources import BadRow, Conversation, Message, Reject, expand_files, read_conversations
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
    "draw_histogram",
    "expand_files",
    "has_supervised_pair",
    "load_tokenizer",
    "mask_token_id",
    "prepare_dataset",
    "read_conversations",
    "read_prompts",
    "tokenizer_digest",
    "write_length_histogram",
]
