"""Sandboxes on other machines: a client, and the server, `python -m areax.rollout.sandbox.remote --port 8080`.

POST /run {"code": text, "stdin": text, "limits": {name: number}} -> {"stdout", "stderr", "code", "why"}, as
`sandbox.run_python`; stdin and limits are optional. GET /health -> `sandbox.isolation`, without a key. The key is sent
as `Authorization: Bearer KEY`. Other statuses than 200 come with {"error": {"message", "code"}}: 400 invalid request,
401 wrong key, 403 a browser's page, 408 and 413 slow or large body, 431 headers, 502 the sandbox failed, 503 busy.
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
from ..processes import http_answers, http_process, keys
from ..processes.printable import one_line
from . import Limits, Result

if TYPE_CHECKING:
    import aiohttp
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.types import ASGIApp

log = logging.getLogger(__name__)

KEY = "AREAX_SANDBOX_KEY"  # environment variable; a key on the command line could be read by every user
MOST = Limits(timeout_s=60, memory_bytes=2**31, output_bytes=2**20, files_bytes=2**28, processes=256)
BODY = 4 * 2**20  # bytes
BODY_S = 20.0  # for a body to arrive
WAIT_S = 120.0  # for a free place, in addition to the program's own time
LARGEST = 2**26  # bytes of an answer
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

        seconds, status = Limits(**limits).timeout_s + WAIT_S, 0
        body = {"code": code, "stdin": stdin, "limits": limits}
        try:
            async with self.session.post(
                f"{self.url}/run", json=body, timeout=aiohttp.ClientTimeout(seconds), allow_redirects=False
            ) as answer:
                status = answer.status
                data = await http_answers.read_body(answer, f"sandbox: {self.url}", LARGEST)
            content = json.loads(data)
            if status == 200:
                return _result(content)
            error = content["error"]["message"]
        except (aiohttp.ClientError, TimeoutError, ValueError, TypeError, KeyError, RecursionError) as failed:
            why = f"{type(failed).__name__}: {one_line(failed):.200}"
            said = f" (HTTP {status})" if status else ""
            raise ServerError(f"sandbox: no answer from {self.url}{said}: {why}") from failed
        if status == 400:
            raise ValueError(f"{error!s:.500} (from {self.url})")
        raise ServerError(f"sandbox: {self.url} answered {status}: {error!s:.500}")


def _result(content: Any) -> Result:
    """A Result from JSON; raises TypeError or KeyError for anything else."""
    made = Result(content["stdout"], content["stderr"], content["code"], content["why"], content["seconds"])
    if not (
        type(made.code) is int
        and all(isinstance(text, str) for text in (made.stdout, made.stderr, made.why))
        and isinstance(made.seconds, int | float)
        and made.seconds >= 0
    ):
        raise TypeError(f"not the result of a program: {content!r:.80}")
    return made


def app(*, places: int, key: str | None = None, most: Limits = MOST) -> ASGIApp:
    """The server as an ASGI application.

    Args:
      places: most programs that run at the same time.
      most: upper bounds of the limits in requests.
    """
    from starlette.exceptions import HTTPException
    from starlette.responses import JSONResponse
    from starlette.routing import Route

    from ..processes import http_limits

    bounds = http_limits.Limits(body_bytes=BODY, body_s=BODY_S)
    free = asyncio.Semaphore(places)
    inside = 0

    async def run(request: Request) -> Response:
        nonlocal inside
        given = request.headers.get("authorization", "").encode()
        if key is not None and not hmac.compare_digest(given, f"Bearer {key}".encode()):
            raise HTTPException(401, "the key is missing or wrong", http_limits.CLOSE)
        if inside >= places * WAITING:
            raise HTTPException(503, f"{inside} programs are running or waiting; try again later", http_limits.CLOSE)
        inside += 1
        try:
            code, stdin, limits = _asked(http_limits.parse(await request.body(), bounds), most)
            async with free:
                result = await sandbox.run_python(code, stdin=stdin, **limits)
        except ServerError as error:
            raise HTTPException(502, str(error)) from error
        finally:
            inside -= 1
        return JSONResponse(asdict(result))

    async def health(request: Request) -> Response:
        return JSONResponse(asdict(await asyncio.to_thread(sandbox.isolation)))

    return http_limits.app([Route("/run", run, methods=["POST"]), Route("/health", health)], bounds)


def _asked(asked: dict[str, Any], most: Limits) -> tuple[str, str, dict[str, Any]]:
    """Parses a request body to (code, stdin, limits); raises ValueError if it is invalid."""
    if not asked.keys() <= {"code", "stdin", "limits"}:
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
