"""Garbage collection that does not hold up a process with very many objects.

A full collection visits every object that may refer to others. Of 100,000 episodes in flight that takes seconds, and
Python makes one each time a quarter more has come to live long: every half minute, although an episode is freed without
it, unless its own code makes reference cycles.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import time
from collections.abc import AsyncIterator
from typing import Any

from . import memory

log = logging.getLogger(__name__)

LONG_S = 0.05  # of a full collection
EVERY_S = 1.0  # after which an object counts as one that lives long
GROWN = 1.5  # memory since the last full collection that calls for another
MOST_S = 3600.0  # between two
NEVER = 1 << 30


@contextlib.asynccontextmanager
async def spared() -> AsyncIterator[None]:
    """Keeps full collections short, or rare, within the block.

    What is there at the beginning, such as imported modules, is not visited. When the others take longer than LONG_S to
    visit, full collections are made only after the process's memory has grown by half, or an hour has passed;
    those of young objects go on.
    """
    thresholds, begun, longest = gc.get_threshold(), 0.0, 0.0

    def measured(phase: str, about: dict[str, Any]) -> None:
        nonlocal begun, longest
        if about["generation"] == 2:
            if phase == "start":
                begun = time.perf_counter()
            else:
                longest = max(longest, time.perf_counter() - begun)

    async def seldom() -> None:
        while longest < LONG_S:
            await asyncio.sleep(EVERY_S)
        log.info("full garbage collections take %.2f s and become rare", longest)
        gc.set_threshold(*thresholds[:2], NEVER)
        level, at = memory.resident(), time.monotonic()
        while True:
            if memory.resident() > GROWN * level or time.monotonic() - at > MOST_S:
                gc.unfreeze()
                gc.collect()
                level, at = memory.resident(), time.monotonic()
            gc.freeze()  # takes no time, however much there is
            await asyncio.sleep(EVERY_S)

    gc.collect()
    gc.freeze()
    gc.callbacks.append(measured)
    watching = asyncio.create_task(seldom())
    try:
        yield
    finally:
        watching.cancel()
        gc.callbacks.remove(measured)
        gc.set_threshold(*thresholds)
        gc.unfreeze()
