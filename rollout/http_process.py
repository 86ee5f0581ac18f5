"""Small servers as processes of their own: where they listen, and how they say that they are ready and end."""

from __future__ import annotations

import asyncio
import ipaddress
import signal
import socket
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from starlette.types import ASGIApp


def listening(host: str, port: int, *, key: str | None, variable: str, what: str) -> socket.socket:
    """A socket at host:port (0 = any port that is free).

    Args:
      key: what callers need; without one only this machine may reach the address.
      variable: the environment variable that holds the key; `what`: the server's name. Both for complaints.

    Raises:
      ValueError: the address cannot be had, can be reached from elsewhere without a key, or the key is empty.
    """
    if key == "":
        raise ValueError(f"{what}: the key must not be empty; set {variable}, or unset it on this machine alone")
    if key is None and not loopback(host):
        raise ValueError(f"{what}: {host} can be reached from other machines; set {variable}")
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except (OSError, OverflowError) as error:
        raise ValueError(f"{what}: cannot serve at {host}:{port} ({error})") from error


def address(place: tuple) -> str:
    """The URL of a place where a socket listens, as `getsockname` gives it."""
    host, port = place[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def serve(app: ASGIApp, sock: socket.socket, ready: str) -> None:
    """Serves until SIGTERM or SIGINT; prints the line `ready` once requests are answered."""
    import uvicorn

    for number in (signal.SIGINT, signal.SIGTERM):  # uvicorn raises once more what ended it: no error
        signal.signal(number, lambda *_: None)
    config = uvicorn.Config(
        app, log_level="warning", access_log=False, proxy_headers=False, server_header=False,
        timeout_graceful_shutdown=1,
    )  # fmt: skip
    server = uvicorn.Server(config)

    async def run() -> None:
        running = asyncio.create_task(server.serve(sockets=[sock]))
        while not (server.started or running.done()):
            await asyncio.sleep(0.01)
        if server.started:
            print(ready, flush=True)
        await running

    asyncio.run(run())


def loopback(host: str) -> bool:
    """Whether only this machine reaches the address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
