"""Converts errors to responses in the format of the requested API, and logs them in one line."""

from __future__ import annotations

import logging

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from ..chat.api import chat, messages
from ..chat.fields import Refused
from ..processes.http_limits import GONE, status_of

log = logging.getLogger(__name__)

KINDS = (HTTPException, ValueError, RuntimeError, ClientDisconnect)  # anything else is a bug in this library


async def failed(http: Request, error: Exception) -> Response:
    """The response to a request that raised an error."""
    status, message = report(http, error)
    if status == GONE:
        return Response(status_code=GONE)
    shape = messages.error if http.url.path.startswith("/v1/messages") else chat.error
    name = error.name if isinstance(error, Refused) else None
    return JSONResponse(shape(status, message, name), status, getattr(error, "headers", None))


def report(http: Request, error: Exception) -> tuple[int, str]:
    """Logs an error in one line, without keys and request content; returns (status, message)."""
    status, message = status_of(error)
    what = f"{http.method} {http.url.path[:100]!r}: {status}"
    if status >= 500:
        log.error("failed: %s: %.300r", what, message)
    else:
        log.warning("refused: %s %s", what, error.name if isinstance(error, Refused) else type(error).__name__)
    return status, message
