"""A channel of bytes from process 0 to all others, over TCP.

Unlike a broadcast by the devices it does not wait for their queues, takes a tenth of a millisecond, and may stay idle
for days.
"""

import contextlib
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax._src.distributed import global_state  # its key-value store has no public API

from .meeting import GREETING_S, START_S, listen

KEY = "areax/channel"
Share = Callable[[bytes], bytes]


@contextlib.contextmanager
def opened() -> Iterator[Share]:
    """Yields share(data), which returns process 0's data in all processes; what others pass is ignored.

    All processes of a job must open it, once; a single process gets its data back.

    Raises:
      OSError: from `share`, if a process has ended; at the start, if one is not there in `liveness.START_S` seconds.
    """
    if jax.process_count() == 1:
        yield lambda data: data
        return
    if jax.process_index() == 0:
        connections = _accepted(jax.process_count() - 1)

        def share(data: bytes) -> bytes:
            for other in connections:
                other.sendall(len(data).to_bytes(8, "little") + data)
            return data

    else:
        connections = [first := _connected()]

        def share(data: bytes) -> bytes:
            return _read(first, int.from_bytes(_read(first, 8), "little"))

    yield share
    for connection in connections:  # not after an error: others would report the closed connection, not the error
        connection.close()


def _accepted(count: int) -> list[socket.socket]:
    """In process 0: the connections of all others."""
    found: list[socket.socket] = []
    token = secrets.token_hex(8)
    store: Any = global_state.client
    deadline = time.monotonic() + START_S
    with listen() as server:
        store.key_value_set(KEY, f"{server.getsockname()[1]} {token}")
        while len(found) < count:
            server.settimeout(max(deadline - time.monotonic(), 1e-3))
            other, _ = server.accept()
            other.settimeout(GREETING_S)  # an unknown client may send nothing
            try:
                known = _read(other, len(token)) == token.encode()
            except OSError:
                known = False
            if known:
                found.append(_ready(other))
            else:
                other.close()
    return found


def _connected() -> socket.socket:
    """In the others: the connection to process 0."""
    store: Any = global_state.client
    port, token = store.blocking_key_value_get(KEY, START_S * 1000).split()
    host = str(global_state.coordinator_address).rpartition(":")[0].strip("[]")
    first = socket.create_connection((host, int(port)), timeout=START_S)
    first.sendall(token.encode())
    return _ready(first)


def _ready(connection: socket.socket) -> socket.socket:
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def _read(connection: socket.socket, count: int) -> bytes:
    data = bytearray(count)
    view = memoryview(data)
    while view:
        if not (size := connection.recv_into(view)):
            raise ConnectionError("the connection to another process of the job was closed")
        view = view[size:]
    return bytes(data)
