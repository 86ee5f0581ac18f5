"""Several processes of one command on this machine: `areax launch --processes 4 -- train sft ...`."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path

from ..parallel import processes, watch

STOPPED = 130  # exit code of a run that was stopped and has saved what it had
LINES = 20


@dataclass(frozen=True)
class Config:
    """Run several processes of one command on this machine: areax launch --processes 4 -- train sft ...

    Attributes:
      processes: how many.
      devices: of each process: GPUs of its own, or virtual devices on the CPU.
      logs: folder for process-1.log and so on, what all but process 0 print; "" = a new one.
    """

    processes: int
    devices: int = 1
    logs: str = ""

    def __post_init__(self):
        for name, least in (("processes", 2), ("devices", 1)):  # one process needs no launcher
            if getattr(self, name) < least:
                raise ValueError(f"areax launch: --{name} must be at least {least}, got {getattr(self, name)}")


def launch(config: Config, command: list[str]) -> int:
    """Starts `areax COMMAND` so many times and waits for all; returns the exit code of process 0.

    Process 0 has this terminal, the others a file each. SIGINT and SIGTERM go on to all of them, as does the end of the
    terminal, as SIGTERM. When one ends badly the others are ended too, what is known of it is printed, and its exit
    code returned (128 + n for signal n).
    """
    logs = Path(config.logs or tempfile.mkdtemp(prefix="areax-launch-"))
    logs.mkdir(parents=True, exist_ok=True)
    address = f"127.0.0.1:{_free_port()}"
    running: list[subprocess.Popen] = []

    def pass_on(number, frame):  # recipes know no SIGHUP
        _signal(running, signal.SIGTERM if number == signal.SIGHUP else signal.Signals(number))

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    heard = [number for number in numbers if signal.getsignal(number) != signal.SIG_IGN]  # nohup ignores SIGHUP
    before = {number: signal.signal(number, pass_on) for number in heard}
    try:
        for index in range(config.processes):
            running.append(_start(config, command, address, index, _log(logs, index)))
        while (first := _first_bad(running)) is None and any(p.poll() is None for p in running):
            time.sleep(0.05)
        if first is None:
            return _shell_code(running[0].returncode)
        print(_obituary(first, running[first], _log(logs, first)), file=sys.stderr)
        return _shell_code(running[first].returncode)
    finally:
        _end(running)
        for number, handler in before.items():
            signal.signal(number, handler)


def _start(config: Config, command: list[str], address: str, index: int, log: Path) -> subprocess.Popen:
    own = range(index * config.devices, (index + 1) * config.devices)
    environ = {
        **os.environ,
        processes.COORDINATOR: address,
        processes.COUNT: str(config.processes),
        processes.INDEX: str(index),
        "JAX_LOCAL_DEVICE_IDS": ",".join(map(str, own)),
        "JAX_NUM_CPU_DEVICES": str(config.devices),
        "PYTHONUNBUFFERED": "1",  # so that the last lines are there, however it ends
    }
    arguments = [sys.executable, "-m", "areax", *command]
    # A session of its own: Ctrl-C comes from here, once.
    if index == 0:
        return subprocess.Popen(arguments, env=environ, start_new_session=True)
    with open(log, "wb") as file:
        return subprocess.Popen(arguments, env=environ, start_new_session=True, stdout=file, stderr=file)


def _first_bad(running: list[subprocess.Popen]) -> int | None:
    """The process that ended badly, once one has; one that ended because of another is not it, if there is another."""
    if all((process.poll() or 0) in (0, STOPPED) for process in running):
        return None
    deadline = time.monotonic() + 2  # for the one that began it to be seen
    while True:
        ended = {index: process.poll() for index, process in enumerate(running)}
        bad = {index: code for index, code in ended.items() if code not in (None, 0, STOPPED)}
        began = [index for index, code in bad.items() if code != watch.LOST]
        if began or time.monotonic() > deadline:
            return next(iter(began or bad))
        time.sleep(0.05)


def _obituary(index: int, process: subprocess.Popen, log: Path) -> str:
    code = process.returncode
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    line = f"areax launch: process {index} (pid {process.pid}) {how}; the others are ended"
    if index == 0:
        return f"{line}; what it said is above"
    with open(log, encoding="utf-8", errors="replace") as file:
        last = deque(file, maxlen=LINES)
    return f"{line}; the end of {log}:\n" + "".join(f"  {said.rstrip()}\n" for said in last).rstrip("\n")


def _end(running: list[subprocess.Popen]) -> None:
    """Ends what still runs: asked first, so that process 0 can put away what it holds."""
    _signal(running, signal.SIGTERM)
    deadline = time.monotonic() + watch.GRACE_S + 5
    for process in running:
        try:
            process.wait(max(0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _signal(running: list[subprocess.Popen], number: signal.Signals) -> None:
    for process in running:
        if process.poll() is None:
            process.send_signal(number)


def _log(logs: Path, index: int) -> Path:
    return logs / f"process-{index}.log"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _shell_code(code: int) -> int:
    return 128 - code if code < 0 else code
