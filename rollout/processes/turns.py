"""Limits how many calls and answers begin in one turn of the event loop, so that very many do not hold up the rest."""

from __future__ import annotations

import asyncio
import weakref
from collections import deque

AT_ONCE = 8  # that begin in one turn of the loop


class _Turns:
    """The calls of one loop that begin in this turn, and those that wait."""

    def __init__(self) -> None:
        self.begun = 0  # in this turn
        self.waiting = deque[asyncio.Future[None]]()

    def renew(self) -> None:
        self.begun = 0
        while self.waiting and self.begun < AT_ONCE:
            if not (one := self.waiting.popleft()).done():  # it was not cancelled
                one.set_result(None)
                self.begun += 1
        if self.begun:
            asyncio.get_running_loop().call_soon(self.renew)


_of_loop: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Turns] = weakref.WeakKeyDictionary()


async def turn() -> None:
    """Waits until the caller is among the AT_ONCE that begin in this turn of the loop, in the order of their calls."""
    loop = asyncio.get_running_loop()
    turns = _of_loop.setdefault(loop, _Turns())
    if turns.begun == 0:
        loop.call_soon(turns.renew)
    if turns.begun < AT_ONCE:  # then none waits
        turns.begun += 1
        return
    turns.waiting.append(one := loop.create_future())
    await one
