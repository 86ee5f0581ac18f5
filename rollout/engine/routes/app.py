"""The HTTP server of an engine as an ASGI application: its routes, its errors, its key."""

from __future__ import annotations

import contextlib
import hmac

from starlette.exceptions import HTTPException
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from ...chat.api import messages
from ...chat.fields import Refused
from ...processes import http_limits as limits
from . import openapi
from .adapters import Adapters
from .metrics import Metrics
from .openai import OpenAI
from .replies import Answer
from .service import Service
from .sglang import SGLang
from .tokenizer import Tokenizer
from .weights import Weights

UNGUARDED = ("/health", "/health_generate", "/ready")  # answered without the key


def app(service: Service, api_key: str | None = None, style: str = "", reasoning: bool = True) -> ASGIApp:
    """The server as an ASGI application; `style` and `reasoning` as for `OpenAI`."""

    @contextlib.asynccontextmanager
    async def lifespan(_):
        service.open()
        yield

    parts = (
        SGLang(service), Weights(service), Adapters(service), OpenAI(service, style, reasoning), Tokenizer(service),
        Metrics(service),
    )  # fmt: skip
    routes = [route for part in parts for route in part.routes()]
    inner = limits.app(openapi.with_document(routes), failed=_failed, lifespan=lifespan)
    return inner if api_key is None else _guarded(inner, api_key)


async def _failed(http: HTTPRequest, error: Exception) -> Response:
    """The response to an error, in the shape of the API: Anthropic's, or OpenAI's next to SGLang's."""
    status, message = limits.status_of(error)
    if (status, message) == (404, "Not Found"):
        message = _no_route(http.url.path)
    if http.url.path.startswith("/v1/messages"):
        return Answer(messages.error(status, message), status, getattr(error, "headers", None))
    kind = "BadRequestError" if status == 400 else "InternalServerError" if status >= 500 else "Error"
    flat = {
        "message": message,
        "type": kind,
        "param": error.name if isinstance(error, Refused) else None,
        "code": status,
    }
    return Answer({"object": "error", **flat, "error": flat}, status, getattr(error, "headers", None))


def _no_route(path: str) -> str:
    """What is wrong with a path that no route has, most often because of its client's address."""
    if path.startswith("/v1/v1/"):
        return f"there is no {path}; give Anthropic's clients the address without /v1"
    if path in ("/chat/completions", "/completions", "/responses", "/models"):
        return f"there is no {path}; give OpenAI's clients the address with /v1"
    return f"there is no {path}; /openapi.json lists the routes"


def _guarded(inner: ASGIApp, api_key: str) -> ASGIApp:
    expected = f"Bearer {api_key}".encode()

    async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in UNGUARDED:
            headers = dict(scope["headers"])
            given = headers.get(b"authorization") or b"Bearer " + headers.get(b"x-api-key", b"")  # Anthropic's
            if not hmac.compare_digest(given, expected):
                refusal = HTTPException(401, "the key is missing or wrong", limits.CLOSE)
                await (await _failed(HTTPRequest(scope), refusal))(scope, receive, send)
                return
        await inner(scope, receive, send)

    return guarded
