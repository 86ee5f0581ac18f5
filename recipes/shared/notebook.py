"""Recipes in a running event loop, such as a notebook's: `await grpo.run(config)` instead of `grpo.main(config)`."""

import asyncio
import contextvars
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

Result = TypeVar("Result")

# Done once the caller has cancelled `run_in_thread`: the run in this context then stops as after Ctrl-C.
stop_request: contextvars.ContextVar[Future | None] = contextvars.ContextVar("stop_request", default=None)


def refuse_running_loop(config) -> None:
    """Raises RuntimeError, naming the recipe's `run`, if an event loop is running in this thread."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    name = type(config).__module__.rpartition(".")[2]
    raise RuntimeError(f"{name}.main: an event loop is running here, as in a notebook; use: await {name}.run(config)")


async def run_in_thread(main: Callable[..., Result], config) -> Result:
    """Runs a recipe's `main` in a thread, so that the loop of the caller goes on.

    If cancelled, it asks the run to stop, which saves its state, and waits for its end.
    """
    stop: Future = Future()
    token = stop_request.set(stop)
    running = asyncio.ensure_future(asyncio.to_thread(main, config))  # with a copy of this context
    stop_request.reset(token)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        stop.set_result(None)
        await asyncio.wait([running])
        running.exception()  # marks it as seen; what matters here is the cancellation
        raise
