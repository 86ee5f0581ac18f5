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

from starlette.exceptions import HTTPException

from ..request import Progress, Request

WATCH_S = 1.0  # delay before watching for a disconnected client, which would cost a quarter of a short request
REQUESTS, PROMPT_TOKENS = 2**14, 2**24  # most that the engine holds, running or waiting

Ended = Callable[[Progress], Progress]


class Bridge:
    """Submits requests to an engine and awaits their progress; owned by one event loop.

    Attributes:
      engine: the Engine.
      running: names of the requests in the engine.
      tokens: of their prompts.
      heard: time.monotonic() of the last progress.
    """

    def __init__(self, engine):
        self.engine = engine
        self.running: set[str] = set()
        self.tokens = 0
        self.heard = 0.0
        self._loop = asyncio.get_running_loop()
        self._mail: collections.deque[tuple[Callable[[Progress], None], Progress]] = collections.deque()
        self._woken = False

    async def finish(
        self, requests: Sequence[Request], gone: Callable[[], Coroutine], ended: Ended | None = None
    ) -> list[Progress] | None:
        """Waits for the last Progress of each of `requests`; aborts them and returns None if `gone()` returns first.

        Args:
          ended: called with each Progress; returns it, or one with a `finish`, which ends the request there.

        Raises:
          ValueError: the engine refuses one of them, and has none then.
        """
        last: dict[str, Progress] = {}
        done = self._loop.create_future()

        def end(_=None) -> None:
            if not done.done():
                done.set_result(None)

        def take(progress: Progress) -> None:
            if progress.finish:
                last[progress.rid] = progress
            if len(last) == len(requests):
                end()

        watching: list[asyncio.Task] = []

        def watch() -> None:
            watching.append(self._loop.create_task(gone()))
            watching[0].add_done_callback(end)

        with self._submitted(requests, take, ended, every=int(ended is not None)):
            timer = self._loop.call_later(WATCH_S, watch)
            try:
                await done
            finally:
                timer.cancel()
                for task in watching:
                    task.cancel()
        return [last[request.rid] for request in requests] if len(last) == len(requests) else None

    def stream(
        self, requests: Sequence[Request], ended: Ended | None = None, every: int = 1
    ) -> AsyncIterator[tuple[int, Progress]]:
        """Yields (index of a request, its Progress) at first, whenever there are `every` more tokens, and at the end;
        `ended` as in `finish`. If the caller stops early, unfinished requests are aborted. A slow caller misses
        intermediate updates, which is harmless because each Progress is cumulative.

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
        submitted.enter_context(self._submitted(requests, take, ended, every))

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
        start = rid + "_"
        if names := [name for name in self.running if name == rid or name.startswith(start)]:
            self.engine.abort(*names)

    def check_room(self, requests: Sequence[Request]) -> None:
        """Raises HTTPException (503) if the engine would hold too many requests, or too many tokens of prompts."""
        tokens = self.tokens + _prompt_tokens(requests)
        if len(self.running) + len(requests) > REQUESTS or (self.running and tokens > PROMPT_TOKENS):
            raise HTTPException(503, f"{len(self.running)} requests are running or waiting; try again later")

    @contextlib.contextmanager
    def _submitted(self, requests: Sequence[Request], take, ended: Ended | None, every: int) -> Iterator[None]:
        """Args: every: new tokens after which progress is passed on; 0 = only at the end."""
        over: set[str] = set()
        passed: dict[str, int] = {}  # tokens

        def until(progress: Progress) -> None:
            if progress.rid in over:
                return
            progress = ended(progress) if ended else progress
            if progress.finish:
                over.add(progress.rid)
                if progress.rid in self.running:
                    self.engine.abort(progress.rid)
            take(progress)

        def on_progress(progress: Progress) -> None:  # in the engine's thread
            before, now = passed.get(progress.rid), len(progress.tokens)
            if progress.finish or every and (before is None or now - before >= every):
                passed[progress.rid] = now
                self._mail.append((until, progress))
                if not self._woken:
                    self._woken = True
                    with contextlib.suppress(RuntimeError):  # the loop is closed
                        self._loop.call_soon_threadsafe(self._deliver)

        names = {request.rid for request in requests}
        if taken := names & self.running:
            raise ValueError(f"rid: must not be that of a running request, got {min(taken)!r}")
        self.engine.submit_all(requests, on_progress)
        tokens = _prompt_tokens(requests)
        self.running |= names
        self.tokens += tokens
        try:
            yield
        finally:
            self.tokens -= tokens
            if left := names & self.running:
                self.running -= left
                self.engine.abort(*left)

    def _deliver(self) -> None:
        self._woken = False  # set first: anything posted from here on wakes the loop again
        self.heard = time.monotonic()
        while self._mail:
            take, progress = self._mail.popleft()
            if progress.finish:
                self.running.discard(progress.rid)
            take(progress)


def _prompt_tokens(requests: Sequence[Request]) -> int:
    """Tokens of the prompts; samples share theirs."""
    return sum(map(len, {id(request.prompt): request.prompt for request in requests}.values()))
