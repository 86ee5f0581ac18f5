"""The generations of one request, which are cancelled with it, and their answer as server-sent events."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Receive, Scope, Send

from ..chat.api.ask import Event, encoded
from ..chat.api.logprobs import sampled
from ..chat.parsers import Piece
from ..chat.trajectory import Interaction
from . import errors
from .sessions import Entry

Job = Callable[[Callable[[Piece], None]], Awaitable[Interaction]]  # job(on_piece) generates an interaction


@contextlib.asynccontextmanager
async def running(http: Request, entry: Entry, jobs: Sequence[Job], most: int) -> AsyncIterator[Work]:
    """Runs the jobs of a request while the block runs. Raises HTTPException if the session would run too many."""
    if entry.closed:  # while the request's body was being read
        raise HTTPException(409, "the session has ended")
    if len(entry.running) + len(jobs) > most:
        raise HTTPException(429, f"at most {most} generations may run in a session at the same time")
    work = Work(http, jobs)
    entry.running.update(work.tasks)
    try:
        yield work
    finally:
        await work.stop()
        entry.running.difference_update(work.tasks)
        entry.used = time.monotonic()


class Work:
    """Jobs that run until they are done, one fails, their session ends, or the client disconnects.

    Attributes:
      tasks: one per job.
    """

    def __init__(self, http: Request, jobs: Sequence[Job]):
        self._news: asyncio.Queue[tuple[int, Piece] | asyncio.Task] = asyncio.Queue()
        self._watch = asyncio.create_task(_gone(http.receive))
        self.tasks = [asyncio.create_task(self._run(i, job)) for i, job in enumerate(jobs)]
        for task in (self._watch, *self.tasks):
            task.add_done_callback(self._news.put_nowait)

    async def _run(self, i: int, job: Job) -> Interaction:
        return await job(lambda piece: self._news.put_nowait((i, piece)))

    async def pieces(self) -> AsyncIterator[tuple[int, Piece]]:
        """Yields (job index, piece) as they arrive, until all jobs are done. Raises a job's error; ClientDisconnect."""
        left = len(self.tasks)
        while left:
            news = await self._news.get()
            if isinstance(news, tuple):
                yield news
            elif news is self._watch:
                raise ClientDisconnect
            elif news.cancelled():
                raise HTTPException(409, "the session has ended")
            else:  # all its pieces have been yielded
                news.result()
                left -= 1

    async def done(self) -> list[Interaction]:
        """Waits for the jobs and returns their results. Raises as `pieces`."""
        async for _ in self.pieces():
            pass
        return [task.result() for task in self.tasks]

    async def stop(self) -> None:
        for task in (self._watch, *self.tasks):
            task.cancel()
        await asyncio.gather(self._watch, *self.tasks, return_exceptions=True)


def streamed(
    http: Request, entry: Entry, jobs: Sequence[Job], most: int, ids: Sequence[str], stream: Any, read: Sequence[int]
) -> ASGIApp:
    """Streams an answer as server-sent events; an error before the first piece gets a normal error response.

    Args:
      ids: ids for the interactions.
      stream: a `Stream` of one of the APIs; its log-probabilities come at the end of each choice.
      read: tokens of the prompt, which the jobs append before their first piece.
    """

    async def respond(scope: Scope, receive: Receive, send: Send) -> None:
        async def emit(events: Iterable[Event]) -> None:
            if body := b"".join(encoded((name, named(data, ids))) for name, data in events):
                await send({"type": "http.response.body", "body": body, "more_body": True})

        async with running(http, entry, jobs, most) as work:
            pieces = work.pieces()
            first = await anext(pieces, None)
            headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            try:
                await emit(stream.begin(*read[:1]))
                if first:
                    await emit(stream.pieces(first[0], [first[1]]))
                async for i, piece in pieces:
                    await emit(stream.pieces(i, [piece]))
                done = [task.result() for task in work.tasks]
                for x, id in zip(done, ids, strict=True):
                    x.id = id  # the id that the agent knows from the beginning of the stream
                for i, x in enumerate(done):
                    await emit(stream.finish(i, x, sampled(x)))
                await emit(stream.end(done))
            except errors.KINDS as error:
                await emit(stream.failed(*errors.report(http, error)))
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    return respond


def named(answer: Any, ids: Sequence[str]) -> Any:
    """An answer or chunk of OpenAI's API, with the id of its interaction in each choice."""
    if isinstance(answer, dict):
        for choice in answer.get("choices", ()):
            choice["interaction"] = ids[choice["index"]]
    return answer


async def _gone(receive: Receive) -> None:
    """Returns when the client disconnects; the body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass
