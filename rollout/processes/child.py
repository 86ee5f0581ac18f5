"""Child processes that run a function of ours and answer in JSON, through which what runs there cannot execute code
here: the parent's handle (`Child`) and what the function needs (`opened`, `put`).

Both directions are frames: a length of 4 bytes, little-endian, and as many bytes; to the child pickled, back as JSON.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import pickle
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO

from ..errors import ServerError
from . import guard, orphan_guard

LARGEST = 2**26  # bytes of a frame
QUIET = "signal.signal(signal.SIGUSR1, signal.SIG_IGN)"  # which asks other processes of the job for stacks


class Garbled(ConnectionError):
    """A child's stream of answers holds something else, which its code, or a process it forked, has written."""


@dataclass(eq=False)
class Child:
    """A process that runs `function(handle, answers, *arguments)`, whose first two are for `opened`.

    Attributes:
      mark: of its environment, and so of all that it starts (`orphan_guard.kill_marked`).
    """

    process: subprocess.Popen
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    mark: str

    @classmethod
    async def start(cls, what: str, function: str, arguments: tuple[Any, ...], environ: Mapping[str, str]) -> Child:
        """Starts a fresh interpreter with our import path. Unlike a spawned `multiprocessing` child it does not run the
        main script again, which may import JAX; being in a new session, it gets no Ctrl-C and is killed together
        with its children. Its environment is `environ`, and a mark by which children in other sessions are found.

        Args:
          what: it is, for errors, such as "reward NAME".
          function: "module:name"; `arguments` are literals.

        Raises:
          ServerError: it cannot be started.
        """
        mark = secrets.token_hex(8)
        ours, theirs = socket.socketpair()
        # Answers use a pipe: a socket whose peer dies with unread frames also drops the answers in transit.
        answers, out = os.pipe()
        with theirs, open(out, "wb", buffering=0), contextlib.ExitStack() as kept:
            pipe = kept.enter_context(open(answers, "rb", buffering=0))
            _, writer = await asyncio.open_connection(sock=ours)
            kept.callback(writer.close)
            reader = asyncio.StreamReader()
            protocol = functools.partial(asyncio.StreamReaderProtocol, reader)
            await asyncio.get_running_loop().connect_read_pipe(protocol, pipe)
            kept.pop_all()  # from here on the two transports close them
            module, _, name = function.partition(":")
            given = ", ".join(map(repr, (theirs.fileno(), out, *arguments)))
            found = f"sys.path[:] = {sys.path!r}; from {module} import {name}; {name}({given})"
            program = f"import signal, sys; {QUIET}; {found}"
            try:
                process = subprocess.Popen(
                    [sys.executable, "-c", program],
                    stdin=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno(), out],
                    env={**environ, orphan_guard.MARK: mark},
                    start_new_session=True,
                )
            except OSError as error:
                writer.close()
                raise ServerError(f"{what}: cannot start a worker process ({error})") from error
        guard.process(process.pid, mark=mark)
        return cls(process, reader, writer, mark)

    def send(self, content: Any) -> None:
        frame = pickle.dumps(content, pickle.HIGHEST_PROTOCOL)
        self.writer.write(len(frame).to_bytes(4, "little") + frame)

    async def receive(self) -> dict[str, Any]:
        """The next frame; raises Garbled if it is none, IncompleteReadError or ConnectionError at the stream's end."""
        size = int.from_bytes(await self.reader.readexactly(4), "little")
        if size > LARGEST:
            raise Garbled(f"a frame of {size} bytes")
        data = await self.reader.readexactly(size)
        try:
            frame = json.loads(data)
        except (ValueError, RecursionError):
            frame = None
        if not isinstance(frame, dict):
            raise Garbled(f"{data[:40]!r}")
        return frame

    def kill(self) -> None:
        """Kills it and all that it has started, in other sessions, too; one of these may hold its stream of answers
        open. It looks through all processes of the machine: call it in a thread."""
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
        orphan_guard.kill_marked(self.mark)

    async def end(self) -> None:
        """Kills it and all that it has started, and waits: a large process takes a while to exit."""
        self.writer.close()
        try:
            await asyncio.to_thread(self._end)
        except asyncio.CancelledError:  # perhaps before a thread started to wait
            self._end()
            raise
        finally:
            guard.process_ended(self.process.pid)
        with contextlib.suppress(ConnectionError):
            await self.writer.wait_closed()

    def _end(self) -> None:
        self.kill()
        self.process.wait()


@contextlib.contextmanager
def opened(handle: int, answers: int) -> Iterator[tuple[socket.socket, BinaryIO]]:
    """In the child: the connection from which frames are read, and the stream for `put`."""
    signal.signal(signal.SIGINT, lambda *_: None)  # Ctrl-C reaches all processes; the one that it is for ends this one
    for number in (handle, answers):  # programs that this one starts must not hold the streams open
        os.set_inheritable(number, False)
    _owner.append(os.getpid())
    with socket.socket(fileno=handle) as connection, open(answers, "wb", buffering=0) as out:
        yield connection, out


_owner: list[int] = []  # the child's process id


def put(out: BinaryIO, content: Mapping[str, Any]) -> None:
    """In the child: sends a frame."""
    if os.getpid() not in _owner:  # its code forked, and the fork has returned from it
        os._exit(0)
    data = json.dumps(content).encode()
    left = memoryview(len(data).to_bytes(4, "little") + data)
    while left:
        left = left[out.write(left) :]
