"""What the episodes of a workflow share: opened when first used, closed with the workflow.

AReaL's workflows import this module: `from areax.rollout.workflows.areal import workflow_context`.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
from collections.abc import AsyncIterator, Callable, Hashable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any

import aiohttp

from .. import rewards
from ..types import Generate, Workflow


class Shared:
    """Resources by key, and how many workers and which variables of the environment rewards get."""

    def __init__(self, stack: contextlib.AsyncExitStack, reward: Any = None):
        like = reward if isinstance(reward, rewards.Pool) else None
        self.workers, self.environment = (like.size, tuple(like.environ)) if like else (2, ())
        self._stack, self._lock, self._open = stack, asyncio.Lock(), {}  # type: ignore[var-annotated]

    async def get(self, key: Hashable, make: Callable[[], AbstractAsyncContextManager[Any]]) -> Any:
        """What `make()` yields, made once per key."""
        async with self._lock:
            if key not in self._open:
                self._open[key] = await self._stack.enter_async_context(make())
            return self._open[key]


_current: contextvars.ContextVar[Shared] = contextvars.ContextVar("shared")


@contextlib.asynccontextmanager
async def opened(reward: Any = None) -> AsyncIterator[Shared]:
    """Yields what is shared until the end of the block; workers are as many, and see what, the run's `reward` does."""
    async with contextlib.AsyncExitStack() as stack:
        yield Shared(stack, reward)


@contextlib.asynccontextmanager
async def current() -> AsyncIterator[Shared]:
    """Yields what the episodes of this workflow share; outside an episode something of its own."""
    if shared := _current.get(None):
        yield shared
    else:
        async with opened() as own:
            yield own


def within(shared: Shared, workflow: Workflow) -> Workflow:
    """The workflow, whose episodes share `shared`."""

    async def episode(generate: Generate, row: Mapping[str, Any]) -> Any:
        token = _current.set(shared)
        try:
            return await workflow(generate, row)
        finally:
            _current.reset(token)

    return episode


async def get_aiohttp_session() -> aiohttp.ClientSession:
    """The HTTP session of this workflow, which must not be closed.

    Raises:
      ValueError: outside an episode, after which nothing would close it.
    """
    if not (shared := _current.get(None)):
        raise ValueError(
            "get_aiohttp_session: must be called in an episode, which closes it; make a session of your own"
        )
    return await shared.get("aiohttp", aiohttp.ClientSession)


async def get_httpx_client() -> Any:
    """Raises ValueError: areax has no httpx client to share."""
    raise ValueError("get_httpx_client: must be get_aiohttp_session() in areax; SDKs work best with their own client")
