"""Results that clients wait for, by request id."""

from __future__ import annotations

import asyncio

from .log import PENDING, Log, Request


class Futures:
    """Waiting for requests to run."""

    def __init__(self, store: Log):
        self._log = store
        self._loop: asyncio.AbstractEventLoop
        self._events: dict[str, tuple[asyncio.Event, int]] = {}  # and how many wait

    def open(self) -> None:
        """Must be called in the event loop, before anything runs."""
        self._loop = asyncio.get_running_loop()

    def find(self, id: str) -> Request | None:
        """The request with an id."""
        owner, _, seq = id.rpartition(":")
        return self._log.request(owner, int(seq)) if seq.isascii() and seq.isdigit() and len(seq) < 19 else None

    async def wait(self, id: str, seconds: float) -> Request | None:
        """The request once it has run, or as it is after `seconds`."""
        event, count = self._events.get(id, (asyncio.Event(), 0))
        self._events[id] = event, count + 1
        try:
            found = self.find(id)  # after the event is there: nothing is missed
            if found is not None and found.state == PENDING:
                try:
                    async with asyncio.timeout(seconds):
                        await event.wait()
                except TimeoutError:
                    pass
                found = self.find(id)
            return found
        finally:
            event, count = self._events.pop(id)
            if count > 1:
                self._events[id] = event, count - 1

    def settled(self, request: Request) -> None:
        """Wakes those who wait for a request; called from any thread."""

        def wake() -> None:
            if request.id in self._events:
                self._events[request.id][0].set()

        self._loop.call_soon_threadsafe(wake)
