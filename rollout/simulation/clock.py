"""A virtual clock for asyncio, and a network on it: a simulation takes only its own CPU time.

Time advances only when every task is blocked. Raises RuntimeError if none of them waits for a timer: a deadlock.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import selectors
import types
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, Protocol, TypeVar
from urllib.parse import urlsplit

Result = TypeVar("Result")


class _Jump(selectors.DefaultSelector):
    """A selector that advances its loop's clock instead of waiting."""

    loop: Loop

    def select(self, timeout=None):
        if timeout is None:
            raise RuntimeError("deadlock: every task is blocked and no timer is pending")
        if timeout > 0:
            self.loop.now += timeout
        return super().select(0)


class Loop(asyncio.SelectorEventLoop):
    """An event loop whose `time` is virtual; `now` is in seconds."""

    def __init__(self):
        self.now = 0.0
        self._spent = 0.0
        jump = _Jump()
        jump.loop = self
        super().__init__(jump)

    def time(self) -> float:
        return self.now

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, func: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        """Runs `func` at once, in this thread; its result arrives after the seconds that it `spend`s."""
        self._spent = 0.0
        work = self.create_future()
        try:
            settle = functools.partial(work.set_result, func(*args))
        except Exception as error:  # raised where the future is awaited
            settle = functools.partial(work.set_exception, error)
        self.call_later(self._spent, lambda: work.done() or settle())
        return work

    def spend(self, seconds: float) -> None:
        self._spent += seconds


def spend(seconds: float) -> None:
    """Replaces `time.sleep` in functions that `asyncio.to_thread` runs."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, Loop)
    loop.spend(seconds)


def run(main: Coroutine[Any, Any, Result]) -> Result:
    """Like `asyncio.run`, on a virtual clock."""
    gc.freeze()  # the collector, busy with a simulation's objects, need not go through all others each time
    try:
        with asyncio.Runner(loop_factory=Loop) as runner:
            return runner.run(main)
    finally:
        gc.unfreeze()


class Answers(Protocol):
    """A server: maps a path and a JSON body to (status, text), or raises what aiohttp would raise."""

    async def answer(self, path: str, body: dict | None) -> tuple[int, str]: ...


class Network:
    """Replaces an `aiohttp.ClientSession`: passes requests to `servers` by address, without sockets."""

    def __init__(self, servers: dict[str, Any] | None = None):
        self.servers: dict[str, Any] = {} if servers is None else servers

    @contextlib.asynccontextmanager
    async def request(
        self, method: str, where: str, json: dict | None = None, headers: dict | None = None,
        allow_redirects: bool = True,
    ) -> AsyncIterator[types.SimpleNamespace]:  # fmt: skip
        parts = urlsplit(where)
        status, text = await self.servers[f"{parts.scheme}://{parts.netloc}"].answer(parts.path, json)

        async def pieces() -> AsyncIterator[bytes]:
            yield text.encode()

        content = types.SimpleNamespace(iter_any=pieces)
        yield types.SimpleNamespace(status=status, headers={}, content=content)
