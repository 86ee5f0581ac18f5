"""A job of trainer processes and what serves them: started in order, watched, ended in order.

Servers first; the trainers once all of them answer. A server that ends is started again at its address; a trainer that
ends badly ends all. Servers end after the trainers.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ...parallel.multihost import liveness
from .host import Gone, Host

STOPPED = 130  # exit code of a run that was stopped and has saved what it had
START_S = 1800.0  # a large checkpoint loads and compiles for many minutes
STOP_S = 20.0  # for a server to end what it answers
RESTARTS, WINDOW_S = 3, 3600.0  # of one server within so many seconds
PAUSE_S = 1.0  # before the first; doubles
GONE = 255  # instead of an exit code: the machine is gone


@dataclass
class Part:
    """One process of a job.

    Attributes:
      name: as it is told of: "process 0", "server 1", "stager 1".
      words: its command.
      environ: changes of the environment; None takes a variable out.
      log: the file on its machine that it writes to; "" = the launcher's terminal.
      where: " on ADDRESS", if that is not this machine.
      url: of servers: where they answer.
      shown: what it writes is printed here.
      pid: since it was started.
      why: of one whose machine is gone.
      restarts: when it was started again.
      due: when it is to be, while it is down; infinite = never.
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
        """Its exit code, -n for signal n, GONE; None while it runs, or was never started."""
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
        """Prints what it has written since the last call."""
        if self.shown and self.pid and not self.why:
            with contextlib.suppress(Gone):
                print(self.host.read(self.name), end="", flush=True)

    def ended(self) -> str:
        """How it ended, in words."""
        code, who = self.poll() or 0, f"{self.name} (pid {self.pid}{self.where})"
        if self.why:
            return f"{who} is gone: {self.why}"
        return f"{who} was ended by {signal.Signals(-code).name}" if code < 0 else f"{who} ended with exit code {code}"

    def last(self) -> str:
        """Where its last lines are, and what they are."""
        if not self.log or self.shown:
            return "what it said is above"
        try:
            path, lines = self.host.last(self.name)
        except Gone:
            return "what it said is gone too"
        return "\n".join([f"the end of {path}{self.where}:", *(f"  {line}" for line in lines)])


def run(trainers: list[Part], servers: list[Part], *, look_s: float = 0.05) -> int:
    """Runs the job, and returns the exit code of trainer 0, or of the one that ended badly (128 + n for signal n).

    SIGINT and SIGTERM go on to the trainers, as does the end of the terminal, as SIGTERM. How a process ended that
    should not have is printed.

    Args:
      look_s: between two looks at all processes.
    """
    with _heard() as asked:
        try:
            for server in servers:
                server.start()
            if servers and (code := _until_ready(servers, asked, look_s)) is not None:
                return code
            if servers:
                _say(f"{', '.join(server.url for server in servers)} answer; logs are in {Path(servers[0].log).parent}")
            for trainer in trainers:
                trainer.start()
            while (first := _first_bad(trainers)) is None and any(trainer.poll() is None for trainer in trainers):
                while asked:
                    number = asked.pop(0)  # recipes know no SIGHUP
                    for trainer in trainers:
                        trainer.signal(signal.SIGTERM if number == signal.SIGHUP else number)
                _keep(servers)
                trainers[0].show()
                time.sleep(look_s)
            trainers[0].show()
            if first is None:
                return _shell_code(trainers[0].poll())
            _say(f"{first.ended()}; the others are ended; {first.last()}")
            return _shell_code(first.poll())
        finally:
            _end(trainers, liveness.GRACE_S + 5, look_s)  # asked first, so that process 0 can put away what it holds
            trainers[0].show()
            _end(servers, STOP_S, look_s)


@contextlib.contextmanager
def _heard() -> Iterator[list[int]]:
    """Signals that came."""
    asked: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    heard = [number for number in numbers if signal.getsignal(number) != signal.SIG_IGN]  # nohup ignores SIGHUP
    before = {number: signal.signal(number, lambda number, frame: asked.append(number)) for number in heard}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _until_ready(servers: list[Part], asked: list[int], look_s: float) -> int | None:
    """None once all answer; the job's exit code if that cannot be."""
    waiting, deadline = list(servers), time.monotonic() + START_S
    while waiting:
        if asked:
            return 128 + asked[0]
        for server in servers:
            if server.poll() is not None:
                _say(f"{server.ended()} before it was ready; {server.last()}")
                return _shell_code(server.poll()) or 1
        if time.monotonic() > deadline:
            _say(f"{waiting[0].name}{waiting[0].where} was not ready in {START_S:.0f} s; {waiting[0].last()}")
            return 1
        waiting = [server for server in waiting if not server.host.answers(f"{server.url}/health")]
        time.sleep(look_s)
    return None


def _keep(servers: list[Part]) -> None:
    """Starts servers again that have ended, after a pause, while their budget lasts."""
    now = time.monotonic()
    for server in servers:
        if server.due:
            if now >= server.due:
                server.due = 0.0
                server.restarts.append(now)
                with contextlib.suppress(Gone):  # seen at the next look
                    server.host.kill(server.name)  # what it left in its group
                    server.start()
        elif server.poll() is not None:
            server.restarts = [then for then in server.restarts if now - then < WINDOW_S]
            lasts = len(server.restarts) < RESTARTS and not server.why
            server.due = now + PAUSE_S * 2 ** len(server.restarts) if lasts else float("inf")
            what = "it is started again" if lasts else "it stays down"
            _say(f"{server.ended()}; {what}; {server.last()}")


def _first_bad(trainers: list[Part]) -> Part | None:
    """The one that ended badly, once one has; one that ended because of another is not it, if there is another."""
    if all((trainer.poll() or 0) in (0, STOPPED) for trainer in trainers):
        return None
    deadline = time.monotonic() + 2  # for the one that began it to be seen
    while True:
        bad = [trainer for trainer in trainers if trainer.poll() not in (None, 0, STOPPED)]
        began = [trainer for trainer in bad if trainer.poll() != liveness.LOST]
        if began or time.monotonic() > deadline:
            return (began or bad)[0]
        time.sleep(0.05)


def _end(parts: list[Part], grace_s: float, look_s: float) -> None:
    """Ends what still runs, with all that it has started in its group."""
    left = [part for part in parts if part.pid and part.poll() is None]
    for part in left:
        part.signal(signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    while any(part.poll() is None for part in left) and time.monotonic() < deadline:
        time.sleep(look_s)
    for part in left:
        with contextlib.suppress(Gone):
            part.host.kill(part.name)


def _say(line: str) -> None:
    print(f"areax launch: {line}", file=sys.stderr, flush=True)


def _shell_code(code: int | None) -> int:
    code = code or 0
    return 128 - code if code < 0 else code
