"""Begins the calls to very many servers a few at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

Result = TypeVar("Result")

AT_ONCE = 16  # calls begun in one turn of the loop


async def gather(coroutines: Iterable[Coroutine[Any, Any, Result]]) -> list[Result]:
    """As `asyncio.gather`, but between AT_ONCE of them and the next whatever else is due gets its turn.

    Args:
      coroutines: made as they begin, if this is a generator.
    """
    tasks: list[asyncio.Task[Result]] = []
    try:
        for coroutine in coroutines:
            tasks.append(asyncio.create_task(coroutine))
            if len(tasks) % AT_ONCE == 0:
                await asyncio.sleep(0)
        return await asyncio.gather(*tasks)
    except asyncio.CancelledError:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
