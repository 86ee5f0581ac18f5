"""Fetches a published version from a source, a file server or a bucket: whole or not at all, whatever fails.

Interrupted transfers are resumed. If the source has a delta from the newest version here, and deltas have been faster
than whole versions, it is fetched instead of the tensors. Files that do not differ from those of the newest version
here are not fetched at all.
"""

from __future__ import annotations

import asyncio
import errno
import functools
import logging
import math
import os
import shutil
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

import aiohttp

from ..errors import ServerError
from ..processes.http_answers import Failed
from ..processes.printable import one_line
from ..servers.labels import version_of
from . import delta
from .listing import checked, described

log = logging.getLogger(__name__)
Result = TypeVar("Result")

KEEP = 2  # versions; the newest is the base of the next delta
ATTEMPTS = 5  # consecutive attempts without progress
PAUSE_S = 0.2  # before the second attempt; doubles
PASSING = aiohttp.ClientError, TimeoutError, Failed  # errors after which another attempt is made


class Source(Protocol):
    """Where a version is fetched from; both methods raise one of PASSING, or ValueError for what will not pass.

    Attributes:
      url: of the version, for errors.
      fetched: bytes of files so far.
    """

    url: str
    fetched: int

    async def listing(self, held: str, base: str) -> Any:
        """The version's listing (listing.py), with files that are those of version `held`, and a delta from `base`."""

    async def append(self, name: str, path: Path, have: int, size: int) -> None:
        """Appends the bytes of a file from `have` on to the file at `path`, up to `size`."""


async def fetch_version(
    root: Path, label: str, sources: Sequence[Source], speeds: dict[str, float] | None = None
) -> dict[str, Any]:
    """Fetches version `label` to `root/label`, which appears by rename; files that exist already are not fetched again.

    Args:
      sources: of the parts of the version, which are fetched at the same time.
      speeds: bytes of a version per second of the last fetches, by kind: "delta" or "all". Over a fast connection a
        complete version arrives sooner than its delta is made; until both are known a delta is tried.

    Raises:
      ValueError: the source refuses, or has no such version.
      RuntimeError: it cannot be reached, or the data does not match its hashes.
      OSError: writing to this disk failed.
    """
    begun = time.monotonic()
    report = {"path": str(root / label), "bytes": 0, "resumed": 0, "delta": False}
    if not (root / label).is_dir():
        held = next((path.name for path in reversed(kept(root))), "")
        speeds = {} if speeds is None else speeds
        base = held if speeds.get("delta", math.inf) >= speeds.get("all", 0.0) else ""
        part = root / f".{label}.part"
        part.mkdir(exist_ok=True)
        for other in root.glob(".*.part"):  # an abandoned version
            if other != part:
                await asyncio.to_thread(shutil.rmtree, other)
        try:
            asked = (persistently(one.url, functools.partial(one.listing, held, base)) for one in sources)
            listings = await _all(asked)
            parts = checked(listings, label)
            works = zip(sources, listings, parts, strict=True)
            await _all(_fetch_part(*work, root / held, bool(base), part, report) for work in works)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):  # frees the space of the incomplete version
                await asyncio.to_thread(shutil.rmtree, part)
            raise
        os.rename(part, root / label)
        total = sum(entry["bytes"] for files in parts for entry in files.values())
        speeds["delta" if report["delta"] else "all"] = total / (time.monotonic() - begun)
        for old in kept(root)[:-KEEP]:
            await asyncio.to_thread(shutil.rmtree, old.rename(root / f".{old.name}.part"))
        report["bytes"] = sum(source.fetched for source in sources)
    return report | {"seconds": time.monotonic() - begun}


async def _all(works: Iterable[Awaitable[Result]]) -> list[Result]:
    """The results of all, once none is running any more; raises the first error."""
    results = await asyncio.gather(*works, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return cast(list[Result], results)


async def _fetch_part(
    source: Source, listing: dict, files: dict[str, dict], held: Path, deltas: bool, part: Path, report: dict[str, Any]
) -> None:
    """Fetches the files of a source to `part`.

    Args:
      held: the newest version here; the folder of versions if there is none.
      deltas: whether to apply a delta to it.
    """
    path = part / f".{min(files, default='')}.delta"
    made = await _from_delta(source, listing.get("delta"), held, path, files, report) if deltas else set()
    given = listing.get("same")
    same = given if isinstance(given, list) else []
    for name in files.keys() - made:
        if name not in same or not await asyncio.to_thread(_linked, held, part, name, files[name]):
            await fetch_file(source, name, part / name, files[name], report)


def kept(root: Path) -> list[Path]:
    """The versions stored in `root`, newest last."""
    found = [path for path in root.iterdir() if version_of(path.name) >= 0]
    return sorted(found, key=lambda path: path.stat().st_mtime_ns)  # by time: a new run starts again at low numbers


async def fetch_file(source: Source, name: str, path: Path, wanted: dict, report: dict[str, Any]) -> None:
    """Fetches a file, or the rest of it, and verifies it; a second time if it is damaged."""
    url = f"{source.url}/{name}"
    here = lambda: path.stat().st_size if path.exists() else -1

    async def rest() -> None:
        if (have := here()) != wanted["bytes"]:
            await source.append(name, path, have, wanted["bytes"])

    for last in (False, True):
        if here() > wanted["bytes"]:
            path.unlink()
        report["resumed"] += max(0, here())
        await persistently(url, rest, here)
        got = await asyncio.to_thread(described, path)
        if all(got[field] == wanted[field] for field in got):
            return
        path.unlink()
        if last:
            raise RuntimeError(f"{url}: arrived damaged twice")


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


async def _from_delta(
    source: Source, offered: dict | None, base: Path, path: Path, files: dict, report: dict[str, Any]
) -> set[str]:
    """Fetches the offered delta to `path` and makes the files beside it; returns their names, none if there is no delta
    or a result has a wrong hash."""
    if not offered:
        return set()
    part = path.parent
    try:
        if Path(name := str(offered["name"])).name != name:
            raise ValueError(f"it must be a file without folders, got {name!r:.80}")
        await fetch_file(source, name, path, offered, report)
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
    report["delta"] = True
    return set(made)


async def persistently(url: str, once: Callable[[], Awaitable[Result]], progress: Callable[[], int] = int) -> Result:
    """The result of `once`, retried until ATTEMPTS in a row failed without progress."""
    failed, before = 0, progress()
    while True:
        try:
            return await once()
        except PASSING as error:
            now = progress()
            failed, before = (0, now) if now > before else (failed + 1, before)
            if failed == 1:  # a store that does not answer at all takes minutes
                log.warning("%s: failed and is tried again: %s", url, one_line(error) or type(error).__name__)
            if failed == ATTEMPTS:
                raise ServerError(
                    f"{url}: {ATTEMPTS} attempts in a row without progress; the last: {type(error).__name__}: "
                    f"{one_line(error)}"
                ) from error
        await asyncio.sleep(PAUSE_S * 2**failed)
