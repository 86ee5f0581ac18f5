"""The body of a request, and its parsed form, common to the gateway's APIs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request

from ..chat.fields import Refused
from ..processes import http_limits as limits


async def read_body(http: Request, most: limits.Limits) -> dict[str, Any]:
    """Reads the request's body, a JSON object; {} if there is none. Raises HTTPException, Refused."""
    if not await http.body():
        return {}
    try:
        return await limits.read_json(http, most)
    except ValueError as error:
        raise Refused("body", str(error).removeprefix("the body ")) from None


@dataclass(frozen=True)
class Ask:
    """A parsed request: for `Session.ask` if it has messages, for `Session.complete` if it has prompts.

    Attributes:
      body: the request's body.
      n: answers per prompt.
      prompts: token ids, if there are no messages.
    """

    body: Mapping[str, Any]
    messages: Sequence[Mapping[str, Any]] = ()
    tools: Sequence[Mapping[str, Any]] = ()
    template: Mapping[str, Any] = field(default_factory=dict)
    sampling: Mapping[str, Any] = field(default_factory=dict)
    n: int = 1
    stream: bool = False
    prompts: Sequence[Sequence[int]] = ()
