"""Responses of the routes: JSON, server-sent events."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterable
from typing import Any

from starlette.requests import Request as HTTPRequest
from starlette.responses import JSONResponse, Response, StreamingResponse

from ..request import Progress

_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


class Answer(JSONResponse):
    """A JSON response that keeps NaN (a log-probability of broken weights) as Python's json module reads it."""

    def render(self, content: Any) -> bytes:
        return _encode(content).encode()


def failure(progress: Iterable[Progress]) -> tuple[int, str] | None:
    """The status and message of the first request that failed in the engine, if any did."""
    ends = (one.finish or {} for one in progress)
    return next(((end["status_code"], end["message"]) for end in ends if "status_code" in end), None)


def events(answers: AsyncIterator[dict]) -> Response:
    """Streams answers as server-sent events."""

    async def lines() -> AsyncIterator[str]:
        async for answer in answers:
            yield f"data: {_encode(answer)}\n\n"
        yield "data: [DONE]\n\n"

    return StreamingResponse(lines(), media_type="text/event-stream")


def disconnected(http: HTTPRequest):
    """A coroutine function that returns when the client disconnects; the body must have been read."""

    async def gone() -> None:
        while (await http.receive())["type"] != "http.disconnect":
            pass

    return gone
