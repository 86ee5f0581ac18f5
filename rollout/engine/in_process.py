"""Runs the embedded engine in the trainer's process: its HTTP server in a thread, with new weights passed as arrays.

For machines with one device, and for TPUs, where a device belongs to one process. Requests, pauses and labels use HTTP
as with any server; only the weights bypass it.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from ... import models
from ...core import param
from ..processes import http_process, keys
from ..servers.engine_mesh import EngineMesh
from . import server as http


@dataclass(frozen=True)
class Weights:
    """A version of the weights as arrays.

    Attributes:
      params: numpy arrays from `hf.host_copy`: separate buffers, so the trainer may donate its own.
      manifest: their `hf.manifest`, so that the label identifies exactly these bytes.
    """

    config: Any
    params: Any
    manifest: dict

    def checksums(self) -> dict[str, str]:
        return {name: entry["xxh3_128"] for name, entry in self.manifest["tensors"].items()}

    def cast(self, dtype: str):
        """The parameters in the engine's dtype, as it would read them from files."""
        table = models.table(self.config)
        fit = lambda _, x, to: x.astype(to.dtype, copy=False)
        return param.tree_map(fit, table, self.params, param.abstract(table, dtype))


@contextlib.contextmanager
def serving(
    path: str, first: Callable[[], tuple[str, Weights]] | None = None, *, slots: int, context: int, memory: float = 0,
    mesh: EngineMesh = EngineMesh(), draft: int = 1, dtype: str,
) -> Iterator[tuple[str, Inside]]:  # fmt: skip
    """Serves the model of the checkpoint folder `path` on a free loopback port until the block ends.

    Yields its URL, and the `Inside` that gives it weights as arrays.

    Args:
      first: returns the initial label and weights, to which no reference is kept; None = those in the folder, as
        "default". The tokenizer is the folder's.
      slots, context, memory, mesh, draft, dtype: as `server.serve`.

    Raises:
      ValueError: the folder cannot be loaded.
      RuntimeError: the server ended before it was ready.
    """
    dtype = http.known_dtype(dtype)
    with contextlib.closing(http_process.bind("127.0.0.1", 0)) as sock, contextlib.ExitStack() as stack:
        label, *weights = _given(first, dtype) if first else ("default", *http.read_weights(path, dtype))
        service = http.prepare(
            path, *weights, slots=slots, context=context, memory=memory, mesh=mesh, draft=draft, dtype=dtype,
            version=label,
        )  # fmt: skip
        del weights  # the engine has copies
        stack.enter_context(service.engine)
        app = http.app(service, keys.read(keys.SERVER))
        uvicorn = http_process.server(app, **http.OPTIONS)
        serve = lambda: asyncio.run(uvicorn.serve(sockets=[sock]))
        thread = threading.Thread(target=serve, name="areax-http", daemon=True)
        thread.start()
        try:
            while not uvicorn.started:
                if not thread.is_alive():
                    raise RuntimeError("the generation server in this process ended before it was ready")
                time.sleep(0.01)
            yield f"http://127.0.0.1:{sock.getsockname()[1]}", Inside(service)
        finally:
            service.engine.abort_all()
            uvicorn.should_exit = True
            thread.join()


def _given(first: Callable[[], tuple[str, Weights]], dtype: str) -> tuple:
    label, weights = first()
    return label, weights.config, weights.cast(dtype), weights.checksums()


class Inside:
    """Gives the engine of this process the arrays of a version: the `handover` of a `servers.server.Server`, which
    replaces the old weights; `stage` is its `prepare`."""

    def __init__(self, service: http.Service):
        self._service = service
        self._staged: tuple[Any, Any] = None, None  # a version's arrays, and the engine's staged copy

    async def stage(self, weights) -> None:
        """Stages them next to the current ones, while requests continue. Raises ValueError like the call."""
        if not self._service.engine.released:
            await self._ready(weights.arrays)

    async def _ready(self, new: Weights) -> Any:
        if self._staged[0] is not new:
            self._staged = None, None  # never three versions in memory
            stage = self._service.engine.stage
            self._staged = new, await asyncio.to_thread(lambda: stage(new.cast(self._service.dtype)))
        return self._staged[1]

    async def __call__(self, _, weights, flush_cache: bool) -> None:
        """Switches to the version. Raises ValueError if its arrays belong to another model; the old weights stay."""
        ready = await self._ready(weights.arrays)
        self._staged = None, None
        await asyncio.to_thread(self._service.engine.swap, ready, weights.label, flush=flush_cache)
        self._service.checksums = weights.arrays.checksums()
