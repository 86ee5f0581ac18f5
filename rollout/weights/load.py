"""Loads a version of the whole model into one server: stage, pause, load, resume, verify."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterator

from ..errors import ServerError
from ..servers.server import Server
from ..servers.sglang import SGLang
from ..servers.types import Loaded, Published, Reported
from ..servers.vllm import VLLM
from . import verify

log = logging.getLogger(__name__)

PROBE_S = 60.0  # for the answer to the probe

_unproved: set[str] = set()  # addresses of servers of which this was said


async def load(server: Server, weights: Published, mode: str) -> Loaded:
    """Gives `server` the weights; generation is paused only while they are loaded.

    A fresh server that was started with these weights is only verified.

    Args:
      mode: what happens to running requests, as in `SGLang.pause`; on a server with adapters they are aborted, because
        a request that began with an adapter must not continue on other weights.

    Raises:
      Unreached: a call could not be delivered; the server is unchanged unless it is `released` or unverified.
      ServerError, ValueError: a step failed. The server may be paused or hold new weights under the old label; its
        answers are held back.
    """
    now = asyncio.get_running_loop().time
    holds, server.fresh = server.fresh and not server.released and server.label == weights.label, False
    pause_s = load_s = 0.0
    if not holds:
        directory = (await server.stager.stage(weights)).directory if server.stager else weights.directory
        files = not (server.handover and weights.arrays is not None)
        if files and server.stages and isinstance(server.api, SGLang) and not server.released:
            await server.api.stage_weights_from_disk(directory)

        if server.reported and server.state == "healthy":  # else the weights of a push replace others that nobody named
            why = server.replaced(await server.api.reported_weights(reach_s=server.api.reach_s))
            if why:
                log.warning("%s: %s; tokens since the last heartbeat may be theirs", server.url, why)
        paused = now()
        mode = "abort" if server.adapters else mode
        await server.api.pause(mode, reach_s=server.api.reach_s)
        server.pauses += 1
        await server.reclaim_memory()
        server.weights_verified.clear()
        server.given.add(weights.label)
        server.labels.append(weights.label)  # tokens sampled from here on may carry it
        server.adapters, server.folders, server.reported, server.read = [], {}, None, None
        server.base = ""  # else an adapter could be loaded over a base whose load ended half-way
        loading = now()
        if files:
            await server.api.update_weights_from_disk(directory, weights.label, flush_cache=mode != "in_place")
        elif server.handover:
            with _engine_errors(server):
                await server.handover(server, weights, mode != "in_place")
        server.cached.clear()  # prefixes computed with the old weights are flushed or keyed differently
        load_s = now() - loading
        server.reported = _checked(server, await server.api.reported_weights(reach_s=server.api.reach_s), weights.label)
        server.base, server.admitted = "", len(server.labels) - 1
        await server.api.resume()
        pause_s = now() - paused

    resumed = now()
    answer = await server.api.read(weights.probe.tokens, timeout_s=PROBE_S) if weights.probe else None
    ranks = await server.api.checksums()
    if answer or ranks:  # else another run's weights, loaded meanwhile, would be taken for a fault, or for these
        server.reported = _checked(server, await server.api.reported_weights(reach_s=server.api.reach_s), weights.label)
    difference = verify.probe_difference(server, weights.probe, answer) if weights.probe and answer else None
    if ranks:
        verify.compare_checksums(server, weights, ranks)
    elif isinstance(server.api, VLLM) and not weights.probe and server.url not in _unproved:
        _unproved.add(server.url)
        log.warning("%s: nothing proves its weights, without checksums and a probe; give --push.tolerance", server.url)
    server.weights_verified.set()
    return Loaded(pause_s, load_s, now() - resumed, difference)


def _checked(server: Server, now: Reported, label: str) -> Reported:
    """What the server says of its weights; raises ServerError if they have another label, or were replaced."""
    if now.label != label:
        raise ServerError(f"{server.url}: reports weights {now.label!r} instead of {label!r}")
    if why := server.replaced(now):
        raise ServerError(f"{server.url}: {why}")
    return now


@contextlib.contextmanager
def _engine_errors(server: Server) -> Iterator[None]:
    """Converts RuntimeErrors (a full device, for example) of an engine in this process to ServerError."""
    try:
        yield
    except RuntimeError as error:
        raise error if isinstance(error, ServerError) else ServerError(f"{server.url}: {error}") from error
