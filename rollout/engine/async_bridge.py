"""Connects the server's event loop with the engine's thread: passes requests to it and progress back.

The engine calls back from its own thread. Callbacks are batched into one wake-up of the loop, and for requests that are
not streamed only the last one is passed on.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence

from .request import Progress, Request

WATCH_S = 1.0  # delay before watching for a disconnected client, which would cost a quarter of a short request


class Bridge:
    """Submits requests to an engine and awaits their progress; owned by one event loop.

    Attributes:
      engine: the Engine.
      running: names of the requests in the engine.
      heard: time.monotonic() of the last progress.
    """

    def __init__(self, engine):
        self.engine = engine
        self.running: set[str] = set()
        self.heard = 0.0
        self._loop = asyncio.get_running_loop()
        self._mail: collections.deque[tuple[Callable[[Progress], None], Progress]] = collections.deque()
        self._woken = False

    async def finish(self, requests: Sequence[Request], gone: Callable[[], Coroutine]) -> list[Progress] | None:
        """Waits for the last Progress of each of `requests`; aborts them and returns None if `gone()` returns first.

        Raises:
          ValueError: the engine refuses one of them; the others are aborted.
        """
        last: dict[str, Progress] = {}
        done = self._loop.create_future()

        def end(_=None) -> None:
            if not done.done():
                done.set_result(None)

        def take(progress: Progress) -> None:
            last[progress.rid] = progress
            if len(last) == len(requests):
                end()

        watching: list[asyncio.Task] = []

        def watch() -> None:
            watching.append(self._loop.create_task(gone()))
            watching[0].add_done_callback(end)

        with self._submitted(requests, take, every=False):
            timer = self._loop.call_later(WATCH_S, watch)
            try:
                await done
            finally:
                timer.cancel()
                for task in watching:
                    task.cancel()
        return [last[request.rid] for request in requests] if len(last) == len(requests) else None

    def stream(self, requests: Sequence[Request]) -> AsyncIterator[tuple[int, Progress]]:
        """Yields (index of a request, its Progress) on every update. If the caller stops early, unfinished requests are
        aborted. A slow caller misses intermediate updates, which is harmless because each Progress is cumulative.

        Raises:
          ValueError: as `finish`, before anything is iterated.
        """
        index = {request.rid: i for i, request in enumerate(requests)}
        waiting: dict[int, Progress] = {}
        updated = asyncio.Event()

        def take(progress: Progress) -> None:
            waiting[index[progress.rid]] = progress
            updated.set()

        submitted = contextlib.ExitStack()
        submitted.enter_context(self._submitted(requests, take, every=True))

        async def news() -> AsyncIterator[tuple[int, Progress]]:
            with submitted:
                left = len(requests)
                while left:
                    await updated.wait()
                    updated.clear()
                    for i in sorted(waiting):
                        progress = waiting.pop(i)
                        left -= progress.finish is not None
                        yield i, progress

        return news()

    def abort(self, rid: str) -> None:
        """Aborts request `rid`, or all samples named `rid_...`."""
        for name in [name for name in self.running if name == rid or name.startswith(rid + "_")]:
            self.engine.abort(name)

    @contextlib.contextmanager
    def _submitted(self, requests: Sequence[Request], take, every: bool) -> Iterator[None]:
        def on_progress(progress: Progress) -> None:  # in the engine's thread
            if every or progress.finish:
                self._mail.append((take, progress))
                if not self._woken:
                    self._woken = True
                    with contextlib.suppress(RuntimeError):  # the loop is closed
                        self._loop.call_soon_threadsafe(self._deliver)

        submitted = []
        try:
            for request in requests:
                if request.rid in self.running:
                    raise ValueError(f"rid: must not be that of a running request, got {request.rid!r}")
                self.engine.submit(request, on_progress)
                self.running.add(request.rid)
                submitted.append(request.rid)
            yield
        finally:
            for rid in submitted:
                if rid in self.running:
                    self.running.discard(rid)
                    self.engine.abort(rid)

    def _deliver(self) -> None:
        self._woken = False  # set first: anything posted from here on wakes the loop again
        self.heard = time.monotonic()
        while self._mail:
            take, progress = self._mail.popleft()
            if progress.finish:
                self.running.discard(progress.rid)
            take(progress)
