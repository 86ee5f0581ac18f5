"""Sandboxes on other machines: a client, and the server, `python -m areax.rollout.sandbox.remote --port 8080`.

POST /run {"code": text, "stdin": text, "limits": {name: number}} -> {"stdout", "stderr", "code", "why"}, as
`sandbox.run_python` takes and returns them; stdin and limits may be missing. GET /health -> what `sandbox.isolation`
says, to anyone. The key goes as `Authorization: Bearer KEY`. Any other status than 200 comes with {"error": text}: 400
what the caller can mend, 401 the key, 408 and 413 a body that is slow or large, 500 the sandbox failed, 503 busy.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hmac
import json
import logging
import os
import sys
from collections.abc import AsyncIterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from .. import http_process, sandbox
from ..errors import ServerError
from . import Limits, Result

if TYPE_CHECKING:
    import aiohttp
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

log = logging.getLogger(__name__)

KEY = "AREAX_SANDBOX_KEY"  # environment variable; a key on the command line could be read by every user
MOST = Limits(timeout_s=60, memory_bytes=2**31, output_bytes=2**20, files_bytes=2**28, processes=256)
BODY = 4 * 2**20  # bytes
BODY_S = 20.0  # for a body to arrive
WAIT_S = 120.0  # for a free place, on top of the program's own time
WAITING = 16  # requests a place; more are told to come later


@contextlib.asynccontextmanager
async def connect(url: str, *, key: str | None = None) -> AsyncIterator[Remote]:
    """A sandbox at `url`, such as "http://10.0.0.7:8080"; the `key` is that of AREAX_SANDBOX_KEY unless given."""
    import aiohttp

    key = os.environ.get(KEY) if key is None else key
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    async with aiohttp.ClientSession(headers=headers) as session:
        yield Remote(url.rstrip("/"), session)


class Remote:
    """Runs programs over there; made by `connect`, a `sandbox.Sandbox`."""

    def __init__(self, url: str, session: aiohttp.ClientSession):
        self.url, self.session = url, session

    async def run_python(self, code: str, *, stdin: str = "", **limits: Any) -> Result:
        """As `sandbox.run_python`.

        Raises:
          ValueError: a limit that is out of range, here or there.
          ServerError: the server cannot be reached, refuses the key, is busy or failed.
        """
        import aiohttp

        seconds = Limits(**limits).timeout_s + WAIT_S
        body = {"code": code, "stdin": stdin, "limits": limits}
        try:
            async with self.session.post(
                f"{self.url}/run", json=body, timeout=aiohttp.ClientTimeout(seconds), allow_redirects=False
            ) as answer:
                status, said = answer.status, json.loads(await answer.read())
            if status == 200:
                return Result(**said)
            error = said["error"]
        except (aiohttp.ClientError, TimeoutError, ValueError, TypeError, KeyError) as failed:
            raise ServerError(f"sandbox: no answer of {self.url}: {type(failed).__name__}: {failed}") from failed
        if status == 400:
            raise ValueError(f"{error} (of {self.url})")
        raise ServerError(f"sandbox: {self.url} answered {status}: {error}")


def app(*, places: int, key: str | None = None, most: Limits = MOST) -> Starlette:
    """The server's routes, as an ASGI application.

    Args:
      places: programs that run at the same time.
      most: what a caller may ask for.
    """
    from starlette.applications import Starlette
    from starlette.responses import JSONResponse
    from starlette.routing import Route

    free = asyncio.Semaphore(places)
    inside = 0

    async def run(request: Request) -> Response:
        nonlocal inside
        given = request.headers.get("authorization", "").encode()
        if key is not None and not hmac.compare_digest(given, f"Bearer {key}".encode()):
            return refused(401, "the key is missing or wrong")
        if inside >= places * WAITING:
            return refused(503, f"{inside} programs run or wait here, come later")
        inside += 1
        try:
            code, stdin, limits = _asked(await _body(request), most)
            async with free:
                result = await sandbox.run_python(code, stdin=stdin, **limits)
        except TimeoutError:
            return refused(408, f"the body must arrive within {BODY_S:g} s")
        except OverflowError as error:
            return refused(413, str(error))
        except ValueError as error:
            return refused(400, str(error))
        except ServerError as error:
            return refused(500, str(error))
        finally:
            inside -= 1
        return JSONResponse(asdict(result))

    async def health(request: Request) -> Response:
        return JSONResponse(asdict(await asyncio.to_thread(sandbox.isolation)))

    def refused(status: int, error: str) -> Response:
        log.warning("sandbox: refused a request, %d: %s", status, error)
        return JSONResponse({"error": error}, status, {"Connection": "close"})  # the rest of a body is not read

    return Starlette(routes=[Route("/run", run, methods=["POST"]), Route("/health", health)])


async def _body(request: Request) -> bytes:
    body = bytearray()
    async with asyncio.timeout(BODY_S):
        async for chunk in request.stream():
            body += chunk
            if len(body) > BODY:
                raise OverflowError(f"a body has at most {BODY} bytes")
    return bytes(body)


def _asked(body: bytes, most: Limits) -> tuple[str, str, dict[str, Any]]:
    """(code, stdin, limits) of a body, or a ValueError."""
    try:
        asked = json.loads(body)
    except RecursionError:
        raise ValueError("sandbox: the body is nested too deeply") from None
    if not isinstance(asked, dict) or not asked.keys() <= {"code", "stdin", "limits"}:
        raise ValueError("sandbox: the body must be an object with code, and perhaps stdin and limits")
    code, stdin, limits = asked.get("code"), asked.get("stdin", ""), asked.get("limits", {})
    if not (isinstance(code, str) and isinstance(stdin, str) and isinstance(limits, dict)):
        raise ValueError("sandbox: code and stdin must be texts, and limits an object")
    bounds = asdict(most) | {"cpu_s": most.timeout_s if most.cpu_s is None else most.cpu_s}
    if unknown := limits.keys() - bounds.keys():
        raise ValueError(f"sandbox: there is no limit {min(unknown)!r:.80}; there are {', '.join(bounds)}")
    for name, value in asdict(Limits(**limits)).items():
        if value is not None and value > bounds[name]:
            raise ValueError(f"sandbox: {name} is at most {bounds[name]:g} here, got {value:g}")
    return code, stdin, limits


def serve(*, host: str = "127.0.0.1", port: int = 8080, places: int = 4, key: str | None = None) -> None:
    """Serves until SIGTERM or SIGINT; once ready prints one line that begins with the URL.

    Args:
      port: 0 = any that is free.

    Raises:
      ValueError: the address cannot be had, or it can be reached from elsewhere and there is no key.
      ServerError: there can be no sandbox here.
    """
    if places < 1:
        raise ValueError(f"sandbox: places must be at least 1, got {places}")
    with http_process.bind_guarded(host, port, key=key, variable=KEY, what="sandbox") as sock:
        ready = f"{http_process.address(sock.getsockname())} runs {places} programs at a time, {sandbox.isolation()}"
        http_process.serve(app(places=places, key=key), sock, ready)


def main() -> None:
    parser = argparse.ArgumentParser(description=f"Runs programs for others; the key they need: {KEY}.")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8080, help="0 = any that is free")
    parser.add_argument("--places", type=int, default=4, help="programs that run at the same time")
    try:
        serve(**vars(parser.parse_args()), key=os.environ.get(KEY))
    except (ValueError, ServerError) as error:
        print(error, file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
