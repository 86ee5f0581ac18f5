"""Serves published versions over HTTP to stagers on machines without access to the trainer's files (stager.py).

    GET /LABEL?held=LABEL&base=LABEL -> its listing (listing.py)
    GET /LABEL/NAME -> the bytes of a file, or of the delta in the listing; ranges are supported

"same" are the files that do not differ from those of `held`. A delta from `base` of the other tensors' files is offered
if it is small enough. Every request needs `Authorization: Bearer KEY`, with a
key that is generated for the run. Other statuses than 200 and 206 come with {"error": {"message", "code"}}.

Of a version in parts (parts.py) each process of the trainer serves its own, once process 0 knows the label:

    GET /parts/VERSION -> the manifest's entries of this process's tensors, as soon as they are written
    POST /parts/LABEL -> {}; serves what this process has of that version under its label
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import functools
import hmac
import secrets
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp.web

from ..errors import ServerError
from ..processes import folders, http_process, keys
from ..processes import http_limits as limits
from ..servers.endpoint import Endpoint
from ..servers.labels import version_of
from ..servers.server import Origin
from ..servers.types import Published, Staged
from . import listing, store

KEY = keys.STAGER
CHUNK = 8 << 20
STAGE_S = 3600.0  # to fetch a version: large ones over slow links take long, and the server keeps serving


@contextlib.asynccontextmanager
async def serve(
    host: str,
    most: limits.Limits = limits.Limits(),  # noqa: B008 (frozen)
    key: str = "",
) -> AsyncIterator[FileServer]:
    """Serves published versions at a free port of `host`; of `most` it has the connections and the time of a head.

    Args:
      key: that callers need; "" = a new one.
    """
    with folders.scratch(store.choose_root(), "deltas") as folder:
        file_server = FileServer(folder, key or secrets.token_urlsafe(32))
        heads = _Heads(most)
        app = aiohttp.web.Application(middlewares=[heads.arrived, _answered])
        app.router.add_get("/parts/{version}", file_server._part)
        app.router.add_post("/parts/{label}", file_server._named)
        app.router.add_get("/{label}", file_server._listing)
        app.router.add_get("/{label}/{name}", file_server._file)
        runner = aiohttp.web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        assert runner.server is not None
        try:
            with http_process.bind(host, 0, "file server") as sock:
                file_server.url = http_process.address(sock.getsockname())
                make = functools.partial(heads.awaited, runner.server)
                async with await asyncio.get_running_loop().create_server(make, sock=sock):
                    yield file_server
                    await runner.cleanup()
        finally:
            await runner.cleanup()


class _Heads:
    """Closes connections on which no request arrives in time, as `limits.protocol` does for the other servers."""

    def __init__(self, most: limits.Limits):
        self._most = most
        self._late: dict[asyncio.BaseProtocol, asyncio.TimerHandle] = {}

    def awaited(self, server: aiohttp.web.Server) -> asyncio.BaseProtocol:
        """Makes the protocol of a new connection."""
        protocol = server()
        delay = self._most.head_s if len(server.connections) < self._most.connections else 0.0
        self._late[protocol] = asyncio.get_running_loop().call_later(delay, self._close, protocol)
        return protocol

    def _close(self, protocol: Any) -> None:
        del self._late[protocol]
        protocol.force_close()

    @aiohttp.web.middleware
    async def arrived(self, request: aiohttp.web.Request, handler: Any) -> aiohttp.web.StreamResponse:
        if late := self._late.pop(request.protocol, None):
            late.cancel()
        response = await handler(request)
        response.force_close()  # so that every connection has one request, which this has waited for
        return response


@aiohttp.web.middleware
async def _answered(request: aiohttp.web.Request, handler: Any) -> aiohttp.web.StreamResponse:
    """The response, also to errors: {"error": {"message", "code"}}."""
    try:
        if limits.from_another_page(request.headers):
            raise aiohttp.web.HTTPForbidden(text=limits.ANOTHER_PAGE)
        return await handler(request)
    except aiohttp.web.HTTPException as error:
        content = {"error": {"message": error.text or error.reason, "code": error.status}}
        return aiohttp.web.json_response(content, status=error.status)


class FileServer:
    """The file server; made by `serve`. `url` is its address, `key` the key that callers need."""

    def __init__(self, folder: Path, key: str):
        self.url, self.key = "", key
        self._folder = folder
        self._parts: dict[str, asyncio.Future[tuple[Path, dict]]] = collections.defaultdict(asyncio.Future)
        self._versions: dict[str, Path] = {}  # directory by label
        self._listings: dict[str, dict[str, dict]] = {}
        self._deltas: dict[tuple[str, str], dict | None] = {}  # by label and base
        self._working = asyncio.Lock()

    def offer(self, weights: Published) -> None:
        """Serves this version from now on; forgets those whose directory is gone."""
        self._versions[weights.label] = Path(weights.directory)
        for label in [label for label, path in self._versions.items() if not path.exists()]:
            del self._versions[label]
            self._listings.pop(label, None)
        for pair in [pair for pair in self._deltas if pair[0] not in self._versions]:
            if made := self._deltas.pop(pair):
                (self._folder / made["name"]).unlink(missing_ok=True)

    async def offered(self, weights: Published) -> dict[str, Any]:
        """Serves this version from now on; returns where stagers find it."""
        self.offer(weights)
        return {"sources": [self.url], "source_key": self.key}

    def hold(self, version: int, directory: Path, tensors: dict[str, dict]) -> None:
        """Has this process's part of a version: its files, and the entries of its tensors in the manifest."""
        name = str(version)
        self._parts[name].set_result((directory, tensors))
        for other in self._parts.keys() - {name}:
            del self._parts[other]

    async def _part(self, request: aiohttp.web.Request) -> aiohttp.web.Response:
        self._check_key(request)
        if not (version := request.match_info["version"]).isdecimal():
            raise aiohttp.web.HTTPNotFound(text=f"a part has the number of a version, got {version[:80]}")
        _, tensors = await asyncio.shield(self._parts[version])
        return aiohttp.web.json_response(tensors)

    async def _named(self, request: aiohttp.web.Request) -> aiohttp.web.Response:
        self._check_key(request)
        label = request.match_info["label"]
        part = self._parts.get(str(version_of(label)))
        if not (part and part.done()):
            raise aiohttp.web.HTTPNotFound(text=f"no part of version {label} here")
        self.offer(Published(str(part.result()[0]), label))
        return aiohttp.web.json_response({})

    async def _listing(self, request: aiohttp.web.Request) -> aiohttp.web.Response:
        label = self._allowed(request)
        held, base = request.query.get("held", ""), request.query.get("base", "")
        async with self._working:  # concurrent requests share one computation
            try:
                if label not in self._listings:
                    self._listings[label] = await asyncio.to_thread(listing.files_of, self._versions[label])
                if base in self._versions and (label, base) not in self._deltas:
                    self._deltas[label, base] = await asyncio.to_thread(self._difference, label, base)
            except FileNotFoundError as error:
                raise aiohttp.web.HTTPNotFound(text=f"version {label} is being removed ({error})") from error
        found = {
            "files": self._listings[label],
            "same": self._same(label, held),
            "delta": self._deltas.get((label, base)),
        }
        return aiohttp.web.json_response(found)

    async def _file(self, request: aiohttp.web.Request) -> aiohttp.web.StreamResponse:
        label, name = self._allowed(request), request.match_info["name"]
        if name in self._listings.get(label, {}):
            return aiohttp.web.FileResponse(self._versions[label] / name, chunk_size=CHUNK)
        if any(made and made["name"] == name for (of, _), made in self._deltas.items() if of == label):
            return aiohttp.web.FileResponse(self._folder / name, chunk_size=CHUNK)
        raise aiohttp.web.HTTPNotFound(text=f"version {label} has no file {name}")

    def _allowed(self, request: aiohttp.web.Request) -> str:
        """Authenticates a request and returns its label."""
        self._check_key(request)
        label = request.match_info["label"]
        if label not in self._versions:
            raise aiohttp.web.HTTPNotFound(text=f"no version {label} here")
        return label

    def _check_key(self, request: aiohttp.web.Request) -> None:
        given = request.headers.get("authorization", "").encode(errors="surrogateescape")
        if not hmac.compare_digest(given, f"Bearer {self.key}".encode()):
            raise aiohttp.web.HTTPUnauthorized(text="the key is missing or wrong")

    def _same(self, label: str, other: str) -> list[str]:
        """The files of a version that do not differ from those of another one, which was listed before."""
        return listing.same(self._listings[label], self._listings.get(other, {}))

    def _difference(self, label: str, base: str) -> dict | None:
        new, old = (label, self._versions[label]), (base, self._versions[base])
        return listing.make_delta(self._folder, new, old, self._same(label, base))


class Stager:
    """The client of a stager, which fetches versions for a server without access to the trainer's files."""

    def __init__(self, url: str, http: aiohttp.ClientSession, source: Origin):
        self._there, self._source = Endpoint(url, http, key_variable=KEY), source

    @property
    def url(self) -> str:
        return self._there.url

    def at(self, url: str) -> Stager:
        """A client of the stager at another address, which fetches from the same source."""
        return Stager(url, self._there.http, self._source)

    async def check(self, *, timeout_s: float) -> None:
        """Raises ValueError if the stager refuses the key, ServerError if it does not answer."""
        await self._there.call("GET", "/versions", timeout_s=timeout_s)

    async def stage(self, weights: Published) -> Staged:
        """Has the stager fetch `weights`; returns them once every file is on the server's machine and verified.

        Raises ValueError if the stager refuses, ServerError if it cannot be reached or failed.
        """
        body = {"label": weights.label, **await self._source.offered(weights)}
        answer = await self._there.call("POST", "/stage", body, timeout_s=STAGE_S, reach_s=self._there.reach_s)
        try:
            return Staged(str(answer["path"]), int(answer["bytes"]))
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise ServerError(f"{self._there.url}/stage: not the answer of a stager: {answer!r:.200}") from error
