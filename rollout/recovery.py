"""How a server that is not healthy becomes so again; each has one task here meanwhile, and gets no requests.

    healthy -> suspect -> healthy                        a connection failed, yet it answers and has its weights
               suspect -> dead -> restarting -> stale    it does not answer, and is ours to restart
    healthy -> poisoned | stale -> healthy               it holds what nobody vouches for: loaded anew, in full
    dead -> healthy                                      it answers again, and has loaded

A server that comes back gets the newest published version before it gets a request.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from . import lora
from .pressure import Limit
from .server import Published, Server

if TYPE_CHECKING:
    from .client import Fleet

log = logging.getLogger(__name__)

# Ends a server's process and starts another one, with these weights if there are any; returns its address.
Restart = Callable[[str, Published | None], Awaitable[str]]

PATIENCE_S = 30.0  # how long a server that cannot be reached is waited for
OWN_PATIENCE_S = 5.0  # where we can restart it instead
RELOADS = 3  # failed, a server is dead though it answers
RESTARTS, WINDOW_S = 3, 3600.0  # of one server within so many seconds
PAUSE_S = 1.0  # before a second attempt; doubles
MAX_PAUSE_S = 30.0
BEAT_S = 10.0  # between two looks at a healthy server
ANSWER_S = 30.0  # a healthy server answers a look within
LOAD_S = 5.0  # and says how loaded it is, or is not heard


async def tend(fleet: Fleet, server: Server) -> None:
    """Returns when `server` is healthy. One that is dead gives no hope meanwhile, but is tried on."""
    patience_s = OWN_PATIENCE_S if fleet.restart else PATIENCE_S
    failed = 0
    while True:
        await fleet.awake.wait()
        try:
            label = await server.weight_label(timeout_s=patience_s)
        except (RuntimeError, ValueError) as error:
            fleet.turn(server, "dead", str(error))
        else:
            if server.state == "suspect" and not server.released and await _unharmed(fleet, server, label):
                return
            try:
                while not await _reloaded(fleet, server):
                    pass
                return
            except (RuntimeError, ValueError) as error:
                failed += 1
                log.warning("a server is not back, attempt %d: %s", failed, error)
                if failed % RELOADS == 0 or not fleet.published:
                    fleet.turn(server, "dead", str(error))
        if server.state == "dead" and fleet.restart:
            await _restarted(fleet, server, fleet.restart)
        await asyncio.sleep(_pause(failed))


async def _unharmed(fleet: Fleet, server: Server, label: str) -> bool:
    """Whether a suspect that answered still has the newest weights; then it is healthy, else stale."""
    async with fleet.publishing:
        newest = fleet.published.label if fleet.published else server.label
        if label in server.expected(server.admitted) and server.label == newest and server.proved.is_set():
            fleet.turn(server, "healthy", "")
            return True
    fleet.turn(server, "stale", f"{server.url}: came back with weights {label!r} after: {server.why}")
    return False


async def _reloaded(fleet: Fleet, server: Server) -> bool:
    """Gives `server` the newest version, that of a push in progress included; False if a newer one came meanwhile."""
    async with fleet.publishing:
        weights = fleet.published
    if weights:
        if not server.released:  # a push that failed left it paused: there SGLang keeps requests that are told to end
            await server.resume()
        await lora.load(server, weights, "abort")
    elif server.state == "poisoned" or await server.weight_label(timeout_s=PATIENCE_S) != server.label:
        raise RuntimeError(f"{server.why}, and no version was published that it could load")
    async with fleet.publishing:
        if fleet.published != weights:
            return False
        label = weights.label if weights else server.label
        server.labels[:], server.admitted = [label], 0  # nothing that it began before is waited for
        fleet.turn(server, "healthy", "")
        fleet.counts["recovered"] += 1
        return True


async def _restarted(fleet: Fleet, server: Server, restart: Restart) -> None:
    """Restarts a dead server until that succeeds: then it is stale; or its budget is used up: then it stays dead."""
    now = asyncio.get_running_loop().time
    while True:
        server.restarts = [then for then in server.restarts if now() - then < WINDOW_S]
        if len(server.restarts) >= RESTARTS:
            fleet.turn(server, "dead", server.why)
            return
        fleet.turn(server, "restarting", server.why)
        await asyncio.sleep(_pause(len(server.restarts)))
        server.restarts.append(now())
        try:
            server.url = await restart(server.url, fleet.published)
        except (OSError, RuntimeError, ValueError) as error:
            server.why = f"{server.url}: the restart failed: {error}"
            log.warning("%s", server.why)
            continue
        server.released = False
        server.limit = Limit()
        fleet.counts["restarted"] += 1
        fleet.turn(server, "stale", f"{server.url}: was restarted")
        return


async def watch(fleet: Fleet) -> None:
    """Looks at the healthy servers again and again: one that hangs breaks no connection, nor does one with a queue."""
    pauses: dict[Server, int] = {}  # of each, at the last look
    while True:
        await asyncio.sleep(BEAT_S)
        await asyncio.gather(*(_look(fleet, server) for server in fleet.healthy))
        await asyncio.gather(*(_listen(fleet, server, pauses) for server in fleet.healthy))


async def _listen(fleet: Fleet, server: Server, pauses: dict[Server, int]) -> None:
    """Has the server's limit follow what it says of its load, unless a push has lately upset its queue."""
    report = await server.reported_load(timeout_s=LOAD_S)
    before, pauses[server] = pauses.get(server), server.pauses
    fleet.hear(server, report if server.pauses == before else None)


async def _look(fleet: Fleet, server: Server) -> None:
    oldest = server.admitted
    try:
        label = await server.weight_label(timeout_s=ANSWER_S)
    except (RuntimeError, ValueError) as error:
        fleet.miss(server, str(error))
        return
    expected = server.expected(oldest)
    if label not in expected:
        fleet.fail(server, "stale", f"{server.url}: has weights {label!r}, but was given {expected}")


def _pause(attempt: int) -> float:
    return min(PAUSE_S * 2**attempt, MAX_PAUSE_S)
