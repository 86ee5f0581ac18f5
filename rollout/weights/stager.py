"""The stager: a process next to a server without access to the trainer's files, which fetches published versions.

    AREAX_STAGER_KEY=... python -m areax.rollout.weights.stager --host 10.0.0.7 --port 31000 --root /dev/shm/areax

POST /stage {"label", "sources", "source_key"} -> {"path", "bytes", "resumed", "delta", "seconds"}, once version `label`
of the file servers at `sources` (file_server.py), each of which has a part, is in `path`, complete and verified
(fetch.py). With `--bucket URL` the bucket (object_store.py) is the only source. The generation server keeps running
meanwhile. The newest two versions are kept, until SIGTERM or SIGINT: the stager then removes all of them, because
`root` is often memory that nobody else would free.
GET /versions -> {"versions"}: their labels. The key is sent as `Authorization: Bearer KEY`. GET /health answers anyone.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import errno
import hmac
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from ..processes import folders, http_process, keys
from ..servers.labels import version_of
from . import fetch, http_source
from .object_store import Bucket, BucketSource

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.types import ASGIApp

KEY = keys.STAGER
LOCK = ".stager"  # in the root: locked while a stager uses it
BODY = 64 * 2**10  # bytes
WAITING = 16  # requests at a time; more get a 503


def app(root: Path, *, key: str | None = None, bucket: Bucket | None = None) -> ASGIApp:
    """The stager as an ASGI application; versions are stored in `root`, by label, and come from `bucket` if given."""
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
        label, sources, source_key = _asked(await limits.read_json(request, bounds), bucket)
        if inside >= WAITING:
            raise HTTPException(503, f"{inside} requests are waiting; try again later")
        inside += 1
        try:
            async with one_at_a_time, http_source.session(source_key) as http:
                parts = [http_source.HTTPSource(http, f"{url}/{label}") for url in sources]
                found = [BucketSource(bucket, label)] if bucket else parts
                return JSONResponse(await fetch.fetch_version(root, label, found, speeds))
        except OSError as error:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            why = "the disk is full; it needs room for three versions" if full else error
            raise HTTPException(507, f"{root}: {why}") from error
        except RuntimeError as error:
            raise HTTPException(502, str(error)) from error
        finally:
            inside -= 1

    async def versions(request: Request) -> Response:
        if not allowed(request):
            raise unauthorized
        return JSONResponse({"versions": [path.name for path in fetch.kept(root)]})

    async def health(request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    def allowed(request: Request) -> bool:
        given = request.headers.get("authorization", "").encode()
        return key is None or hmac.compare_digest(given, f"Bearer {key}".encode())

    routes = [Route("/stage", stage, methods=["POST"]), Route("/versions", versions), Route("/health", health)]
    return limits.app(routes, bounds)


def _asked(asked: dict[str, Any], bucket: Bucket | None) -> tuple[str, list[str], str]:
    """(label, sources, source key) of a request. Raises ValueError, also for another source than the bucket."""
    label, sources, source_key = asked.get("label"), asked.get("sources"), asked.get("source_key")
    texts = [label, source_key, *(sources if isinstance(sources, list) else ())]
    if not isinstance(sources, list) or not sources or not all(isinstance(text, str) for text in texts):
        raise ValueError("the body must be an object with label, sources, a list of addresses, and source_key")
    label, source_key = str(label), str(source_key)
    if len(label) > 64 or version_of(label) < 0:
        raise ValueError(f"a label must be '<version>-<8 hex digits>', got {label!r:.80}")
    if bucket and sources != [bucket.url]:
        raise ValueError(f"the source must be {bucket.url}, which this stager was started with, got {sources!r:.80}")
    for source in sources:
        parts = urlsplit(source)  # raises ValueError, too
        if not bucket and (parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0):
            raise ValueError(
                f"the source must be the address of a file server, got {source!r:.80}; for a bucket start it with "
                "--bucket"
            )
    if not (source_key.isascii() and source_key.isprintable()):
        raise ValueError("the source_key must be printable ASCII")
    return label, sources, source_key


def serve(*, root: str, host: str = "127.0.0.1", port: int = 31000, bucket: str = "", key: str | None = None) -> None:
    """Serves until SIGTERM or SIGINT, then removes its versions; prints a line with its URL first once it is ready.

    Raises ValueError if the folder, the address or the bucket is not available, if another stager has the folder, or if
    other machines can reach it and there is no key.
    """
    source = Bucket(bucket, "--bucket") if bucket else None
    if source:
        asyncio.run(source.owner())  # it can be read
    folder = Path(root).absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        held = folders.lock(folder / LOCK)
    except OSError as error:
        raise ValueError(f"stager: cannot write to {folder} ({error})") from error
    if held is None:  # each would remove what the other fetches
        raise ValueError(f"stager: another stager has its versions in {folder}; give each a --root of its own")
    with held:
        with http_process.bind_guarded(host, port, key=key, variable=KEY, what="stager") as sock:
            http_process.serve(
                app(folder, key=key, bucket=source),
                sock,
                f"{http_process.address(sock.getsockname())} stages versions in {folder}",
            )
        with contextlib.suppress(OSError):  # whoever started it has removed the folder, or it holds something else
            for version in (*fetch.kept(folder), *folder.glob(".*.part")):
                shutil.rmtree(version, ignore_errors=True)
            (folder / LOCK).unlink()
            folder.rmdir()


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Fetches published weights for a server on this machine; callers need the key in "
        f"{KEY}, or in the file that {KEY}_FILE names."
    )
    parser.add_argument("--root", required=True, help="folder for versions, preferably in memory: /dev/shm/areax")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=31000, help="0 = any free port")
    parser.add_argument("--bucket", default="", help="the run's --push.bucket: fetch from there, and nowhere else")
    try:
        serve(**vars(parser.parse_args()), key=keys.read(KEY))
    except ValueError as error:
        print(error, file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
