"""Reads the body of a request."""

from __future__ import annotations

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
