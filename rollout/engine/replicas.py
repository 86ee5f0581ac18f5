"""Replicas of an engine on devices of their own, behind the methods of one: data parallelism for generation.

A request goes to the replica that has computed the longest beginning of its prompt, unless that is much busier than the
others (`servers.prefix_routing`). It has the same bits in any of them.
"""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Self

from ...models.lora import Lora
from ..servers.engine_mesh import ONE_DEVICE, EngineMesh
from ..servers.prefix_routing import Cached, chain, choose
from ..types import Image
from .engine import COMPUTED, COUNTED, RELEASABLE, Checked, Engine, Pair, collect
from .request import Progress, Request
from .slots import devices_of

SUMMED = ("slots", "running", "queued", "capacity", "used", "bytes", *COUNTED, *COMPUTED)


def serving(config, params, *, mesh: EngineMesh = ONE_DEVICE, **options: Any) -> Engine | Replicas:
    """The engine that a mesh asks for; arguments as of `Engine`."""
    if mesh.dp > 1:
        return Replicas(config, params, mesh=mesh, **options)
    return Engine(config, params, mesh=mesh, **options)


@dataclass(eq=False)
class Replica:
    """An engine, and the chunks of prompts that it is expected to have cached."""

    engine: Engine
    cached: Cached

    @property
    def load(self) -> int:
        return self.engine.requests


class Replicas:
    """`mesh.dp` engines with the same weights; the methods are those of `Engine`, of all of them together.

    Every command reaches all engines before the next one does, and either all or none of them refuse it.

    Attributes:
      slots: of all engines.
      options: of each engine, with the mesh of all.
    """

    def __init__(self, config, params, *, mesh: EngineMesh, seed: int = 0, **options: Any):
        """
        Args:
          seed: from which requests without a seed get theirs, in order of submission, as in one engine.
          options: of each engine.

        Raises:
          ValueError: there are not enough devices; or as `Engine`.
        """
        devices, size = devices_of(mesh), mesh.replica.devices
        parts = [devices[start : start + size] for start in range(0, mesh.devices, size)]
        self._engines = [Engine(config, params, devices=part, mesh=mesh.replica, **options) for part in parts]
        first = self._engines[0]
        self.config, self.context, self.grammars, self.pictures = config, first.context, first.grammars, first.pictures
        self.slots, self.options = mesh.dp * first.slots, replace(first.options, mesh=mesh)
        self._page, self._seeds = first.options.page, random.Random(seed)
        self._replicas = [Replica(engine, Cached(engine.stats()["capacity"], self._page)) for engine in self._engines]
        self._started = False
        self._commands, self._swaps = threading.Lock(), threading.Lock()

    def start(self) -> None:
        self._started = True
        for engine in self._engines:
            engine.start()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_):
        self.close()

    def close(self) -> None:
        self._each(Engine.close)

    # Requests.

    def submit(self, request: Request, on_progress: Callable[[Progress], None]) -> None:
        self._enqueue([(request, on_progress)])

    def submit_all(self, requests: Sequence[Request], on_progress: Callable[[Progress], None]) -> None:
        """As `Engine.submit_all`; requests with the same prompt go to the same engine."""
        self._enqueue([(request, on_progress) for request in requests])

    def generate(self, requests: Sequence[Request]) -> list[Progress]:
        if not self._started:
            self.start()
        return collect(self._enqueue, requests)

    def abort(self, *rids: str) -> None:
        for engine in self._engines:
            engine.abort(*rids)

    def abort_all(self) -> None:
        for engine in self._engines:
            engine.abort_all()

    def _enqueue(self, pairs: Sequence[Pair]) -> None:
        checked = self._engines[0].checked(pairs)
        groups: dict[tuple[str, Sequence[int], tuple[Image, ...]], list[int]] = {}
        for i, (request, *_) in enumerate(checked):
            groups.setdefault((request.adapter, tuple(request.prompt), request.images), []).append(i)
        hashed = [self._hashes(checked[group[0]]) for group in groups.values()]
        with self._locked():
            for engine in self._engines:
                engine.refuse(checked)
            # What is refused takes no seed.
            queued = [(self._seeded(one[0]), *one[1:]) for one in checked]
            for hashes, group in zip(hashed, groups.values(), strict=True):
                replica = choose(self._replicas, hashes)
                replica.cached.add(hashes)
                replica.engine.queue([queued[i] for i in group])

    def _hashes(self, checked: Checked) -> list[int]:
        """Of each page of a prompt and all that is before it: its tokens, images and adapter."""
        request, *_, images = checked
        marks = images.marks if images else {}
        return [hash((request.adapter, chunk)) for chunk in chain(request.prompt, self._page, marks)]

    def _seeded(self, request: Request) -> Request:
        if request.sampling.seed is not None:
            return request
        return replace(request, sampling=replace(request.sampling, seed=self._seeds.getrandbits(64)))

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Holds what requests are queued under, of all engines in order."""
        with contextlib.ExitStack() as held:
            for engine in self._engines:
                held.enter_context(engine.lock)
            yield

    # Commands.

    def pause(self, mode: str) -> None:
        with self._commands:
            self._each(lambda engine: engine.pause(mode))

    def resume(self) -> None:
        with self._alone():
            self._each(Engine.resume)

    def stage(self, params) -> list[Any]:
        return [engine.stage(params) for engine in self._engines]

    def load(self, params, version: str, *, flush: bool = True) -> None:
        self.swap(self.stage(params), version, flush=flush)

    def swap(self, weights: Sequence[Any], version: str, *, flush: bool = True) -> None:
        """As `Engine.swap`: none switches before all can, so that no request gets old weights once another has got
        new ones. Pauses may come meanwhile, as they do for one engine."""
        own = dict(zip(self._engines, weights, strict=True))
        with self._swaps:
            self._agree(lambda engine, agreed: engine.swap(own[engine], version, flush=flush, agreed=agreed))
        self._forget()

    def release(self, what: Iterable[str] = RELEASABLE) -> None:
        tags = tuple(what)
        with self._alone():
            self._agree(lambda engine, agreed: engine.release(tags, agreed=agreed))
        self._forget()

    def reclaim(self, what: Iterable[str] = RELEASABLE) -> None:
        tags = tuple(what)
        with self._alone():
            self._each(lambda engine: engine.reclaim(tags))

    def load_adapter(self, name: str, spec: Lora, adapters, path: str = "") -> None:
        with self._alone(), contextlib.ExitStack() as loaded:
            for engine in self._engines:
                engine.load_adapter(name, spec, adapters, path)
                loaded.callback(engine.drop_adapter, name)  # no request can use it before all have it
            loaded.pop_all()

    def unload_adapter(self, name: str) -> None:
        with self._alone():
            unused = self._each(lambda engine: engine.drop_adapter(name))
        for done in unused:
            done.result()

    def flush(self) -> bool:
        """As `Engine.flush`; False if any has running requests, and only the others' prompts are cleared then."""
        with self._alone():
            flushed = self._each(Engine.flush)
        self._forget()
        return all(flushed)

    def set_version(self, version: str) -> None:
        with self._alone():
            self._each(lambda engine: engine.set_version(version))

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Keeps out all other commands. Waits for a swap before it keeps out pauses, which let the swap in."""
        with self._swaps, self._commands:
            yield

    def _forget(self) -> None:
        with self._locked():
            for one in self._replicas:
                one.cached.clear()

    def _agree(self, act: Callable[[Engine, Callable[[], Any]], None]) -> None:
        """`act(engine, agreed)` of all engines, where agreed() waits until all have called it, and raises if one has
        failed before."""
        barrier = threading.Barrier(len(self._engines))

        def one(engine: Engine) -> None:
            try:
                act(engine, barrier.wait)
            except (ValueError, RuntimeError):
                barrier.abort()
                raise

        self._each(one)

    def _each(self, act: Callable[[Engine], Any]) -> list[Any]:
        """`act` of all engines at the same time; raises what one of them has raised, once all have ended."""
        for engine in self._engines:
            engine.check_thread()
        with ThreadPoolExecutor(len(self._engines)) as pool:
            made = [pool.submit(act, engine) for engine in self._engines]
        errors = [error for future in made if (error := future.exception())]
        for error in sorted(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
            raise error  # the cause, rather than that the others could not agree
        return [future.result() for future in made]

    # State.

    @property
    def version(self) -> str:
        return self._engines[0].version

    @property
    def paused(self) -> bool:
        return any(engine.paused for engine in self._engines)

    @property
    def released(self) -> frozenset[str]:
        return frozenset().union(*(engine.released for engine in self._engines))

    @property
    def able(self) -> bool:
        return all(engine.able for engine in self._engines)

    @property
    def loaded(self) -> bool:
        return all(engine.loaded for engine in self._engines)

    @property
    def weights(self) -> list[Any] | None:
        """As `Engine.weights`, of all engines."""
        return [engine.weights for engine in self._engines] if self.loaded else None

    @property
    def draft_from(self) -> str | None:
        return self._engines[0].draft_from

    def check_memory(self) -> None:
        """As `Engine.check_memory`; all engines release their memory together."""
        self._engines[0].check_memory()

    @property
    def adapters(self) -> dict[str, str]:
        return self._engines[-1].adapters  # the last to load one

    def stats(self) -> dict:
        each = [engine.stats() for engine in self._engines]
        sums = {name: sum(one[name] for one in each) for name in SUMMED}
        return each[0] | sums | {"paused": self.paused, "released": sorted(self.released)}
