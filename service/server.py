"""Starts the service: `serve(model)`."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from starlette.types import ASGIApp

from ..adapters import hf, peft
from ..rollout.engine.engine import Engine
from ..rollout.engine.server import known_dtype
from ..rollout.processes import http_limits, http_process
from ..rollout.servers.engine_options import DEFAULTS, EngineOptions
from . import saves
from .futures import Futures
from .log import Log
from .model import Base
from .options import Options
from .routes import Service, failed, routes
from .sampling import Sampler
from .sessions import Sessions
from .worker import Worker

KEYS = "AREAX_TINKER_KEYS"
DATABASE = "service.db"
EVERY_S = 60.0  # between looks for sessions that went silent


@contextlib.contextmanager
def serving(
    path: str, served: str, options: Options, engine: EngineOptions = DEFAULTS, *, keys: Sequence[str] = (),
    dtype: str = "auto",
) -> Iterator[ASGIApp]:  # fmt: skip
    """Yields the application that serves the checkpoint folder `path`; it goes on from what is in the folder `out`.

    Args:
      served: the model's name for clients.
      keys: as for `Sessions`.
      dtype: of the computation.

    Raises:
      ValueError: the model cannot be loaded, or another server uses the folder.
    """
    if engine.mesh.devices > 1:
        raise ValueError(f"tinker: the mesh must have one device, got {engine.mesh}")
    out, dtype = Path(options.out), known_dtype(dtype)
    out.mkdir(parents=True, exist_ok=True)
    with contextlib.closing(Log(out / DATABASE)) as store:
        saves.sweep(out)
        base, sampling = loaded(path, engine, dtype)
        peft.modules(base.config, base.spec(options.rank))  # refuses what could not be saved once it is trained
        futures = Futures(store)
        sampler = Sampler(sampling, base, store, out, options.rank, futures.settled)
        worker = Worker(base, store, out, served, options.save_every, futures.settled, sampler.forget)
        names = frozenset({served, path, str(Path(path).resolve())})
        service = Service(
            base, store, Sessions(store, keys), futures, worker, sampler, out, served, names, options.rank
        )

        @contextlib.asynccontextmanager
        async def running(_: Any) -> AsyncIterator[None]:
            futures.open()
            sampler.start()
            worker.start()
            parking = asyncio.create_task(_park(service))
            try:
                yield
            finally:
                parking.cancel()
                await asyncio.to_thread(worker.close)
                await asyncio.to_thread(sampler.close)

        yield http_limits.app(routes(service), failed=failed, lifespan=running)


def loaded(path: str, options: EngineOptions, dtype: str) -> tuple[Base, Engine]:
    """The base for training, and the engine for sampling."""
    config, params = hf.load(path, dtype=None)
    decode = None
    if tokenizer := hf.tokenizer_in(Path(path)):
        config = hf.with_ends(config, tokenizer)
        decode = functools.partial(tokenizer.decode, skip_special_tokens=True)
    options = replace(options, context=min(options.context, config.context))
    engine = Engine(config, hf.cast(config, params, dtype), decode=decode, **vars(options))
    return Base(config, params, options.context, dtype), engine


async def _park(service: Service) -> None:
    """Takes models of silent sessions out of memory."""
    while True:
        await asyncio.sleep(EVERY_S)
        for model in service.sessions.silent():
            service.worker.leave(model, for_good=False)


def serve(
    path: str, served: str, options: Options, engine: EngineOptions = DEFAULTS, *, host: str = "127.0.0.1",
    port: int = 8000, keys: Sequence[str] = (), dtype: str = "auto",
    loading: contextlib.AbstractContextManager | None = None,
) -> None:  # fmt: skip
    """Serves until SIGTERM or SIGINT; prints a line that begins with the URL when ready.

    Args:
      port: 0 = any free port.
      loading: entered while the model is loaded.

    Raises:
      ValueError: the address is not available, or other machines reach it and there are no keys; or as `serving`.
    """
    key = " ".join(keys) or None
    with contextlib.ExitStack() as stack:
        guarded = http_process.bind_guarded(host, port, key=key, variable=KEYS, what="tinker")
        sock = stack.enter_context(contextlib.closing(guarded))
        with loading or contextlib.nullcontext():
            app = stack.enter_context(serving(path, served, options, engine, keys=keys, dtype=dtype))
        address = http_process.address((host, sock.getsockname()[1]))
        ready = f"{address} serves {served} to clients of Tinker's API; state is in {options.out}"
        http_process.serve(app, sock, ready, lifespan="on")
