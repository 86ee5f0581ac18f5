"""Versions in parts: each process of the trainer keeps, and serves to stagers, its tensors of a version alone, so that
as many links carry a version as there are hosts.

Processes other than 0 train while it pushes, so nothing here is collective: each has a file server (file_server.py) in
a thread, which process 0 asks for the part's entries of the manifest and tells the label that it computes of all.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import shutil
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from ..processes import folders, http_process
from ..servers.types import Published
from . import fetch, file_server, http_source, store


class Parts:
    """In process 0: the source of stagers, which is its own file server and those of the others, at `others`."""

    def __init__(self, own: file_server.FileServer, others: Sequence[str]):
        self._own, self._others = own, others
        self._named: set[str] = set()  # labels that the others know
        self._naming = asyncio.Lock()

    async def tensors(self, version: int) -> dict[str, dict]:
        """The manifest's entries of the others' tensors, once they are written. Raises as `fetch.persistently`."""
        return {name: entry for part in await self._asked("GET", str(version)) for name, entry in part.items()}

    async def offered(self, weights: Published) -> dict[str, Any]:
        """Has all processes serve a version; returns where stagers find it."""
        self._own.offer(weights)
        async with self._naming:
            if weights.label not in self._named:
                await self._asked("POST", weights.label)
                self._named.add(weights.label)
        return {"sources": [self._own.url, *self._others], "source_key": self._own.key}

    async def _asked(self, method: str, what: str) -> list[Any]:
        async with http_source.session(self._own.key) as http:
            one = functools.partial(http_source.asked, http, method)
            urls = [f"{url}/parts/{what}" for url in self._others]
            return await asyncio.gather(*(fetch.persistently(url, functools.partial(one, url)) for url in urls))


class Keeper:
    """In another process: what it has of the newest versions, in the folder `root`; made by `keeping`."""

    def __init__(self, root: Path, server: file_server.FileServer, loop: asyncio.AbstractEventLoop):
        self.url, self._root, self._server, self._loop = server.url, root, server, loop
        self.writing: list[concurrent.futures.Future[None]] = []  # the newest

    def keep(
        self, version: int, write: Callable[[Path], dict[str, dict]], kept: Collection[int], failed: Callable
    ) -> None:
        """Has this process's part of a version written and served, and returns at once.

        Args:
          write: writes it to a new directory, and returns its entries of the manifest.
          kept: earlier versions that may still be asked for; all others are removed.
          failed: called in the thread with the error if there is one, such as a full disk.
        """

        async def done() -> None:
            for path in [*self._root.iterdir()]:
                if path.name.isdecimal() and int(path.name) not in kept:
                    gone = path.rename(self._root / f".{path.name}.removing")  # nothing lists an incomplete one
                    await asyncio.to_thread(shutil.rmtree, gone)
            directory = self._root / str(version)
            self._server.hold(version, directory, await store.written(lambda: write(directory), self._root, tuple))

        self.writing = [future := asyncio.run_coroutine_threadsafe(done(), self._loop)]
        future.add_done_callback(lambda ended: failed(error) if (error := ended.exception()) else None)


@contextlib.contextmanager
def keeping(url: str, key: str, size: int) -> Iterator[Keeper]:
    """Yields a Keeper, which serves in a thread until the end.

    Args:
      url: of a stager, at whose side of this host it listens.
      key: that callers need.
      size: bytes of a part.
    """
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="parts", daemon=True)
    thread.start()
    there = lambda coroutine: asyncio.run_coroutine_threadsafe(coroutine, loop).result()
    serving = file_server.serve(http_process.towards(url), key=key)
    try:
        with folders.scratch(store.choose_root(size), "weights") as root:
            keeper = Keeper(root, there(serving.__aenter__()), loop)
            yield keeper
            concurrent.futures.wait(keeper.writing)
            there(serving.__aexit__(None, None, None))
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
