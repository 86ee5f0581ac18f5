"""The state in which each turn of an episode began, for credit by state (`core.advantages.by_state`)."""

from __future__ import annotations

import contextvars
import json
from collections.abc import Mapping
from typing import Any

import xxhash

from ..types import Generate, Sample, Workflow
from .observations import with_array
from .trajectory import Interaction

wanted: contextvars.ContextVar[bool] = contextvars.ContextVar("states", default=False)


async def marked(workflow: Workflow, generate: Generate, row: Mapping[str, Any]) -> list[Sample]:
    """A workflow whose samples have the "target" array `state` i32[n]: the number of the state in which a sampled
    token's turn began, 0 = none; bind `workflow` with `functools.partial`.

    Raises:
      ValueError: the workflow makes samples without that array.
    """
    return await with_array("state", "--objective.advantage.state-coef", wanted, workflow, generate, row)


def number(x: Interaction) -> int:
    """The number of an interaction's state, an i32 other than 0: a hash of the messages behind the answer before, which
    are what the environment showed last; of a prompt of tokens, of those behind it."""
    if x.messages:
        new = x.messages[len(x.parent.conversation) if x.parent else 0 :]
        text = json.dumps([*map(_without_ids, new)], sort_keys=True, default=lambda image: image.hash)
    else:
        text = str(x.prompt[len(x.parent.tokens) if x.parent and x.extends else 0 :])
    return xxhash.xxh32_intdigest(text.encode()) - 2**31 or 1


def _without_ids(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message without the ids of calls, which are drawn anew in each episode."""
    calls = [{name: x for name, x in call.items() if name != "id"} for call in message.get("tool_calls") or ()]
    rest = {name: x for name, x in message.items() if name not in ("tool_call_id", "tool_calls")}
    return rest | ({"tool_calls": calls} if calls else {})
