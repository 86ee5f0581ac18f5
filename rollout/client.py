"""A fleet of generation servers behind one coroutine: `await fleet.generate(tokens)`.

Requests go to the least loaded usable server, a bounded number to each. A token enters a completion
once, with the log-probability and the version that the sampling server reported for it: an answer
cut off on its way is discarded whole and asked for again; one that a pause ended early is continued.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import logging
import random
from collections.abc import AsyncIterator, Iterable, Sequence

import aiohttp
import numpy as np

from . import versions
from .server import FIRST_DELAY_S, MAX_DELAY_S, Broken, Busy, Part, Server, Unreached
from .types import Completion

log = logging.getLogger(__name__)

REPEATS = 2  # of a request whose connection broke: one that kills its server must not kill them all
IDLE_ABORTS = 8  # aborts in a row that brought no token
PATIENCE_S = 30.0  # how long a server that cannot be reached is waited for


@contextlib.asynccontextmanager
async def connect(
    urls: Iterable[str],
    *,
    concurrency: int = 64,
    timeout_s: float = 600.0,
    ready_s: float = 30.0,
) -> AsyncIterator[Fleet]:
    """The servers at `urls` as a Fleet, once each has said which weights it serves.

    Args:
      concurrency: most requests that one server holds at a time; further ones wait here, in order.
      timeout_s: total seconds of a `generate`: waiting, repeats, pauses and resumptions included.
      ready_s: how long a server may take to answer for the first time.

    Raises RuntimeError if a server does not answer.
    """
    urls = [url.rstrip("/") for url in urls]
    if not urls or len(set(urls)) != len(urls):
        raise ValueError(f"connect: urls must name one or more different servers, got {urls}")
    if concurrency < 1:
        raise ValueError(f"connect: concurrency must be at least 1, got {concurrency}")
    # Idle connections are dropped before the server does so (uvicorn: after 5 s), which could
    # otherwise meet a request half-way.
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=2.0)
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=10.0)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as http:
        servers = [Server(url, http) for url in urls]
        await asyncio.gather(*(_introduce(server, ready_s) for server in servers))
        fleet = Fleet(servers, concurrency, timeout_s)
        try:
            yield fleet
        finally:
            await fleet.close()


async def _introduce(server: Server, ready_s: float) -> None:
    server.labels = [await server.weight_label(timeout_s=ready_s)]
    info = await server.server_info(timeout_s=ready_s)
    server.seeded = info.get("enable_deterministic_inference") is True


class Fleet:
    """Servers that `connect` reached.

    Attributes:
      servers: all of them; each is usable, or has a `reason` why it is not (and stays so).
      counts: events so far: `requests, tokens, resumed` (after an abort), `dropped` (tokens taken
        back for a stop string), `busy` (503), `refused`, `broken`, `rerouted` (its server was
        retired), `stale` (sampled under weights the server was not given).
    """

    def __init__(self, servers: Sequence[Server], concurrency: int, timeout_s: float):
        self.servers = tuple(servers)
        self.counts: collections.Counter[str] = collections.Counter()
        self._concurrency, self._timeout_s = concurrency, timeout_s
        self._waiting: collections.deque[asyncio.Future] = collections.deque()

    @property
    def usable(self) -> list[Server]:
        """The servers that take requests. Raises RuntimeError, with the reasons, if none is left."""
        usable = [server for server in self.servers if not server.reason]
        if not usable:
            reasons = "; ".join(server.reason for server in self.servers)
            raise RuntimeError(f"no usable generation server is left ({reasons})")
        return usable

    @property
    def version(self) -> int:
        """The policy version that every usable server has reached; -1 before the first push."""
        return min(versions.number(server.label) for server in self.usable)

    @property
    def labels(self) -> set[str]:
        """Weight labels in use: those that usable servers serve or are loading."""
        return {label for server in self.servers if not server.reason for label in server.labels[server.admitted :]}

    @property
    def seeded(self) -> bool:
        """Whether all usable servers honour `seed`."""
        return all(server.seeded for server in self.usable)

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
        seed: int | None = None,
    ) -> Completion:
        """Continues the prompt `tokens` by up to `max_new_tokens`; finish is `stop` or `length`.

        An abort (a pause in abort mode) is resumed with what was generated so far as prompt. `text`
        is then "": only the tokens as a whole decode rightly. With stop strings the last tokens, as
        many as a stop string could reach back over, are sampled anew, whatever they say, because
        the server looks for stop strings only in what one request generates.

        Args:
          routed_experts: also report the experts that tokens went to; those of a token stay what they were when its
            successor was sampled, whatever weights a resumption reads it with.
          seed: the sampling stream of this completion: the same on a repeat or a resumption, for
            servers draw token i by (seed, absolute index). Needs `fleet.seeded`.

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
            **({"sampling_seed": int(seed)} if seed is not None else {}),
        }
        trouble: list[str] = []
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._generate([int(t) for t in tokens], sampling, routed_experts, trouble)
        except TimeoutError:
            why = trouble[-1] if trouble else "still waiting or generating"
            raise RuntimeError(f"generate: not done in {self._timeout_s:g} s ({why})") from None

    async def _generate(self, prompt: list[int], sampling: dict, experts: bool, trouble: list[str]) -> Completion:
        self.counts["requests"] += 1
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
            server, part = await self._ask(body, trouble)
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
        return Completion(
            tokens=tokens,
            logp=logp,
            version=[versions.number(label) for label in labels],
            finish="length" if part.finish == "abort" else part.finish,
            text="" if resumed else part.text,
            routed=routed,
            info={**part.info, "url": server.url, "resumed": resumed},
        )

    async def _ask(self, body: dict, trouble: list[str]) -> tuple[Server, Part]:
        """One whole answer to `body`, from whichever server gives it."""
        busy = broken = 0
        while True:
            server = await self._acquire()
            oldest = server.admitted
            try:
                part = await self._send(server, body)
            except Busy as error:
                trouble.append(str(error))
                self.counts["busy"] += 1
            except Unreached as error:
                trouble.append(str(error))
                self.counts["refused"] += 1
                self._miss(server, str(error))
                continue
            except Broken as error:
                trouble.append(str(error))
                if server.reason:
                    self.counts["rerouted"] += 1
                    continue
                self.counts["broken"] += 1
                self._miss(server, str(error))
                if (broken := broken + 1) > REPEATS:
                    raise RuntimeError(f"{error}; so did {REPEATS} attempts before it") from error
                continue
            else:
                strange = set(part.labels) - set(server.labels[oldest:])
                if not strange:
                    return server, part
                self.counts["stale"] += 1
                trouble.append(f"{server.url}: sampled under weights {sorted(strange)}")
                self.retire(
                    server,
                    f"{server.url}: samples under weights {sorted(strange)}, but was given {server.labels[oldest:]}",
                )
                continue
            finally:
                server.load -= 1
                self._wake()
            await asyncio.sleep(_delay(busy))
            busy += 1

    async def _send(self, server: Server, body: dict) -> Part:
        task = asyncio.create_task(server.generate(body))
        server.running.add(task)
        try:
            await asyncio.wait({task})
            if task.cancelled():  # by `retire`; nothing of this request was kept
                raise Broken(f"{server.url}: {server.reason}")
            return task.result()
        finally:
            server.running.discard(task)
            task.cancel()

    async def _acquire(self) -> Server:
        while True:
            ready = [s for s in self.usable if not s.away and s.load < self._concurrency]
            if ready:
                server = min(ready, key=lambda s: s.load)
                server.load += 1
                return server
            waiter = asyncio.get_running_loop().create_future()
            self._waiting.append(waiter)
            try:
                await waiter
            except asyncio.CancelledError:
                if waiter.done() and not waiter.cancelled():
                    self._wake()  # this turn goes to the next in line
                raise

    def _wake(self, everyone: bool = False) -> None:
        while self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.done():
                waiter.set_result(None)
                if not everyone:
                    return

    def retire(self, server: Server, reason: str) -> None:
        """Marks `server` unusable for good; its requests move to others."""
        if server.reason:
            return
        log.error("a server is unusable from now on: %s", reason)
        server.reason = reason
        for task in server.running:
            task.cancel()
        self._wake(everyone=True)

    def _miss(self, server: Server, why: str) -> None:
        """Sends `server` no more until it answers again, with the weights it had."""
        if not server.away and not server.reason:
            server.away = asyncio.create_task(self._await_return(server, why))

    async def _await_return(self, server: Server, why: str) -> None:
        try:
            label = await server.weight_label(timeout_s=PATIENCE_S)
            if label not in server.labels[server.admitted :]:
                self.retire(server, f"{server.url}: came back with weights {label!r} after: {why}")
        except (RuntimeError, ValueError) as error:
            self.retire(server, str(error))
        finally:
            server.away = None
            self._wake(everyone=True)

    async def close(self) -> None:
        """Ends what is still running; `connect` calls it."""
        tasks = [t for s in self.servers for t in (*s.running, *([s.away] if s.away else []))]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


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
