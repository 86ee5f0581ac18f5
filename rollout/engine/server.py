"""Serves the embedded engine with SGLang's HTTP API: `serve(path)`."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import hmac
import logging
import signal
import socket
from collections.abc import Callable
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HTTPRequest
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from ...adapters import tokenizer as tokenizers
from .adapters_api import Adapters
from .engine import Engine
from .openai_api import OpenAI
from .sglang_api import Service, read_weights

log = logging.getLogger(__name__)

GRACE_S = 5  # for responses in progress at shutdown
UNGUARDED = ("/health", "/health_generate", "/ready")  # answered without the key


def serve(
    path: str,
    *,
    host: str = "127.0.0.1",
    port: int = 30000,
    slots: int = 16,
    context: int = 2048,
    dtype: str = "float32",
    version: str = "default",
    seed: int = 0,
    api_key: str | None = None,
) -> None:
    """Serves the checkpoint folder `path` until SIGTERM or SIGINT; prints a line that begins with the URL when ready.

    Args:
      port: 0 = any free port.
      slots: sequences generated at the same time; further requests wait.
      context: longest sequence, prompt and generated tokens; the model's limit if that is lower.
      version: label of the weights until the first update.
      seed: from which requests without a seed get theirs.
      api_key: key that requests must send as `Authorization: Bearer KEY`.

    Raises:
      ValueError: the address is not available, or the folder cannot be loaded; nothing is served then.
    """
    with contextlib.closing(bind(host, port)) as sock:
        service = prepare(
            path, *read_weights(path, dtype), slots=slots, context=context, dtype=dtype, version=version, seed=seed
        )
        engine = service.engine
        shown = f"[{host}]" if ":" in host else host
        url = f"http://{shown}:{sock.getsockname()[1]}"
        ready = f"{url} serves {engine.config.family} {path}, {slots} slots of {engine.context} tokens"
        if service.tokenizer is None:
            ready += ", token ids only (the folder has no tokenizer)"
        if api_key is None and not _local(host):
            ready += "; WARNING: anyone who reaches this address can use it and replace its weights; set an api_key"
        engine.start()
        try:
            run(app(service, api_key), sock, lambda: print(ready, flush=True), engine.abort_all)
        finally:
            engine.close()


def prepare(
    path: str, config, params, checksums: dict[str, str], *, slots: int, context: int, dtype: str, version: str,
    seed: int = 0,
) -> Service:  # fmt: skip
    """Makes an engine with a copy of these weights, and its service; with a tokenizer if the folder `path` has one."""
    tokenizer, decode = None, None
    if any((Path(path) / name).is_file() for name in tokenizers.FILES):
        tokenizer = tokenizers.load(path)
        decode = functools.partial(tokenizer.decode, skip_special_tokens=True)
    context = min(context, config.context)
    engine = Engine(config, params, slots=slots, context=context, version=version, decode=decode, seed=seed)
    return Service(engine, tokenizer, str(path), checksums, dtype)


def bind(host: str, port: int) -> socket.socket:
    """Binds a socket, to reserve the address while weights are read; it does not listen yet.

    Raises:
      ValueError: the address is in use, or does not belong to this machine.
    """
    if not 0 <= port < 2**16:
        raise ValueError(f"serve: port must be from 0 (any free port) to 65535, got {port}")
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except OSError as error:
        raise ValueError(f"serve: {host}:{port} is not an address of this machine ({error})") from error
    # asyncio sets TCP_NODELAY only if the protocol is given; without it each answer waits 40 ms for the one before.
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind(address)
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            raise ValueError(
                f"serve: port {port} of {host} is in use; choose another, or 0 for any free port"
            ) from error
        raise ValueError(f"serve: cannot use {host}:{port} ({error.strerror})") from error
    return sock


def app(service: Service, api_key: str | None = None) -> ASGIApp:
    """All routes, as an ASGI application."""

    @contextlib.asynccontextmanager
    async def lifespan(_):
        service.open()
        yield

    routes = [*service.routes(), *Adapters(service).routes(), *OpenAI(service).routes()]
    handlers = {ValueError: _refused, ClientDisconnect: _gone}
    inner = Starlette(routes=routes, lifespan=lifespan, exception_handlers=handlers)
    return inner if api_key is None else _guarded(inner, api_key)


async def _refused(http: HTTPRequest, error: Exception) -> Response:
    """The response to an invalid request, in SGLang's format for errors of the route."""
    if http.url.path == "/generate":
        return JSONResponse({"error": {"message": str(error)}}, 400)
    body = {"object": "error", "message": str(error), "type": "BadRequestError", "param": None, "code": 400}
    return JSONResponse(body, 400)


async def _gone(http: HTTPRequest, error: Exception) -> Response:
    return Response(status_code=499)  # nobody reads it


def _guarded(inner: ASGIApp, api_key: str) -> ASGIApp:
    expected = f"Bearer {api_key}".encode()

    async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in UNGUARDED:
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(given, expected):
                await JSONResponse({"error": "Unauthorized"}, 401)(scope, receive, send)
                return
        await inner(scope, receive, send)

    return guarded


def listener(application: ASGIApp) -> uvicorn.Server:
    return uvicorn.Server(
        uvicorn.Config(
            application,
            log_level="warning",
            access_log=False,
            proxy_headers=False,
            server_header=False,
            lifespan="on",
            timeout_graceful_shutdown=GRACE_S,
        )
    )


def run(application: ASGIApp, sock: socket.socket, started: Callable[[], None], ended: Callable[[], None]) -> None:
    """Serves on `sock` until a signal; calls `started` once it answers, and `ended` when it is asked to stop."""
    # uvicorn re-raises the signal that ended it: these handlers turn that into a normal return.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    server = listener(application)

    async def watched() -> None:
        running = asyncio.create_task(server.serve(sockets=[sock]))
        while not (server.started or running.done()):
            await asyncio.sleep(0.01)
        if server.started:
            started()
        while not (server.should_exit or running.done()):
            await asyncio.sleep(0.1)
        ended()
        await running

    with asyncio.Runner(loop_factory=server.config.get_loop_factory()) as runner:
        runner.run(watched())


def _local(host: str) -> bool:
    return host in ("localhost", "::1") or host.startswith("127.")
