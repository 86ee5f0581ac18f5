"""Published versions in an object store, by fsspec: the trainer uploads each once, stagers fetch from there.

    PREFIX/run                            the id of the run that they belong to
    PREFIX/LABEL/NAME                     a file of a version
    PREFIX/LABEL/LABEL-from-BASE.delta    makes its tensors' files of those of the version before, where that pays
    PREFIX/LABEL/listing.json             its listing (listing.py), with "base": the label of the version before

Object stores have no rename: the listing is written last and removed first, and a version without one is not there.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import json
import logging
import re
import threading
from collections.abc import AsyncIterator, Callable, Collection, Iterable
from pathlib import Path
from typing import Any, TypeVar

import fsspec

from ..errors import ServerError
from ..processes import folders, keys
from ..processes.http_answers import Failed
from ..processes.printable import one_line, printable
from ..servers.labels import version_of
from ..servers.types import Published
from . import listing, store
from .fetch import persistently

log = logging.getLogger(__name__)
Result = TypeVar("Result")

OPTION = "--push.bucket"
ADDRESS = re.compile(r"(?!memory:)[a-z][a-z0-9+.-]+://[^*[\]]+")  # each process has a memory of its own
LISTING = "listing.json"
MOST = 64 * 2**20  # bytes of a listing
RANGE = 8 << 20  # bytes of a request
PARALLEL = 4  # requests for a file at a time: object stores limit the speed of each
REQUEST_S = 120.0  # a request that takes longer has failed; one for more than RANGE, that for each


class Missing(ValueError):
    """There is no such object, or no such bucket."""


def check_url(url: str, what: str) -> None:
    """Raises ValueError unless `url` is the address of a folder in an object store, without secrets.

    fsspec takes * and [ for patterns: to remove a version would remove those of other folders, too.
    """
    keys.check_address(url, what)
    if not ADDRESS.fullmatch(url) or "::" in url or not url.isprintable() or url != url.strip():
        raise ValueError(
            f"{what}: must be a folder of an object store, such as s3://BUCKET/PREFIX, without * [ ] and control "
            f"characters, got {url!r:.200}"
        )


class Bucket:
    """A folder of an object store, whose address is the option `what`.

    Raises ValueError for an address of another form, or if the package for its protocol is not installed.
    """

    def __init__(self, url: str, what: str):
        check_url(url, what)
        self.url, self._what = url.rstrip("/"), what
        try:
            self._fs, self._root = fsspec.core.url_to_fs(self.url, use_listings_cache=False)
        except Exception as error:  # the packages for fsspec raise classes of their own; some name what to install
            raise ValueError(f"{what} {url}: {one_line(error)}") from error
        if hasattr(self._fs, "auto_mkdir"):  # of this machine's files; object stores have no folders
            self._fs.auto_mkdir = True

    async def once(self, method: str, *given: str | Path | bytes, size: int = 0, **options: Any) -> Any:
        """What a method of the file system returns.

        Args:
          given: names of objects, paths of files on this machine, contents; the last name is that of errors.
          size: bytes that are transferred.

        Raises:
          Missing: an object is not there.
          FileExistsError: one is, in mode "create".
          ValueError: the store refuses.
          Failed: anything else; it may pass.
        """
        where = self._address(given)
        arguments = (f"{self._root}/{x}".rstrip("/") if isinstance(x, str) else x for x in given)
        arguments = (str(x) if isinstance(x, Path) else x for x in arguments)
        try:
            call = functools.partial(getattr(self._fs, method), *arguments, **options)
            return await _in_thread(call, REQUEST_S * (1 + size // RANGE))
        except FileNotFoundError as error:
            raise Missing(f"{where}: is not there ({one_line(error)})") from error
        except PermissionError as error:
            raise ValueError(f"{where}: access is denied ({one_line(error)}); check the credentials") from error
        except FileExistsError:
            raise
        except Exception as error:  # the packages for fsspec raise classes of their own
            raise Failed(f"{where}: {type(error).__name__}: {one_line(error)}") from error

    async def surely(self, method: str, *given: str | Path | bytes, **options: Any) -> Any:
        """`once`, repeated where an error may pass. Raises ServerError if it does not."""
        return await persistently(self._address(given), lambda: self.once(method, *given, **options))

    async def names(self) -> list[str]:
        """The names of all objects."""
        return [path.removeprefix(f"{self._root}/") for path in await self.surely("find", "")]

    async def content(self, name: str) -> bytes | None:
        """The content of a small object; None if it is not there."""
        try:
            return await self.once("cat_file", name, start=0, end=MOST)
        except Missing:
            return None

    async def listing(self, label: str) -> dict[str, Any] | None:
        """The listing of a version; None if there is none, or an incomplete one."""
        content = await self.content(f"{label}/{LISTING}") or b"null"
        try:
            found = json.loads(content)
        except (ValueError, RecursionError):
            return None
        return found if isinstance(found, dict) else None

    async def owner(self) -> str:
        """The id of the run whose versions these are; "" = of none. Raises ValueError if the bucket cannot be read."""
        try:
            return (await self.content(store.OWNER) or b"").decode(errors="replace").strip()
        except Failed as error:
            raise ValueError(f"{self._what} {error}") from error

    def _address(self, given: Iterable[str | Path | bytes]) -> str:
        *_, name = (x for x in given if isinstance(x, str))
        return f"{self.url}/{name}".rstrip("/")


async def _in_thread(call: Callable[[], Result], seconds: float) -> Result:
    """What `call` returns, in a thread that nobody waits for at the end, if it is still in there."""
    done: concurrent.futures.Future[Result] = concurrent.futures.Future()
    done.set_running_or_notify_cancel()  # so that nothing can cancel it below

    def run() -> None:
        try:
            done.set_result(call())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, daemon=True, name="bucket").start()
    try:
        async with asyncio.timeout(seconds):
            return await asyncio.wrap_future(done)
    except TimeoutError as error:
        raise TimeoutError(str(error) or f"no answer in {seconds:g} s") from error


class BucketSource:
    """A version in a bucket, as a source of `fetch.fetch_version`."""

    def __init__(self, bucket: Bucket, label: str):
        self._bucket, self._label = bucket, label
        self.url, self.fetched = f"{bucket.url}/{label}", 0

    async def listing(self, held: str, base: str) -> Any:
        if (found := await self._bucket.listing(self._label)) is None:
            raise ValueError(f"{self.url}: there is no such version")
        return found if found.get("base") == held else {"files": found.get("files")}

    async def append(self, name: str, path: Path, have: int, size: int) -> None:
        async def read(start: int) -> bytes:
            end = min(start + RANGE, size)
            data = await self._bucket.once("cat_file", f"{self._label}/{name}", start=start, end=end)
            if len(data) != end - start:
                raise Failed(f"{self.url}/{name}: {start + len(data)} of {size} bytes are there")
            return data

        starts = range(max(have, 0), size, RANGE)
        with open(path, "ab") as file:
            for first in range(0, len(starts), PARALLEL):
                some = map(read, starts[first : first + PARALLEL])
                for data in await asyncio.gather(*some, return_exceptions=True):
                    if isinstance(data, BaseException):
                        raise data
                    file.write(data)
                    self.fetched += len(data)


@contextlib.asynccontextmanager
async def opened(url: str, run: str, *, keep: bool) -> AsyncIterator[Uploads]:
    """Yields a bucket, which then belongs to this run; its versions are removed at the end unless `keep`.

    Raises as `check_owner`.
    """
    await check_owner(url, run)
    bucket = Bucket(url, OPTION)
    with contextlib.suppress(FileExistsError):
        await bucket.surely("pipe_file", store.OWNER, run.encode(), mode="create")
    await check_owner(url, run)  # another run may have taken it meanwhile
    with folders.scratch(store.choose_root(), "deltas") as folder:
        uploads = Uploads(bucket, folder)
        try:
            yield uploads
        finally:
            await uploads.close(keep=keep)


async def check_owner(url: str, run: str) -> None:
    """Raises ValueError if a bucket cannot be read, or cannot become one for the versions of this run; writes nothing.

    Args:
      run: the run's id; "" = of a new run, to which no versions belong yet.
    """
    bucket = Bucket(url, OPTION)
    owner = await bucket.owner()
    if not owner and {*await bucket.names()} - {store.OWNER}:  # which another run may have written by now
        raise ValueError(
            f"{OPTION} {url}: must be empty or of the same run, got other objects; name another prefix, or empty it"
        )
    if owner not in ("", run):
        raise ValueError(
            f"{OPTION} {url}: holds versions of another run ({printable(owner):.80}, this one is {run or 'new'}); name "
            "another prefix, or empty it"
        )


class Uploads:
    """The versions that a run has uploaded to its bucket, each once, however many servers ask for it."""

    def __init__(self, bucket: Bucket, folder: Path):
        self._bucket, self._folder = bucket, folder
        self._versions: dict[str, tuple[Path, asyncio.Task[None]]] = {}  # by label
        self._before: tuple[Published, dict[str, dict]] | None = None  # the last one and its files
        self._one_at_a_time = asyncio.Lock()

    async def offered(self, weights: Published) -> dict[str, Any]:
        """Uploads a version unless it is there; returns where stagers find it.

        Raises ServerError or ValueError if that fails.
        """
        _, task = self._versions.get(weights.label, (None, None))
        if task is None or (task.done() and (task.cancelled() or task.exception())):
            task = asyncio.create_task(self._upload(weights))
            self._versions[weights.label] = Path(weights.directory), task
        try:
            await asyncio.shield(task)
        except OSError as error:
            raise ServerError(f"{weights.directory}: {error}") from error
        return {"sources": [self._bucket.url], "source_key": ""}

    async def _upload(self, weights: Published) -> None:
        label, directory, put = weights.label, Path(weights.directory), self._bucket.surely
        async with self._one_at_a_time:
            before, self._before = self._before, None  # after a failure the next one is uploaded in full
            files = await asyncio.to_thread(listing.files_of, directory)
            found = await persistently(self._bucket.url, lambda: self._bucket.listing(label))
            if not found or found.get("files") != files:
                await self._remove("rm_file", f"{label}/{LISTING}")
                listed: dict[str, Any] = {"files": files, "base": "", "same": [], "delta": None}
                if before and before[0].base == weights.base:
                    last, others = before
                    same, old = listing.same(files, others), (last.label, Path(last.directory))
                    delta = await asyncio.to_thread(listing.make_delta, self._folder, (label, directory), old, same)
                    listed |= {"base": last.label, "same": same, "delta": delta}
                for name, entry in files.items():
                    if name in listed["same"]:
                        await put("cp_file", f"{listed['base']}/{name}", f"{label}/{name}", size=entry["bytes"])
                    else:
                        await put("put_file", directory / name, f"{label}/{name}", size=entry["bytes"])
                if delta := listed["delta"]:
                    path = self._folder / delta["name"]
                    try:
                        await put("put_file", path, f"{label}/{path.name}", size=delta["bytes"])
                    finally:
                        path.unlink()
                await put("pipe_file", f"{label}/{LISTING}", json.dumps(listed).encode())
            self._before = weights, files

    async def prune(self) -> None:
        """Removes versions whose directory is gone, and what a former process of this run has left."""
        self._versions = {label: version for label, version in self._versions.items() if version[0].exists()}
        await self._remove_but(self._versions)

    async def close(self, *, keep: bool) -> None:
        """Ends the uploads; removes what is in the bucket unless `keep`."""
        tasks = [task for _, task in self._versions.values()]
        ended = all(task.done() for task in tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if not keep:  # where an upload was ended, its thread may go on, and what it leaves is this run's
            await self._remove_but((), owner=ended)

    async def _remove_but(self, labels: Collection[str], owner: bool = False) -> None:
        """Removes all versions but those, and then the owner if `owner`."""
        try:
            there = {name.partition("/")[0] for name in await self._bucket.names()}
            for label in sorted(label for label in there if version_of(label) >= 0 and label not in labels):
                await self._remove("rm_file", f"{label}/{LISTING}")
                await self._remove("rm", label, recursive=True)
            if owner:
                await self._remove("rm_file", store.OWNER)
        except (ServerError, ValueError) as error:
            log.warning("%s: some of what is not needed is left: %s", self._bucket.url, error)

    async def _remove(self, method: str, name: str, **options: Any) -> None:
        with contextlib.suppress(Missing):
            await self._bucket.surely(method, name, **options)
