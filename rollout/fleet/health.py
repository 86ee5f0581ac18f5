"""Recovers unhealthy servers, one task per server; a server gets no requests meanwhile.

    healthy -> suspect -> healthy                       a connection failed, but it answers and has its weights
               suspect -> dead -> restarting -> stale   it does not answer, and we can restart it
    healthy -> weights_unknown | stale -> healthy       it loads the published version in full
    healthy -> stale -> healthy                         a canary drifts (canary.py): its prefix cache is flushed, or it
                                                        loads the published version in full
               stale -> dead -> restarting -> stale     neither helps, and we can restart it
               stale -> dead                            another run keeps giving it other weights, or it keeps
                                                        sampling with others than it loads
    dead -> healthy                                     it answers again and has loaded

A server always loads the newest published version before it gets a request.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import itertools
import logging

from ..errors import ServerError
from ..processes.turns import turn
from ..servers.concurrency import Limit
from ..servers.labels import version_of
from ..servers.server import Server
from ..servers.types import Reported
from ..weights import load, lora, verify
from . import canary
from .fleet import Fleet, Restart, labels_of

log = logging.getLogger(__name__)

IDLE_CHECKS = 3  # in a row after which a server that runs nothing is named
TAKEN = 3  # times that a server is taken back from another run: two runs on one would go on for ever
FLUSHES = 5  # attempts, a second apart: servers refuse while requests end
STRANGE = 3  # times in a row that a server loads its weights again because it samples with others

Idle = collections.Counter[Server]  # at how many checks in a row it had requests and ran none


async def recover(fleet: Fleet, server: Server) -> None:
    """Returns when `server` is healthy, or it has given up on it; one that does not answer is retried."""
    try:
        await _recover(fleet, server)
    finally:
        server.reads = ()


async def _recover(fleet: Fleet, server: Server) -> None:
    timeouts = fleet.timeouts
    patience_s = timeouts.lost_own_s if fleet.restart else timeouts.lost_s
    failed, after = 0, "load"
    if server.drifts and await _flush_helps(fleet, server):
        return
    if server.strange > STRANGE:
        why = f"{server.why}, after it loaded them {STRANGE} times in a row; give the run another server"
        fleet.set_state(server, "dead", why)
        return
    while True:
        await fleet.not_offloaded.wait()
        try:
            now = await server.api.reported_weights(timeout_s=patience_s)
        except (ServerError, ValueError) as error:
            fleet.set_state(server, "dead", str(error))
        else:
            foreign = f"another run has given it weights {now.label!r}" if _is_foreign(server, now) else ""
            foreign = foreign or server.replaced(now)
            if foreign and server.taken >= TAKEN:
                why = f"{foreign}, after this run took it back {TAKEN} times; give each run servers of its own"
                fleet.set_state(server, "dead", f"{server.url}: {why}")
                return
            if server.state == "suspect" and not server.released and await _is_unharmed(fleet, server, now):
                return
            try:
                while not await _reload(fleet, server, after):
                    pass
                server.taken += bool(foreign)
                return
            except canary.Drift as error:
                fleet.set_state(server, "dead", str(error))
                if after == "restart" or not fleet.restart:
                    return
                after = "restart"
            except (ServerError, ValueError) as error:
                failed += 1
                log.warning("a server is not back, attempt %d: %s", failed, error)
                if failed % timeouts.max_loads == 0 or not fleet.published:
                    fleet.set_state(server, "dead", str(error))
        if server.state == "dead" and fleet.restart:
            await _restart(fleet, server, fleet.restart)
        await asyncio.sleep(timeouts.backoff(failed))


def _is_foreign(server: Server, now: Reported) -> bool:
    return version_of(now.label) >= 0 and now.label not in server.given


async def _is_unharmed(fleet: Fleet, server: Server, now: Reported) -> bool:
    """Marks a suspect that answered healthy if it still has the newest weights, else stale."""
    async with fleet.publishing:
        newest = fleet.published.label if fleet.published else server.label
        has = now.label in server.expected(server.admitted) and not server.replaced(now)
        if has and server.label == newest and server.weights_verified.is_set():
            fleet.set_state(server, "healthy", "")
            return True
    fleet.set_state(server, "stale", f"{server.url}: came back with weights {now.label!r} after: {server.why}")
    return False


async def _flush_helps(fleet: Fleet, server: Server) -> bool:
    """Flushes the prefix cache of a server that drifts; whether it no longer does, and is healthy."""
    await fleet.not_offloaded.wait()
    weights, why = fleet.published, f"{server.url}: has not the version, or that has no canaries"
    for attempt in range(FLUSHES):
        try:
            if attempt:
                await asyncio.sleep(1.0)
            await server.api.flush_cache()
            if weights and weights.canaries and await canary.prove(server, weights, "flush"):
                now = await server.api.reported_weights(timeout_s=fleet.timeouts.lost_s)
                return await _is_unharmed(fleet, server, now)
            break
        except ValueError as error:  # requests are ending
            why = str(error)
        except ServerError as error:
            why = str(error)
            break
    log.warning("a flush of a server's prefix cache did not help: %s", why)
    return False


async def _reload(fleet: Fleet, server: Server, after: str) -> bool:
    """Loads the newest version, that of a push in progress included; False if a newer one appeared meanwhile.

    Raises as `load.load`, and Drift if it still drifts `after` this.
    """
    async with fleet.publishing:
        weights = fleet.published
    server.reads = labels_of(weights)
    if weights:
        if not server.released:  # a failed push may have left it paused, and paused SGLang does not abort requests
            await server.api.resume()
        if weights.base:
            server.base = "" if server.drifts else server.base  # what is below adapters is loaded, too
            await lora.load(server, weights, weights.base, "abort")
        else:
            await load.load(server, weights, "abort")
        if server.drifts and weights.canaries:
            await canary.prove(server, weights, after)
    elif server.state == "weights_unknown" or not await _has_first(fleet, server):
        raise ServerError(f"{server.why}, and no version was published that it could load")
    async with fleet.publishing:
        if fleet.published != weights:
            return False
        label = weights.label if weights else server.label
        server.labels[:], server.admitted = [label], 0  # nothing sampled before the failure is still awaited
        fleet.set_state(server, "healthy", "")
        fleet.counts["recovered"] += 1
        return True


async def _has_first(fleet: Fleet, server: Server) -> bool:
    """Whether a server has the weights that it had when it was met."""
    now = await server.api.reported_weights(timeout_s=fleet.timeouts.lost_s)
    return now.label == server.label and not server.replaced(now)


async def _restart(fleet: Fleet, server: Server, restart: Restart) -> None:
    """Restarts a dead server until that succeeds, which makes it stale, or it has used up its restarts."""
    now, timeouts = asyncio.get_running_loop().time, fleet.timeouts
    for attempt in itertools.count():
        server.restarts = [then for then in server.restarts if now() - then < timeouts.restart_window_s]
        if len(server.restarts) >= timeouts.max_restarts:
            fleet.set_state(server, "dead", server.why)
            return
        fleet.set_state(server, "restarting", server.why)
        await asyncio.sleep(timeouts.backoff(attempt))
        server.restarts.append(now())
        weights = fleet.published
        server.reads = labels_of(
            weights
        )  # it reads them for as long as it takes to start, whatever is pushed meanwhile
        try:
            server.api.url = await restart(server.url, weights)
        except (OSError, RuntimeError, ValueError) as error:
            server.why = f"{server.url}: the restart failed: {error}"
            log.warning("%s", server.why)
            continue
        server.released = False
        server.limit = Limit()
        fleet.counts["restarted"] += 1
        fleet.set_state(server, "stale", f"{server.url}: was restarted")
        return


async def watch(fleet: Fleet) -> None:
    """Checks the healthy servers periodically: a server that hangs breaks no connection, nor does a long queue."""
    pauses: dict[Server, int] = {}  # of each server at the last check
    idle = Idle()
    while True:
        await asyncio.sleep(fleet.timeouts.heartbeat_s)
        await asyncio.gather(*(_check(fleet, server) for server in fleet.healthy))
        await asyncio.gather(*(_read_load(fleet, server, pauses, idle) for server in fleet.healthy))


async def _read_load(fleet: Fleet, server: Server, pauses: dict[Server, int], idle: Idle) -> None:
    """Adjusts the server's limit to its load report, unless a push has just disturbed its queue; says if it runs
    nothing. It is not resumed: another run may be loading weights into it."""
    await turn()
    report = await server.api.reported_load(timeout_s=fleet.timeouts.load_report_s)
    before, pauses[server] = pauses.get(server), server.pauses
    report = report if server.pauses == before else None
    fleet.on_load_report(server, report)
    idle[server] = idle[server] + 1 if report and server.load and not report.running else 0
    if idle[server] == IDLE_CHECKS:
        log.warning(
            "%s: has %d requests of this run and ran none at the last %d checks: something else may have paused it; "
            "POST /continue_generation resumes it", server.url, server.load, IDLE_CHECKS,
        )  # fmt: skip


async def _check(fleet: Fleet, server: Server) -> None:
    await turn()
    oldest = server.admitted
    try:
        now = await server.api.reported_weights(timeout_s=fleet.timeouts.heartbeat_answer_s)
    except (ServerError, ValueError) as error:
        fleet.mark_suspect(server, str(error))
        return
    expected = server.expected(oldest)
    if now.label not in expected:
        fleet.fail(server, "stale", f"{server.url}: has weights {now.label!r}, but was given {expected}")
        return
    why = server.replaced(now)
    with contextlib.suppress(ServerError, ValueError):  # whether it answers at all is known already
        why = why or await lora.replaced(server, timeout_s=fleet.timeouts.heartbeat_answer_s)
        if not (why or now.source):  # it does not say where its weights are from
            why = await verify.replaced(server, timeout_s=fleet.timeouts.heartbeat_answer_s)
    if why:
        fleet.fail(server, "stale", f"{server.url}: {why}")
