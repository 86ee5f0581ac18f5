"""HTTP servers of ours: the socket that they listen on, how they run, and how those that are processes end."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import signal
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import uvicorn
    from starlette.types import ASGIApp


def bind(host: str, port: int, what: str = "serve") -> socket.socket:
    """A socket that holds host:port (0 = any port that is free), so that nobody else gets it; it does not listen yet.

    Args:
      what: the server's name, for complaints.

    Raises:
      ValueError: the address is taken, or is none of this machine.
    """
    if not 0 <= port < 2**16:
        raise ValueError(f"{what}: port must be from 0 (any that is free) to 65535, got {port}")
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except OSError as error:
        raise ValueError(f"{what}: {host}:{port} is not an address of this machine ({error})") from error
    # By its protocol asyncio knows that answers are to be sent at once: each would otherwise wait 40 ms for the last.
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind(address)
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            raise ValueError(
                f"{what}: port {port} of {host} is in use; choose another, or 0 for any that is free"
            ) from error
        raise ValueError(f"{what}: cannot use {host}:{port} ({error.strerror})") from error
    return sock


def bind_guarded(host: str, port: int, *, key: str | None, variable: str, what: str) -> socket.socket:
    """As `bind`, for a server whose callers need a key unless only this machine may reach it.

    Args:
      key: what callers need; without one only this machine may reach the address.
      variable: the environment variable that holds the key, for complaints.

    Raises:
      ValueError: as `bind`; the address can be reached from elsewhere without a key, or the key is empty.
    """
    if key == "":
        raise ValueError(f"{what}: the key must not be empty; set {variable}, or unset it on this machine alone")
    if key is None and not loopback(host):
        raise ValueError(f"{what}: {host} can be reached from other machines; set {variable}")
    return bind(host, port, what)


def loopback(host: str) -> bool:
    """Whether only this machine reaches the address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def address(place: tuple) -> str:
    """The URL of a host and a port, such as `getsockname` gives."""
    host, port = place[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def server(app: ASGIApp, **options: Any) -> uvicorn.Server:
    """A uvicorn server that leaves signals to the program; `options` are further ones of `uvicorn.Config`."""
    import uvicorn

    class Server(uvicorn.Server):
        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield

    quiet: dict[str, Any] = dict(log_level="warning", access_log=False, proxy_headers=False, server_header=False)
    return Server(uvicorn.Config(app, **(quiet | options)))


@contextlib.asynccontextmanager
async def running(server: uvicorn.Server, sock: socket.socket) -> AsyncIterator[asyncio.Task]:
    """Runs a `server` on `sock` while the block runs, which begins once requests are answered; yields its task.

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
    app: ASGIApp, sock: socket.socket, ready: str, *, ending: Callable[[], None] = lambda: None, **options: Any
) -> None:
    """Serves until SIGTERM or SIGINT; prints the line `ready` once requests are answered.

    Args:
      ending: called when it is told to end, before it waits for answers under way.
      options: as `server`.
    """
    made = server(app, **({"loop": "asyncio", "timeout_graceful_shutdown": 1} | options))
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
        for number in ends:  # what follows is the way out already
            signal.signal(number, lambda *_: None)

    with asyncio.Runner(loop_factory=made.config.get_loop_factory()) as runner:
        runner.run(run())
