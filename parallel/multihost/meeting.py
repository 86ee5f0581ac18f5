"""The meeting of a job's processes, before JAX: all connect to process 0 at the coordinator's address and say who they
are.

Process 0 answers once all are there. Two with one number, or another count of processes, end all that are waiting, with
a line that names them; one that comes later is refused. `liveness` watches the connections from then on.
"""

import contextlib
import dataclasses
import os
import queue
import secrets
import socket
import threading
import time
from typing import NamedTuple, TextIO

START_S = 300  # for all processes to start
CONNECT_S = 10  # for a connection: what a firewall drops gets no answer
GREETING_S = 5  # for a connected process to identify itself
AGAIN_S = 0.5  # between attempts to connect
TELL_S = 1.0  # between lines to those that wait
SILENT_S = 40  # without a line from a process that sends one every few seconds: it stands still, or its host is gone
LINE = 1 << 12  # characters of a line: an unknown client may send no end of them
GREETING, SELF, MISSING, START, REFUSED = "areax-process", "self", "missing", "start", "refused"


@dataclasses.dataclass(frozen=True)
class Member:
    """A process of a job.

    Attributes:
      where: its pid and host.
      token: tells it from another one with its number.
    """

    index: int
    count: int
    where: str
    token: str

    def __str__(self) -> str:
        return f"process {self.index} of {self.count} ({self.where})"


class Link(NamedTuple):
    """A connection to another process."""

    member: Member
    socket: socket.socket
    lines: TextIO

    def send(self, line: str) -> None:
        with contextlib.suppress(OSError):  # it has ended; whoever reads from the connection notices
            self.socket.sendall(f"{line}\n".encode())

    def close(self) -> None:
        self.lines.close()
        self.socket.close()


class Met(NamedTuple):
    """The end of a meeting.

    Attributes:
      links: in process 0 to all others, in the others to process 0.
      address: host:port of JAX's service, in process 0.
      here: the address of this host by which process 0 and another one reach each other.
    """

    links: list[Link]
    address: str
    here: str


def here(index: int, count: int) -> Member:
    """This process."""
    return Member(index, count, f"pid {os.getpid()} on {socket.gethostname()}", secrets.token_hex(8))


def listen(port: int = 0) -> socket.socket:
    """A server on a port of this host, 0 = any free one."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))


class Meeting:
    """This process's part in it.

    Args:
      address: host:port of process 0.

    Attributes:
      waits: whom this process waits for, in words.
    """

    def __init__(self, address: str, me: Member):
        self.address, self.me = address, me
        host, _, port = address.rpartition(":")
        self._at = host.strip("[]"), int(port)
        self._door: _Door | None = None
        self._present: dict[int, Link] = {}  # in process 0: the others that are there
        self.waits = f"connects to process 0 at {address}"

    def attend(self) -> Met:
        """Waits for all.

        Raises:
          ValueError: they are not there in START_S seconds, or two have one number, or not all the same count.
        """
        return self._attend() if self.me.index else self._gather()

    def refuse_late(self) -> None:
        """In process 0, after the meeting: refuses who comes, until `close`."""
        assert self._door
        while link := self._door.arrivals.get():
            link.send(f"{REFUSED} {self._refusal(link.member)}")
            link.close()

    def close(self) -> None:
        """Frees the coordinator's port: the job may be started again before this process has ended."""
        if self._door:
            self._door.close()

    # -- process 0 -------------------------------------------------------------------------------

    def _gather(self) -> Met:
        door = self._door = self._opened()
        others: queue.SimpleQueue[str] = queue.SimpleQueue()  # what another process 0 at the address says
        threading.Thread(target=self._find_another, args=(others,), daemon=True).start()
        deadline, present = time.monotonic() + START_S, self._present
        while missing := [i for i in range(1, self.me.count) if i not in present]:
            self.waits = f"waits at {self.address} for {_numbers(missing)} to start"
            problem = "" if others.empty() else others.get()
            try:
                link = door.arrivals.get(timeout=TELL_S)
            except queue.Empty:
                link = None
            for i in [i for i, other in present.items() if _gone(other.socket)]:  # it may come again
                present.pop(i).close()
            if link is None:
                if time.monotonic() > deadline:
                    problem = problem or (
                        f"processes: all must start within {START_S} s, got no {_numbers(missing)} at {self.address}; "
                        "start them, and let their hosts reach that address"
                    )
            else:
                problem = problem or self._refusal(link.member)
                if not problem and link.member.index:
                    present[link.member.index] = link
                else:
                    link.send(f"{REFUSED} {problem}" if problem else SELF)
                    link.close()
            for other in present.values():
                other.send(f"{REFUSED} {problem}" if problem else f"{MISSING} {_numbers(missing)}")
            if problem:
                for other in present.values():
                    other.close()
                door.close()
                raise ValueError(problem)
        with listen() as free:
            port = free.getsockname()[1]
        for link in present.values():
            link.send(f"{START} {port} {self.me.where}")
        own = _plain(present[1].socket.getsockname()[0]) if present else "127.0.0.1"
        return Met(list(present.values()), f"127.0.0.1:{port}", own)

    def _opened(self) -> "_Door":
        port = self._at[1]
        try:
            return _Door(port)
        except OSError as error:
            answer = self._ask("localhost")
            if answer.startswith(REFUSED):
                raise ValueError(answer.partition(" ")[2]) from error
            raise ValueError(
                f"processes: {self.me} cannot listen at port {port} of its host ({error.strerror}); end what does, or "
                "name another port"
            ) from error

    def _refusal(self, other: Member) -> str:
        """Why a process cannot be of this job; "" if it can."""
        if other.token == self.me.token:
            return ""
        if other.count != self.me.count:
            return (
                f"processes: all need the same count of processes, got {other.count} from {other.where} and "
                f"{self.me.count} from {self.me.where}"
            )
        taken = {0: self.me} | {i: link.member for i, link in self._present.items()}
        same = taken.get(other.index, other)
        if same.token == other.token:
            return ""
        return (
            f"processes: each needs a number of its own, got {other.index} twice: from {same.where} and from "
            f"{other.where}; number them from 0 to {self.me.count - 1}"
        )

    def _find_another(self, others: queue.SimpleQueue) -> None:
        """Finds who answers at the coordinator's address: it must be this process."""
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            answer = self._ask(self._at[0])
            if answer.startswith(REFUSED):
                others.put(answer.partition(" ")[2])
            if answer.startswith((REFUSED, SELF)):
                return
            time.sleep(AGAIN_S)

    def _ask(self, host: str) -> str:
        """What process 0 at a host says to this process 0; "" if there is none."""
        try:
            with socket.create_connection((host, self._at[1]), timeout=CONNECT_S) as connection:
                connection.settimeout(GREETING_S)
                connection.sendall(_greeting(self.me))
                return _lines(connection).readline(LINE).strip()
        except OSError:
            return ""

    # -- the others ------------------------------------------------------------------------------

    def _attend(self) -> Met:
        deadline, why = time.monotonic() + START_S, "no answer"
        while (left := deadline - time.monotonic()) > 0:
            try:
                connection = socket.create_connection(self._at, timeout=min(CONNECT_S, left))
                connection.settimeout(SILENT_S)
                connection.sendall(_greeting(self.me))
                link = Link(Member(0, self.me.count, "", ""), connection, _lines(connection))
                if met := self._wait(link):
                    return met
                link.close()
                why = "what listens there is no process 0 of areax, or it ended"
            except OSError as error:
                why = str(error) or "no answer"
            self.waits = f"cannot reach process 0 at {self.address} ({why})"
            time.sleep(AGAIN_S)
        raise ValueError(
            f"processes: {self.me} must reach process 0 at {self.address}, could not in {START_S} s: {why}; is process "
            "0 running, is that its address, and does a firewall let the port pass?"
        )

    def _wait(self, link: Link) -> Met | None:
        """Waits until process 0 says that all are there; None if the connection ends before."""
        while line := link.lines.readline(LINE).strip():
            word, _, words = line.partition(" ")
            if word == REFUSED:
                link.close()
                raise ValueError(words)
            if word == MISSING:
                self.waits = f"waits at {self.address} for {words} to start"
            elif word == START:
                port, where = words.split(" ", 1)
                host, own = (_plain(at()[0]) for at in (link.socket.getpeername, link.socket.getsockname))
                first = link._replace(member=dataclasses.replace(link.member, where=where))
                return Met([first], f"[{host}]:{port}" if ":" in host else f"{host}:{port}", own)
            else:
                break
        return None


class _Door:
    """A server at a port of process 0; who greets as a process of a job is put into `arrivals`, None at the end."""

    def __init__(self, port: int):
        self.arrivals: queue.SimpleQueue[Link | None] = queue.SimpleQueue()
        self._server = listen(port)
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        with contextlib.suppress(OSError):  # closed already
            self._server.shutdown(socket.SHUT_RDWR)  # else `accept` would go on
        self._server.close()
        self.arrivals.put(None)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._server.accept()
            except OSError:  # closed
                return
            threading.Thread(target=self._greet, args=(connection,), daemon=True).start()

    def _greet(self, connection: socket.socket) -> None:
        connection.settimeout(GREETING_S)  # an unknown client may send nothing
        link = Link(Member(0, 0, "", ""), connection, _lines(connection))
        try:
            word, index, count, token, where = link.lines.readline(LINE).strip().split(" ", 4)
            member = Member(int(index), int(count), where, token)
        except (OSError, ValueError):
            word = ""
        if word == GREETING and 0 <= member.index < member.count:
            connection.settimeout(SILENT_S)
            self.arrivals.put(link._replace(member=member))
        else:
            link.close()


def _greeting(me: Member) -> bytes:
    return f"{GREETING} {me.index} {me.count} {me.token} {me.where}\n".encode()


def _lines(connection: socket.socket) -> TextIO:
    return connection.makefile(encoding="utf-8", errors="replace")


def _gone(connection: socket.socket) -> bool:
    """Whether a process that says nothing yet has closed its connection."""
    connection.setblocking(False)
    try:
        return connection.recv(1, socket.MSG_PEEK) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True
    finally:
        connection.settimeout(SILENT_S)


def _numbers(indices: list[int]) -> str:
    """As "process 1", or "processes 1, 2 and 5"."""
    *first, last = map(str, indices)
    return f"processes {', '.join(first)} and {last}" if first else f"process {last}"


def _plain(address: str) -> str:
    """A numeric address; one of IPv4 as such."""
    return address.removeprefix("::ffff:")
