"""A route of a run at which servers join its fleet and leave it.

    POST /servers {"url": "http://10.0.0.7:30000", "stager": "", "for_s": 60}    joins, or stays for so long
    DELETE /servers {"url": "http://10.0.0.7:30000"}                             leaves when its requests have finished
    GET /servers -> {"servers": [{"url", "stager"}, ...]}

Without "for_s" a server stays until it leaves. Every request needs `Authorization: Bearer KEY` if AREAX_FLEET_KEY is
set, without which the route is for this machine alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import math
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from ..processes import addresses, http_process, keys
from .members import JOIN, Member, Read

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

BODY = 2**14  # bytes
MOST = 10_000  # servers
LONGEST_S = 10**9  # that a server may ask to stay


@contextlib.asynccontextmanager
async def serve(entry: str) -> AsyncIterator[Read]:
    """Serves the route at the address of an entry `join+http://HOST:PORT` of `--servers`; yields what reads the list.

    Raises ValueError if the address cannot be used, or other machines reach it and there is no key.
    """
    from starlette.exceptions import HTTPException
    from starlette.responses import JSONResponse
    from starlette.routing import Route

    from ..processes import http_limits as limits

    key, parts, bounds = keys.read(keys.FLEET), urlsplit(entry.removeprefix(JOIN)), limits.Limits(body_bytes=BODY)
    unauthorized = HTTPException(401, f"the key is missing or wrong; set {keys.FLEET} to that of the run", limits.CLOSE)
    members: dict[str, tuple[Member, float]] = {}  # by identity, with the time until which each stays
    now = asyncio.get_running_loop().time

    async def servers(request: Request) -> Response:
        given = request.headers.get("authorization", "").encode()
        if key and not hmac.compare_digest(given, f"Bearer {key}".encode()):
            raise unauthorized
        if request.method == "POST":
            member, seconds = _asked(await limits.read_json(request, bounds))
            name = addresses.identity(member.url)
            if len(members) >= MOST and name not in members:
                raise HTTPException(503, f"{MOST} servers have joined, the most there can be")
            members[name] = member, now() + seconds
        elif request.method == "DELETE":
            member, _ = _asked(await limits.read_json(request, bounds))
            members.pop(addresses.identity(member.url), None)
        return JSONResponse({"servers": [member._asdict() for member in await read()]})

    async def read() -> list[Member]:
        for name in [name for name, (_, until) in members.items() if until < now()]:
            del members[name]
        return [member for member, _ in members.values()]

    routes = [Route("/servers", servers, methods=["GET", "POST", "DELETE"])]
    host, port = parts.hostname or "", parts.port or 0
    sock = http_process.bind_guarded(host, port, key=key, variable=keys.FLEET, what=f"--servers {entry}")
    with contextlib.closing(sock):
        async with http_process.running(http_process.server(limits.app(routes, bounds)), sock):
            yield read


def _asked(asked: dict) -> tuple[Member, float]:
    """The member that a request names, and how many seconds it stays. Raises ValueError."""
    if unknown := sorted(set(asked) - {"url", "stager", "for_s"}):
        raise ValueError(f"the body must have url, stager and for_s, got {', '.join(unknown):.80}")
    url, stager, seconds = asked.get("url"), asked.get("stager", ""), asked.get("for_s", math.inf)
    if not isinstance(url, str) or not isinstance(stager, str):
        raise ValueError("url and stager must be texts")
    for name, address in (("url", url), ("stager", stager)):
        if address or name == "url":
            addresses.check(address, name)
    if type(seconds) not in (int, float) or not (0 < seconds <= LONGEST_S or seconds == math.inf):
        raise ValueError(f"for_s must be a number above 0 and at most {LONGEST_S:,}, got {seconds!r:.80}")
    return Member(addresses.plain(url), addresses.plain(stager) if stager else ""), float(seconds)
