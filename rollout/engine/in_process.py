"""Runs the embedded engine in the trainer's process: its HTTP server in a thread, with new weights passed on devices.

For machines with one device, and for TPUs, where a device belongs to one process. Requests, pauses and labels use HTTP
as with any server; only the weights bypass it.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax

from ...adapters import hf
from ..processes import http_process, keys
from ..servers.engine_options import EngineOptions
from . import server
from .checkpoint import blind, read_weights
from .routes.app import app
from .routes.service import Service


@dataclass(frozen=True)
class Weights:
    """A version of the trainer's weights.

    Attributes:
      params: its arrays, maybe sharded, which it may donate once they are staged.
      manifest: their `hf.manifest`, so that the label identifies exactly these bytes.
      saved: the dtype of that manifest; None = that of the checkpoint the model came from.
    """

    config: Any
    params: Any
    manifest: dict
    saved: str | None = None

    def checksums(self) -> dict[str, str]:
        return {name: entry["xxh3_128"] for name, entry in self.manifest["tensors"].items()}

    def cast(self, dtype: str):
        """The parameters in the engine's dtype, as it would read them from files."""
        return hf.cast(self.config, self.params, dtype, self.saved)


@dataclass(frozen=True)
class Ready:
    """A version in the engine's layout, and the checksums of its tensors."""

    staged: Any
    checksums: dict[str, str]


@contextlib.contextmanager
def serving(
    path: str, options: EngineOptions, first: Callable[[], tuple[str, Weights]] | None = None, *, dtype: str
) -> Iterator[tuple[str, Inside]]:
    """Serves the model of the checkpoint folder `path` on a free loopback port until the block ends.

    Yields its URL, and the `Inside` that gives it weights as arrays.

    Args:
      first: returns the initial label and weights, to which no reference is kept; None = those in the folder, as
        "default". The tokenizer is the folder's.
      dtype: as `server.serve`.

    Raises:
      ValueError: the folder cannot be loaded.
      RuntimeError: the server ended before it was ready.
    """
    dtype = server.known_dtype(dtype)
    with contextlib.closing(http_process.bind("127.0.0.1", 0)) as sock, contextlib.ExitStack() as stack:
        label, *weights = (
            _given(first, dtype) if first else ("default", *read_weights(path, dtype, sees=blind(path) is None))
        )
        service = server.prepare(path, options, *weights, dtype=dtype, version=label)
        del weights  # the engine has copies
        stack.enter_context(service.engine)
        uvicorn = http_process.server(app(service, keys.read(keys.SERVER)), **server.UVICORN)
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
    return label, dataclasses.replace(weights.config, mtp=False), weights.cast(dtype), weights.checksums()


class Inside:
    """Gives the engine of this process the weights of a version: the `handover` of a `servers.server.Server`, which
    replaces the old ones; `stage` is its `prepare`."""

    def __init__(self, service: Service):
        self._service = service

    def stage(self, label: str, new: Weights) -> Ready:
        """Copies a version to the engine's devices, next to the weights in use, while requests continue.

        Raises:
          ValueError: it belongs to another model.
        """
        engine = self._service.engine
        in_use = engine.weights if engine.version == label else None
        return Ready(engine.stage(new.cast(self._service.dtype)) if in_use is None else in_use, new.checksums())

    async def __call__(self, _, weights, flush_cache: bool) -> None:
        """Switches to a version that is `Ready`.

        Raises:
          ValueError: the engine had it before and has released its memory.
        """
        ready = weights.arrays
        if any(x.is_deleted() for x in jax.tree.leaves(ready.staged)):
            raise ValueError(f"version {weights.label} was released with the engine's memory; push the next one")
        await asyncio.to_thread(self._service.engine.swap, ready.staged, weights.label, flush=flush_cache)
        self._service.checksums = ready.checksums
