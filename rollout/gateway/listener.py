"""An HTTP server inside a running event loop, with limits on connections, headers and bodies."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from ..chat.fields import Refused
from ..processes import http_process
from .sessions import Limits

log = logging.getLogger(__name__)

GRACE_S = 1  # for responses in progress at shutdown
KEEP_ALIVE_S = 30
CLOSE = {"connection": "close"}  # the unread rest of a request must not be parsed as the next one


@contextlib.asynccontextmanager
async def listen(app: ASGIApp, host: str, port: int, limits: Limits) -> AsyncIterator[str]:
    """Serves `app` while the block runs; yields its URL.

    Raises:
      ValueError: the address is not available.
    """
    with contextlib.closing(http_process.bind(host, port)) as sock:
        server = http_process.server(
            app,
            http=_protocol(limits),
            ws="none",
            lifespan="off",
            log_config=None,
            log_level=None,
            h11_max_incomplete_event_size=limits.header_bytes,
            limit_concurrency=limits.connections,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=GRACE_S,
        )
        async with http_process.running(server, sock):
            yield http_process.address((host, sock.getsockname()[1]))


def _protocol(limits: Limits) -> type[asyncio.Protocol]:
    class Protocol(H11Protocol):
        """Closes connections on which the head of a request does not arrive in time."""

        late: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._await_request()

        def data_received(self, data: bytes) -> None:
            self._await_request()
            super().data_received(data)
            if self._in_request() and self.late:
                self.late.cancel()
                self.late = None

        def connection_lost(self, exc: Exception | None) -> None:
            if self.late:
                self.late.cancel()
            super().connection_lost(exc)

        def _await_request(self) -> None:
            if not self.late and not self._in_request():
                self.late = self.loop.call_later(limits.head_s, self._close)

        def _in_request(self) -> bool:
            return self.cycle is not None and not self.cycle.response_complete

        def _close(self) -> None:
            log.warning("refused: no complete request head within %g s", limits.head_s)
            self.transport.close()

    return Protocol


async def read_json(http: Request, limits: Limits) -> dict[str, Any]:
    """Reads the request's body, a JSON object; {} if there is none.

    Raises:
      HTTPException: it is too large, or does not arrive in time.
      Refused: it is not a JSON object.
    """
    too_large = HTTPException(413, f"the body must have at most {limits.body_bytes} bytes", CLOSE)
    if int(http.headers.get("content-length", 0)) > limits.body_bytes:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(limits.body_s):
            async for chunk in http.stream():
                body += chunk
                if len(body) > limits.body_bytes:
                    raise too_large
    except TimeoutError:
        raise HTTPException(408, f"the body must arrive within {limits.body_s:g} s", CLOSE) from None
    try:
        value = json.loads(body or b"{}", parse_constant=_constant)
        if b"\\u" in body:  # refuses lone surrogates
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise Refused("body", f"must be JSON ({' '.join(str(error).split())[:100]})") from None
    if not isinstance(value, dict):
        raise Refused("body", "must be a JSON object")
    return value


def _constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
