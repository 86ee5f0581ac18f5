"""Routes for clients that open sessions over HTTP, use, reward and end them, for online training."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from ..chat.fields import Refused
from ..chat.session import Session
from ..rewards.signatures import reported, reported_number
from ..types import Sample
from .body import read_body
from .sessions import Entry, Limits, Sessions

log = logging.getLogger(__name__)

Start = Callable[[dict[str, Any]], Awaitable[Session]]
End = Callable[[Session], Awaitable[None]]


class Online:
    """Handlers of the routes under /sessions.

    Attributes:
      base_url: the API's base URL, as returned to clients.
    """

    def __init__(self, sessions: Sessions, limits: Limits, on_start: Start | None, on_end: End | None):
        self.base_url = ""
        self._sessions, self._limits, self._on_start, self._on_end = sessions, limits, on_start, on_end

    def routes(self) -> list[Route]:
        session = "/sessions/{id}"
        return [
            Route("/sessions", self._start, methods=["POST"]),
            Route(session, self._finish, methods=["DELETE"]),
            Route(f"{session}/reward", self._reward, methods=["POST"]),
            Route(f"{session}/trajectories", self._trajectories, methods=["GET"]),
        ]

    async def expire(self) -> None:
        """Ends expired sessions, periodically and forever."""
        while True:
            await asyncio.sleep(min(self._limits.idle_s, self._limits.total_s, 10.0) / 4)
            stale = self._sessions.stale()
            ended = await asyncio.gather(*map(self._end, stale), return_exceptions=True)
            for entry, error in zip(stale, ended, strict=True):
                log.warning("session %s has expired", entry.session.id, exc_info=error)

    async def _start(self, http: Request) -> Response:
        if not self._sessions.admin(http):
            raise HTTPException(401, "starting a session needs the admin key")
        wanted = await read_body(http, self._limits.http)
        if self._on_start is None:
            raise HTTPException(403, "this server starts no sessions over HTTP")
        if self._sessions.full:
            raise HTTPException(429, "too many sessions are open")
        try:
            session = await self._on_start(wanted)
            key = self._sessions.open(session, online=True)
        except RuntimeError as error:
            raise HTTPException(503, str(error)) from error
        return JSONResponse({"id": session.id, "api_key": key, "base_url": self.base_url})

    async def _reward(self, http: Request) -> Response:
        session = self._sessions.named(http).session
        body = await read_body(http, self._limits.http)
        interaction = body.get("interaction") or ""
        if "value" not in body or not body.keys() <= {"value", "interaction"} or not isinstance(interaction, str):
            raise Refused("body", 'must have a "value" and optionally the id of an "interaction"')
        value = body["value"]
        if value is not None:
            value = (reported if isinstance(value, dict) else reported_number)(value, "value: a client")
        try:
            session.set_reward(value, interaction)
        except OverflowError:
            raise Refused("value", "must be a finite number") from None
        return JSONResponse({"id": session.id})

    async def _trajectories(self, http: Request) -> Response:
        session = self._sessions.named(http).session
        style, discount = http.query_params.get("style", "leaves"), http.query_params.get("discount", "1")
        if style not in ("leaves", "interactions"):
            raise Refused("style", "must be leaves or interactions")
        try:
            gamma = float(discount)
        except ValueError:
            raise Refused("discount", "must be a number") from None
        if not math.isfinite(gamma):
            raise Refused("discount", "must be a finite number")
        rows = session.samples(style=style, discount=gamma)  # type: ignore[arg-type]
        return JSONResponse({"id": session.id, "rows": [_row(sample) for sample in rows]})

    async def _finish(self, http: Request) -> Response:
        entry = self._sessions.named(http)
        await self._end(entry)
        return JSONResponse({"id": entry.session.id, "ended": True})

    async def _end(self, entry: Entry) -> None:
        if await self._sessions.close(entry) and entry.online and self._on_end:
            await self._on_end(entry.session)


def _row(sample: Sample) -> dict[str, Any]:
    """A row of training data as JSON; null stands for an unscorable reward."""
    scored = lambda value: None if math.isnan(value) else value
    return {
        **{name: getattr(sample, name).tolist() for name in ("tokens", "mask", "logp", "version", "turn")},
        "temperature": sample.temperature,
        "rewards": [[index, scored(value)] for index, value in sample.rewards],
        "components": {name: scored(value) for name, value in sample.components.items()},
        "finish": sample.finish,
        "weight": sample.weight,
        "prompt": sample.info.get("prompt"),
        "text": sample.info.get("text"),
        **({"images": [image.hash for image in sample.images]} if sample.images else {}),
    }
