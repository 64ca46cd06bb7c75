"""Keys from Prefect's Secret blocks, where the environment has none.

A deployment's worker may have been started without the user's environment. `regenerate.api_key_env: DFLASH_SERVER_KEY`
then also takes the Secret block `dflash-server-key`, into the environment of this process and only while it is needed. Which
names a form may ask for is checked before, for the variable and the block alike (`dflash_core.experiment_confine`).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

log = logging.getLogger(__name__)


def block_name(variable: str) -> str:
    """What a block is called: lower case, with dashes, as Prefect asks of names."""
    return variable.lower().replace("_", "-")


@contextmanager
def key_from_block(variable: str | None) -> Iterator[None]:
    """Set an environment variable from its Secret block while inside; one that is set stays as it is.

    Without such a block nothing is set, and what needs the key says so.
    """
    value = None if variable is None or os.environ.get(variable) else _load(block_name(variable))
    if variable is None or value is None:
        yield
        return
    os.environ[variable] = value
    try:
        yield
    finally:
        del os.environ[variable]


def _load(name: str) -> str | None:
    from prefect.blocks.system import Secret

    try:
        block: Any = Secret.load(name)
    except ValueError:  # there is no such block
        return None
    log.info("key: from the Secret block %s", name)
    return str(block.get())
