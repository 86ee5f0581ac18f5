"""Servers on the trainer's devices, in turns: they rest, without weights and caches, while it computes.

    rest(fleet): healthy -> resting      paused, what runs is put back, memory is released
    the next push: resting -> healthy    memory is taken again, the version loaded and verified, what waits goes on

Meanwhile requests wait, and no server is restarted or loaded: that would take the memory which the trainer was given.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from .server import Server, Unreached

if TYPE_CHECKING:
    from .client import Fleet

log = logging.getLogger(__name__)

POLL_S = 0.05
END_S = 20.0  # that a server has for taking its memory again when the run ends


async def rest(fleet: Fleet) -> float:
    """Has every server release its memory, until the next push; returns the seconds that took.

    Servers that are just being brought back are waited for; dead ones are left alone till that push. One that fails to
    release its memory is poisoned; it may hold it still. While they rest already nothing is done.

    Raises RuntimeError if no server is left.
    """
    now = asyncio.get_running_loop().time
    begun = now()
    if not fleet.awake.is_set():
        return 0.0
    while any(server.state not in ("healthy", "dead", "leaving") for server in fleet.servers):
        fleet.hope()
        await asyncio.sleep(POLL_S)
    fleet.awake.clear()
    for server in fleet.servers:
        if server.tending:  # on from the beginning, once the fleet is awake
            server.tending.cancel()
            await asyncio.wait({server.tending})
            server.tending = None
            fleet.fail(server, "dead", server.why)
    await asyncio.gather(*(_rest(fleet, server) for server in fleet.healthy))
    return now() - begun


async def _rest(fleet: Fleet, server: Server) -> None:
    fleet.turn(server, "resting", "")
    try:
        await server.release_memory()
    except Unreached as error:
        fleet.miss(server, str(error))
    except (ValueError, RuntimeError) as error:
        fleet.fail(server, "poisoned", f"{server.url}: did not release its memory: {error}")


async def end(fleet: Fleet) -> None:
    """Lets the servers that rest take their memory again. They stay paused: nobody has given them weights."""
    await asyncio.gather(*(_end(server) for server in fleet.servers if server.state == "resting"))


async def _end(server: Server) -> None:
    try:
        await server.reclaim(timeout_s=END_S)
    except (ValueError, RuntimeError) as error:
        log.warning("%s: did not take its memory again: %s", server.url, error)
