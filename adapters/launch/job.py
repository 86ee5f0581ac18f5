"""Runs a job of trainer processes and their servers: starts them in order, supervises them, ends them in order.

Servers start first, trainers once all servers are ready. A server that exits is restarted at its address; a trainer
that fails ends the job. Servers end after the trainers.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ...parallel.multihost import liveness
from ..tracking import progress
from .host import Gone, Host

STOPPED = 130  # exit code of a run that was stopped by a signal and has saved its progress
START_S = 1800.0  # loading and compiling a large checkpoint takes many minutes
STOP_S = 20.0  # for a server to finish its requests
RESTARTS, WINDOW_S = 3, 3600.0  # maximum restarts of a server, or of the job, within a time window
PAUSE_S = 1.0  # before the first restart; doubles each time
GONE = 255  # exit code if the machine is gone


@dataclass
class Part:
    """One process of a job.

    Attributes:
      name: name in messages: "process 0", "server 1", "stager 1".
      host: the machine it runs on.
      words: its command.
      environ: environment changes; None unsets a variable.
      log: log file on its machine; "" = the launcher's terminal.
      where: " on ADDRESS" unless it is this machine.
      url: address of a server or stager.
      shown: whether its output is printed by the launcher.
      pid: process id; 0 = not started.
      why: error if its machine is gone.
      restarts: times of its restarts.
      due: time of its next restart; 0 = none due, infinite = stays down.
    """

    name: str
    host: Host
    words: list[str]
    environ: Mapping[str, str | None]
    log: str
    where: str = ""
    url: str = ""
    shown: bool = False
    pid: int = 0
    why: str = ""
    restarts: list[float] = field(default_factory=list)
    due: float = 0.0

    def start(self) -> None:
        self.pid = self.host.start(self.name, self.words, self.environ, self.log)

    def poll(self) -> int | None:
        """Exit code, -n for signal n, or GONE; None while it runs or if it was never started."""
        if not self.pid:
            return None
        try:
            return GONE if self.why else self.host.poll(self.name)
        except Gone as error:
            self.why = str(error)
            return GONE

    def signal(self, number: int) -> None:
        if self.pid and not self.why:
            with contextlib.suppress(Gone):
                self.host.signal(self.name, number)

    def show(self) -> None:
        """Prints its output since the last call."""
        if self.shown and self.pid and not self.why:
            with contextlib.suppress(Gone):
                print(self.host.read(self.name), end="", flush=True)

    def ended(self) -> str:
        """Describes how it ended."""
        code, who = self.poll() or 0, f"{self.name} (pid {self.pid}{self.where})"
        if self.why:
            return f"{who} is gone: {self.why}"
        return f"{who} was killed by {signal.Signals(-code).name}" if code < 0 else f"{who} ended with exit code {code}"

    def last(self) -> str:
        """Its last lines of output, with the log's path."""
        if not self.log or self.shown:
            return "its output is above"
        try:
            path, lines = self.host.last(self.name)
        except Gone:
            return "its output is gone too"
        return "\n".join([f"the end of {path}{self.where}:", *(f"  {line}" for line in lines)])


def run(trainers: list[Part], servers: list[Part], *, look_s: float = 0.05, check: Callable[[], object] = bool) -> int:
    """Runs the job and returns the exit code of trainer 0, or of the trainer that failed (128 + n for signal n).

    Forwards SIGINT and SIGTERM to the trainers, SIGHUP as SIGTERM, and SIGUSR1, at which they print the stacks of their
    threads. Reports processes that end unexpectedly.

    Args:
      look_s: seconds between polls of all processes.
      check: called after each; what it raises ends the job.

    Raises:
      Gone: the machine of a trainer is, or those of all servers are: the job can go on elsewhere, unless a signal has
        asked it to end.
    """
    stopping = False
    with _received_signals() as asked:
        try:
            for server in servers:
                server.start()
            if servers:
                words = f"areax launch: starting {len(servers)} server{'s' * (len(servers) > 1)}"
                progress.say(f"{words}; logs are in {Path(servers[0].log).parent}")
                with progress.reminding(words):
                    code = _until_ready(servers, asked, look_s, check)
                if code is not None:
                    return code
                _report(f"{', '.join(server.url for server in servers)} ready")
            for trainer in trainers:
                trainer.start()
            while any(trainer.poll() is None for trainer in trainers) and _first_failed(trainers) is None:
                while asked:
                    number = asked.pop(0)  # recipes do not handle SIGHUP
                    stopping |= number != signal.SIGUSR1
                    for trainer in trainers:
                        trainer.signal(signal.SIGTERM if number == signal.SIGHUP else number)
                _restart_ended(servers)
                trainers[0].show()
                check()
                time.sleep(look_s)
            trainers[0].show()
            if (first := _first_failed(trainers)) is None:
                return _shell_code(trainers[0].poll())
            _report(f"{first.ended()}; ending the others; {first.last()}")
            if not stopping and (first.why or (servers and all(server.why for server in servers))):
                raise Gone(first.ended())
            return _shell_code(first.poll())
        finally:
            _end(trainers, liveness.GRACE_S + 5, look_s)  # with time for process 0 to save its state
            trainers[0].show()
            _end(servers, STOP_S, look_s)


@contextlib.contextmanager
def _received_signals() -> Iterator[list[int]]:
    """Yields a list that collects received signals."""
    asked: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
    heard = [number for number in numbers if signal.getsignal(number) != signal.SIG_IGN]  # nohup ignores SIGHUP
    before = {number: signal.signal(number, lambda number, frame: asked.append(number)) for number in heard}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _until_ready(servers: list[Part], asked: list[int], look_s: float, check: Callable[[], object]) -> int | None:
    """Waits until all servers are ready and returns None; returns the job's exit code on failure. Raises as `run`."""
    waiting, deadline = list(servers), time.monotonic() + START_S
    while waiting:
        if ends := [number for number in asked if number != signal.SIGUSR1]:
            return 128 + ends[0]
        asked.clear()
        for server in servers:
            if server.poll() is not None:
                if server.why:
                    raise Gone(server.ended())
                _report(f"{server.ended()} before it was ready; {server.last()}")
                return _shell_code(server.poll()) or 1
        if time.monotonic() > deadline:
            _report(f"{waiting[0].name}{waiting[0].where} was not ready in {START_S:.0f} s; {waiting[0].last()}")
            return 1
        waiting = [server for server in waiting if not server.host.answers(f"{server.url}/health")]
        check()
        time.sleep(look_s)
    return None


def _restart_ended(servers: list[Part]) -> None:
    """Restarts servers that have ended, after a pause, up to RESTARTS times per WINDOW_S."""
    now = time.monotonic()
    for server in servers:
        if server.due:
            if now >= server.due:
                server.due = 0.0
                server.restarts.append(now)
                with contextlib.suppress(Gone):  # handled at the next poll
                    server.host.kill(server.name)  # what is left of its process group
                    server.start()
        elif server.poll() is not None:
            server.restarts = [then for then in server.restarts if now - then < WINDOW_S]
            lasts = len(server.restarts) < RESTARTS and not server.why
            what = "restarting it" if lasts else "the run goes on without it" if server.why else "not restarting it"
            told = server.why and any(other.why and other.due and other.host is server.host for other in servers)
            server.due = now + PAUSE_S * 2 ** len(server.restarts) if lasts else float("inf")
            if not told:  # of the same machine
                _report(f"{server.ended()}; {what}; {server.last()}")


def _first_failed(trainers: list[Part]) -> Part | None:
    """The trainer that failed first, or None; prefers one that did not end because of another's failure."""
    if all((trainer.poll() or 0) in (0, STOPPED) for trainer in trainers):
        return None
    deadline = time.monotonic() + 2  # for the original failure to show up
    while True:
        bad = [trainer for trainer in trainers if trainer.poll() not in (None, 0, STOPPED)]
        causes = [trainer for trainer in bad if trainer.poll() != liveness.LOST]
        if causes or time.monotonic() > deadline:
            return (causes or bad)[0]
        time.sleep(0.05)


def _end(parts: list[Part], grace_s: float, look_s: float) -> None:
    """Ends running parts: SIGTERM, then after `grace_s` SIGKILL to their process groups."""
    left = [part for part in parts if part.pid and part.poll() is None]
    for part in left:
        part.signal(signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    while any(part.poll() is None for part in left) and time.monotonic() < deadline:
        time.sleep(look_s)
    for part in left:
        with contextlib.suppress(Gone):
            part.host.kill(part.name)


def _report(line: str) -> None:
    print(f"areax launch: {line}", file=sys.stderr, flush=True)


def _shell_code(code: int | None) -> int:
    code = code or 0
    return 128 - code if code < 0 else code
