"""The report of runs that go on, over HTTP: `areax report --serve`. Nothing in their directories changes.

    GET /                               the page, with the sections that are open at first
    GET /parts?since=STAMP&open=ID...   {"stamp", "parts": {id: HTML}} of open sections; no parts if nothing changed
    GET /live.js                        asks for parts every two seconds, and puts them into the page

The form of the section of samples adds its fields to the query (`samples.browser`). Every request needs the key, if
there is one, as the password of the browser's own dialog or as `Authorization: Bearer KEY`. Without one the server is
for this machine alone, also by the name under which a browser asks: a page of another site that points its name here
gets nothing.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import hmac
import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from ...rollout.processes import http_process, keys
from ...rollout.processes.printable import one_line
from ..tracking import run_dir as tracker
from ..tracking import tail
from . import build, results, rows, samples
from . import html as page

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.types import ASGIApp

FILES = tracker.METRICS, tracker.REPLAY, tracker.SUMMARY, tracker.CONFIG
OPEN = (*build.OPEN, "asynchrony")  # sections that are not folded at first
LOADS = '<p class="lead">is read ...</p>'
NOTHING = '<p class="lead">Nothing of this was logged so far.</p>'
SCRIPT = Path(__file__).with_name("live.js")
HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class Followed:
    """A run's directory, read as it grows.

    Attributes:
      run: what was read of it.
      note: what is wrong with the directory, or "".
    """

    def __init__(self, path: Path, name: str):
        self.path, self.note = path, ""
        self.run = build.Run(name, {})
        self._mark: Any = None
        self._tails: dict[str, tail.Tail] = {}
        self._steps: dict[str, rows.Steps] = {}

    def look(self) -> bool:
        """Reads what was added. Returns whether anything changed."""
        mark = [self.path.is_dir(), *(_mark(self.path / name) for name in FILES)]
        if mark == self._mark:
            return False
        self._mark, self.note = mark, ""
        try:
            self._read()
        except (ValueError, OSError) as error:
            self.note = one_line(error)
            self.close()  # to read it all again once it is mended
        if not mark[0]:
            gone = "was removed; below is what was read before" if self.run.table else "does not exist yet"
            self.note = f"{self.path} {gone}"
        elif not (self.run.table or self.note):
            self.note = f"{self.path}: no step is logged yet"
        return True

    def close(self) -> None:
        """Closes its files."""
        for following in self._tails.values():
            following.close()
        self._tails.clear()

    def _read(self) -> None:
        for name in (tracker.METRICS, tracker.REPLAY):
            following = self._tails.setdefault(name, tail.Tail(self.path / name))
            void, lines = following.look()
            steps = self._steps.setdefault(name, {})
            if void:
                steps.clear()
            for line in lines:
                rows.add(steps, rows.checked(line, str(following.path)))
        tables = (rows.table(self._steps[name]) for name in (tracker.METRICS, tracker.REPLAY))
        table: dict[str, rows.Rows] = {kind: steps for each in tables for kind, steps in each.items()}
        files = (build.json_object(self.path / name) for name in (tracker.SUMMARY, tracker.CONFIG))
        self.run = build.Run(self.run.name, table, *files)


def _mark(path: Path) -> tuple | None:
    with contextlib.suppress(OSError):
        found = path.stat()
        return found.st_ino, found.st_size, found.st_mtime_ns
    return None


class Page:
    """The page of one or two runs, used in one thread."""

    def __init__(self, paths: Sequence[Path], opened: Callable[[Path], samples.Source]):
        """
        Args:
          opened: makes the samples of a run's directory.
        """
        names = [path.resolve().name for path in paths]
        if len({*names}) < len(names):
            names = [str(path) for path in paths]
        self.runs = [Followed(path, name) for path, name in zip(paths, names, strict=True)]
        self.sources = {name: opened(path) for path, name in zip(paths, names, strict=True)}
        self._stamp, self._made = "", dict[str, str]()

    def whole(self) -> str:
        """The page as HTML."""
        found = self.parts("", OPEN, {})
        parts, note = found["parts"], f'<p class="note" id="note" role="status" data-stamp="{found["stamp"]}">'
        return page.document(
            " and ".join(followed.run.name for followed in self.runs),
            self._subtitle(),
            [(name, title, parts.get(name, LOADS), name in OPEN) for name, (title, _) in build.sections([]).items()],
            live=f'{note}{parts["note"]}</p><script src="/live.js" defer></script>',
        )

    def parts(self, since: str, names: Sequence[str], chosen: Mapping[str, str]) -> dict[str, Any]:
        """{"stamp", "parts": {id: HTML}} of these sections, if something changed since a stamp.

        Args:
          chosen: which sample is shown, as `samples.browser`.
        """
        if any([followed.look() for followed in self.runs]) or not self._stamp:
            self._stamp, self._made = secrets.token_hex(8), {}
        if since == self._stamp:
            return {"stamp": since, "parts": {}}
        parts = {"subtitle": page.escape(self._subtitle())}
        parts["note"] = "<br>".join(page.escape(followed.note) for followed in self.runs if followed.note)
        made = self._made
        for name, (_, make) in build.sections([followed.run for followed in self.runs]).items():
            if name == "samples" and name in names:
                parts[name] = samples.browser(self.sources, chosen)
            elif name in names:
                parts[name] = made[name] = made.get(name) or make() or NOTHING
        return {"stamp": self._stamp, "parts": parts}

    def close(self) -> None:
        """Closes the files of all runs."""
        for followed in self.runs:
            followed.close()
        for source in self.sources.values():
            source.close()

    def _subtitle(self) -> str:
        each = [(run.name, results.subtitle(run.summary, run.table)) for run in (one.run for one in self.runs)]
        return "; ".join(f"{name}: {words}" if len(each) > 1 else words for name, words in each if words)


def app(made: Page, pool: ThreadPoolExecutor, key: str | None) -> ASGIApp:
    """The application; `pool` has the one thread in which the page is made."""
    from starlette.exceptions import HTTPException
    from starlette.responses import FileResponse, Response
    from starlette.routing import Route

    from ...rollout.processes import http_limits as limits

    def check(request: Request) -> None:
        if key is None:
            try:
                named = urlsplit(f"//{request.headers.get('host', '')}").hostname or ""
            except ValueError:
                named = ""
            if not http_process.loopback(named):
                raise HTTPException(403, limits.ANOTHER_PAGE, limits.CLOSE)
        elif not hmac.compare_digest(_given(request.headers.get("authorization", "")), key.encode()):
            asks = {"WWW-Authenticate": 'Basic realm="areax report: the key is the password", charset="UTF-8"'}
            raise HTTPException(401, f"the key is missing or wrong; {keys.REPORT} has it", {**limits.CLOSE, **asks})

    async def whole(request: Request) -> Response:
        check(request)
        text = await asyncio.get_running_loop().run_in_executor(pool, made.whole)
        return Response(text.encode(errors="replace"), headers=HEADERS, media_type="text/html")

    async def parts(request: Request) -> Response:
        check(request)
        asked = request.query_params
        names = asked.getlist("open")
        found = await asyncio.get_running_loop().run_in_executor(pool, made.parts, asked.get("since", ""), names, asked)
        return Response(json.dumps(found), headers=HEADERS, media_type="application/json")

    async def script(request: Request) -> Response:
        check(request)
        return FileResponse(SCRIPT, headers=HEADERS, media_type="text/javascript")

    routes = [Route("/", whole), Route("/parts", parts), Route("/live.js", script)]
    return limits.app(routes, limits.Limits(body_bytes=0, connections=64))


def _given(header: str) -> bytes:
    """The key in the header of a request: a bearer's, or the password of a browser's dialog."""
    kind, _, value = header.partition(" ")
    if kind.lower() != "basic":
        return (value if kind.lower() == "bearer" else "").encode()
    try:
        return base64.b64decode(value, validate=True).partition(b":")[2]
    except binascii.Error:
        return b""


def serve(paths: Sequence[Path], opened: Callable[[Path], Any], *, host: str, port: int, key: str | None) -> None:
    """Serves the page of one or two runs until SIGTERM or SIGINT; prints its address.

    Args:
      opened: as of `Page`; what it makes is closed at the end.
      key: what callers need; None = none, for loopback addresses only.

    Raises ValueError if a path is a file, both are the same, or the address cannot be used or needs a key.
    """
    for path in paths:
        if path.exists() and not path.is_dir():
            raise ValueError(f"report: needs a run directory, got the file {path}; pass one, such as runs/demo")
    if len({path.resolve() for path in paths}) < len(paths):
        raise ValueError(f"report: the second run must be another one, got {paths[0]} twice; leave it out")
    sock = http_process.bind_guarded(host, port, key=key, variable=keys.REPORT, what="report")
    made = Page(paths, opened)
    with contextlib.closing(sock), ThreadPoolExecutor(1, "report") as pool:
        try:
            pool.submit(made.whole)  # the first to open the page does not wait for all that was logged
            url = http_process.address(sock.getsockname())
            shown = " and ".join(f"{path}{'' if path.exists() else ' (does not exist yet)'}" for path in paths)
            http_process.serve(app(made, pool, key), sock, f"{url} follows {shown}; Ctrl-C ends it")
        finally:
            pool.submit(made.close).result()
