"""Turns: at most AT_ONCE commands run in an event loop, so that their memory and files together are bounded.

A caller's time limit is suspended while it waits for a turn: only its own commands' time counts.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import weakref
from collections.abc import AsyncIterator, Iterator
from contextvars import ContextVar

AT_ONCE = 4 * (os.cpu_count() or 1)
_turns: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = weakref.WeakKeyDictionary()


class Clock:
    """Suspends a time limit while its task, or one that it has started, waits for a turn.

    Attributes:
      waiting: commands that wait.
    """

    def __init__(self, limit: asyncio.Timeout):
        self.limit, self.waiting, self.left = limit, 0, 0.0

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        now = asyncio.get_running_loop().time
        if not self.waiting:
            self.left = (self.limit.when() or 0.0) - now()
            self._to(None)
        self.waiting += 1
        try:
            yield
        finally:
            self.waiting -= 1
            if not self.waiting:
                self._to(now() + self.left)

    def _to(self, when: float | None) -> None:
        with contextlib.suppress(RuntimeError):  # it has ended, and a task that its own has left behind goes on
            self.limit.reschedule(when)


CLOCK: ContextVar[Clock | None] = ContextVar("CLOCK", default=None)  # of the task that runs commands


@contextlib.asynccontextmanager
async def turn() -> AsyncIterator[None]:
    """Waits for a turn, and has it inside."""
    turns, clock = _turns.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(AT_ONCE)), CLOCK.get()
    with clock.stopped() if clock and turns.locked() else contextlib.nullcontext():
        await turns.acquire()
    try:
        yield
    finally:
        turns.release()
