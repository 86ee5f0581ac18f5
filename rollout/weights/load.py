"""Loads a version of the whole model into one server: stage, pause, load, resume, verify."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

from ..errors import ServerError
from ..servers.server import Server
from ..servers.types import Loaded, Published
from . import verify


async def load(server: Server, weights: Published, mode: str) -> Loaded:
    """Gives `server` the weights; generation is paused only while they are loaded. A fresh server that was started with
    them is verified alone.

    Args:
      mode: what happens to running requests, as in `SGLang.pause`.

    Raises:
      Unreached: a call could not be delivered; the server is unchanged unless it is `released` or unverified.
      ServerError, ValueError: a step failed. The server may be paused or hold new weights under the old label; its
        answers are held back.
    """
    now = asyncio.get_running_loop().time
    fresh, server.fresh = server.fresh and not server.released, False
    if fresh and server.label == weights.label:
        begun = now()
        difference = await verify.verify(server, weights)
        return Loaded(0.0, 0.0, now() - begun, difference)

    directory = (await server.stage(weights)).directory
    files = not (server.handover and weights.arrays is not None)
    if not files and server.prepare:
        await _in_process(server, server.prepare(weights))
    elif files and server.stages and not server.released:
        await server.api.stage_weights_from_disk(directory)

    paused = now()
    await server.api.pause(mode, reach_s=server.api.reach_s)
    server.pauses += 1
    await server.reclaim_memory()
    server.weights_verified.clear()
    server.labels.append(weights.label)  # tokens sampled from here on may carry it
    loading = now()
    if files:
        await server.api.update_weights_from_disk(directory, weights.label, flush_cache=mode != "in_place")
    elif server.handover:
        await _in_process(server, server.handover(server, weights, mode != "in_place"))
    server.cached.clear()  # prefixes computed with the old weights are flushed or keyed differently
    load_s = now() - loading
    reported = await server.api.weight_label(reach_s=server.api.reach_s)
    if reported != weights.label:
        raise ServerError(f"{server.url}: reports weights {reported!r} instead of {weights.label!r}")
    server.admitted = len(server.labels) - 1
    await server.api.resume()
    pause_s, resumed = now() - paused, now()

    difference = await verify.verify(server, weights)
    server.weights_verified.set()
    return Loaded(pause_s, load_s, now() - resumed, difference)


async def _in_process(server: Server, work: Awaitable[None]) -> None:
    """Awaits code that may run an engine in this process, whose RuntimeErrors (a full device) are the server's."""
    try:
        await work
    except RuntimeError as error:
        raise error if isinstance(error, ServerError) else ServerError(f"{server.url}: {error}") from error
