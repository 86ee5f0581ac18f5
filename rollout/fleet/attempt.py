"""One attempt at a completion: a request to one server, which ends in time."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from ..errors import ServerError
from ..servers.image_tokens import TokensPrompt
from ..servers.server import Server
from ..servers.types import Part
from ..weights import lora

ABORT_S = 1.0  # between aborts of a request that is out of time


async def ask(
    prompt: TokensPrompt, sampling: Mapping[str, Any], experts: int, until: float | None, on_tokens: Callable | None,
    on_part: Callable[[Part], None] | None, every: int, server: Server, adapter: str,
) -> Part:  # fmt: skip
    """Sends a prompt to a server and returns its answer.

    Args:
      until: time of the loop's clock at which the request is aborted; None = never.
      experts, on_tokens, every: `experts_per_token`, `on_tokens` and `every` of `SGLang.generate`.
      on_part: as there; the part has no labels where it is unknown which weights sampled it.
    """
    oldest = server.admitted

    def on_unfinished(part: Part) -> None:
        assert on_part
        on_part(replace(part, labels=_labels(part, server, adapter, oldest)))

    if not server.seeded:  # in a fleet of both kinds the others need one
        sampling = {option: value for option, value in sampling.items() if option != "seed"}
    name = "" if until is None else secrets.token_hex(16)
    ending = None if until is None else asyncio.create_task(_abort_at(until, server, name))
    try:
        # The cache key is the version: a push `in_place` leaves prefixes of the old weights behind.
        return await server.api.generate(
            prompt, sampling, experts_per_token=experts, adapter=adapter, cache_key=server.label, rid=name,
            on_tokens=on_tokens, on_part=on_unfinished if on_part else None, every=every,
        )  # fmt: skip
    finally:
        if ending:
            ending.cancel()


def _labels(part: Part, server: Server, adapter: str, oldest: int) -> list[str]:
    """The labels of tokens of an answer that goes on; [] while new weights are not verified, and of a server that does
    not say them where these may be several.

    Args:
      oldest: index in `server.labels` of the version that it had when it was asked.
    """
    given = [adapter] if adapter else server.labels[oldest:]
    labels = lora.stamped(server, adapter, part).labels
    if "" in labels and len(given) == 1 and part.info.get("weight_version") in (given[0], server.base):
        labels = given * len(part.tokens)
    return labels if server.weights_verified.is_set() and set(labels) <= set(given) else []


async def _abort_at(until: float, server: Server, name: str) -> None:
    """Aborts the request `name` at a time of the loop's clock, until it is cancelled: an abort may overtake it."""
    await asyncio.sleep(until - asyncio.get_running_loop().time())
    while True:
        with contextlib.suppress(ServerError):  # the request fails alike
            await server.api.abort(name)
        await asyncio.sleep(ABORT_S)
