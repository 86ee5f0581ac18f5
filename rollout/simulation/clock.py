"""A virtual clock for asyncio, and a network that lives by it: a simulation takes as long as its own work.

Time passes only while everybody waits. Who would wait for ever is told so: that is a deadlock.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import selectors
import types
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, Protocol, TypeVar
from urllib.parse import urlsplit

Result = TypeVar("Result")


class _Jump(selectors.DefaultSelector):
    """Does not wait but moves its loop's clock on."""

    loop: Loop

    def select(self, timeout=None):
        if timeout is None:
            raise RuntimeError("deadlock: everybody waits, and nothing will happen")
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
        """Runs `func` here; its result is there once the seconds that it said it would `spend` have passed."""
        self._spent = 0.0
        work = self.create_future()
        try:
            settle = functools.partial(work.set_result, func(*args))
        except Exception as error:  # goes to whoever awaits it
            settle = functools.partial(work.set_exception, error)
        self.call_later(self._spent, lambda: work.done() or settle())
        return work

    def spend(self, seconds: float) -> None:
        self._spent += seconds


def spend(seconds: float) -> None:
    """Stands where `time.sleep` does in what `asyncio.to_thread` runs."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, Loop)
    loop.spend(seconds)


def run(main: Coroutine[Any, Any, Result]) -> Result:
    """As `asyncio.run`, under a virtual clock."""
    with asyncio.Runner(loop_factory=Loop) as runner:
        return runner.run(main)


class Answers(Protocol):
    """A server: answers a path and a JSON body with (status, text), or raises what aiohttp would raise."""

    async def answer(self, path: str, body: dict | None) -> tuple[int, str]: ...


class Network:
    """Stands where an `aiohttp.ClientSession` does: requests reach `servers` by address, without a socket."""

    def __init__(self, servers: dict[str, Any] | None = None):
        self.servers: dict[str, Any] = {} if servers is None else servers

    @contextlib.asynccontextmanager
    async def request(self, method: str, where: str, json: dict | None = None) -> AsyncIterator[types.SimpleNamespace]:
        parts = urlsplit(where)
        status, text = await self.servers[f"{parts.scheme}://{parts.netloc}"].answer(parts.path, json)

        async def read() -> str:
            return text

        yield types.SimpleNamespace(status=status, text=read)
