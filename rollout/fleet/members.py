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
import os
import socket
import stat
from collections.abc import Awaitable, Callable, Collection
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from ..errors import ServerError
from ..processes import addresses
from ..processes.addresses import identity
from ..processes.printable import one_line
from ..servers.server import Server
from .fleet import Fleet

log = logging.getLogger(__name__)

EVERY_S = 2.0  # between reads of a list
LONGEST = 1 << 20  # characters of a file
CONNECT_S = 3.0  # for a listed server to accept a connection
PORTS = {"http": 80, "https": 443}
AT_A_TIME = 32  # servers that are connected to
SHOWN = 3  # servers in a line
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
        addresses.check(entry.removeprefix(DNS).removeprefix(JOIN), what)
        parts = urlsplit(entry)
        if not parts.port or parts.path.strip("/"):
            raise ValueError(f"{what}: must be {parts.scheme}://HOST:PORT, got {entry!r}")
    else:
        addresses.check(entry, what)


def reader(entry: str) -> Read:
    """The function that reads a list `@FILE` or `dns+http://NAME:PORT`."""
    if entry.startswith(FILE):
        return lambda: asyncio.to_thread(in_file, Path(entry[1:]))
    return lambda: resolved(entry.removeprefix(DNS))


def in_file(path: Path) -> list[Member]:
    """The servers listed in a file. Raises OSError; ValueError, which names a line that lists none."""
    found = []
    if not stat.S_ISREG(os.stat(path).st_mode):  # opening a pipe would wait for its writer
        raise ValueError(f"{path} must be a regular file")
    with open(path, encoding="utf-8-sig") as file:
        text = file.read(LONGEST + 1)
    if len(text) > LONGEST:
        raise ValueError(f"{path} must have at most {LONGEST:,} characters")
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        where = f"{path}, line {number}"
        if len(words) > 2:
            raise ValueError(f"{where}: must be the address of a server, and of its stager if it has one, got {line!r}")
        for word in words:
            addresses.check(word, where)
        if words:
            found.append(Member(*map(addresses.plain, words)))
    return found


async def resolved(url: str) -> list[Member]:
    """A server at each address that the URL's host resolves to. Raises OSError if it resolves to none."""
    parts = urlsplit(url)
    infos = await asyncio.get_running_loop().getaddrinfo(parts.hostname, parts.port, type=socket.SOCK_STREAM)
    hosts = sorted({str(place[0]) for _, _, _, _, place in infos})
    return [Member(f"{parts.scheme}://{f'[{host}]' if ':' in host else host}:{parts.port}") for host in hosts]


class Lists:
    """Lists of servers by their names in `--servers`, and what each said when it was last read.

    A list that cannot be read keeps what it had, which is logged.
    """

    def __init__(self, readers: dict[str, Read]):
        self.names = ", ".join(readers)
        self._readers, self._read, self._now = readers, dict[str, list[Member]](), dict[str, list[Member]]()
        self._said: dict[str, tuple[str, float]] = {}

    async def read(self, *, at_once: bool = False) -> list[Member]:
        """All members, each server once; a list's change counts from the second time on that it is read, unless
        `at_once`."""
        for name, read in self._readers.items():
            try:
                now = await read()
            except (ValueError, OSError) as error:  # UnicodeDecodeError is one
                self.say(name, f"--servers {name}: keeps the servers that it had ({error})")
                continue
            if at_once or now == self._read.get(name):
                self._now[name] = now
            self._read[name] = now
        return list({identity(member.url): member for own in self._now.values() for member in own}.values())

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
    slots, known = asyncio.Semaphore(AT_A_TIME), {*map(identity, fixed)}
    while True:
        listed = [member for member in await lists.read(at_once=True) if identity(member.url) not in known]
        found = await asyncio.gather(*(_reached(reach, member, slots) for member in listed), return_exceptions=True)
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


async def _reached(reach: Callable[[str, str], Awaitable[Server]], member: Member, slots: asyncio.Semaphore) -> Server:
    async with slots:
        await _accepts(member.url)
        return await reach(*member)


async def _accepts(url: str) -> None:
    """Raises ServerError unless a server accepts a connection: none that is gone may hold up those behind it, which
    `reach` would ask again for as long as a server may take to start. Lists are read again anyway."""
    parts = urlsplit(url)
    try:
        async with asyncio.timeout(CONNECT_S):
            _, writer = await asyncio.open_connection(parts.hostname, parts.port or PORTS[parts.scheme])
    except (OSError, UnicodeError) as error:  # TimeoutError is one; a name may be none of IDNA
        raise ServerError(f"{url}: cannot connect ({one_line(error) or f'no answer in {CONNECT_S:g} s'})") from error
    writer.close()


async def follow(fleet: Fleet, lists: Lists, fixed: Collection[str]) -> None:
    """Has the fleet's servers follow lists until it is cancelled: those that appear join, those that go leave.

    Args:
      fixed: addresses that stay whatever the lists say.
    """
    moving: dict[tuple[str, str], asyncio.Task] = {}
    slots, stay = asyncio.Semaphore(AT_A_TIME), {*map(identity, fixed)}
    name_of = lambda url, stager: (identity(url), stager and identity(stager))
    try:
        while True:
            await asyncio.sleep(EVERY_S)
            members = {name_of(*member): member for member in await lists.read()}
            here = {name_of(server.url, server.stager.url if server.stager else ""): server for server in fleet.servers}
            moving = {name: task for name, task in moving.items() if not task.done()}
            for name in members.keys() - here.keys() - moving.keys():
                if name[0] not in {url for url, _ in here}:  # else it first leaves, as its stager is another now
                    moving[name] = asyncio.create_task(_join(fleet, members[name], lists, slots))
            for name in here.keys() - members.keys() - moving.keys():
                if name[0] not in stay:
                    moving[name] = asyncio.create_task(fleet.leave(here[name].url))
            if not fleet.healthy and (fleet.waiting or fleet.waiting_push):
                what = " and a push" * fleet.waiting_push
                why = "; ".join(server.why for server in fleet.servers[:SHOWN]) or "none is listed"
                lists.say("", f"{fleet.waiting} requests{what} wait for a server of {lists.names} ({why})")
    finally:
        for task in moving.values():
            task.cancel()
        await asyncio.gather(*moving.values(), return_exceptions=True)


async def _join(fleet: Fleet, member: Member, lists: Lists, slots: asyncio.Semaphore) -> None:
    try:
        async with slots:
            await _accepts(member.url)
            await fleet.join(member.url, stager=member.stager)
    except (ValueError, ServerError) as error:  # it is tried again while it is listed
        lists.say(member.url, str(error))
