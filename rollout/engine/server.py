"""The embedded engine as a server that speaks SGLang's HTTP contract: `serve(path)`."""

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

from ...adapters import hf
from ...adapters import tokenizer as tokenizers
from ..servers.labels import read_label
from .adapters_api import Adapters
from .engine import Engine
from .openai_api import OpenAI
from .sglang_api import Service, read_weights

log = logging.getLogger(__name__)

GRACE_S = 5  # for answers under way when the server is told to end
UNGUARDED = ("/health", "/health_generate", "/ready")  # answered without the key


def serve(
    path: str,
    *,
    host: str = "127.0.0.1",
    port: int = 30000,
    slots: int = 16,
    context: int = 2048,
    dtype: str = "float32",
    version: str | None = None,
    seed: int = 0,
    api_key: str | None = None,
) -> None:
    """Serves the checkpoint folder `path` until SIGTERM or SIGINT; once ready prints one line that begins with the URL.

    Args:
      port: 0 = any that is free.
      slots: sequences generated at the same time; further requests wait.
      context: longest sequence, prompt and generated tokens; the model's own limit if that is lower.
      version: label of the weights until the first update; None = of a published version its own, else "default".
      seed: of requests that bring none.
      api_key: requests must carry it, as `Authorization: Bearer KEY`.

    Raises:
      ValueError: the address cannot be had, or the folder cannot be loaded; nothing is served then.
    """
    with contextlib.closing(bind(host, port)) as sock:
        weights, label = read_weights(path, dtype), version or published_label(path)
        service = prepare(path, *weights, slots=slots, context=context, dtype=dtype, version=label, seed=seed)
        del weights  # the engine has its own
        engine = service.engine
        shown = f"[{host}]" if ":" in host else host
        url = f"http://{shown}:{sock.getsockname()[1]}"
        ready = f"{url} serves {engine.config.family} {path}, {slots} slots of {engine.context} tokens"
        if service.tokenizer is None:
            ready += ", token ids only (the folder has no tokenizer)"
        if api_key is None and not _local(host):
            ready += "; WARNING: whoever reaches this address can use it and replace its weights; give an api_key"
        engine.start()
        try:
            run(app(service, api_key), sock, lambda: print(ready, flush=True), engine.abort_all)
        finally:
            engine.close()


def published_label(path: str) -> str:
    """The label of the published version in the folder `path`; "default" if it is another checkpoint."""
    manifest = Path(path) / hf.MANIFEST
    if not manifest.is_file() or hf.read_json(manifest).get("version") is None:
        return "default"
    return read_label(manifest)


def prepare(
    path: str, config, params, checksums: dict[str, str], *, slots: int, context: int, dtype: str, version: str,
    seed: int = 0,
) -> Service:  # fmt: skip
    """The engine of these weights, which it copies, and its routes; with the tokenizer in the folder `path`, if any."""
    tokenizer, decode = None, None
    if any((Path(path) / name).is_file() for name in tokenizers.FILES):
        tokenizer = tokenizers.load(path)
        decode = functools.partial(tokenizer.decode, skip_special_tokens=True)
    context = min(context, config.context)
    engine = Engine(config, params, slots=slots, context=context, version=version, decode=decode, seed=seed)
    return Service(engine, tokenizer, str(path), checksums, dtype)


def bind(host: str, port: int) -> socket.socket:
    """A socket that holds the address, so that nobody else gets it while weights are read; it does not listen yet.

    Raises:
      ValueError: the address is taken, or is none of this machine.
    """
    if not 0 <= port < 2**16:
        raise ValueError(f"serve: port must be from 0 (any that is free) to 65535, got {port}")
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except OSError as error:
        raise ValueError(f"serve: {host}:{port} is not an address of this machine ({error})") from error
    # By its protocol asyncio knows that answers are to be sent at once: each would otherwise wait 40 ms for the last.
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind(address)
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            raise ValueError(
                f"serve: port {port} of {host} is in use; choose another, or 0 for any that is free"
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
    """A request that cannot be honoured, in the shape that SGLang gives to errors of the route."""
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
    """Serves on `sock` until a signal ends it; `started` is called once it answers, `ended` when it is told to stop."""
    # uvicorn raises the signal that ended it once more: handlers of ours make that an ordinary return.
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
