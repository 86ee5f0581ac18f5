"""JSON calls to one HTTP server, each with an overall deadline.

A call is retried only while it cannot have had an effect: the connection was never made, or the server's status says
that it did not take the request (`LATER`). Anything else is left to the caller.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass

import aiohttp

from ..errors import ServerError
from ..processes import keys
from ..processes.http_answers import (
    FAILED,
    UNSURE,
    Broken,
    Failed,
    Unreached,
    again,
    beginning,
    check_taken,
    connection_errors,
    parsed,
    read_body,
)
from ..processes.printable import printable
from ..processes.turns import turn

LARGEST_ERROR = 2**20  # bytes of an answer with an error
LARGEST = 2**26  # bytes of an answer, if the call says nothing else
SHORT = 2**12  # bytes of an answer that takes no time to read


class Missing(ValueError):
    """The server has no such route (404)."""


@dataclass(eq=False)
class Endpoint:
    """One HTTP server.

    Attributes:
      url: without a trailing slash.
      reach_s: how long calls that change something try to reach the server.
      key_variable: environment variable with the server's key, as `keys.read` reads it; "" = no key.
    """

    url: str
    http: aiohttp.ClientSession
    reach_s: float = 5.0
    key_variable: str = ""

    def __post_init__(self):
        key = keys.read(self.key_variable) if self.key_variable else None
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}

    async def call(
        self,
        method: str,
        path: str,
        body: dict | None = None,
        *,
        timeout_s: float | None = None,
        reach_s: float | None = None,
        must_succeed: bool = False,
        on_event: Callable[[dict], None] | None = None,
        most: int = LARGEST,
    ) -> dict:
        """Makes one call; with `timeout_s` it is retried for that long while it cannot be delivered.

        A GET changes nothing, so it is also retried after a broken connection, and while a proxy answers for a server
        that starts.

        Args:
          must_succeed: for routes that answer failures with 200, too: the answer must have `success` true.
          on_event: streams the answer: each event is passed to this function, the last one is returned.
          most: bytes of the answer, or of each event.

        Raises:
          ValueError: a 4xx answer, with the server's message; Missing if that is 404.
          Unreached: not delivered within `reach_s` seconds.
          ServerError: any other failure.
        """
        where, last = f"{self.url}{path}", f"{self.url}{path}: no answer"
        retried = UNSURE if method == "GET" else (Unreached,)

        async def once() -> dict:
            nonlocal where, last
            where = f"{self.url}{path}"  # a restart moves the server
            try:
                with connection_errors(where):
                    async with self.http.request(
                        method, where, json=body, headers=self._headers, allow_redirects=False
                    ) as reply:
                        if reply.status == 401 and self.key_variable:
                            raise ValueError(self._key_refused(where))
                        return await _answer(where, reply, on_event, most)
            except UNSURE as error:
                last = str(error)
                raise

        try:
            async with asyncio.timeout(timeout_s):
                answer = await (once() if timeout_s is None else again(once, retried, reach_s))
        except TimeoutError:
            if timeout_s is None:
                raise
            raise ServerError(f"{last}; gave up after {timeout_s:g} s") from None
        if must_succeed and answer.get("success") is not True:
            said = answer.get("error_message") or answer.get("message") or answer
            raise ServerError(f"{where}: {' '.join(str(said).split()):.500}")
        return answer

    def _key_refused(self, where: str) -> str:
        name, wrong = self.key_variable, "is wrong" if self._headers else "is missing"
        return f"{where}: HTTP 401: the key {wrong}; set {name} to the right one, or {name}_FILE to a file with it"


async def _answer(
    where: str, reply: aiohttp.ClientResponse, on_event: Callable[[dict], None] | None, most: int
) -> dict:
    """Parses a response to an object; raises as `Endpoint.call`."""
    status = reply.status
    if on_event and status == 200:
        return await _last_event(where, reply, on_event, most)
    data = await read_body(reply, where, most if status == 200 else LARGEST_ERROR)
    if len(data) > SHORT:
        await turn()
    check_taken(where, reply, data)
    page = _is_page(data, status)  # a proxy's, not the server's own
    if 400 <= status < 500 and not (page and reply.method == "POST"):
        raise (Missing if status == 404 else ValueError)(f"{where}: HTTP {status}: {_message(data)}")
    if status in FAILED or (status >= 400 and page):
        raise Failed(f"{where}: HTTP {status}: {beginning(data)}")
    if status != 200:
        raise ServerError(f"{where}: HTTP {status}: {beginning(data)}")
    try:
        answer = parsed(where, data)
    except ValueError:  # some routes answer with plain text
        if page:
            raise Failed(f"{where}: the answer must be JSON, got a page: {beginning(data)}") from None
        return {"message": beginning(data)}
    if answer is None:  # others with nothing
        return {}
    if not isinstance(answer, dict):
        raise ServerError(f"{where}: the answer must be a JSON object, got {beginning(data)}")
    return answer


async def _last_event(where: str, reply: aiohttp.ClientResponse, on_event: Callable[[dict], None], most: int) -> dict:
    """The last of the server-sent events, each of which repeats everything generated so far."""
    last, rest = None, bytearray()
    async for piece in reply.content.iter_any():
        rest += piece
        if len(rest) > most:
            raise ServerError(f"{where}: an event has more than {most} bytes")
        if b"\n" not in piece:
            continue
        await turn()
        *lines, left = bytes(rest).split(b"\n")
        rest = bytearray(left)
        for line in lines:
            data = line.removeprefix(b"data:").strip()
            if data == b"[DONE]" and last:
                return last
            if not data or not line.startswith(b"data:"):
                continue
            try:
                last = json.loads(data)
            except (ValueError, RecursionError):
                raise ServerError(f"{where}: an event is not JSON: {beginning(data)}") from None
            if not isinstance(last, dict):
                raise ServerError(f"{where}: an event must be a JSON object, got {beginning(data)}")
            if "error" in last:
                error = last["error"]
                kind = ValueError if isinstance(error, dict) and error.get("code") == 400 else ServerError
                raise kind(f"{where}: {_message(data)}")
            on_event(last)
    raise Broken(f"{where}: the stream ended before its answer")


def _is_page(data: bytes | bytearray, status: int) -> bool:
    """Whether an answer is HTML, or an error in plain text: servers write JSON, or nothing."""
    text = bytes(data).strip()
    if text.startswith(b"<") or status < 400 or not text:
        return text.startswith(b"<")
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return True
    return False


def _message(data: bytes | bytearray) -> str:
    """The message in an error body, in either of the two formats that servers use."""
    text = bytes(data).decode(errors="replace")
    try:
        body = json.loads(text)
        error = body.get("error", body)
        message = error.get("message", text) if isinstance(error, dict) else error
    except (ValueError, AttributeError, RecursionError):
        message = text
    return printable(" ".join(str(message).split())[:500])
