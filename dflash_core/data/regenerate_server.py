"""Answers from a server for many rows at once. The window of requests is bounded, and so is what is in memory."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from dflash_core.data.regenerate_client import AnswerClient, Refused
from dflash_core.data.regenerate_inputs import InputRow
from dflash_core.data.regenerate_tally import Tally
from dflash_core.data.rows import BadRow


async def answer_by_server(rows: Iterable[InputRow], client: AnswerClient, concurrency: int, tally: Tally) -> None:
    """Answer all rows, at most `concurrency` at once. A row is recorded as soon as it ends.

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
                running = await _wait(running)
        while running:
            running = await _wait(running)
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


async def _wait(running: set[asyncio.Task[None]]) -> set[asyncio.Task[None]]:
    """Wait until one has ended; raises what it raised."""
    done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
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
