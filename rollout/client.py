"""A fleet of generation servers behind one coroutine: `await fleet.generate(tokens)`.

Requests go to a healthy server that has the beginning of their prompt, else to the least loaded one (affinity.py), to
each no more than do it good (pressure.py). A token enters a completion once, with the log-probability and the version
that the sampling server reported for it: an answer cut off on its way is discarded whole and asked for again; one that
a pause ended early is continued. Servers may die, come back, join and leave (recovery.py).
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import json
import logging
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Sequence
from typing import Any, TypeVar

import aiohttp
import numpy as np

from . import affinity, journal, lora, meter, pressure, recovery, rest, versions
from .server import (
    FIRST_DELAY_S,
    MAX_DELAY_S,
    SOUND,
    Broken,
    Busy,
    Handover,
    Part,
    Published,
    Server,
    State,
    Unreached,
    slots,
)
from .types import Completion, Finish

log = logging.getLogger(__name__)
Result = TypeVar("Result")

REPEATS = 2  # of a request whose connection broke: one that kills its server must not kill them all
LAYOUT = ("dtype", "quantization", "tp_size", "pp_size", "ep_size", "load_format", "version")  # of /server_info
IDLE_ABORTS = 8  # aborts in a row that brought no token


class Moved(Broken):
    """The server was taken out of traffic meanwhile."""


@contextlib.asynccontextmanager
async def connect(
    urls: Iterable[str],
    *,
    concurrency: int = 64,
    timeout_s: float = 600.0,
    ready_s: float = 30.0,
    restart: recovery.Restart | None = None,
    stagers: Sequence[str] = (),
    handover: Handover | None = None,
) -> AsyncIterator[Fleet]:
    """The servers at `urls` as a Fleet, once each has said which weights it serves.

    Args:
      concurrency: most requests that one server holds at a time; further ones wait here, in order.
      timeout_s: total seconds of a `generate`: waiting, repeats, pauses and resumptions included.
      ready_s: how long a server may take to answer for the first time.
      restart: ends a dead server's process and starts another; without it a dead server is only waited for.
      stagers: for servers that do not see the trainer's files, the addresses of what fetches versions beside each
        (stager.py), in the same order. The key is AREAX_STAGER_KEY, as it is for them.
      handover: gives servers the arrays of a push that has some (`tensors.handover`); they then need no files, except
        to come back after a failure.

    Raises RuntimeError if a server does not answer, ValueError for addresses that cannot be right.
    """
    urls, stagers = ([url.rstrip("/") for url in some] for some in (urls, stagers))
    if not urls or len(set(urls)) != len(urls):
        raise ValueError(f"connect: urls must name one or more different servers, got {urls}")
    if stagers and len(stagers) != len(urls):
        raise ValueError(f"connect: stagers must be one a server, in their order, got {len(stagers)} for {len(urls)}")
    if concurrency < 1:
        raise ValueError(f"connect: concurrency must be at least 1, got {concurrency}")
    # Idle connections are dropped before the server does so (uvicorn: after 5 s), which could
    # otherwise meet a request half-way.
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=2.0)
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=10.0)
    async with contextlib.AsyncExitStack() as stack:
        http = await stack.enter_async_context(aiohttp.ClientSession(connector=connector, timeout=timeout))
        servers = [Server(url, http, handover=handover) for url in urls]
        if stagers:
            from . import depot  # with a web server, which other fleets need not load

            here = await stack.enter_async_context(depot.serve(depot.towards(stagers[0])))
            for server, url in zip(servers, stagers, strict=True):
                server.stager = depot.Stager(url, http, here)
        await asyncio.gather(*(_introduce(server, ready_s) for server in servers))
        fleet = Fleet(servers, concurrency, timeout_s, restart)
        watching = asyncio.create_task(recovery.watch(fleet))
        try:
            yield fleet
        finally:
            watching.cancel()
            await fleet.close()
            await asyncio.gather(watching, return_exceptions=True)


async def _introduce(server: Server, ready_s: float) -> None:
    server.labels = [await server.weight_label(timeout_s=ready_s)]
    info = await server.server_info(timeout_s=ready_s)
    server.seeded = info.get("enable_deterministic_inference") is True
    server.stages = info.get("stages_weights") is True
    server.ranks = int(info.get("tp_size") or 1)
    server.layout = json.dumps([info.get(name) for name in LAYOUT])
    server.released = any(state.get("released") for state in info.get("internal_states") or ())  # by a run that died
    room = info.get("max_total_num_tokens")
    server.cached = affinity.Cached(room) if isinstance(room, int) and room > 0 else affinity.Cached()
    server.slots = slots(info)


class Fleet:
    """Servers that `connect` reached.

    Attributes:
      servers: all of them; those whose `state` is healthy take requests.
      published: the newest version that was pushed; what a server that comes back loads.
      publishing: held while a version is brought to the servers: none becomes healthy with another one meanwhile.
      awake: not so while servers rest (`rest.rest`): then none is brought back either.
      restart: ends a dead server's process and starts another, where somebody can.
      counts: events so far: `requests, reads, tokens, resumed` (after an abort), `dropped` (tokens taken
        back for a stop string), `busy` (503), `preempted` (answers that a server computed in part anew), `lowered`
        (limits of servers, pressure.py), `refused`, `broken`, `rerouted` (its server was taken out of traffic),
        `strange` (sampled under weights the server was not given); of servers: the states that they were
        turned into, `recovered, restarted, joined, left`; of pushes: `undone`.
      waits: how long requests waited here for a server with room.
    """

    def __init__(
        self, servers: Sequence[Server], concurrency: int, timeout_s: float, restart: recovery.Restart | None = None
    ):
        self.servers = list(servers)
        self.published: Published | None = None
        self.publishing = asyncio.Lock()
        self.awake = asyncio.Event()
        self.awake.set()
        self.restart = restart
        self.counts: collections.Counter[str] = collections.Counter()
        self.waits = meter.Waits()
        self._concurrency, self._timeout_s = concurrency, timeout_s
        self._waiting: collections.deque[asyncio.Future] = collections.deque()

    @property
    def healthy(self) -> list[Server]:
        """The servers that take requests; may be none for a while."""
        return [server for server in self.servers if server.state == "healthy"]

    def hope(self) -> None:
        """Raises RuntimeError, with the reasons, if no server is healthy and none is about to be."""
        if all(server.state in ("dead", "leaving") for server in self.servers):
            reasons = "; ".join(server.why for server in self.servers)
            raise RuntimeError(f"no usable generation server is left ({reasons})")

    @property
    def version(self) -> int:
        """The policy version that every healthy server has reached; -1 before the first push."""
        labels = [server.label for server in self.healthy] or [self.published.label if self.published else ""]
        return min(versions.number(label) for label in labels)

    @property
    def labels(self) -> set[str]:
        """Weight labels in use: those that servers serve or are loading, and what one that comes back would load."""
        healthy = {label for server in self.healthy for label in (*server.expected(server.admitted), *server.adapters)}
        published = (self.published, self.published.base) if self.published else ()
        return healthy | {version.label for version in published if version}

    @property
    def seeded(self) -> bool:
        """Whether all servers honour `seed`."""
        return all(server.seeded for server in self.servers)

    async def generate(
        self,
        tokens: Sequence[int],
        *,
        temperature: float = 1.0,
        max_new_tokens: int = 64,
        top_p: float = 1.0,
        top_k: int = -1,
        min_p: float = 0.0,
        stop: Sequence[str] = (),
        stop_token_ids: Sequence[int] = (),
        min_new_tokens: int = 0,
        ignore_eos: bool = False,
        routed_experts: bool = False,
        json_schema: str = "",
        seed: int | None = None,
        on_tokens: Callable[[list[int]], None] | None = None,
    ) -> Completion:
        """Continues the prompt `tokens` by up to `max_new_tokens`; finish is `stop` or `length`.

        An abort (a pause in abort mode) is resumed with what was generated so far as prompt. `text`
        is then "": only the tokens as a whole decode rightly. With stop strings the last tokens, as
        many as a stop string could reach back over, are sampled anew, whatever they say, because
        the server looks for stop strings only in what one request generates.

        Args:
          json_schema: JSON text of a schema that the text has to follow, where the server can see to it.
          routed_experts: also report the experts that tokens went to; those of a token stay what they were when its
            successor was sampled, whatever weights a resumption reads it with.
          seed: the sampling stream of this completion: the same on a repeat or a resumption, for
            servers draw token i by (seed, absolute index). Needs `fleet.seeded`.
          on_tokens: called with the tokens so far as they come. After a repeat, or a resumption with stop strings, they
            may be others than before; what it raises ends the request.

        Raises:
          ValueError: the server refused the request (prompt too long, a bad parameter), or does
            not honour `seed`.
          RuntimeError: no answer in time, no usable server, or an answer that breaks the contract.
        """
        if isinstance(stop, str):
            raise ValueError(f"generate: stop must be a list of strings, got {stop!r}")
        if seed is not None and not self.seeded:
            raise ValueError(
                f"generate: seed needs servers that honour it, got {seed}; start SGLang with "
                "--enable-deterministic-inference, or leave the seed out"
            )
        if seed is None and self.seeded:  # such servers give every request without a seed the same
            seed = random.getrandbits(63)
        sampling = {
            "temperature": float(temperature),
            "top_p": float(top_p),
            "top_k": int(top_k),
            "min_p": float(min_p),
            "max_new_tokens": int(max_new_tokens),
            "min_new_tokens": int(min_new_tokens),
            "ignore_eos": bool(ignore_eos),
            **({"stop": list(stop)} if stop else {}),
            **({"stop_token_ids": [int(t) for t in stop_token_ids]} if len(stop_token_ids) else {}),
            **({"json_schema": json_schema} if json_schema else {}),
            **({"sampling_seed": int(seed)} if seed is not None else {}),
        }
        trouble: list[str] = []
        work = self._generate([int(t) for t in tokens], sampling, routed_experts, trouble, on_tokens)
        return await self._in_time("generate", work, trouble)

    async def read(self, tokens: Sequence[int], *, top_k: int = 0) -> tuple[str, Part]:
        """(the server's address, its answer), which says of `tokens` themselves how likely they are, at temperature 1;
        nothing is generated.

        Args:
          top_k: also report so many of the likeliest tokens at each place.

        Raises as `generate`.
        """
        body = {
            "input_ids": [int(t) for t in tokens],
            "sampling_params": {"temperature": 1.0, "max_new_tokens": 0},
            "return_logprob": True,
            "logprob_start_len": 0,
            **({"top_logprobs_num": int(top_k)} if top_k else {}),
        }
        self.counts["reads"] += 1
        trouble: list[str] = []
        server, part = await self._in_time("read", self._ask(body, trouble), trouble)
        return server.url, part

    async def _in_time(self, what: str, work: Awaitable, trouble: list[str]):
        try:
            async with asyncio.timeout(self._timeout_s):
                return await work
        except TimeoutError:
            why = trouble[-1] if trouble else "still waiting or generating"
            raise RuntimeError(f"{what}: not done in {self._timeout_s:g} s ({why})") from None

    async def _generate(
        self,
        prompt: list[int],
        sampling: dict,
        experts: bool,
        trouble: list[str],
        on_tokens: Callable[[list[int]], None] | None,
    ) -> Completion:
        self.counts["requests"] += 1
        begun = asyncio.get_running_loop().time()
        most, least = sampling["max_new_tokens"], sampling["min_new_tokens"]
        reach = max((len(word.encode()) for word in sampling.get("stop", ())), default=1) - 1
        tokens: list[int] = []
        logp: list[float] = []
        labels: list[str] = []
        routed: np.ndarray | None = None
        resumed = longest = idle = 0
        while True:
            left = {
                "max_new_tokens": most - len(tokens),
                "min_new_tokens": max(0, least - len(tokens)),
            }
            body = {
                "input_ids": prompt + tokens,
                "sampling_params": sampling | left,
                "return_logprob": True,
                **({"return_routed_experts": True} if experts else {}),
            }
            so_far = tuple(tokens)
            on_new = (lambda new, so_far=so_far: on_tokens([*so_far, *new])) if on_tokens else None
            server, part = await self._ask(body, trouble, on_new, labels[-1] if labels else "")
            if experts:
                routed = _joined(server, routed, part, len(prompt) + len(tokens))
            tokens += part.tokens
            logp += part.logp
            labels += part.labels
            if part.finish != "abort" or len(tokens) == most:
                break
            if reach:
                keep = max(0, len(tokens) - reach)
                self.counts["dropped"] += len(tokens) - keep
                del tokens[keep:], logp[keep:], labels[keep:]
            longest, idle = max(longest, len(tokens)), 0 if len(tokens) > longest else idle + 1
            if idle > IDLE_ABORTS:
                raise RuntimeError(f"{server.url}/generate: aborted {idle} times in a row without a new token")
            resumed += 1
            self.counts["resumed"] += 1
            if idle:  # a server that aborts at once must not be asked in a tight loop
                await asyncio.sleep(_delay(idle - 1))
        self.counts["tokens"] += len(tokens)
        version = [versions.number(label) for label in labels]
        finish: Finish = "length" if part.finish == "abort" else part.finish
        journal.note(
            "call", begun=begun, url=server.url, prompt_tokens=len(prompt), tokens=len(tokens),
            versions=journal.runs(version), finish=finish, resumed=resumed,
        )  # fmt: skip
        return Completion(
            tokens=tokens,
            logp=logp,
            version=version,
            finish=finish,
            text="" if resumed else part.text,
            routed=routed,
            info={**part.info, "url": server.url, "resumed": resumed},
        )

    async def _ask(
        self, body: dict, trouble: list[str], on_tokens: Callable | None = None, begun: str = ""
    ) -> tuple[Server, Part]:
        """One whole answer to `body`, from whichever server gives it; `begun`: the label of the tokens before it."""
        busy = broken = 0
        while True:
            with self.waits.timed():
                server = await self._acquire(body["input_ids"])
            oldest, sent, pauses = server.admitted, asyncio.get_running_loop().time(), server.pauses
            name = lora.choose(server, begun)
            try:
                with lora.using(server, name) as named:
                    part = await self.on(server, self._believed(server, body | named, on_tokens))
                part = lora.stamped(server, name, part)
            except Busy as error:
                trouble.append(str(error))
                self.counts["busy"] += 1
                if server.limit.refused(sent, asyncio.get_running_loop().time()):
                    self.counts["lowered"] += 1
            except Unreached as error:
                trouble.append(str(error))
                self.counts["refused"] += 1
                self.miss(server, str(error))
                continue
            except Moved as error:
                trouble.append(str(error))
                self.counts["rerouted"] += 1
                continue
            except Broken as error:
                trouble.append(str(error))
                self.counts["broken"] += 1
                self.miss(server, str(error))
                if (broken := broken + 1) > REPEATS:
                    raise RuntimeError(f"{error}; so did {REPEATS} attempts before it") from error
                continue
            except ValueError as error:
                if not name or name not in str(error):
                    raise
                self._strange(server, f"{server.url}: does not have the adapter that it was given: {error}", trouble)
                continue
            else:
                given = [name] if name else server.labels[oldest:]
                strange = set(part.labels) - set(given)
                if not strange:
                    put_back = part.info.get("num_retractions", 0) - (server.pauses - pauses)  # a push does so too
                    self._feel(server, sent, preempted=put_back > 0)
                    if len(self.servers) > 1:
                        server.cached.add(affinity.chain([*body["input_ids"], *part.tokens]))
                    return server, part
                why = f"{server.url}: samples under weights {sorted(strange)}, but was given {given}"
                self._strange(server, why, trouble)
                continue
            finally:
                server.load -= 1
                self._wake()
            await asyncio.sleep(_delay(busy))
            busy += 1

    async def _believed(self, server: Server, body: dict, on_tokens: Callable | None) -> Part:
        """The server's answer, once what it had loaded before it answered is proved."""
        # Weights of other versions share no prefix: what a push in place leaves in the cache is not found again.
        part = await server.generate({**body, "extra_key": server.label}, on_tokens)
        await server.proved.wait()
        return part

    def _feel(self, server: Server, sent: float, *, preempted: bool) -> None:
        """Whether an answer was computed in part anew says whether its server may have more, or should have fewer."""
        moved = server.limit.answered(sent, server.load, asyncio.get_running_loop().time(), preempted=preempted)
        if preempted:
            self.counts["preempted"] += 1
        if moved < 0:
            self.counts["lowered"] += 1
        elif moved > 0:
            self._wake()

    def hear(self, server: Server, report: pressure.Report | None) -> None:
        """What `server` says of its load; None where it says nothing, or nothing that holds."""
        if server.limit.reported(report, server.load, asyncio.get_running_loop().time()):
            self.counts["lowered"] += 1
        self._wake()

    def _strange(self, server: Server, why: str, trouble: list[str]) -> None:
        self.counts["strange"] += 1
        trouble.append(why)
        self.fail(server, "stale", why)

    async def on(self, server: Server, work: Coroutine[Any, Any, Result]) -> Result:
        """The result of `work`, which talks to `server`; Moved if the server is taken out of traffic before."""
        task = asyncio.create_task(work)
        server.running.add(task)
        try:
            await asyncio.wait({task})
            if task.cancelled():  # by `turn`; nothing of it was kept
                raise Moved(server.why)
            return task.result()
        finally:
            server.running.discard(task)
            task.cancel()

    async def _acquire(self, tokens: Sequence[int]) -> Server:
        hashes = affinity.chain(tokens) if len(self.servers) > 1 else []
        while True:
            self.hope()
            ready = [server for server in self.healthy if server.load < self.room(server) and not server.draining]
            if ready:
                server = affinity.choose(ready, hashes)
                server.cached.add(hashes)
                server.load += 1
                server.limit.sent(asyncio.get_running_loop().time(), server.load)
                return server
            waiter = asyncio.get_running_loop().create_future()
            self._waiting.append(waiter)
            try:
                await waiter
            except asyncio.CancelledError:
                if waiter.done() and not waiter.cancelled():
                    self._wake()  # this turn goes to the next in line
                raise

    def room(self, server: Server) -> int:
        """How many requests `server` may hold now."""
        return int(min(self._concurrency, server.limit.most))

    def _wake(self, everyone: bool = False) -> None:
        while self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.done():
                waiter.set_result(None)
                if not everyone:
                    return

    @contextlib.asynccontextmanager
    async def drained(self, server: Server) -> AsyncIterator[None]:
        """Begins once `server` has finished what it runs; it gets nothing new before the end."""
        server.draining = True
        try:
            while server.running:
                await asyncio.wait(server.running)
            yield
        finally:
            server.draining = False
            self._wake(everyone=True)

    def miss(self, server: Server, why: str) -> None:
        """A connection to `server` failed: it gets no more requests until it has answered; what it runs may go on."""
        if server.state in SOUND:
            self.fail(server, "suspect", why)

    def fail(self, server: Server, state: State, why: str) -> None:
        """Takes `server` out of traffic; unless it is about to leave, it is tended until it is healthy again."""
        if server.state == "leaving":
            _stop(server.running)
            return
        self.turn(server, state, why)
        if not server.tending:
            server.tending = asyncio.create_task(self._tend(server))

    def turn(self, server: Server, state: State, why: str) -> None:
        """Changes the state; what runs on a server that is neither healthy, resting nor suspect moves to others."""
        if state in SOUND:
            log.info("%s is %s", server.url, state)
        else:
            if state != server.state:
                self.counts[state] += 1
                log.warning("a server is %s: %s", state, why)
            server.why = why
        if state != server.state:
            journal.note("server", url=server.url, state=state, why=why)
        server.state = state
        if state not in (*SOUND, "suspect", "leaving"):
            server.cached.clear()
            _stop(server.running)
        self._wake(everyone=True)

    async def _tend(self, server: Server) -> None:
        try:
            await recovery.tend(self, server)
        finally:
            server.tending = None

    async def join(self, url: str, *, stager: str = "", ready_s: float = 30.0) -> None:
        """Adds the server at `url`, which gets requests once it has the newest published version.

        Args:
          stager: as of `connect`, where the other servers have one.

        Raises:
          ValueError: it is here already, or does not honour seeds as the others do.
          RuntimeError: it does not answer, or before the first push has weights of its own.
        """
        url = url.rstrip("/")
        if any(server.url == url for server in self.servers):
            raise ValueError(f"join: {url} is in the fleet already")
        others = self.servers[0].stager
        server = Server(url, self.servers[0].http, handover=self.servers[0].handover)
        if (others is None) != (stager == ""):
            raise ValueError(f"join: a server has a stager where the others have one, got {stager!r} for {url}")
        if others:
            server.stager = others.beside(stager.rstrip("/"))
        await _introduce(server, ready_s)
        if self.seeded and not server.seeded:
            raise ValueError(
                f"join: {url} honours no seed, the others do; start SGLang with --enable-deterministic-inference"
            )
        if not self.published and server.label != self.servers[0].label:
            raise RuntimeError(f"join: {url} has weights {server.label!r}, the others {self.servers[0].label!r}")
        self.servers.append(server)
        self.counts["joined"] += 1
        self.fail(server, "stale", f"{url}: joined")

    async def leave(self, url: str, *, patience_s: float = 600.0) -> None:
        """Takes the server at `url` out once it has finished what it runs; what takes longer moves to others.

        Raises ValueError if there is no such server, or no other one.
        """
        url = url.rstrip("/")
        found = [server for server in self.servers if server.url == url]
        if not found or all(server.state == "leaving" for server in self.servers if server.url != url):
            raise ValueError(f"leave: must name one of several servers, got {url} of {[s.url for s in self.servers]}")
        [server] = found
        if server.tending:
            server.tending.cancel()
        self.turn(server, "leaving", f"{url}: left")
        if server.running:
            await asyncio.wait(server.running, timeout=patience_s)
        _stop(server.running)
        self.servers.remove(server)
        self.counts["left"] += 1

    async def close(self) -> None:
        """Ends what is still running, and the rest of those that rest; `connect` calls it."""
        await rest.end(self)
        tasks = [t for s in self.servers for t in (*s.running, *([s.tending] if s.tending else []))]
        _stop(tasks)
        await asyncio.gather(*tasks, return_exceptions=True)


def _stop(tasks: Iterable[asyncio.Task]) -> None:
    for task in tasks:
        task.cancel()


def _joined(server: Server, before: np.ndarray | None, part: Part, asked: int) -> np.ndarray | None:
    """Experts of all tokens so far: of those that were asked with, what was reported before stays."""
    if part.routed is None:
        if part.tokens:
            raise RuntimeError(
                f"{server.url}/generate: routed experts were asked for, got none; start SGLang with "
                "--enable-return-routed-experts"
            )
        return before
    kept = part.routed[:0] if before is None else before[:asked]
    return np.concatenate([kept, part.routed[len(kept) :]])


def _delay(attempt: int) -> float:
    return min(FIRST_DELAY_S * 2**attempt, MAX_DELAY_S)
