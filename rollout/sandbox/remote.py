"""Sandboxes on other machines: a client, and the server, `python -m areax.rollout.sandbox.remote --port 8080`.

POST /run {"code": text, "stdin": text, "limits": {name: number}} -> {"stdout", "stderr", "code", "why"}, as
`sandbox.run_python`; stdin and limits are optional. GET /health -> `sandbox.isolation`, without a key. The key is sent
as `Authorization: Bearer KEY`. Other statuses than 200 come with {"error": text}: 400 invalid request, 401 wrong key,
408 and 413 slow or large body, 500 the sandbox failed, 503 busy.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hmac
import json
import logging
import sys
from collections.abc import AsyncIterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from .. import sandbox
from ..errors import ServerError
from ..processes import http_process, keys
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
WAIT_S = 120.0  # for a free place, in addition to the program's own time
WAITING = 16  # requests per place; more get a 503


@contextlib.asynccontextmanager
async def connect(url: str, *, key: str | None = None) -> AsyncIterator[Remote]:
    """Yields the sandbox at `url`, such as "http://10.0.0.7:8080"; `key` defaults to that in AREAX_SANDBOX_KEY, or in
    the file that AREAX_SANDBOX_KEY_FILE names."""
    import aiohttp

    key = keys.read(KEY) if key is None else key
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    async with aiohttp.ClientSession(headers=headers) as session:
        yield Remote(url.rstrip("/"), session)


class Remote:
    """A `sandbox.Sandbox` that runs programs on a remote server; made by `connect`."""

    def __init__(self, url: str, session: aiohttp.ClientSession):
        self.url, self.session = url, session

    async def run_python(self, code: str, *, stdin: str = "", **limits: Any) -> Result:
        """Like `sandbox.run_python`.

        Raises:
          ValueError: a limit is out of range, here or on the server.
          ServerError: the server cannot be reached, refuses the key, is busy or failed.
        """
        import aiohttp

        seconds = Limits(**limits).timeout_s + WAIT_S
        body = {"code": code, "stdin": stdin, "limits": limits}
        try:
            async with self.session.post(
                f"{self.url}/run", json=body, timeout=aiohttp.ClientTimeout(seconds), allow_redirects=False
            ) as answer:
                status, content = answer.status, json.loads(await answer.read())
            if status == 200:
                return Result(**content)
            error = content["error"]
        except (aiohttp.ClientError, TimeoutError, ValueError, TypeError, KeyError) as failed:
            raise ServerError(f"sandbox: no answer from {self.url}: {type(failed).__name__}: {failed}") from failed
        if status == 400:
            raise ValueError(f"{error} (from {self.url})")
        raise ServerError(f"sandbox: {self.url} answered {status}: {error}")


def app(*, places: int, key: str | None = None, most: Limits = MOST) -> Starlette:
    """The server as an ASGI application.

    Args:
      places: most programs that run at the same time.
      most: upper bounds of the limits in requests.
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
            return refused(503, f"{inside} programs are running or waiting; try again later")
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
                raise OverflowError(f"the body must have at most {BODY} bytes")
    return bytes(body)


def _asked(body: bytes, most: Limits) -> tuple[str, str, dict[str, Any]]:
    """Parses a request body to (code, stdin, limits); raises ValueError if it is invalid."""
    try:
        asked = json.loads(body)
    except RecursionError:
        raise ValueError("sandbox: the body is nested too deeply") from None
    if not isinstance(asked, dict) or not asked.keys() <= {"code", "stdin", "limits"}:
        raise ValueError("sandbox: the body must be an object with code, and optionally stdin and limits")
    code, stdin, limits = asked.get("code"), asked.get("stdin", ""), asked.get("limits", {})
    if not (isinstance(code, str) and isinstance(stdin, str) and isinstance(limits, dict)):
        raise ValueError("sandbox: code and stdin must be strings, and limits an object")
    bounds = asdict(most) | {"cpu_s": most.timeout_s if most.cpu_s is None else most.cpu_s}
    if unknown := limits.keys() - bounds.keys():
        raise ValueError(f"sandbox: limits must be among {', '.join(bounds)}, got {min(unknown)!r:.80}")
    for name, value in asdict(Limits(**limits)).items():
        if value is not None and value > bounds[name]:
            raise ValueError(f"sandbox: {name} must be at most {bounds[name]:g} here, got {value:g}")
    return code, stdin, limits


def serve(*, host: str = "127.0.0.1", port: int = 8080, places: int = 4, key: str | None = None) -> None:
    """Serves until SIGTERM or SIGINT; prints a line that begins with the URL once it is ready.

    Args:
      port: 0 = any free port.

    Raises:
      ValueError: the address is not available, or it is reachable from other machines and there is no key.
      ServerError: this machine supports no sandbox.
    """
    if places < 1:
        raise ValueError(f"sandbox: places must be at least 1, got {places}")
    with http_process.bind_guarded(host, port, key=key, variable=KEY, what="sandbox") as sock:
        ready = f"{http_process.address(sock.getsockname())} runs {places} programs at a time, {sandbox.isolation()}"
        http_process.serve(app(places=places, key=key), sock, ready)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=f"Runs programs for other machines; callers need the key in {KEY}, or in the file at {KEY}_FILE."
    )
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8080, help="0 = any free port")
    parser.add_argument("--places", type=int, default=4, help="most programs that run at the same time")
    try:
        serve(**vars(parser.parse_args()), key=keys.read(KEY))
    except (ValueError, ServerError) as error:
        print(error, file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
