"""Staggers calls to very many servers, so that whatever else is due gets its turn between them."""

from __future__ import annotations

import asyncio

AT_ONCE = 16  # calls that begin in one turn of the loop


async def stagger(number: int) -> None:
    """Waits until call `number`, of many that were made together, is to begin."""
    for _ in range(number // AT_ONCE):
        await asyncio.sleep(0)
