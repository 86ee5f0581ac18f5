"""The stager: a process next to a server without access to the trainer's files, which fetches published versions.

    AREAX_STAGER_KEY=... python -m areax.rollout.weights.stager --host 10.0.0.7 --port 31000 --root /dev/shm/areax

POST /stage {"label", "source", "source_key"} -> {"path", "bytes", "resumed", "delta", "seconds"}, once version `label`
of the file server at `source` (file_server.py) is in `path`, complete and verified. The generation server keeps running
meanwhile. Interrupted transfers are resumed. If the file server has a delta from the newest version here, and
deltas have been faster than whole versions, it is fetched instead of the tensors. Files that do not differ from those
of the newest version here are not fetched at all. The newest two versions are kept, until SIGTERM or SIGINT: the
stager then removes all of them, because `root` is often memory that nobody else would free.
GET /versions -> {"versions"}: their labels. The key is sent as `Authorization: Bearer KEY`. GET /health answers anyone.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import errno
import hmac
import json
import logging
import math
import os
import shutil
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

import aiohttp

from ..processes import http_answers, http_process, keys
from ..processes.printable import one_line
from ..servers.labels import MANIFEST, version_of
from . import delta
from .file_server import KEY, described

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.types import ASGIApp

log = logging.getLogger(__name__)
Result = TypeVar("Result")

KEEP = 2  # versions; the newest is the base of the next delta
ATTEMPTS = 5  # consecutive attempts without progress
PAUSE_S = 0.2  # before the second attempt; doubles
READ_S = 30.0  # a connection without data is closed after this
LISTING_S = 1800.0  # for the file server to hash a version and make a delta
CHUNK = 1 << 20
BODY = 64 * 2**10  # bytes
LISTING = 64 * 2**20  # bytes of a listing, or of an error, of a file server
WAITING = 16  # requests at a time; more get a 503


def app(root: Path, *, key: str | None = None) -> ASGIApp:
    """The stager as an ASGI application; versions are stored in `root`, by label."""
    from starlette.exceptions import HTTPException
    from starlette.responses import JSONResponse
    from starlette.routing import Route

    from ..processes import http_limits as limits

    problem = f"the key is missing or wrong; set {KEY} to the same text at the run and at the stager"
    unauthorized = HTTPException(401, problem, limits.CLOSE)
    bounds = limits.Limits(body_bytes=BODY)
    one_at_a_time, speeds = asyncio.Lock(), dict[str, float]()
    inside = 0

    async def stage(request: Request) -> Response:
        nonlocal inside
        if not allowed(request):
            raise unauthorized
        label, source, source_key = _asked(await limits.read_json(request, bounds))
        if inside >= WAITING:
            raise HTTPException(503, f"{inside} requests are waiting; try again later")
        inside += 1
        try:
            async with one_at_a_time:
                return JSONResponse(await fetch_version(root, label, source, source_key, speeds))
        except OSError as error:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            raise HTTPException(507, f"{root}: {'the disk is full' if full else error}") from error
        except RuntimeError as error:
            raise HTTPException(502, str(error)) from error
        finally:
            inside -= 1

    async def versions(request: Request) -> Response:
        if not allowed(request):
            raise unauthorized
        return JSONResponse({"versions": [path.name for path in _kept(root)]})

    async def health(request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    def allowed(request: Request) -> bool:
        given = request.headers.get("authorization", "").encode()
        return key is None or hmac.compare_digest(given, f"Bearer {key}".encode())

    routes = [Route("/stage", stage, methods=["POST"]), Route("/versions", versions), Route("/health", health)]
    return limits.app(routes, bounds)


def _asked(asked: dict[str, Any]) -> tuple[str, str, str]:
    """(label, source, source key) of a request. Raises ValueError."""
    fields = [asked.get(name) for name in ("label", "source", "source_key")]
    if not all(isinstance(field, str) for field in fields):
        raise ValueError("the body must be an object with label, source and source_key")
    label, source, source_key = map(str, fields)
    if len(label) > 64 or version_of(label) < 0:
        raise ValueError(f"a label must be '<version>-<8 hex digits>', got {label!r:.80}")
    parts = urlsplit(source)  # raises ValueError, too
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0:
        raise ValueError(f"the source must be the address of a file server, got {source!r:.80}")
    if not (source_key.isascii() and source_key.isprintable()):
        raise ValueError("the source_key must be printable ASCII")
    return label, source, source_key


async def fetch_version(
    root: Path, label: str, source: str, source_key: str, speeds: dict[str, float] | None = None
) -> dict[str, Any]:
    """Fetches version `label` to `root/label`, which appears by rename; files that exist already are not fetched again.

    Args:
      speeds: bytes of a version per second of the last fetches, by kind: "delta" or "all". Over a fast connection a
        complete version arrives sooner than its delta is made; until both are known a delta is tried.

    Raises:
      ValueError: the file server refuses, or has no such version.
      RuntimeError: it cannot be reached, or the data does not match its hashes.
      OSError: writing to this disk failed.
    """
    begun = time.monotonic()
    report = {"path": str(root / label), "bytes": 0, "resumed": 0, "delta": False}
    if not (root / label).is_dir():
        held = next((path.name for path in reversed(_kept(root))), "")
        speeds = {} if speeds is None else speeds
        base = held if speeds.get("delta", math.inf) >= speeds.get("all", 0.0) else ""
        part = root / f".{label}.part"
        part.mkdir(exist_ok=True)
        for other in root.glob(".*.part"):  # an abandoned version
            if other != part:
                await asyncio.to_thread(shutil.rmtree, other)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10.0, sock_read=READ_S)
        headers = {"Authorization": f"Bearer {source_key}"}
        try:
            async with aiohttp.ClientSession(headers=headers, timeout=timeout, auto_decompress=False) as http:
                fetch = _Fetch(http, f"{source}/{label}", report)
                listing = await fetch.listing({"held": held, "base": base})
                files = _checked(listing, label)
                made = await _from_delta(fetch, listing.get("delta"), root / base, part, files) if base else set()
                same = set(listing.get("same") or ()) if held else set()
                for name in files.keys() - made:
                    if name not in same or not await asyncio.to_thread(_linked, root / held, part, name, files[name]):
                        await fetch.file(name, part / name, files[name])
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):  # frees the space of the incomplete version
                await asyncio.to_thread(shutil.rmtree, part)
            raise
        os.rename(part, root / label)
        total = sum(entry["bytes"] for entry in files.values())
        speeds["delta" if report["delta"] else "all"] = total / (time.monotonic() - begun)
        for old in _kept(root)[:-KEEP]:
            await asyncio.to_thread(shutil.rmtree, old.rename(root / f".{old.name}.part"))
    return report | {"seconds": time.monotonic() - begun}


def _kept(root: Path) -> list[Path]:
    """The versions stored here, newest last."""
    found = [path for path in root.iterdir() if version_of(path.name) >= 0]
    return sorted(found, key=lambda path: path.stat().st_mtime_ns)  # by time: a new run starts again at low numbers


def _checked(listing: Any, label: str) -> dict[str, dict[str, Any]]:
    """The files of a listing, after checking its format and that its manifest has the label's hash."""
    try:
        files: dict[str, dict[str, Any]] = {
            str(name): {"bytes": int(entry["bytes"]), "xxh3_128": str(entry["xxh3_128"])}
            for name, entry in listing["files"].items()
        }
        manifest = files[MANIFEST]["xxh3_128"]
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as error:
        raise RuntimeError(f"stager: the listing of {label} is malformed ({error!r})") from error
    if not all(Path(name).name == name and not name.startswith(".") for name in files):
        raise RuntimeError(f"stager: the listing of {label} must name files without folders, got {sorted(files)}")
    if manifest[:8] != label.partition("-")[2]:
        raise RuntimeError(f"stager: {label} is the name of another manifest than the file server's, {manifest[:8]}")
    return files


def _linked(held: Path, part: Path, name: str, wanted: dict[str, Any]) -> bool:
    """Whether a file of the version in `held` is the wanted one; it is then linked to `part`."""
    if not (held / name).is_file() or described(held / name) != wanted:
        return False
    (part / name).unlink(missing_ok=True)
    try:
        os.link(held / name, part / name)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.EMLINK):  # not every disk has links
            raise
        return False
    return True


async def _from_delta(fetch: _Fetch, offered: dict | None, base: Path, part: Path, files: dict) -> set[str]:
    """Applies the offered delta; returns the files it made, none if there is no delta or a result has a wrong hash."""
    if not offered:
        return set()
    path = part / ".delta"
    try:
        await fetch.file(str(offered["name"]), path, offered)
        made = await asyncio.to_thread(delta.apply, path, base, part, base.name)
        for name in made:
            if await asyncio.to_thread(described, part / name) != files[name]:
                raise ValueError(f"{name} is not what was published")
    except (ValueError, KeyError, TypeError, RuntimeError) as error:
        log.warning("stager: fetching the complete version, because its delta is unusable: %s", error)
        for name in files:
            (part / name).unlink(missing_ok=True)
        return set()
    finally:
        path.unlink(missing_ok=True)
    fetch.report["delta"] = True
    return set(made)


class _Fetch:
    """Fetches files of one version; counts bytes in `report`."""

    def __init__(self, http: aiohttp.ClientSession, url: str, report: dict[str, Any]):
        self.http, self.url, self.report = http, url, report

    async def listing(self, versions: dict[str, str]) -> dict[str, Any]:
        async def once() -> dict[str, Any]:
            timeout = aiohttp.ClientTimeout(total=LISTING_S, sock_connect=10.0)
            async with self.http.get(self.url, params=versions, timeout=timeout, allow_redirects=False) as reply:
                text = await _agreed(self.url, reply)
            try:
                return json.loads(text)
            except (ValueError, RecursionError) as error:
                raise RuntimeError(f"{self.url}: not the answer of a file server ({error})") from error

        return await _persistently(self.url, once)

    async def file(self, name: str, path: Path, wanted: dict) -> None:
        """Fetches a file, or the rest of it, and verifies it; a second time if it is damaged."""
        url = f"{self.url}/{name}"
        here = lambda: path.stat().st_size if path.exists() else -1
        for last in (False, True):
            if here() > wanted["bytes"]:
                path.unlink()
            self.report["resumed"] += max(0, here())
            await _persistently(url, lambda: self._rest(url, path, here(), wanted["bytes"]), here)
            got = await asyncio.to_thread(described, path)
            if all(got[field] == wanted[field] for field in got):
                return
            path.unlink()
            if last:
                raise RuntimeError(f"{url}: arrived damaged twice")

    async def _rest(self, url: str, path: Path, have: int, size: int) -> None:
        """Fetches the missing bytes and appends them."""
        if have == size:
            return
        headers = {"Range": f"bytes={have}-"} if have > 0 else {}
        async with self.http.get(url, headers=headers, allow_redirects=False) as reply:
            if reply.status not in (200, 206):
                await _agreed(url, reply)
            with open(path, "ab" if reply.status == 206 else "wb") as file:
                async for chunk in reply.content.iter_chunked(CHUNK):
                    file.write(chunk)
                    self.report["bytes"] += len(chunk)
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


async def _persistently(url: str, once: Callable[[], Awaitable[Result]], progress: Callable[[], int] = int) -> Result:
    """The result of `once`, retried until ATTEMPTS in a row failed without progress."""
    failed, before = 0, progress()
    while True:
        try:
            return await once()
        except (aiohttp.ClientError, TimeoutError) as error:
            now = progress()
            failed, before = (0, now) if now > before else (failed + 1, before)
            if failed == ATTEMPTS:
                raise RuntimeError(
                    f"{url}: {ATTEMPTS} attempts in a row without progress; the last: {type(error).__name__}: "
                    f"{one_line(error)}"
                ) from error
        await asyncio.sleep(PAUSE_S * 2**failed)


def serve(*, root: str, host: str = "127.0.0.1", port: int = 31000, key: str | None = None) -> None:
    """Serves until SIGTERM or SIGINT, then removes its versions; prints a line with its URL first once it is ready.

    Raises ValueError if the folder or the address is not available, or if other machines can reach it and there is no
    key.
    """
    folder = Path(root).absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"stager: cannot create {folder} ({error})") from error
    with http_process.bind_guarded(host, port, key=key, variable=KEY, what="stager") as sock:
        http_process.serve(
            app(folder, key=key), sock, f"{http_process.address(sock.getsockname())} stages versions in {folder}"
        )
    with contextlib.suppress(OSError):  # whoever started it has removed the folder, or it holds something else
        for version in (*_kept(folder), *folder.glob(".*.part")):
            shutil.rmtree(version, ignore_errors=True)
        folder.rmdir()


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Fetches published weights for a server on this machine; callers need the key in "
        f"{KEY}, or in the file that {KEY}_FILE names."
    )
    parser.add_argument("--root", required=True, help="folder for versions, preferably in memory: /dev/shm/areax")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=31000, help="0 = any free port")
    try:
        serve(**vars(parser.parse_args()), key=keys.read(KEY))
    except ValueError as error:
        print(error, file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
