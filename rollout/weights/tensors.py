"""Pushes tensors over HTTP to servers that have neither access to the trainer's files nor a stager.

SGLang answers "success" to names that it does not know, so the result has to be verified (verify.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

from ..servers.server import Handover, Server
from ..servers.types import Published
from ..servers.vllm import VLLM


def handover(messages: Callable[[Any], Iterator[tuple[str, bool]]]) -> Handover:
    """Makes a handover that sends a version's tensors in messages of some hundred MB.

    Args:
      messages: yields a version's arrays as serialised messages, each with whether it is the last
        (`adapters.torch.messages`).
    """

    async def send(server: Server, weights: Published, flush_cache: bool) -> None:
        if isinstance(server.api, VLLM):
            raise ValueError(f"{server.url}: vLLM takes no tensors over HTTP; push by --push.way disk")
        await server.api.begin_weight_update()
        parts, last = messages(weights.arrays), False
        while not last:
            part, last = await asyncio.to_thread(next, parts)
            label = weights.label if last else ""
            await server.api.update_weights_from_tensor([part] * server.ranks, label=label, flush_cache=flush_cache)
        await server.api.end_weight_update()

    return send
