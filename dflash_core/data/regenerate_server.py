"""Answers from a server for many rows at once. The window of requests is bounded, and so is what is in memory."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from dflash_core.data.regenerate_client import AnswerClient, Refused
from dflash_core.data.regenerate_inputs import InputRow
from dflash_core.data.regenerate_tally import Tally
from dflash_core.data.rows import BadRow

LOOK_EVERY_S = 0.5


async def answer_by_server(
    rows: Iterable[InputRow], client: AnswerClient, concurrency: int, tally: Tally, still_wanted: Callable[[], None] | None = None
) -> None:
    """Answer all rows, at most `concurrency` at once. A row is recorded as soon as it ends.

    Args:
        still_wanted: called about twice a second; what it raises ends the job.

    Raises:
        DFlashError: the job cannot go on; requests that are under way are given up.
    """
    running: set[asyncio.Task[None]] = set()
    try:
        for row in rows:
            if isinstance(row.asked, BadRow):
                tally.skip(row, row.asked)
                continue
            running.add(asyncio.create_task(_answer_row(row, client, tally)))
            if len(running) >= concurrency:
                running = await _wait(running, still_wanted)
        while running:
            running = await _wait(running, still_wanted)
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


async def _wait(running: set[asyncio.Task[None]], still_wanted: Callable[[], None] | None) -> set[asyncio.Task[None]]:
    """Wait until one has ended; raises what it raised."""
    done: set[asyncio.Task[None]] = set()
    while not done:
        every_s = None if still_wanted is None else LOOK_EVERY_S
        done, _ = await asyncio.wait(running, timeout=every_s, return_when=asyncio.FIRST_COMPLETED)
        if still_wanted is not None:
            still_wanted()
    for task in done:
        task.result()
    return running - done


async def _answer_row(row: InputRow, client: AnswerClient, tally: Tally) -> None:
    remade = row.asked
    assert not isinstance(remade, BadRow)
    try:
        while (prompt := remade.prompt()) is not None:
            remade.take(await client.ask(prompt, remade.conversation.tools))
        tally.finish(row)
    except BadRow as error:
        tally.fail(row, error)
    except Refused as error:
        tally.fail(row, BadRow("not answered", error.text), error.status, passing=error.passing)
