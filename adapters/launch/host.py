"""Processes on one machine: started, looked at, told to end, and ended when what started them is gone.

A `Host` is used as it is for this machine, and as an actor for others (launch_ray.py).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Mapping
from pathlib import Path

from .orphan_guard import reached

PYTHON = ""  # a program's name
LINES = 20  # of a log, where it is told how a process ended
ANSWER_S = 5.0


class Gone(RuntimeError):
    """The machine is, or what speaks for it there."""


class Host:
    """This machine.

    Everything it started ends with this object's process, even if that is killed: launch_guard.py sees to it.
    """

    def __init__(self) -> None:
        self._running: dict[str, subprocess.Popen] = {}
        self._logs: dict[str, Path] = {}
        self._read: dict[str, int] = {}
        self._folders: list[str] = []
        script = Path(__file__).with_name("orphan_guard.py")
        self._guard = subprocess.Popen(
            [sys.executable, "-I", str(script)], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True,
            bufsize=1, start_new_session=True,
        )  # fmt: skip
        self._guard.wait()  # it has forked

    def enter(self, folder: str) -> None:
        """Makes a folder the one on which relative paths depend."""
        try:
            os.chdir(folder)
        except OSError as error:
            raise ValueError(
                f"areax launch: the folder must be on all machines, got {folder}, which {socket.gethostname()} cannot "
                f"enter ({error.strerror}); start from a shared one"
            ) from error

    def ports(self, address: str, count: int) -> list[int]:
        """Ports of an address of this machine that are free now."""
        with contextlib.ExitStack() as stack:
            probes = [stack.enter_context(socket.create_server((address, 0))) for _ in range(count)]
            return [probe.getsockname()[1] for probe in probes]

    def scratch(self, model: str) -> str:
        """A new folder for versions of a model, in memory if three fit there; removed at the end."""
        path, memory = Path(model), Path("/dev/shm")
        size = sum(file.stat().st_size for file in path.glob("*.safetensors"))
        roomy = os.access(memory, os.W_OK | os.X_OK) and shutil.disk_usage(memory).free >= 3 * size
        self._folders.append(tempfile.mkdtemp(prefix="areax-stager-", dir=memory if roomy else None))
        self._tell(self._folders[-1])
        return self._folders[-1]

    def start(self, name: str, words: list[str], environ: Mapping[str, str | None], log: str) -> int:
        """Starts a process and returns its id; one of that name that has ended is forgotten.

        Args:
          words: the command; PYTHON at its beginning is the one that runs here.
          environ: changes of the environment; None takes a variable out.
          log: the file that it writes to, after what is there; "" = where this process does.
        """
        words = [sys.executable, *words[1:]] if words[0] == PYTHON else words
        # Unbuffered so that the last lines are there, however it ends; a session of its own: Ctrl-C comes from the
        # launcher, once.
        changed = {**os.environ, "PYTHONUNBUFFERED": "1", **environ}
        given = {key: value for key, value in changed.items() if value is not None}
        with contextlib.ExitStack() as stack:
            file = None
            if log:
                self._logs[name] = Path(log).absolute()
                self._logs[name].parent.mkdir(parents=True, exist_ok=True)
                file = stack.enter_context(open(log, "ab" if name in self._read else "wb"))
                self._read.setdefault(name, 0)
            process = subprocess.Popen(words, env=given, start_new_session=True, stdout=file, stderr=file)
        self._running[name] = process
        self._tell(f"+{process.pid}")
        return process.pid

    def poll(self, name: str) -> int | None:
        """How a process ended: its exit code, -n for signal n; None while it runs."""
        process = self._running[name]
        ran = process.returncode is None
        if process.poll() is not None and ran:
            self._tell(f"-{process.pid}")
        return process.returncode

    def signal(self, name: str, number: int) -> None:
        """Sends a signal to a process, if it runs."""
        if self.poll(name) is None:
            self._running[name].send_signal(number)

    def kill(self, name: str) -> None:
        """Ends a process and all that it has started in its group."""
        process = self._running[name]
        reached(process.pid, signal.SIGKILL)
        process.wait()
        self.poll(name)

    def read(self, name: str) -> str:
        """What a process has written to its log since the last call."""
        with open(self._logs[name], "rb") as file:
            file.seek(self._read[name])
            new = file.read()
        self._read[name] += len(new)
        return new.decode(errors="replace")

    def last(self, name: str) -> tuple[str, list[str]]:
        """The log of a process, and its last lines."""
        path = self._logs[name]
        with open(path, encoding="utf-8", errors="replace") as file:
            return str(path), [line.rstrip() for line in deque(file, maxlen=LINES)]

    def answers(self, url: str) -> bool:
        """Whether a GET is answered with 200."""
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with direct.open(url, timeout=ANSWER_S) as reply:
                return reply.status == 200
        except (urllib.error.URLError, OSError):
            return False

    def close(self) -> None:
        """Ends what still runs, at once, and removes the folders."""
        for name in self._running:
            if self.poll(name) is None:
                self.kill(name)
        for folder in self._folders:
            shutil.rmtree(folder, ignore_errors=True)
        if self._guard.stdin:
            self._guard.stdin.close()

    def _tell(self, line: str) -> None:
        assert self._guard.stdin is not None
        self._guard.stdin.write(f"{line}\n")
