"""Connects to generation servers: `async with client.connect(urls) as fleet: await fleet.generate(tokens)`."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import TYPE_CHECKING

import aiohttp

from .errors import ServerError
from .fleet import health, members, offload, registry
from .fleet.fleet import Fleet as Fleet
from .fleet.fleet import Restart
from .fleet.timeouts import TIMEOUTS
from .fleet.timeouts import Timeouts as Timeouts
from .processes import addresses, http_process, keys
from .servers.endpoint import Endpoint, Missing
from .servers.server import Handover, Origin, Server
from .servers.server import connect as connect_server

if TYPE_CHECKING:
    from .weights.file_server import Stager


@contextlib.asynccontextmanager
async def connect(
    urls: Iterable[str],
    *,
    concurrency: int = 64,
    timeout_s: float = 3600.0,
    ready_s: float = 30.0,
    key_variable: str = keys.SERVER,
    restart: Restart | None = None,
    stagers: Sequence[str] = (),
    source: Origin | None = None,
    handover: Handover | None = None,
    timeouts: Timeouts = TIMEOUTS,
    experts_per_token: int = 0,
    longest: int = 0,
    image_token: int | None = None,
    ends: Sequence[int] = (),
    vocabulary: int = 0,
) -> AsyncIterator[Fleet]:
    """Yields the servers at `urls` as a Fleet, once each has reported which weights it serves.

    Args:
      urls: addresses, or lists that may change meanwhile (`fleet.members`): `@FILE`, `dns+http://NAME:PORT`,
        `join+http://HOST:PORT`. Of lists alone it waits for the first server that answers.
      concurrency: most requests on one server at a time; further ones wait here, in order.
      timeout_s: how many seconds a `generate` call may take without progress, waits, retries and pauses included. A
        resumption with new tokens is progress, and so are tokens that arrive where `on_tokens` is given, or a `record`
        of a long answer.
      ready_s: how long a server, or a stager, may take to answer for the first time.
      key_variable: environment variable with the servers' key; VARIABLE_FILE may name a file with it instead. Neither
        is set: requests have no key.
      restart: replaces a dead server's process; without it, a dead server is only waited for.
      stagers: for servers without access to the trainer's files, the addresses of their stagers (stager.py), in the
        same order. AREAX_STAGER_KEY must be the same here and there.
      source: where stagers fetch versions from: a bucket (`object_store.opened`), or several processes (`parts.Parts`);
        None = a file server of this process.
      handover: passes the arrays of a push to the servers (`tensors.handover`), which then read files only to recover
        from a failure.
      timeouts: how failures are detected and recovered from.
      experts_per_token: of a mixture of experts, to read what `generate(routed_experts=True)` asks for: servers send it
        without its shape.
      longest: tokens at which generation ends, prompt included, whatever `max_new_tokens` is, or earlier where a server
        takes less; a longer prompt raises ValueError. 0 = servers refuse what they do not take.
      image_token: of a model that reads images, the id of the token that stands for a feature of one.
      ends: ids that end every completion unless `ignore_eos`, whatever the servers know of the model: those of its
        tokenizer, `adapters.tokenizer.stop_ids`.
      vocabulary: number of the model's tokens; an answer with another id is a server's failure. 0 = unknown.

    Raises ServerError if a server or a stager does not answer, ValueError for invalid addresses, and if one refuses the
    key.
    """
    entries, stagers = list(urls), [url.rstrip("/") for url in stagers]
    for entry in entries:
        members.check(entry, "connect")
    for url in stagers:
        keys.check_address(url, "connect")
    fixed = [addresses.plain(entry) for entry in entries if not members.is_list(entry)]
    named = [entry for entry in entries if members.is_list(entry)]
    if not entries or len({*map(addresses.identity, fixed)}) + len({*named}) != len(entries):
        raise ValueError(f"connect: urls must name one or more different servers, got {entries}")
    if stagers and len(stagers) != len(entries):
        raise ValueError(
            f"connect: stagers must be one per server, in the same order, got {len(stagers)} for {len(entries)}"
        )
    if stagers and named:
        raise ValueError(f"connect: stagers of the servers of a list are in the list, got some beside {named[0]}")
    if concurrency < 1:
        raise ValueError(f"connect: concurrency must be at least 1, got {concurrency}")
    # Idle connections are dropped before the server does so (uvicorn: after 5 s), lest a request meets a closing one.
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=2.0)
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=10.0)
    async with contextlib.AsyncExitStack() as stack:
        http = await stack.enter_async_context(aiohttp.ClientSession(connector=connector, timeout=timeout))
        staging = Staging(http, stack, source)

        async def reach(url: str, stager: str, ready_s: float) -> Server:
            server = await connect_server(
                url, http, ready_s=ready_s, reach_s=timeouts.reach_s, key_variable=key_variable, handover=handover,
                vocabulary=vocabulary,
            )  # fmt: skip
            if stager:
                server.stager = await staging.at(stager, ready_s=ready_s)
            return server

        routes = {
            name: await stack.enter_async_context(registry.serve(name)) for name in named if members.is_route(name)
        }
        lists = members.Lists({name: routes.get(name) or members.reader(name) for name in named})
        pairs = itertools.zip_longest(fixed, stagers, fillvalue="")
        servers = await asyncio.gather(*(reach(url, stager, ready_s) for url, stager in pairs))
        if named:
            servers += await members.first(lists, {*fixed}, functools.partial(reach, ready_s=ready_s), bool(servers))
        fleet = assemble(
            servers, concurrency=concurrency, timeout_s=timeout_s, restart=restart, timeouts=timeouts,
            experts_per_token=experts_per_token, longest=longest, image_token=image_token, ends=ends, reach=reach,
            elastic=bool(named),
        )  # fmt: skip
        tasks = [asyncio.create_task(health.watch(fleet))]
        tasks += [asyncio.create_task(members.follow(fleet, lists, fixed))] if named else []
        try:
            yield fleet
        finally:
            for task in tasks:
                task.cancel()
            await offload.resume_all(fleet)
            await fleet.close()
            await asyncio.gather(*tasks, return_exceptions=True)


class Staging:
    """Connections to stagers; without a source, the file server that they fetch from starts with the first."""

    def __init__(self, http: aiohttp.ClientSession, stack: contextlib.AsyncExitStack, source: Origin | None):
        self._http, self._stack, self._starting = http, stack, asyncio.Lock()
        self._source: Origin | None = source

    async def at(self, url: str, *, ready_s: float) -> Stager:
        """The stager at an address; raises as `connect`."""
        from .weights import file_server  # imports a web server, which only fleets with stagers need

        async with self._starting:
            if self._source is None:
                self._source = await self._stack.enter_async_context(file_server.serve(http_process.towards(url)))
        stager = file_server.Stager(url, self._http, self._source)
        await stager.check(timeout_s=ready_s)
        return stager


async def check_keys(urls: Iterable[str], stagers: Iterable[str] = (), *, key_variable: str = keys.SERVER) -> None:
    """Asks servers and stagers whether they take the key, before a run loads anything; arguments as `connect`.

    One that does not answer may still be starting: that is left to `connect`, and so are lists of servers.

    Raises ValueError for a key that is refused or not valid.
    """
    async with aiohttp.ClientSession() as http:
        fixed = [url for url in urls if not members.is_list(url)]
        ours = [(url, key_variable, ["/model_info", "/v1/models"]) for url in fixed]  # SGLang's, vLLM's
        asked = [*ours, *((url, keys.STAGER, ["/versions"]) for url in stagers)]
        for url, variable, paths in asked:
            endpoint = Endpoint(url.rstrip("/"), http, key_variable=variable)
            for path in paths:
                with contextlib.suppress(ServerError, Missing):
                    await endpoint.call("GET", path, timeout_s=5.0, reach_s=0.0)
                    break


def assemble(servers: Sequence, **options) -> Fleet:
    """Makes a Fleet of connected servers that recovers those that fail; options as `Fleet`."""
    return Fleet(servers, health.recover, **options)
