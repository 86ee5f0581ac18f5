"""Reads a version from the file server of a run (file_server.py), as a source of `fetch.fetch_version`."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import aiohttp

from ..processes import http_answers

READ_S = 30.0  # a connection without data is closed after this
LISTING_S = 1800.0  # for the file server to write or hash a version, and make a delta
CHUNK = 1 << 20
LISTING = 64 * 2**20  # bytes of a listing, or of an error, of a file server


def session(key: str) -> aiohttp.ClientSession:
    """A client of the file servers of a run."""
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=10.0, sock_read=READ_S)
    return aiohttp.ClientSession(headers={"Authorization": f"Bearer {key}"}, timeout=timeout, auto_decompress=False)


async def asked(http: aiohttp.ClientSession, method: str, url: str, **query: str) -> Any:
    """The JSON with which a file server answers; raises as a source does."""
    timeout = aiohttp.ClientTimeout(total=LISTING_S, sock_connect=10.0)
    async with http.request(method, url, params=query, timeout=timeout, allow_redirects=False) as reply:
        text = await _agreed(url, reply)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RuntimeError(f"{url}: not the answer of a file server ({error})") from error


class HTTPSource:
    """A version at an address."""

    def __init__(self, http: aiohttp.ClientSession, url: str):
        self._http, self.url, self.fetched = http, url, 0

    async def listing(self, held: str, base: str) -> Any:
        return await asked(self._http, "GET", self.url, held=held, base=base)

    async def append(self, name: str, path: Path, have: int, size: int) -> None:
        url = f"{self.url}/{name}"
        headers = {"Range": f"bytes={have}-"} if have > 0 else {}
        async with self._http.get(url, headers=headers, allow_redirects=False) as reply:
            if reply.status not in (200, 206):
                await _agreed(url, reply)
            with open(path, "ab" if reply.status == 206 else "wb") as file:
                async for chunk in reply.content.iter_chunked(CHUNK):
                    file.write(chunk)
                    self.fetched += len(chunk)
                    if file.tell() > size:
                        break
        if (arrived := path.stat().st_size) != size:
            raise aiohttp.ClientPayloadError(f"{arrived} of {size} bytes arrived")


async def _agreed(url: str, reply: aiohttp.ClientResponse) -> str:
    """The text of a successful response.

    Raises:
      ClientPayloadError: a status that may pass, once the time that the server asks for is over.
      ValueError: another one, such as 404 or a redirect.
    """
    text = (await http_answers.read_body(reply, url, LISTING)).decode(errors="replace")
    if reply.status == 200:
        return text
    if reply.status >= 500 or reply.status in http_answers.LATER:
        await asyncio.sleep(http_answers.wait_s(reply.headers.get("Retry-After", "")))
        raise aiohttp.ClientPayloadError(f"HTTP {reply.status}: {_error(text)}")
    to = reply.headers.get("Location", "")
    to = to and f"redirects to {to!r:.200}, which is not followed"
    raise ValueError(f"{url}: HTTP {reply.status}: {to or _error(text)}")


def _error(text: str) -> str:
    """The message in the body of an error."""
    try:
        return str(json.loads(text)["error"]["message"])[:200]
    except (ValueError, KeyError, TypeError, RecursionError):
        return text[:200]
