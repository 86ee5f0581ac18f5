"""Offloads servers that share the trainer's devices: they release their memory while it computes.

    offload(fleet): healthy -> offloaded      generation pauses, requests are requeued, memory is released
    the next push:  offloaded -> healthy      memory is resumed, the version loaded and verified, requests go on

Meanwhile new requests wait, and no server is restarted or loaded, which would take the trainer's memory.
"""

from __future__ import annotations

import asyncio
import logging

from ..errors import ServerError
from ..processes.http_answers import Unreached
from ..servers.server import Server
from .fleet import Fleet

log = logging.getLogger(__name__)

POLL_S = 0.05


async def offload(fleet: Fleet) -> float:
    """Makes every server release its memory until the next push; returns the seconds it took.

    Waits for servers that are being recovered and skips dead ones. A server that fails to release its memory becomes
    `weights_unknown` and may still hold it. Does nothing while servers are offloaded already.

    Raises ServerError if no server is left.
    """
    now = asyncio.get_running_loop().time
    begun = now()
    if not fleet.not_offloaded.is_set():
        return 0.0
    while any(server.state not in ("healthy", "dead", "leaving") for server in fleet.servers):
        fleet.raise_if_unrecoverable()
        await asyncio.sleep(POLL_S)
    fleet.not_offloaded.clear()
    for server in fleet.servers:
        if server.recovery:  # starts over after the next push
            server.recovery.cancel()
            await asyncio.wait({server.recovery})
            server.recovery = None
            fleet.fail(server, "dead", server.why)
    await asyncio.gather(*(_offload(fleet, server) for server in fleet.healthy))
    return now() - begun


async def _offload(fleet: Fleet, server: Server) -> None:
    fleet.set_state(server, "offloaded", "")
    try:
        await server.release_memory()
    except Unreached as error:
        fleet.mark_suspect(server, str(error))
    except (ValueError, ServerError) as error:
        fleet.fail(server, "weights_unknown", f"{server.url}: did not release its memory: {error}")


async def resume_all(fleet: Fleet) -> None:
    """Gives offloaded servers their memory back at the end of a run. They stay paused, for they have no weights."""
    await asyncio.gather(*(_resume(fleet, server) for server in fleet.servers if server.state == "offloaded"))


async def _resume(fleet: Fleet, server: Server) -> None:
    try:
        await server.reclaim_memory(timeout_s=fleet.timeouts.resume_memory_s)
    except (ValueError, ServerError) as error:
        log.warning("%s: did not take its memory again: %s", server.url, error)
