"""Limits of HTTP servers: connections, headers, bodies, origins; and the form of their errors.

Every server of areax is an `app` run by `http_process.server`: what exceeds a limit is refused before any work.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

log = logging.getLogger(__name__)

ANOTHER_PAGE = "this server does not serve pages of other addresses (see the headers Origin and Sec-Fetch-Site)"
CLOSE = {"connection": "close"}  # the unread rest of a request must not be parsed as the next one
SMALL = 2**16  # bytes of a body that is parsed without a thread
GONE = 499  # the client disconnected; nobody reads the response
Failed = Callable[[Request, Exception], Awaitable[Response]]


@dataclass(frozen=True)
class Limits:
    """Limits of clients; requests that exceed one are refused.

    Attributes:
      body_bytes, body_s: size of a request's body, and seconds in which it must arrive.
      containers: arrays and objects in a JSON body; each takes twenty times the memory of its text.
      values: commas in a JSON body, so about as many values.
      header_bytes, headers: total size and number of a request's headers.
      head_s: seconds in which the request line and headers must arrive.
      idle_s: seconds after which a connection without a request is closed.
      connections: open at the same time; more get a 503.
    """

    body_bytes: int = 32 * 2**20
    body_s: float = 60.0
    containers: int = 2**20
    values: int = 2**22
    header_bytes: int = 2**16
    headers: int = 100
    head_s: float = 10.0
    idle_s: float = 30.0
    connections: int = 4096


def app(
    routes: Sequence[BaseRoute], limits: Limits = Limits(), failed: Failed | None = None, lifespan: Any = None  # noqa: B008
) -> ASGIApp:  # fmt: skip
    """An application of these routes, behind the limits.

    Args:
      failed: makes the response to an error; None = `failure`.
    """
    answer = failed or failure
    kinds = (HTTPException, ValueError, RuntimeError, ClientDisconnect, Exception)
    inner = Starlette(routes=routes, lifespan=lifespan, exception_handlers=dict.fromkeys(kinds, answer))
    inner.router.redirect_slashes = False

    async def limited(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            if refused := _refusal(scope, limits):
                await (await answer(Request(scope), refused))(scope, receive, send)
                return
            receive = _bounded(receive, limits)
        await inner(scope, receive, send)

    return limited


def _refusal(scope: Scope, limits: Limits) -> HTTPException | None:
    """Why the request is refused on account of its headers; None if it is not."""
    headers = scope["headers"]
    if len(headers) > limits.headers or sum(len(name) + len(value) for name, value in headers) > limits.header_bytes:
        return HTTPException(431, f"at most {limits.headers} headers of {limits.header_bytes} bytes", CLOSE)
    found = {name.decode("latin-1"): value.decode("latin-1") for name, value in headers}
    if from_another_page(found):
        return HTTPException(403, ANOTHER_PAGE, CLOSE)
    length = found.get("content-length", "0")
    if length.isdecimal() and int(length[:20]) > limits.body_bytes:
        return _too_large(limits)
    return None


def from_another_page(headers: Mapping[str, str]) -> bool:
    """Whether a browser sends the request for a page of another address; only browsers send these headers.

    A name that an attacker can point at this machine (DNS rebinding) is not an address of this server.
    """
    if headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
        return True
    origin = headers.get("origin")
    if origin is None:
        return False
    try:
        page = urlsplit(origin)
        if page.hostname != "localhost":
            ipaddress.ip_address(page.hostname or "")
    except ValueError:
        return True
    return page.netloc != headers.get("host")


def _too_large(limits: Limits) -> HTTPException:
    return HTTPException(413, f"the body must have at most {limits.body_bytes} bytes", CLOSE)


def _bounded(receive: Receive, limits: Limits) -> Receive:
    """`receive` that raises HTTPException if the body is too large or too slow."""
    clock = asyncio.get_running_loop().time
    size, complete, end = 0, False, clock() + limits.body_s

    async def bounded() -> Message:
        nonlocal size, complete
        if complete:
            return await receive()
        try:
            async with asyncio.timeout_at(end):
                message = await receive()
        except TimeoutError:
            raise HTTPException(408, f"the body must arrive within {limits.body_s:g} s", CLOSE) from None
        size += len(message.get("body", b""))
        complete = not message.get("more_body", False)
        if size > limits.body_bytes:
            raise _too_large(limits)
        return message

    return bounded


async def read_json(http: Request, limits: Limits = Limits()) -> dict[str, Any]:  # noqa: B008
    """Reads the request's body, a JSON object.

    Raises:
      HTTPException: it is too large, or does not arrive in time.
      ValueError: as `parse`, or a text is not Unicode (a lone surrogate).
    """
    body = await http.body()
    value = parse(body, limits)
    if b"\\u" in body:
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"the body must be Unicode ({error.reason})") from None
    return value


def parse(body: bytes, limits: Limits = Limits()) -> dict[str, Any]:  # noqa: B008
    """Parses a JSON object; raises ValueError if it is none, or has too many arrays and objects."""
    if body.count(b"[") + body.count(b"{") > limits.containers:
        raise ValueError(f"the body must have at most {limits.containers} arrays and objects")
    if body.count(b",") > limits.values:
        raise ValueError(f"the body must have at most {limits.values} values")
    try:
        value = json.loads(body, parse_constant=_constant)
    except RecursionError:
        raise ValueError("the body is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"the body must be JSON ({' '.join(str(error).split())[:100]})") from None
    if not isinstance(value, dict):
        raise ValueError(f"the body must be a JSON object, got {type(value).__name__}")
    return value


async def off_loop(http: Request, function: Callable[..., Any], *args: Any) -> Any:
    """The result of `function`, which takes long for a large body: in a thread then, while others are answered. So it
    does for images, of which a small file may have many pixels, and for what goes on from a response that is kept; an
    escape may hide their names."""
    body = await http.body()
    if len(body) > SMALL or any(name in body for name in (b"image", b"previous_response_id", b"\\u")):
        return await asyncio.to_thread(function, *args)
    return function(*args)


def _constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


async def failure(http: Request, error: Exception) -> Response:
    """The response to a request that raised an error: {"error": {"message", "code"}}; logs it in one line."""
    status, message = status_of(error)
    if status != GONE:
        log.warning("%s %.100r: %d: %.300s", http.method, http.url.path, status, message)
    return refused(status, message, getattr(error, "headers", None))


def refused(status: int, message: str, headers: Mapping[str, str] | None = None) -> Response:
    """A response with an error."""
    return Response(json.dumps(_content(status, message)), status, headers, "application/json")


def _content(status: int, message: str) -> dict[str, Any]:
    return {"error": {"message": message, "code": status}}


def status_of(error: Exception) -> tuple[int, str]:
    """(status, message) of the response to an error."""
    if isinstance(error, HTTPException):
        return error.status_code, error.detail
    if isinstance(error, ClientDisconnect):
        return GONE, ""
    if isinstance(error, ValueError):
        return 400, " ".join(str(error).split())
    if isinstance(error, RecursionError):
        return 400, "the body is nested too deeply"
    if isinstance(error, RuntimeError):
        return 500, " ".join(str(error).split())
    return 500, f"a bug of this server: {type(error).__name__}"


def protocol(limits: Limits) -> type[asyncio.Protocol]:
    """uvicorn's protocol, but it closes connections on which the head of a request is too large or too slow."""

    class Protocol(HttpToolsProtocol):
        arriving = "head"  # the part of a request that arrives; "" = none has begun
        size = 0  # bytes of its head
        late: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._hurry()

        def connection_lost(self, exc: Exception | None) -> None:
            self._wait()
            super().connection_lost(exc)

        def on_message_begin(self) -> None:
            super().on_message_begin()
            self.arriving, self.size = "head", 0

        def on_headers_complete(self) -> None:
            super().on_headers_complete()
            self.arriving = "body"
            self._wait()

        def on_message_complete(self) -> None:
            super().on_message_complete()
            self.arriving = ""
            self._wait()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            if self.arriving == "body":  # nobody reads the rest
                self._hurry()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.arriving == "head":
                self.size += len(data)
                self._hurry()
                if self.size > limits.header_bytes:
                    self._close(f"a request's head of more than {limits.header_bytes} bytes")

        def send_400_response(self, msg: str) -> None:
            body = json.dumps(_content(400, msg)).encode()
            head = f"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
            self.transport.write(f"{head}connection: close\r\n\r\n".encode() + body)
            self.transport.close()

        def _hurry(self) -> None:
            self.late = self.late or self.loop.call_later(limits.head_s, self._close, "a request that does not arrive")

        def _wait(self) -> None:
            if self.late:
                self.late.cancel()
                self.late = None

        def _close(self, why: str) -> None:
            log.warning("closed a connection: %s", why)
            self.transport.close()

    return Protocol
