"""Between the server's event loop and the engine's thread: requests go down, progress comes up.

The engine calls back from its own thread. All that came since the loop last looked travels in one wake-up, and of a
request that is not streamed only the end travels.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence

from .request import Progress, Request

WATCH_S = 1.0  # a client that goes away is noticed after this; watching costs a quarter of a short request


class Bridge:
    """Submits requests to an engine and awaits what they bring; belongs to one event loop.

    Attributes:
      engine: the Engine.
      running: names of the requests that the engine holds.
      heard: when a request last sent news, by time.monotonic().
    """

    def __init__(self, engine):
        self.engine = engine
        self.running: set[str] = set()
        self.heard = 0.0
        self._loop = asyncio.get_running_loop()
        self._mail: collections.deque[tuple[Callable[[Progress], None], Progress]] = collections.deque()
        self._woken = False

    async def finish(self, requests: Sequence[Request], gone: Callable[[], Coroutine]) -> list[Progress] | None:
        """The last Progress of each of `requests`; None, and they are aborted, if `gone()` returns before that.

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
        """(index of a request, its Progress) whenever there is news; requests not yet finished are aborted if the
        caller stops early. News that the caller was too slow for are skipped, for each Progress holds all before it.

        Raises:
          ValueError: as `finish`, before anything is iterated.
        """
        index = {request.rid: i for i, request in enumerate(requests)}
        waiting: dict[int, Progress] = {}
        some = asyncio.Event()

        def take(progress: Progress) -> None:
            waiting[index[progress.rid]] = progress
            some.set()

        submitted = contextlib.ExitStack()
        submitted.enter_context(self._submitted(requests, take, every=True))

        async def news() -> AsyncIterator[tuple[int, Progress]]:
            with submitted:
                left = len(requests)
                while left:
                    await some.wait()
                    some.clear()
                    for i in sorted(waiting):
                        progress = waiting.pop(i)
                        left -= progress.finish is not None
                        yield i, progress

        return news()

    def abort(self, rid: str) -> None:
        """Ends request `rid`, or all samples that were numbered after this name."""
        for name in [name for name in self.running if name == rid or name.startswith(rid + "_")]:
            self.engine.abort(name)

    @contextlib.contextmanager
    def _submitted(self, requests: Sequence[Request], take, every: bool) -> Iterator[None]:
        def on_progress(progress: Progress) -> None:  # in the engine's thread
            if every or progress.finish:
                self._mail.append((take, progress))
                if not self._woken:
                    self._woken = True
                    with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                        self._loop.call_soon_threadsafe(self._deliver)

        mine = []
        try:
            for request in requests:
                if request.rid in self.running:
                    raise ValueError(f"rid: must not be that of a running request, got {request.rid!r}")
                self.engine.submit(request, on_progress)
                self.running.add(request.rid)
                mine.append(request.rid)
            yield
        finally:
            for rid in mine:
                if rid in self.running:
                    self.running.discard(rid)
                    self.engine.abort(rid)

    def _deliver(self) -> None:
        self._woken = False  # first: what is posted from here on wakes the loop anew
        self.heard = time.monotonic()
        while self._mail:
            take, progress = self._mail.popleft()
            if progress.finish:
                self.running.discard(progress.rid)
            take(progress)
