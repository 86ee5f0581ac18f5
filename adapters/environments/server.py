"""Requests of one episode to a server of environments, over HTTP."""

from __future__ import annotations

from typing import Any

import aiohttp

from ...rollout.errors import ServerError
from ...rollout.processes.http_answers import (
    Broken,
    Busy,
    Unreached,
    again,
    beginning,
    check_taken,
    connection_errors,
    parsed,
    read_body,
)

AGAIN_S = 30.0  # for which a server that takes no requests is asked again
LARGEST = 2**27  # bytes of an answer


class Server:
    """A server, with a connection for one episode.

    A request that it says it has not taken (`http_answers.LATER`) is made again for AGAIN_S; one that begins an episode
    also while nothing listens there. In the middle of one, where its sessions may be gone, that is a ServerError, as
    are a connection that breaks, a proxy's answer (502, 504), a redirect, which is not followed, and more than LARGEST
    bytes.

    Attributes:
      url: its address, without a slash at the end.
      headers: of each request.
    """

    def __init__(self, url: str):
        self.url, self.headers = url.rstrip("/"), dict[str, str]()
        self._http: aiohttp.ClientSession | None = None

    async def text(self, method: str, path: str, content: Any = None, *, begins: bool = False) -> tuple[int, str]:
        """The status and the text of an answer."""
        where = f"{self.url}/{path}"
        how: dict[str, Any] = dict(json=content, headers=self.headers, allow_redirects=False)

        async def once() -> tuple[int, str]:
            with connection_errors(where):
                async with self._session().request(method, where, **how) as reply:
                    data = await read_body(reply, where, LARGEST)
            check_taken(where, reply, data)
            if reply.status in (502, 504):
                raise Broken(f"{where}: HTTP {reply.status}: {beginning(data)}")
            try:
                return reply.status, data.decode()
            except UnicodeDecodeError as error:
                raise ServerError(f"{where}: the answer is not UTF-8 ({error.reason} at byte {error.start})") from None

        return await again(once, (Unreached,) if begins else (Busy,), AGAIN_S)

    async def json(self, method: str, path: str, content: Any = None, *, begins: bool = False) -> Any:
        """The JSON of an answer. Raises RuntimeError if its status is not 200, ServerError if it is no JSON."""
        return self.parsed(path, await self._right(method, path, content, begins))

    async def events(self, path: str, content: Any, *, begins: bool = False) -> list[tuple[str, str]]:
        """The server-sent events of a POST: (event, data) of each. Raises RuntimeError if its status is not 200."""
        made, event, data = list[tuple[str, str]](), "", list[str]()
        for line in (await self._right("POST", path, content, begins)).split("\n"):
            field, _, value = line.removesuffix("\r").partition(":")
            value = value.removeprefix(" ")
            if field == "event":
                event = value
            elif field == "data":
                data.append(value)
            elif not field and not value and event:
                made.append((event, "\n".join(data)))
                event, data = "", []
        return made

    async def socket(self, path: str) -> aiohttp.ClientWebSocketResponse:
        """A WebSocket, which begins an episode."""
        where = f"{self.url}/{path}"

        async def once() -> aiohttp.ClientWebSocketResponse:
            with connection_errors(where):
                try:
                    return await self._session().ws_connect(where, max_msg_size=LARGEST)
                except aiohttp.WSServerHandshakeError as error:
                    raise Unreached(f"{where}: HTTP {error.status}: there is no WebSocket") from error

        return await again(once, (Unreached,), AGAIN_S)

    def parsed(self, path: str, text: str) -> Any:
        """The JSON of a text from `path`; raises ServerError if it is none."""
        where = f"{self.url}/{path}"
        try:
            return parsed(where, text)
        except ValueError:
            raise ServerError(f"{where}: the answer must be JSON, got {beginning(text[:200].encode())!r}") from None

    async def close(self) -> None:
        if self._http:
            await self._http.close()

    async def _right(self, method: str, path: str, content: Any, begins: bool) -> str:
        status, text = await self.text(method, path, content, begins=begins)
        if status != 200:
            raise RuntimeError(f"{self.url}/{path}: {status}: {' '.join(text.split()):.500}")
        return text

    def _session(self) -> aiohttp.ClientSession:
        if self._http is None:
            trace = aiohttp.TraceConfig()
            trace.on_request_redirect.append(_redirected)  # for WebSockets, which have no other switch
            jar = aiohttp.CookieJar(unsafe=True)  # of an address, too
            limit = aiohttp.ClientTimeout(total=None)  # the episode has its own
            self._http = aiohttp.ClientSession(cookie_jar=jar, timeout=limit, trace_configs=[trace])
        return self._http


async def _redirected(session: Any, context: Any, request: aiohttp.TraceRequestRedirectParams) -> None:
    raise ServerError(f"{request.url}: it redirects, which is not followed; give the server's own address")
