"""Lists of servers that change while a run goes on: those in a file, behind a DNS name, or registered at a route.

    @FILE                    one server a line, its stager behind it if it has one; # begins a comment
    dns+http://NAME:PORT     each address that the name resolves to
    join+http://HOST:PORT    servers register here (registry.py)

A change takes effect once it has been read twice in a row: a file that is being written may be empty for a moment. A
list that cannot be read changes nothing.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Collection
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from ..errors import ServerError
from ..processes import keys
from ..servers.server import Server
from .fleet import Fleet

log = logging.getLogger(__name__)

EVERY_S = 2.0  # between reads of a list
SAID_S = 30.0  # between lines that say the same
FILE, DNS, JOIN = "@", "dns+", "join+"  # with which an entry of `--servers` begins


class Member(NamedTuple):
    """The addresses of a server, and of the stager beside it; "" = it has none."""

    url: str
    stager: str = ""


Read = Callable[[], Awaitable[list[Member]]]  # raises ValueError or OSError if the list cannot be read


def is_list(entry: str) -> bool:
    """Whether an entry of `--servers` names a list of servers, not a server."""
    return entry.startswith((FILE, DNS, JOIN))


def is_route(entry: str) -> bool:
    """Whether an entry is a list at which servers register."""
    return entry.startswith(JOIN)


def check(entry: str, what: str, *, lists: bool = True) -> None:
    """Raises ValueError unless an entry is the address of a server or, if there may be `lists`, names one.

    Args:
      what: names the option in the error.
    """
    if lists and entry.startswith(FILE):
        if not Path(entry[1:]).is_file():
            raise ValueError(f"{what}: {entry} must name a file, which may be empty until there are servers, got none")
    elif lists and is_list(entry):
        _check_url(entry.removeprefix(DNS).removeprefix(JOIN), what)
        parts = urlsplit(entry)
        if not parts.port or parts.path.strip("/"):
            raise ValueError(f"{what}: must be {parts.scheme}://HOST:PORT, got {entry!r}")
    else:
        _check_url(entry, what)


def reader(entry: str) -> Read:
    """What reads the list `@FILE` or `dns+http://NAME:PORT`."""
    if entry.startswith(FILE):
        return lambda: asyncio.to_thread(in_file, Path(entry[1:]))
    return lambda: resolved(entry.removeprefix(DNS))


def in_file(path: Path) -> list[Member]:
    """The servers in a file; raises ValueError with the line that is none, OSError."""
    found = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        words = line.partition("#")[0].split()
        where = f"{path}, line {number}"
        if len(words) > 2:
            raise ValueError(f"{where}: must be the address of a server, and of its stager if it has one, got {line!r}")
        for word in words:
            _check_url(word, where)
        if words:
            found.append(Member(*(word.rstrip("/") for word in words)))
    return found


async def resolved(url: str) -> list[Member]:
    """A server at each address of the URL's name; raises OSError if it does not resolve."""
    parts = urlsplit(url)
    infos = await asyncio.get_running_loop().getaddrinfo(parts.hostname, parts.port, type=socket.SOCK_STREAM)
    hosts = sorted({str(place[0]) for _, _, _, _, place in infos})
    return [Member(f"{parts.scheme}://{f'[{host}]' if ':' in host else host}:{parts.port}") for host in hosts]


def _check_url(url: str, what: str) -> None:
    keys.check_address(url, what)
    try:
        parts = urlsplit(url)
        whole = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is none
        whole = False
    if not whole:
        raise ValueError(f"{what}: must be an address such as http://127.0.0.1:30000, got {url!r:.200}")


class Lists:
    """Lists of servers by their names in `--servers`, and what each said when it was last read.

    A list that cannot be read keeps what it had, which is logged.
    """

    def __init__(self, readers: dict[str, Read]):
        self.names = ", ".join(readers)
        self._readers, self._read, self._now = readers, dict[str, list[Member]](), dict[str, list[Member]]()
        self._said: dict[str, tuple[str, float]] = {}

    async def read(self, *, at_once: bool = False) -> list[Member]:
        """All members, each address once; a list's change counts from the second time on that it is read, unless
        `at_once`."""
        for name, read in self._readers.items():
            try:
                now = await read()
            except (ValueError, OSError) as error:
                self.say(name, f"--servers {name}: keeps the servers that it had ({error})")
                continue
            if at_once or now == self._read.get(name):
                self._now[name] = now
            self._read[name] = now
        return list({member.url: member for own in self._now.values() for member in own}.values())

    def say(self, about: str, line: str) -> None:
        """Logs a line, unless it was the last one about this within SAID_S."""
        now, (last, at) = asyncio.get_running_loop().time(), self._said.get(about, ("", 0.0))
        if line != last or now - at > SAID_S:
            log.warning("%s", line)
            self._said[about] = line, now


async def first(
    lists: Lists, fixed: Collection[str], reach: Callable[[str, str], Awaitable[Server]], enough: bool
) -> list[Server]:
    """Connects to the servers of lists, but for those at the addresses `fixed`.

    Args:
      enough: whether it may return none; it waits for one that answers otherwise.

    Raises ValueError if all that are listed are no servers for this run, for instance as they refuse its key.
    """
    while True:
        listed = [member for member in await lists.read(at_once=True) if member.url not in fixed]
        found = await asyncio.gather(*(reach(*member) for member in listed), return_exceptions=True)
        servers = [server for server in found if isinstance(server, Server)]
        if servers or enough:
            return servers
        errors = [error for error in found if isinstance(error, BaseException)]
        for error in errors:
            if not isinstance(error, ValueError | ServerError):
                raise error
            lists.say("", str(error))
        if errors and all(isinstance(error, ValueError) for error in errors):
            raise errors[0]
        if not errors:
            lists.say("", f"waiting for a server in {lists.names}, which names none yet")
        await asyncio.sleep(EVERY_S)


async def follow(fleet: Fleet, lists: Lists, fixed: Collection[str]) -> None:
    """Has the fleet's servers follow lists until it is cancelled: those that appear join, those that go leave.

    Args:
      fixed: addresses that stay whatever the lists say.
    """
    moving: dict[str, asyncio.Task] = {}
    try:
        while True:
            await asyncio.sleep(EVERY_S)
            members = {member.url: member for member in await lists.read()}
            here = {server.url for server in fleet.servers}
            moving = {url: task for url, task in moving.items() if not task.done()}
            for url in {*members} - here - {*moving}:
                moving[url] = asyncio.create_task(_join(fleet, members[url], lists))
            for url in here - {*members, *fixed} - {*moving}:
                moving[url] = asyncio.create_task(fleet.leave(url))
            if waiting := not fleet.servers and fleet.waiting:
                lists.say("", f"{waiting} requests wait: {lists.names} name no server that answers")
    finally:
        for task in moving.values():
            task.cancel()
        await asyncio.gather(*moving.values(), return_exceptions=True)


async def _join(fleet: Fleet, member: Member, lists: Lists) -> None:
    try:
        await fleet.join(member.url, stager=member.stager)
    except (ValueError, ServerError) as error:  # it is tried again while it is listed
        lists.say(member.url, str(error))
