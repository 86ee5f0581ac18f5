"""Runs HTTP servers: binding their socket, starting uvicorn, and shutting down on signals."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import signal
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from . import keys

if TYPE_CHECKING:
    import uvicorn
    from starlette.types import ASGIApp

    from .http_limits import Limits

STALLED_S = 120.0  # a connection is closed whose client takes no data for this long


def bind(host: str, port: int, what: str = "serve") -> socket.socket:
    """Binds a socket to host:port (0 = any free port), to reserve the address; it does not listen yet.

    Args:
      what: the server's name in errors.

    Raises:
      ValueError: the address is in use, or does not belong to this machine.
    """
    if not 0 <= port < 2**16:
        raise ValueError(f"{what}: port must be from 0 (any free port) to 65535, got {port}")
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except OSError as error:
        raise ValueError(f"{what}: {host}:{port} is not an address of this machine ({error})") from error
    # asyncio sets TCP_NODELAY only if the protocol is given; without it each answer waits 40 ms for the one before.
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux; connections inherit it
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * STALLED_S))
    try:
        sock.bind(address)
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            raise ValueError(
                f"{what}: port {port} of {host} is in use; choose another, or 0 for any free port"
            ) from error
        raise ValueError(f"{what}: cannot use {host}:{port} ({error.strerror})") from error
    return sock


def bind_guarded(host: str, port: int, *, key: str | None, variable: str, what: str) -> socket.socket:
    """Like `bind`, but requires a key unless the address is reachable only from this machine.

    Args:
      key: the key that callers need; None = none, for loopback addresses only.
      variable: the environment variable that holds the key, for errors.

    Raises:
      ValueError: as `bind`; the address is reachable from other machines without a key; the key is not valid.
    """
    if key is not None:
        keys.check(key, what)
    elif not loopback(host):
        raise ValueError(
            f"{what}: {host} can be reached from other machines; set {variable} to a key, or {variable}_FILE to a file "
            "with one"
        )
    return bind(host, port, what)


def loopback(host: str) -> bool:
    """Whether the address is reachable only from this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def towards(url: str) -> str:
    """This machine's address on the route to the machine of `url`."""
    parts = urlsplit(url)
    try:
        [(family, _, _, _, place), *_] = socket.getaddrinfo(parts.hostname, parts.port or 80, type=socket.SOCK_DGRAM)
        with socket.socket(family, socket.SOCK_DGRAM) as sock:
            sock.connect(place)  # sends nothing
            return sock.getsockname()[0]
    except OSError as error:
        raise ValueError(f"{url} cannot be reached from here ({error})") from error


def address(place: tuple) -> str:
    """The URL of an address as returned by `getsockname`."""
    host, port = place[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def server(app: ASGIApp, limits: Limits | None = None, **options: Any) -> uvicorn.Server:
    """Makes a uvicorn server that leaves signals to the program; `options` are passed to `uvicorn.Config`.

    Args:
      limits: of connections, as `limits.app` has them for requests; None = the defaults.
    """
    import uvicorn

    from . import http_limits

    limits = limits or http_limits.Limits()

    class Server(uvicorn.Server):
        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield

    quiet: dict[str, Any] = dict(log_level="warning", access_log=False, proxy_headers=False, server_header=False)
    bounds: dict[str, Any] = {
        "http": http_limits.protocol(limits),
        "ws": "none",
        "limit_concurrency": limits.connections,
        "timeout_keep_alive": limits.idle_s,
    }
    return Server(uvicorn.Config(app, **(quiet | bounds | options)))


@contextlib.asynccontextmanager
async def running(server: uvicorn.Server, sock: socket.socket) -> AsyncIterator[asyncio.Task]:
    """Runs a `server` on `sock` during the block, which is entered once requests are answered; yields its task.

    Raises RuntimeError if it did not start.
    """
    task = asyncio.create_task(server.serve(sockets=[sock]))
    try:
        while not (server.started or task.done()):
            await asyncio.sleep(0.005)
        if not server.started:
            await task
            raise RuntimeError(f"serve: the server at {address(sock.getsockname())} did not start")
        yield task
    finally:
        server.should_exit = True
        await task


def serve(
    app: ASGIApp,
    sock: socket.socket,
    ready: str,
    *,
    limits: Limits | None = None,
    ending: Callable[[], None] = lambda: None,
    **options: Any,
) -> None:
    """Serves until SIGTERM or SIGINT; prints the line `ready` once requests are answered.

    Args:
      ending: called on shutdown, before it waits for responses in progress.
      limits, options: as for `server`.
    """
    made = server(app, limits, **({"loop": "asyncio", "timeout_graceful_shutdown": 1} | options))
    ends = (signal.SIGINT, signal.SIGTERM)

    async def run() -> None:
        loop, stop = asyncio.get_running_loop(), asyncio.Event()
        for number in ends:
            signal.signal(number, lambda *_: loop.call_soon_threadsafe(stop.set))
        async with running(made, sock) as task:
            print(ready, flush=True)
            stopped = asyncio.create_task(stop.wait())
            await asyncio.wait({task, stopped}, return_when=asyncio.FIRST_COMPLETED)
            ending()
        for number in ends:  # shutting down already
            signal.signal(number, lambda *_: None)

    with asyncio.Runner(loop_factory=made.config.get_loop_factory()) as runner:
        runner.run(run())
