"""Starts, polls, signals and kills processes on one machine, also if the launcher dies.

A `Host` is used directly for this machine, and as a Ray actor for others (ray.py).
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

from ...rollout.processes import folders, guard
from ...rollout.processes.orphan_guard import signal_group

PYTHON = "\0python"  # stands for the Python interpreter in a command, whose own words cannot contain a zero byte
LINES = 20  # last lines of a log shown when a process has ended
ANSWER_S = 5.0
GRACE_S = 30.0  # for a trainer to end its servers and remove its folders


class Gone(RuntimeError):
    """The machine, or the actor on it, is gone."""


class Host:
    """Processes on this machine.

    All of them end when this object's process ends, even if it is killed (`processes.guard`).
    """

    def __init__(self) -> None:
        self._running: dict[str, subprocess.Popen] = {}
        self._logs: dict[str, Path] = {}
        self._began: dict[str, int] = {}  # sizes of logs when processes first started: another run may have written
        self._read: dict[str, int] = {}
        self._folders = contextlib.ExitStack()

    def enter(self, folder: str) -> None:
        """Changes to a working directory."""
        try:
            os.chdir(folder)
        except OSError as error:
            raise ValueError(
                f"areax launch: the working directory must exist on all machines, got {folder}, which "
                f"{socket.gethostname()} cannot enter ({error.strerror}); start from a shared one"
            ) from error

    def ports(self, address: str, count: int) -> list[int]:
        """Finds `count` free ports at an address of this machine."""
        with contextlib.ExitStack() as stack:
            probes = [stack.enter_context(socket.create_server((address, 0))) for _ in range(count)]
            return [probe.getsockname()[1] for probe in probes]

    def scratch(self, model: str) -> str:
        """Creates a folder for versions of a model, in /dev/shm if three fit there; removed at the end."""
        path, memory = Path(model), Path("/dev/shm")
        size = sum(file.stat().st_size for file in path.glob("*.safetensors"))
        roomy = os.access(memory, os.W_OK | os.X_OK) and shutil.disk_usage(memory).free >= 3 * size
        root = memory if roomy else Path(tempfile.gettempdir())
        return str(self._folders.enter_context(folders.scratch(root, "stager")))

    def start(self, name: str, words: list[str], environ: Mapping[str, str | None], log: str) -> int:
        """Starts a process and returns its pid; replaces an ended process of the same name.

        Args:
          words: the command; PYTHON stands for this interpreter.
          environ: environment changes; None unsets a variable.
          log: file to append the output to; "" = this process's output.
        """
        words = [sys.executable if word == PYTHON else word for word in words]
        # SIGUSR1 asks for stacks; until Python has installed its handler, the default action would end the process.
        words = ["sh", "-c", "trap '' USR1; exec \"$@\"", "sh", *words]
        # Unbuffered, to have the last lines however it ends; in a new session, so that only the launcher gets Ctrl-C.
        changed = {**os.environ, "PYTHONUNBUFFERED": "1", **environ}
        given = {key: value for key, value in changed.items() if value is not None}
        with contextlib.ExitStack() as stack:
            file = None
            if log:
                self._logs[name] = Path(log).absolute()
                self._logs[name].parent.mkdir(parents=True, exist_ok=True)
                file = stack.enter_context(open(log, "ab"))
                began = self._began.setdefault(name, file.tell())
                self._read.setdefault(name, began)
            process = subprocess.Popen(words, env=given, start_new_session=True, stdout=file, stderr=file)
        self._running[name] = process
        guard.process(process.pid, GRACE_S)
        return process.pid

    def poll(self, name: str) -> int | None:
        """Exit code of a process, -n for signal n; None while it runs."""
        process = self._running[name]
        ran = process.returncode is None
        if process.poll() is not None and ran:
            guard.process_ended(process.pid)
        return process.returncode

    def signal(self, name: str, number: int) -> None:
        """Sends a signal to a process, if it runs."""
        if self.poll(name) is None:
            self._running[name].send_signal(number)

    def kill(self, name: str) -> None:
        """Kills a process and its process group."""
        process = self._running[name]
        signal_group(process.pid, signal.SIGKILL)
        process.wait()
        self.poll(name)

    def read(self, name: str) -> str:
        """Output that a process has written to its log since the last call."""
        with open(self._logs[name], "rb") as file:
            file.seek(self._read[name])
            new = file.read()
        self._read[name] += len(new)
        return new.decode(errors="replace")

    def last(self, name: str) -> tuple[str, list[str]]:
        """Path of a process's log, and its last lines."""
        path = self._logs[name]
        with open(path, "rb") as file:
            file.seek(self._began[name])
            return str(path), [line.decode(errors="replace").rstrip() for line in deque(file, maxlen=LINES)]

    def answers(self, url: str) -> bool:
        """Whether a GET request returns status 200."""
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with direct.open(url, timeout=ANSWER_S) as reply:
                return reply.status == 200
        except (urllib.error.URLError, OSError):
            return False

    def close(self) -> None:
        """Kills processes that still run and removes the folders."""
        for name in self._running:
            if self.poll(name) is None:
                self.kill(name)
        self._folders.close()
