"""What the fleet knows about one generation server; its HTTP calls are `Server.api`."""

from __future__ import annotations

import asyncio
import collections
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import aiohttp

from ..errors import ServerError
from ..processes.http_answers import Unreached
from . import concurrency, gauges, kinds, prefix_routing
from .sglang import SGLang
from .types import Probe, Published, Reported, Staged, State
from .vllm import VLLM


class Stager(Protocol):
    """Brings a version to where a server can read it (`file_server.Stager`)."""

    @property
    def url(self) -> str: ...

    async def check(self, *, timeout_s: float) -> None: ...

    async def stage(self, weights: Published) -> Staged: ...

    def at(self, url: str) -> Stager: ...


class Origin(Protocol):
    """Where stagers fetch versions from: `file_server.FileServer`, `object_store.Uploads` or `parts.Parts`."""

    async def offered(self, weights: Published) -> dict[str, Any]:
        """Makes a version available; returns {"sources": addresses, "source_key"}, for stagers.

        Raises ServerError or ValueError if that fails.
        """


# Passes a version's arrays to a server; the last argument: whether the server drops its prefix cache.
Handover = Callable[["Server", Published, bool], Awaitable[None]]


def _set() -> asyncio.Event:
    event = asyncio.Event()
    event.set()
    return event


@dataclass(eq=False)
class Server:
    """One server.

    Attributes:
      api: its HTTP calls.
      labels: weight labels it may report, in the order of the pushes.
      admitted: index in `labels` of the newest verified one.
      seeded, stages, ranks, layout, slots, context: as `sglang.Description`.
      stager: fetches versions to where the server can read them; None if it sees the trainer's files.
      handover: passes it the arrays of a version, if that has any; None = it reads the directory.
      prepare: of a server in this process: stages a version, (label, weights), next to the current one, before the
        trainer donates its arrays; returns what `handover` takes.
      proved: the tensors in the manifest of the newest version whose checksums it has proved, and these, by rank.
      probed: the newest probe that it has passed, and its own log-probabilities of it; None = none yet.
      read: the tokens of the last probe, and its own log-probabilities of them with the weights that it has.
      first: its first differences on the canaries, which the limits of later ones derive from (`canary.Differences`).
      drifts: a canary found it computing otherwise than the trainer, and none since has found it right.
      fresh: this run started it with the weights of `label` and has not pushed to it since.
      weights_verified: cleared while new weights await verification; answers are held back meanwhile.
      state: healthy; offloaded (released its memory until the next push); suspect (a connection failed);
        weights_unknown (a push failed half-way); stale (serves other weights); dead (does not answer); restarting;
        leaving.
      why: why it last left `healthy`.
      recovery: the task that recovers it while it is unhealthy.
      restarts: times of its recent restarts.
      reads: labels of the version that a recovery is loading, and of its base; its files must stay.
      released: it may have released its memory, which must be resumed before a load.
      draining: it gets no new requests until it has new weights.
      held: number of our requests on it, over time; `load` is the current number, `running` their tasks.
      cached: prompt prefixes it is expected to have in its cache.
      limit: how many requests it gets at a time, below the fleet's bound.
      pauses: how often it was paused for new weights.
      given: the labels of all weights that it had at first or got from this run.
      taken: how often it was taken back from another run.
      strange: how often in a row it sampled with weights that it was not given, and loaded them again each time.
      base: if it serves adapters, the label of the base weights, which it reports.
      adapters: adapters that requests may use, newest last; `using` counts requests per adapter.
      reported: what it said of its weights when they were loaded, or when it was met; None while a load is under way.
      folders: the folder of each adapter when it was loaded.
    """

    api: SGLang | VLLM
    labels: list[str] = field(default_factory=list)
    admitted: int = 0
    seeded: bool = False
    stages: bool = False
    ranks: int = 1
    layout: str = ""
    slots: int = 0
    context: int = 0
    stager: Stager | None = None
    handover: Handover | None = None
    prepare: Callable[[str, Any], Any] | None = None
    proved: tuple[dict[str, dict], list[dict[str, str]]] = field(default_factory=lambda: ({}, []))
    probed: tuple[Probe, list[float]] | None = None
    read: tuple[tuple[int, ...], list[float]] | None = None
    first: tuple[float, float, float] | None = None
    drifts: bool = False
    fresh: bool = False
    weights_verified: asyncio.Event = field(default_factory=_set)
    state: State = "healthy"
    why: str = ""
    recovery: asyncio.Task | None = None
    restarts: list[float] = field(default_factory=list)
    reads: tuple[str, ...] = ()
    released: bool = False
    draining: bool = False
    running: set[asyncio.Task] = field(default_factory=set)
    held: gauges.Level = field(default_factory=gauges.Level)
    cached: prefix_routing.Cached = field(default_factory=prefix_routing.Cached)
    limit: concurrency.Limit = field(default_factory=concurrency.Limit)
    pauses: int = 0
    given: set[str] = field(default_factory=set)
    taken: int = 0
    strange: int = 0
    base: str = ""
    adapters: list[str] = field(default_factory=list)
    using: collections.Counter[str] = field(default_factory=collections.Counter)
    reported: Reported | None = None
    folders: dict[str, str] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return self.api.url

    @property
    def label(self) -> str:
        return self.labels[self.admitted]

    @property
    def load(self) -> int:
        return self.held.value

    @load.setter
    def load(self, requests: int) -> None:
        self.held.set(requests)

    def __post_init__(self):
        self.given.update(self.labels)

    def expected(self, oldest: int) -> list[str]:
        """The labels it may report while `labels[oldest]` is the oldest in use."""
        return self.labels[oldest:] + ([self.base] if self.base else [])

    def replaced(self, now: Reported) -> str:
        """Why the weights are others than those given, although `now`, what it reports, has their label; "" = they are
        not, or it does not say where it loaded them from."""
        known = self.reported
        if not known or known.label != now.label or "" in (known.source, now.source) or known.source == now.source:
            return ""
        return f"has weights {now.label!r} loaded from another folder, {now.source!r}, not {known.source!r}"

    async def release_memory(self) -> None:
        """Pauses it and frees its memory; it must load weights before it generates again.

        Raises Unreached if nothing happened, ValueError if it refused and still has its memory, ServerError if it may
        be paused or without memory.
        """
        await self.api.pause("retract", reach_s=self.api.reach_s)
        self.released = True
        try:
            await self.api.release_memory()
        except ValueError:
            self.released = False
            raise
        except Unreached as error:  # paused, but it still has its memory
            self.released = False
            raise ServerError(str(error)) from error

    async def reclaim_memory(self, *, timeout_s: float = 120.0) -> None:
        """Has it allocate the memory it released, unless it was restarted since then, which its label shows."""
        if self.released:
            now = await self.api.reported_weights(timeout_s=timeout_s, reach_s=self.api.reach_s)
            if now.label == self.label:
                await self.api.resume_memory(timeout_s=timeout_s)
        self.released = False


async def connect(
    url: str,
    http: aiohttp.ClientSession,
    *,
    ready_s: float,
    reach_s: float,
    key_variable: str = "",
    handover: Handover | None = None,
    vocabulary: int = 0,
) -> Server:
    """Connects to the server at `url` once it answers; raises as `kinds.found`, and its `describe`.

    Args:
      key_variable, vocabulary: as `SGLang` has them.
    """
    api = await kinds.found(
        url, http, ready_s=ready_s, reach_s=reach_s, key_variable=key_variable, vocabulary=vocabulary
    )
    info = await api.describe(timeout_s=ready_s)
    return Server(
        api, [info.weights.label], reported=info.weights, seeded=info.seeded, stages=info.stages, ranks=info.ranks,
        layout=info.layout, slots=info.slots, context=info.context, handover=handover, released=info.released,
        cached=prefix_routing.Cached(info.capacity) if info.capacity else prefix_routing.Cached(),
    )  # fmt: skip
