"""Failure detection: each process holds a TCP connection to process 0, which the OS closes however the process ends.

JAX's coordination service notices a dead process only after missed heartbeats and then aborts the others; collectives
over TCP fail earlier, without naming the culprit; those on GPUs hang forever. A connection that closes without a
goodbye identifies the failed process immediately.
"""

import os
import secrets
import signal
import socket
import sys
import threading
import time
import traceback
from typing import Any, NoReturn, TextIO

from jax._src.distributed import global_state  # its key-value store has no public API

from ...core import origin

LOST = 3  # exit code of a process that ends because another process failed
GRACE_S = 25.0  # for process 0 to clean up: servers, folders
START_S = 300  # for all processes to start
LATE_S = 2  # a collective may fail this long before its peer's failure is detected
GREETING_S = 5  # for a connected process to identify itself
LINE = 1 << 12  # characters of a greeting: an unknown client may send no end of them
BYE = "bye"
KEY = "areax/watch"

lost = threading.Event()  # a process of this job has ended: collectives are no longer possible


class FailedElsewhere(ValueError):
    """Another process failed, and says why when it leaves: this one must not be the first to be reported."""


class Watch:
    """This process's connections: process 0 accepts those of all others."""

    def __init__(self, index: int, count: int):
        self.index, self.count = index, count
        self.name = f"process {index} of {count} (pid {os.getpid()} on {socket.gethostname()})"
        self._leaving = False
        self._first_left = threading.Event()
        self._all_here = threading.Event()  # set in process 0
        self._connections: dict[int, socket.socket] = {}
        self._once = threading.Lock()
        store: Any = global_state.client
        if index == 0:
            token, server = secrets.token_hex(8), listen()
            store.key_value_set(KEY, f"{server.getsockname()[1]} {token} {self.name}")
            threading.Thread(target=self._accept, args=(server, token), daemon=True).start()
        else:
            port, token, first = store.blocking_key_value_get(KEY, START_S * 1000).split(" ", 2)
            host = str(global_state.coordinator_address).rpartition(":")[0].strip("[]")
            try:
                to_first = socket.create_connection((host, int(port)), timeout=START_S)
            except OSError as error:
                print(f"{self.name}: cannot reach process 0 at {host}:{port}: {error}", file=sys.stderr, flush=True)
                os._exit(1)  # a normal exit would wait for the others; process 0 notices the missing heartbeats
            to_first.settimeout(None)
            to_first.sendall(f"{token} {index} {self.name}\n".encode())
            self._connections[0] = to_first
            threading.Thread(target=self._read, args=(_lines(to_first), first), daemon=True).start()

    def leave(self, error: BaseException) -> NoReturn:
        """Reports an error and exits; exits with LOST, silently, if the error is due to another process's end."""
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # must not interrupt this function
        sys.stdout.flush()
        if not isinstance(error, SystemExit):
            lost.wait(GRACE_S if isinstance(error, FailedElsewhere) else LATE_S)
        if not self._once.acquire(blocking=False):  # another process failed first
            lost.wait()
            os._exit(LOST)
        words = origin.words(error)
        if isinstance(error, KeyboardInterrupt):
            code = 130
        elif isinstance(error, SystemExit):
            code = error.code if isinstance(error.code, int) else 1
            if isinstance(error.code, str):
                print(words, file=sys.stderr)
        elif isinstance(error, ValueError | OSError):
            code = 2
            print(words, file=sys.stderr)
        elif isinstance(error, RuntimeError) and origin.raised_here(error):
            code = 1
            print(words, file=sys.stderr)
        else:
            code = 1
            traceback.print_exception(error)
        self._broadcast(f"{type(error).__name__}: {words}")
        sys.stderr.flush()
        os._exit(code)

    def goodbye(self) -> None:
        """Announces that this process is done. Others wait for process 0, which may still be writing files."""
        if self.index == 0:
            self._all_here.wait(START_S)
            self._leaving = True
        self._broadcast(BYE)
        if self.index:
            self._first_left.wait()

    def _broadcast(self, line: str) -> None:
        for connection in list(self._connections.values()):
            try:
                connection.sendall(f"{line}\n".encode())
            except OSError:
                continue  # it has ended too; its reader thread handles that

    def _accept(self, server: socket.socket, token: str) -> None:
        with server:
            while len(self._connections) < self.count - 1:
                connection, _ = server.accept()
                connection.settimeout(GREETING_S)  # an unknown client may send nothing
                lines = _lines(connection)
                try:
                    greeting = lines.readline(LINE)
                except OSError:
                    greeting = ""
                word, index, name = (*greeting.strip().split(" ", 2), "", "", "")[:3]
                if word != token:  # not a process of this job
                    connection.close()
                    continue
                connection.settimeout(None)
                self._connections[int(index)] = connection
                threading.Thread(target=self._read, args=(lines, name), daemon=True).start()
            self._all_here.set()

    def _read(self, lines: TextIO, name: str) -> None:
        try:
            line = lines.readline().strip()
        except OSError:  # connection reset: also ended
            line = ""
        if line == BYE:
            self._first_left.set()
        elif not self._leaving:
            self._end(line if line.startswith("process ") else f"{name} ended: {line or 'it was killed, or its host'}")

    def _end(self, line: str) -> None:
        if not self._once.acquire(blocking=False):
            return
        sys.stderr.write(f"{line}; ending {self.name}\n")  # in one piece: what JAX logs meanwhile is on other lines
        sys.stderr.flush()
        lost.set()
        if self.index:
            os._exit(LOST)
        self._broadcast(line)
        os.kill(os.getpid(), signal.SIGINT)  # makes the main thread clean up and exit
        time.sleep(GRACE_S)
        os._exit(LOST)


def _lines(connection: socket.socket) -> TextIO:
    return connection.makefile(encoding="utf-8", errors="replace")


def listen() -> socket.socket:
    """A server on any free port of this host."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))
