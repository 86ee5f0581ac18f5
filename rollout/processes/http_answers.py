"""What clients make of any HTTP server's answer: its body, up to a bound, what its status says, and asking again."""

from __future__ import annotations

import asyncio
import contextlib
import email.utils
import json
import math
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, TypeVar

import aiohttp

from ..errors import ServerError
from . import keys
from .printable import one_line, printable

LATER = (408, 425, 429, 503)  # statuses of a server, or of a proxy before it, which have done nothing
FAILED = (500, 502, 504)  # of one that did not get through the request: what it did is unknown
LONGEST_WAIT_S = 60.0  # that a server may ask for
FIRST_DELAY_S, MAX_DELAY_S = 0.1, 5.0  # between attempts, doubling
Answer = TypeVar("Answer")


class Unreached(ServerError):
    """The server did not accept the request, so it is safe to resend."""


class Busy(Unreached):
    """The server is up, but accepts no requests at the moment; `wait_s` is how long it asks to wait, 0 = unknown."""

    wait_s = 0.0


class Broken(ServerError):
    """The connection ended before the whole answer arrived; what the server did is unknown."""


class Failed(ServerError):
    """The server, or a proxy before it, answered that it failed; what the server did is unknown."""


UNSURE = Unreached, Broken, Failed  # after which a request that changes nothing may be made again


def backoff(attempt: int) -> float:
    """Seconds to wait after failed attempt number `attempt`, counted from 0."""
    return min(FIRST_DELAY_S * 2**attempt, MAX_DELAY_S)


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


@contextlib.contextmanager
def connection_errors(where: str) -> Iterator[None]:
    """Converts aiohttp's errors to Unreached and Broken."""
    try:
        yield
    except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
        cause = error.__cause__  # without aiohttp's own words: the address, which `where` has, and "ssl:default"
        why = getattr(cause, "strerror", None) or str(cause or "") or error
        raise Unreached(f"{where}: cannot connect ({why})") from error
    except aiohttp.ClientError as error:
        why = one_line(error) or type(error).__name__
        raise Broken(f"{where}: connection broke ({why})") from error


def check_taken(where: str, reply: aiohttp.ClientResponse, data: bytes | bytearray) -> None:
    """Raises Busy if an answer's status says that the server has not taken the request; ServerError for a redirect,
    which is not followed."""
    if reply.status in LATER:
        busy = Busy(f"{where}: HTTP {reply.status}: {beginning(data)}")
        busy.wait_s = wait_s(reply.headers.get("Retry-After", ""))
        raise busy
    if 300 <= reply.status < 400:
        target = keys.redacted(reply.headers.get("Location", "nowhere"))
        raise ServerError(
            f"{where}: HTTP {reply.status}: it redirects to {target!r:.200}; give the server's own address"
        )


def parsed(where: str, data: str | bytes | bytearray) -> Any:
    """The JSON of an answer. Raises ServerError if it is nested too deeply or not UTF-8, ValueError if it is none."""
    try:
        return json.loads(data)
    except RecursionError:
        raise ServerError(f"{where}: the answer is nested too deeply") from None
    except UnicodeDecodeError as error:
        raise ServerError(f"{where}: the answer is not UTF-8 ({error.reason} at byte {error.start})") from None


def beginning(data: bytes | bytearray) -> str:
    """The beginning of an answer, for an error."""
    return printable(bytes(data[:200]).decode(errors="replace"))


async def again(
    call: Callable[[], Awaitable[Answer]], errors: tuple[type[ServerError], ...], reach_s: float | None
) -> Answer:
    """What `call` returns, called again after one of `errors` while that begins within `reach_s` seconds; None = for
    ever."""
    attempt, clock = 0, asyncio.get_running_loop().time
    began = clock()
    while True:
        try:
            return await call()
        except errors as error:
            delay = max(backoff(attempt), getattr(error, "wait_s", 0.0))
            if reach_s is not None and clock() - began + delay > reach_s:
                raise
        await asyncio.sleep(delay)
        attempt += 1
