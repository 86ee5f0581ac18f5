"""What clients read of any HTTP server's answer: its body, up to a bound, and when to ask again."""

from __future__ import annotations

import email.utils
import math
import time
from typing import TYPE_CHECKING

from ..errors import ServerError

if TYPE_CHECKING:
    import aiohttp

LATER = (408, 425, 429, 503)  # statuses of a server, or of a proxy before it, which have done nothing
FAILED = (500, 502, 504)  # of one that did not get through the request: what it did is unknown
LONGEST_WAIT_S = 60.0  # that a server may ask for


def wait_s(retry_after: str) -> float:
    """Seconds that a Retry-After header asks for, as a number or a date (RFC 9110, 10.2.3); 0 for anything else."""
    try:
        seconds = float(retry_after)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(retry_after).timestamp() - time.time()
        except (ValueError, OverflowError):
            return 0.0
    return min(max(0.0, seconds), LONGEST_WAIT_S) if math.isfinite(seconds) else 0.0


async def read_body(answer: aiohttp.ClientResponse, where: str, most: int) -> bytearray:
    """The body of an answer; raises ServerError, which names `where` it came from, if it has more than `most` bytes."""
    data = bytearray()
    async for piece in answer.content.iter_any():
        data += piece
        if len(data) > most:
            raise ServerError(f"{where}: the answer has more than {most} bytes")
    return data
