"""The fleet: routes requests to healthy servers, retries what failed, and tracks each server's state.

A request goes to the healthy server that most likely has its prompt's prefix in its cache, else to the least loaded one
(servers/prefix_routing.py), within each server's concurrency limit (servers/concurrency.py). A token enters a
completion exactly once, with the log-probability and the version reported by the server that sampled it: a truncated
answer is discarded and requested again; one that a pause ended early is continued.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import functools
import json
import logging
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import PurePath
from typing import Any, TypeVar

import numpy as np
import xxhash

from .. import events
from ..errors import ServerError
from ..processes import addresses
from ..processes.http_answers import Broken, Busy, Unreached, backoff
from ..processes.turns import turn
from ..servers import concurrency as pressure
from ..servers import gauges, image_tokens, prefix_routing
from ..servers.labels import version_of
from ..servers.server import Server
from ..servers.types import SOUND, Part, Published, State
from ..types import Completion, Finish, Generated, Image, Record
from ..weights import lora
from .attempt import ask
from .timeouts import TIMEOUTS, Timeouts

log = logging.getLogger(__name__)
Result = TypeVar("Result")

REPEATS = 2  # after a broken connection: a request that crashes its server must not crash them all
STATEFUL = {  # sampling parameters with which a server must generate a completion in one piece
    "json_schema", "regex", "ebnf", "frequency_penalty", "presence_penalty", "repetition_penalty"
}  # fmt: skip
BUSY_S = 30.0  # before, and between, lines that servers are busy
IDLE_ABORTS = 8  # consecutive aborts without a new token
EVENTS, EVERY = 8, 256  # most events of an answer that is recorded while it grows; least tokens from one to the next


Attempt = Callable[[Server, str], Coroutine[Any, Any, Part]]  # (server, adapter) -> its answer


class Rerouted(Broken):
    """The server was taken out of traffic while it processed the request."""


# Connects to the server at an address within some seconds, and to its stager, if the second address is not "".
Reach = Callable[[str, str, float], Awaitable[Server]]
# Ends a server's process and starts another one with these weights, if any; returns its address.
Restart = Callable[[str, Published | None], Awaitable[str]]


def labels_of(weights: Published | None) -> tuple[str, ...]:
    """The labels of a version and of its base."""
    return tuple(version.label for version in (weights, weights and weights.base) if version)


def model_of(server: Server) -> str:
    """The name of the folder that a server last loaded weights from; "" = it does not say."""
    return PurePath(server.reported.source).name if server.reported else ""


class Fleet:
    """The servers of a run; `client.connect` makes one.

    Attributes:
      servers: all of them; those in state `healthy` take requests.
      published: the newest pushed version, which a recovering server loads.
      waiting_push: a push waits for a server.
      timeout_s: how long a request goes without progress, and a push without a server.
      publishing: held during a push: no server becomes healthy with another version meanwhile.
      seeded: whether all servers honour `seed`, those that join, too.
      not_offloaded: cleared while servers are offloaded (`offload.offload`); no server is recovered then.
      restart: replaces a dead server's process, if possible.
      counts: events so far: `requests, reads, tokens, resumed` (after an abort), `dropped` (tokens discarded for a stop
        string or an image token), `recalled` (tokens taken from a record), `busy` (503), `preempted` (answers partly
        recomputed by the server), `lowered` (concurrency limits), `refused`, `broken`, `rerouted` (its server was taken
        out of traffic), `strange` (sampled with weights that the server was not given), `out_of_time` (whose episode
        took too long); of servers: `drifted` (by a canary), the states they entered, `recovered, restarted, joined,
        left`; of pushes: `undone`.
      waits: how long requests waited here for a server with room.
    """

    def __init__(
        self,
        servers: Sequence[Server],
        recover: Callable[[Fleet, Server], Awaitable[None]],
        *,
        concurrency: int = 64,
        timeout_s: float = 3600.0,
        restart: Restart | None = None,
        timeouts: Timeouts = TIMEOUTS,
        experts_per_token: int = 0,
        longest: int = 0,
        image_token: int | None = None,
        ends: Sequence[int] = (),
        reach: Reach | None = None,
        elastic: bool = False,
    ):
        """
        Args:
          recover: returns once a server is healthy again; run as a task for each unhealthy server.
          concurrency: most requests on one server at a time; the others wait here, in order.
          timeout_s: longest time without progress of a `generate` call; see `client.connect`.
          experts_per_token: of the model, for `routed_experts`.
          longest: tokens at which generation ends, prompt included; see `client.connect`.
          image_token: the id that stands for a feature of an image; None = prompts have no images.
          ends: ids that end every completion; see `client.connect`.
          reach: connects to a further server, for `join`.
          elastic: further servers may join at any time, so that requests wait while there is none.
        """
        self.servers = list(servers)
        self.seeded = all(server.seeded for server in self.servers)
        self._any_seeded = any(server.seeded for server in self.servers)
        self.published: Published | None = None
        self.publishing = asyncio.Lock()
        self.not_offloaded = asyncio.Event()
        self.not_offloaded.set()
        self.restart, self.timeouts = restart, timeouts
        self.counts: collections.Counter[str] = collections.Counter()
        self.waiting_push = False
        self.timeout_s = timeout_s
        self.waits = gauges.Waits()
        self._said_busy = 0.0  # when it was last said that servers are
        self._recover, self._concurrency = recover, concurrency
        self._experts_per_token, self._longest = experts_per_token, longest
        self._image_token, self._ends = image_token, tuple(ends)
        self._reach, self._elastic = reach, elastic
        self._first = self.servers[0].label if self.servers else ""  # weights before the first push
        self._healthy: tuple[Server, ...] | None = None
        self._model = model_of(self.servers[0]) if self.servers else ""
        self._recent = prefix_routing.Recent[Server]()
        self._waiting: collections.deque[asyncio.Future] = collections.deque()

    @property
    def healthy(self) -> Sequence[Server]:
        """The servers that take requests; may be none for a while."""
        if self._healthy is None:  # each request asks
            self._healthy = tuple(server for server in self.servers if server.state == "healthy")
        return self._healthy

    def raise_if_unrecoverable(self) -> None:
        """Raises ServerError, with the reasons, if every server is dead or leaving and no other may join."""
        if not self._elastic and all(server.state in ("dead", "leaving") for server in self.servers):
            reasons = "; ".join(server.why for server in self.servers)
            raise ServerError(f"no usable generation server is left ({reasons})")

    @property
    def version(self) -> int:
        """The policy version that every healthy server has reached; -1 before the first push."""
        labels = [server.label for server in self.healthy] or [self.published.label if self.published else ""]
        return min(version_of(label) for label in labels)

    @property
    def labels(self) -> set[str]:
        """Weight labels in use: those that servers serve or are loading, and the one a recovering server would load."""
        recovering = {label for server in self.servers for label in server.reads}
        healthy = {label for server in self.healthy for label in (*server.expected(server.admitted), *server.adapters)}
        return healthy | recovering | set(labels_of(self.published))

    @property
    def context(self) -> int:
        """The longest sequence that all servers take, in tokens, of those that report it; 0 = none does."""
        return min((server.context for server in self.servers if server.context), default=0)

    @property
    def waiting(self) -> int:
        """How many requests wait here for a server with room."""
        return len(self._waiting)

    async def generate(
        self,
        tokens: Sequence[int],
        images: Sequence[Image] = (),
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
        sampling_mask: bool = False,
        top_logprobs: int = 0,
        frequency_penalty: float = 0.0,
        presence_penalty: float = 0.0,
        repetition_penalty: float = 1.0,
        logit_bias: Mapping[int, float] | None = None,
        json_schema: str = "",
        regex: str = "",
        ebnf: str = "",
        seed: int | None = None,
        until: float | None = None,
        on_tokens: Callable[[list[int]], None] | None = None,
        record: Record | None = None,
    ) -> Completion:
        """Continues the prompt `tokens` by up to `max_new_tokens`; finish is `stop` or `length`.

        An aborted request (a pause in abort mode) is resumed with the tokens so far appended to the prompt. `text` is
        then "", because parts decoded separately may differ. With stop strings, the last tokens that could be part of
        one are resampled, because the server searches for stop strings only in what one request generates.

        Args:
          images: of a prompt with images, in the order of their tokens; `tokens` have as many as each has features. A
            resumption samples from a sampled image token on anew, which servers would take for another image.
          frequency_penalty, presence_penalty, repetition_penalty, logit_bias: as in SGLang; biases by token id. As with
            grammars, an aborted request then begins anew, because servers count, and follow a grammar, from the
            prompt's end.
          json_schema, regex, ebnf: a grammar that the text follows; at most one.
          routed_experts: also report the experts of each token, as they were when its successor was sampled, even if
            a resumption recomputes them with other weights.
          sampling_mask: also report the tokens that each token was drawn from, those that top_k, top_p and min_p keep;
            `logp` is then that among them. Needs a top_k.
          top_logprobs: also report this many of the likeliest tokens at each place; `areax serve` has 128 at most.
          seed: the random stream of this completion; retries and resumptions continue it, because servers draw token i
            with (seed, absolute index). Needs `fleet.seeded`.
          until: time of the event loop's clock at which generation ends, waits included: the completion is then what
            there is, at least one token, with finish `length`.
          on_tokens: called with all tokens so far as they arrive. After a retry, or a resumption with stop strings,
            they may differ from before; an exception in it ends the request.
          record: has the tokens that a former process recorded of the same request, which then goes on behind them, and
            gets those that are new: while they arrive from SGLang and `areax serve`, else after interruptions. Not with
            `routed_experts`, `sampling_mask` or `top_logprobs`, nor where a server must generate a completion in one
            piece.

        Raises:
          ValueError: the server refused the request (prompt too long, a bad parameter), or does
            not honour `seed`.
          ServerError: no answer in time, no usable server, or an answer that breaks the contract.
        """
        if isinstance(stop, str):
            raise ValueError(f"generate: stop must be a list of strings, got {stop!r}")
        if seed is not None and not self.seeded:
            raise ValueError(
                f"generate: seed needs servers that honour it, got {seed}; start SGLang with "
                "--enable-deterministic-inference, or leave the seed out"
            )
        if routed_experts and not self._experts_per_token:
            raise ValueError(
                "generate: routed_experts needs a model with experts, got experts_per_token 0; say how many a token "
                "goes to, as in connect(..., experts_per_token=8)"
            )
        if sampling_mask and top_k < 1:
            raise ValueError(f"generate: sampling_mask needs a top_k, the most tokens of a mask, got {top_k}")
        if self._longest:
            longest = min(self._longest, self.context or self._longest)
            if len(tokens) >= longest:
                raise ValueError(
                    f"generate: a prompt must leave room for a completion within {longest} tokens, got {len(tokens)}"
                )
            max_new_tokens = min(max_new_tokens, longest - len(tokens))
            min_new_tokens = min(min_new_tokens, max_new_tokens)
        stops = dict.fromkeys(map(int, (*stop_token_ids, *(() if ignore_eos else self._ends))))
        sampling: dict[str, Any] = {
            "temperature": float(temperature),
            "top_p": float(top_p),
            "top_k": int(top_k),
            "min_p": float(min_p),
            "max_new_tokens": int(max_new_tokens),
            "min_new_tokens": int(min_new_tokens),
            "ignore_eos": bool(ignore_eos),
            **({"stop": list(stop)} if stop else {}),
            **({"stop_token_ids": [*stops]} if stops else {}),
            **{
                name: value
                for name, value, neutral in (
                    ("frequency_penalty", frequency_penalty, 0),
                    ("presence_penalty", presence_penalty, 0),
                    ("repetition_penalty", repetition_penalty, 1),
                )
                if value != neutral
            },
            **({"logit_bias": {str(id): float(bias) for id, bias in logit_bias.items()}} if logit_bias else {}),
            **{name: text for name, text in (("json_schema", json_schema), ("regex", regex), ("ebnf", ebnf)) if text},
            **({"sampling_mask": True} if sampling_mask else {}),
            **({"top_logprobs": int(top_logprobs)} if top_logprobs else {}),
            **({"seed": int(seed)} if seed is not None else {}),
        }
        trouble: list[str] = []
        prompt = image_tokens.TokensPrompt(tuple(map(int, tokens)), images, self._image_token)
        request = functools.cache(functools.partial(_hash, prompt, {**sampling}))
        if seed is None and self._any_seeded:  # such servers give all requests without a seed the same
            sampling["seed"] = random.getrandbits(63)
        begun, keep = Generated([], [], []), None
        if record and not (routed_experts or sampling_mask or top_logprobs or STATEFUL & sampling.keys()):
            begun, keep = record.begun(request) or begun, functools.partial(record.keep, request)
        if begun.finish:
            self.counts["recalled"] += len(begun.tokens)
            return Completion(begun.tokens, begun.logp, begun.version, begun.finish)
        work = lambda limit: self._generate(
            prompt, sampling, routed_experts, trouble, limit, until, on_tokens, begun, keep,
            grows=bool(record and record.grows and keep),
        )  # fmt: skip
        return await self._in_time("generate", work, trouble)

    async def read(self, tokens: Sequence[int], *, top_k: int = 0) -> tuple[str, Part]:
        """Computes the log-probabilities of `tokens` themselves, at temperature 1, without generating; returns (the
        server's address, its answer).

        Args:
          top_k: also report this many of the likeliest tokens at each position.

        Raises as `generate`.
        """
        self.counts["reads"] += 1
        trouble: list[str] = []
        attempt = lambda server, adapter: server.api.read(tokens, top_k=top_k, adapter=adapter, cache_key=server.label)
        server, part = await self._in_time(
            "read", lambda limit: self._send(image_tokens.TokensPrompt(tuple(tokens)), attempt, trouble), trouble
        )
        return server.url, part

    async def _in_time(self, what: str, work: Callable[[asyncio.Timeout], Awaitable], trouble: list[str]):
        """Awaits `work(limit)`, which calls `_renew(limit)` when it gets on."""
        try:
            async with asyncio.timeout(self.timeout_s) as limit:
                return await work(limit)
        except TimeoutError:
            why = trouble[-1] if trouble else "still waiting or generating"
            raise ServerError(f"{what}: not done in {self.timeout_s:g} s ({why})") from None

    def _renew(self, limit: asyncio.Timeout) -> None:
        limit.reschedule(asyncio.get_running_loop().time() + self.timeout_s)

    async def _generate(
        self,
        prompt: image_tokens.TokensPrompt,
        sampling: dict,
        experts: bool,
        trouble: list[str],
        limit: asyncio.Timeout,
        until: float | None,
        on_tokens: Callable[[list[int]], None] | None,
        made: Generated,
        keep: Callable[[Generated], None] | None,
        *,
        grows: bool,
    ) -> Completion:
        self.counts["requests"] += 1
        now = asyncio.get_running_loop().time
        begun, late = now(), False
        most, least = sampling["max_new_tokens"], sampling["min_new_tokens"]
        reach = max((len(word.encode()) for word in sampling.get("stop", ())), default=1) - 1
        reach = most if STATEFUL & sampling.keys() else reach
        whole = max(0, len(made.tokens) - max(reach, 1))  # the last one may have ended it
        made = made.between(0, min(prompt.until_image(made.tokens), whole))
        if start := len(made.tokens):
            self.counts["recalled"] += start
        label = ""  # of the last token
        routed: np.ndarray | None = None
        resumed, longest, idle = int(start > 0), start, 0
        while True:
            tokens = made.tokens
            left = {
                "max_new_tokens": most - len(tokens),
                "min_new_tokens": max(0, least - len(tokens)),
            }
            every = 1 if on_tokens else max(EVERY, left["max_new_tokens"] // EVENTS)

            def on_new(new: list[int], so_far=tokens) -> None:
                self._renew(limit)
                if on_tokens:
                    on_tokens([*so_far, *new])

            def on_part(part: Part, so_far=made) -> None:
                self._renew(limit)
                if keep and part.labels:
                    keep(so_far.then(_generated(part)))

            wanted = self._experts_per_token if experts else 0
            sent = replace(prompt, tokens=(*prompt.tokens, *tokens)) if tokens else prompt
            attempt = functools.partial(
                ask, sent, sampling | left, wanted, None if late else until, on_new if on_tokens else None,
                on_part if grows and left["max_new_tokens"] > every else None, every,
            )  # fmt: skip
            server, part = await self._send(sent, attempt, trouble, label if tokens else "")
            if experts:
                routed = _joined(routed, part, len(sent.tokens))
            if part.tokens:
                self._renew(limit)
            made = made.then(_generated(part))
            tokens = made.tokens
            label = part.labels[-1] if part.labels else label
            if part.finish != "abort" or len(tokens) == most:
                break
            if tokens and tokens[-1] in sampling.get("stop_token_ids", ()) and not sampling["ignore_eos"]:
                part = replace(part, finish="stop")  # the abort came with its last token
                break
            late = until is not None and now() >= until
            if late and tokens:
                break
            if late:  # it was still waiting
                most = 1
                continue
            whole = min(prompt.until_image(tokens), max(0, len(tokens) - reach))
            if whole < len(tokens):
                self.counts["dropped"] += len(tokens) - whole
                made = made.between(0, whole)
                tokens = made.tokens
            if keep and grows and tokens:
                keep(made)
            longest, idle = max(longest, len(tokens)), 0 if len(tokens) > longest else idle + 1
            if idle > IDLE_ABORTS:
                raise ServerError(f"{server.url}/generate: aborted {idle} times in a row without a new token")
            resumed += 1
            self.counts["resumed"] += 1
            if idle:  # a server that aborts at once must not be asked in a tight loop
                await asyncio.sleep(backoff(idle - 1))
        self.counts["tokens"] += len(tokens)
        if late:
            self.counts["out_of_time"] += 1
        finish: Finish = "length" if part.finish == "abort" else part.finish
        if keep:  # a stop string is found again
            keep(made._replace(finish=None if late or "stop" in sampling else finish))
        events.emit(
            "call", begun=begun, url=server.url, prompt_tokens=len(prompt.tokens), tokens=len(tokens),
            versions=events.runs(made.version), finish=finish, resumed=resumed, out_of_time=late,
        )  # fmt: skip
        return Completion(
            tokens=tokens,
            logp=made.logp,
            version=made.version,
            finish=finish,
            text="" if resumed else part.text,
            routed=routed,
            info={**part.info, "url": server.url, "resumed": resumed},
            sampling_mask=_padded(made.masks, sampling["top_k"]) if "sampling_mask" in sampling else None,
            top=_likeliest(made.top, sampling["top_logprobs"]) if "top_logprobs" in sampling else None,
        )

    async def _send(
        self, prompt: image_tokens.TokensPrompt, attempt: Attempt, trouble: list[str], begun: str = ""
    ) -> tuple[Server, Part]:
        """Makes attempts, each on the best server at the time, until one returns a complete answer.

        Args:
          prompt: for routing.
          trouble: collects the reasons of failed attempts.
          begun: the label of the completion's last token so far.
        """
        busy = broken = 0
        asked_s = refused_at = 0.0  # how long a server asked to wait; when one was busy at first
        now = asyncio.get_running_loop().time
        while True:
            with self.waits.timed():
                server = await self._acquire(prompt)
            oldest, sent, pauses = server.admitted, asyncio.get_running_loop().time(), server.pauses
            name = lora.choose(server, begun)
            try:
                with lora.using(server, name):
                    part = await self.on(server, self._verified(server, attempt, name))
                part = lora.stamped(server, name, part)
            except asyncio.CancelledError:  # by `_in_time`, whose error names the server
                trouble.append(f"{server.url}: still waiting or generating")
                raise
            except Busy as error:
                trouble.append(str(error))
                asked_s = error.wait_s
                self.counts["busy"] += 1
                if server.limit.refused(sent, asyncio.get_running_loop().time()):
                    self.counts["lowered"] += 1
                refused_at = refused_at or now()
                if now() - max(refused_at, self._said_busy) > BUSY_S:
                    self._said_busy = now()
                    log.warning("still waiting, for %.0f s by now: %s", now() - refused_at, error)
            except Unreached as error:
                trouble.append(str(error))
                self.counts["refused"] += 1
                self.mark_suspect(server, str(error))
                continue
            except Rerouted as error:
                trouble.append(str(error))
                self.counts["rerouted"] += 1
                continue
            except Broken as error:
                trouble.append(str(error))
                self.counts["broken"] += 1
                self.mark_suspect(server, str(error))
                if (broken := broken + 1) > REPEATS:
                    raise ServerError(f"{error}; so did {REPEATS} attempts before it") from error
                continue
            except ValueError as error:
                if not name or name not in str(error):
                    raise
                self._on_unexpected_version(
                    server, f"{server.url}: no longer has an adapter that was loaded: {error}", trouble
                )
                continue
            else:
                given = [name] if name else server.labels[oldest:]
                strange = set(part.labels) - set(given)
                if not strange:
                    server.strange = 0 if part.labels else server.strange
                    preempted = part.preemptions > server.pauses - pauses  # a pause preempts once, too
                    self._update_concurrency_limit(server, sent, preempted=preempted)
                    if len(self.servers) > 1:
                        server.cached.add(prompt.hashes(part.tokens))
                    return server, part
                why = f"{server.url}: samples with weights {sorted(strange)}, but was given {given}"
                self._on_unexpected_version(server, why, trouble)
                continue
            finally:
                server.load -= 1
                self._wake()
            await asyncio.sleep(max(backoff(busy), asked_s if len(self.healthy) < 2 else 0.0))
            busy += 1

    async def _verified(self, server: Server, attempt: Attempt, adapter: str) -> Part:
        """The attempt's answer, held back until the weights the server had loaded by then are verified."""
        part = await attempt(server, adapter)  # called here: the task may be cancelled before it begins
        if not server.weights_verified.is_set():
            await server.weights_verified.wait()
            await turn()  # as many others
        return part

    def _update_concurrency_limit(self, server: Server, sent: float, *, preempted: bool) -> None:
        """Lowers the server's limit if it preempted requests, else may raise it."""
        moved = server.limit.answered(sent, server.load, asyncio.get_running_loop().time(), preempted=preempted)
        if preempted:
            self.counts["preempted"] += 1
        if moved < 0:
            self.counts["lowered"] += 1
        elif moved > 0:
            self._wake()

    def on_load_report(self, server: Server, report: pressure.Report | None) -> None:
        """Takes a server's load report into account; None if there is none, or a push has just disturbed its queue."""
        if server.limit.reported(report, server.load, asyncio.get_running_loop().time()):
            self.counts["lowered"] += 1
        self._wake()

    def _on_unexpected_version(self, server: Server, why: str, trouble: list[str]) -> None:
        self.counts["strange"] += 1
        server.strange += server.state in SOUND  # not of answers that were under way when it was taken out of traffic
        trouble.append(why)
        self.fail(server, "stale", why)

    async def on(self, server: Server, work: Coroutine[Any, Any, Result]) -> Result:
        """Runs `work`, which talks to `server`; raises Rerouted if the server is taken out of traffic meanwhile."""
        task = asyncio.create_task(work)
        server.running.add(task)
        try:
            await asyncio.wait({task})
            if task.cancelled():  # by `set_state`
                raise Rerouted(server.why)
            return task.result()
        finally:
            server.running.discard(task)
            task.cancel()

    async def _acquire(self, prompt: image_tokens.TokensPrompt) -> Server:
        hashes = prompt.hashes() if len(self.servers) > 1 else []
        while True:
            self.raise_if_unrecoverable()
            healthy = self.healthy
            ready = self._with_room(self._recent.candidates(healthy, hashes)) or self._with_room(healthy)
            if ready:
                server = prefix_routing.choose(ready, hashes)
                server.cached.add(hashes)
                self._recent.add(hashes, server)
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

    def _with_room(self, servers: Sequence[Server]) -> list[Server]:
        return [server for server in servers if server.load < self.room(server) and not server.draining]

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
        """Waits until `server` has finished its requests; it gets no new ones inside the block."""
        server.draining = True
        try:
            while server.running:
                await asyncio.wait(server.running)
            yield
        finally:
            server.draining = False
            self._wake(everyone=True)

    def mark_suspect(self, server: Server, why: str) -> None:
        """Sends a server whose connection failed no more requests until it has answered; running ones go on."""
        if server.state in SOUND:
            self.fail(server, "suspect", why)

    def fail(self, server: Server, state: State, why: str) -> None:
        """Takes `server` out of traffic and starts its recovery, unless it is leaving."""
        if server.state == "leaving":
            _stop(server.running)
            return
        self.set_state(server, state, why)
        if not server.recovery:
            server.recovery = asyncio.create_task(self._run_recovery(server))

    def set_state(self, server: Server, state: State, why: str) -> None:
        """Changes the state; requests on a server that is neither healthy, offloaded nor suspect move to others."""
        if state in SOUND:
            level = logging.INFO if server.state in SOUND else logging.WARNING  # who read that it was not reads this
            log.log(level, "%s is %s", server.url, state)
        else:
            if state != server.state:
                self.counts[state] += 1
                log.warning("a server is %s: %s", state, why)
            server.why = why
        if state != server.state:
            events.emit("server", url=server.url, state=state, why=why)
        server.state, self._healthy = state, None
        if state not in (*SOUND, "suspect", "leaving"):
            server.cached.clear()
            _stop(server.running)
        self._wake(everyone=True)

    async def _run_recovery(self, server: Server) -> None:
        try:
            await self._recover(self, server)
        finally:
            server.recovery = None

    async def join(self, url: str, *, stager: str = "", ready_s: float = 30.0) -> None:
        """Adds the server at `url`; it gets requests once it has loaded the newest published version.

        Args:
          stager: its stager, if the other servers have one.

        Raises:
          ValueError: it is in the fleet already, does not honour seeds although the others do, or refuses the key that
            the others have.
          ServerError: it does not answer, or has other weights than the rest before the first push.
        """
        for address in (url, *([stager] if stager else [])):
            addresses.check(address, "join")
        url = addresses.plain(url)
        if not self._reach:
            raise ValueError(f"join: this fleet takes no further servers, got {url}")
        if self.servers and (self.servers[0].stager is None) != (stager == ""):
            raise ValueError(f"join: a server has a stager where the others have one, got {stager!r} for {url}")
        server = await self._reach(url, stager.rstrip("/"), ready_s)
        if any(addresses.identity(server.url) == addresses.identity(url) for server in self.servers):
            raise ValueError(f"join: {url} is in the fleet already")
        if self.seeded and not server.seeded:
            raise ValueError(
                f"join: {url} honours no seed, the others do; start SGLang with --enable-deterministic-inference"
            )
        if not self.published and server.label != self._first:
            raise ServerError(f"join: {url} has weights {server.label!r}, the others {self._first!r}")
        if not self.published:
            self.warn_of_another_model(server)
        self.servers.append(server)
        self._any_seeded |= server.seeded
        self.counts["joined"] += 1
        self.fail(server, "stale", f"{url}: joined")

    def warn_of_another_model(self, server: Server) -> None:
        """Says that a server that nothing was pushed to may have other weights than the first one, by the name of their
        folder: labels of checkpoints are all the same."""
        if (own := model_of(server)) and self._model and own != self._model:
            log.warning(
                "%s: serves %r, the first server %r; unless these are the same model, answers are of different ones",
                server.url, own, self._model,
            )  # fmt: skip

    async def leave(self, url: str, *, patience_s: float = 600.0) -> None:
        """Removes the server at `url` once its requests have finished; after `patience_s` they move to other servers.

        Raises ValueError if there is no such server, or no other one and none may join.
        """
        url = addresses.plain(url)
        found = [server for server in self.servers if server.url == url]
        last = all(server.state == "leaving" for server in self.servers if server.url != url)
        if not found or (last and not self._elastic):
            raise ValueError(f"leave: must name one of several servers, got {url} of {[s.url for s in self.servers]}")
        [server] = found
        if server.recovery:
            server.recovery.cancel()
        self.set_state(server, "leaving", f"{url}: left")
        if server.running:
            await asyncio.wait(server.running, timeout=patience_s)
        _stop(server.running)
        self.servers.remove(server)
        self.counts["left"] += 1

    async def close(self) -> None:
        """Cancels all requests and recoveries."""
        tasks = [t for s in self.servers for t in (*s.running, *([s.recovery] if s.recovery else []))]
        _stop(tasks)
        await asyncio.gather(*tasks, return_exceptions=True)


def _stop(tasks: Iterable[asyncio.Task]) -> None:
    for task in tasks:
        task.cancel()


def _hash(prompt: image_tokens.TokensPrompt, sampling: Mapping[str, Any]) -> str:
    """Of a request."""
    rest = json.dumps([[image.hash for image in prompt.images], sampling], sort_keys=True)
    return xxhash.xxh3_128_hexdigest(np.array(prompt.tokens, np.int64).tobytes() + rest.encode())


def _generated(part: Part) -> Generated:
    labels = [*map(version_of, part.labels)]
    return Generated(part.tokens, part.logp, labels, masks=[*part.masks], top=[*part.top])


def _padded(masks: Sequence[np.ndarray], top_k: int) -> np.ndarray:
    """Masks as rows of equal length, i32[n, top_k], with -1 behind the ids."""
    made = np.full((len(masks), top_k), -1, np.int32)
    for row, ids in zip(made, masks, strict=True):
        row[: len(ids)] = ids
    return made


def _likeliest(top: Sequence[tuple[list[int], list[float]]], count: int) -> tuple[np.ndarray, np.ndarray]:
    """(ids, log-probabilities) of the likeliest tokens at each place, i32 and f32[n, count]."""
    ids, logp = zip(*top, strict=True) if top else ([], [])
    return np.array(ids, np.int32).reshape(-1, count), np.array(logp, np.float32).reshape(-1, count)


def _joined(before: np.ndarray | None, part: Part, asked: int) -> np.ndarray | None:
    """Appends the experts of new tokens; those of the `asked` tokens sent with the request stay as first reported."""
    if part.routed is None:
        return before
    kept = part.routed[:0] if before is None else before[:asked]
    return np.concatenate([kept, part.routed[len(kept) :]])
