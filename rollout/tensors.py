"""A push of tensors over HTTP, to servers that neither see the trainer's files nor have a stager beside them.

SGLang takes tensors between `/begin_weight_update` and `/end_weight_update`, here in messages of some hundred MB. It
answers "success" to names that it does not know, so what it holds afterwards has to be proved (proof.py).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from .server import REACH_S, Handover, Published, Server

BEGIN, END, UPDATE = "/begin_weight_update", "/end_weight_update", "/update_weights_from_tensor"
MESSAGE_S = 600.0
CONTROL_S = 60.0


def handover(messages: Callable[[Any], Iterator[tuple[str, bool]]]) -> Handover:
    """What gives a server the tensors of a version.

    Args:
      messages: a version's arrays as messages of `/update_weights_from_tensor`, and whether each is the last
        (`adapters.torch.messages`).
    """

    async def give(server: Server, weights: Published, flush_cache: bool) -> None:
        with contextlib.suppress(ValueError):  # refused where no session was left open, as it should be
            await server.call("POST", END, {}, timeout_s=CONTROL_S, reach_s=REACH_S)
        await _agreed(server, BEGIN, {}, CONTROL_S)
        parts, last = messages(weights.arrays), False
        while not last:
            part, last = await asyncio.to_thread(next, parts)
            body = {"serialized_named_tensors": [part] * server.ranks, "flush_cache": flush_cache}
            await _agreed(server, UPDATE, body | ({"weight_version": weights.label} if last else {}), MESSAGE_S)
        await _agreed(server, END, {}, CONTROL_S)

    return give


async def _agreed(server: Server, path: str, body: dict, timeout_s: float) -> None:
    answer = await server.call("POST", path, body, timeout_s=timeout_s, reach_s=REACH_S)
    if answer.get("success") is not True:
        raise RuntimeError(f"{server.url}{path}: {answer.get('message') or answer}")
