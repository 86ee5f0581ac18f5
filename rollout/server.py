"""The HTTP calls to one generation server of SGLang's contract, each under a total deadline.

A call is sent again only while nothing can have come of it: the connection was never made, or the
server answered 503 instead of taking it up. Everything else is the caller's to decide.
"""

from __future__ import annotations

import asyncio
import base64
import collections
import json
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

import aiohttp
import numpy as np

from . import affinity, meter, pressure, proof, versions
from .proof import Probe
from .types import Finish

FIRST_DELAY_S, MAX_DELAY_S = 0.1, 5.0  # between attempts, doubling
REACH_S = 5.0  # a server that a push cannot reach for so long is left out of it


class Unreached(RuntimeError):
    """The server did not take the request up: sending it again is safe."""


class Busy(Unreached):
    """It answered 503: it is there, but takes nothing up now."""


class Broken(RuntimeError):
    """The connection ended before the whole answer was here: what the server did is unknown."""


@dataclass(frozen=True)
class Part:
    """What one `/generate` answer holds.

    Attributes:
      labels: of the weights that sampled each token.
      routed: experts of each token that was read, i32[tokens, layers x top_k], where they were asked for.
      inputs: of each token of the prompt [log-probability, id, text], where asked for; the first has none.
      input_top: of each token of the prompt those of the likeliest tokens there, where asked for.
    """

    tokens: list[int]
    logp: list[float]
    labels: list[str]
    finish: Finish
    text: str
    info: Mapping[str, Any]
    routed: np.ndarray | None = None
    inputs: Sequence = ()
    input_top: Sequence = ()


# Only a healthy server gets requests; recovery.py says how the others become healthy again, rest.py when some rest.
State = Literal["healthy", "resting", "suspect", "poisoned", "stale", "dead", "restarting", "leaving"]

SOUND: tuple[State, ...] = ("healthy", "resting")  # those that a push goes to


@dataclass(frozen=True)
class Published:
    """A published version.

    Attributes:
      directory: as servers see it; "" where it was not written.
      label: its weight label.
      base: of adapters, the version that they belong to.
      arrays: the weights themselves, for servers with a `handover`; None = they are read from the directory.
      probe: what the trainer says of a known prompt.
      seen: checksums of those that proved to have it, by the layout of their weights.
    """

    directory: str
    label: str
    base: Published | None = None
    arrays: Any = field(default=None, compare=False, repr=False)
    probe: Probe | None = field(default=None, compare=False, repr=False)
    seen: dict[str, list] = field(default_factory=dict, compare=False, repr=False)


@dataclass(frozen=True)
class Staged:
    """A version where a server can read it: the directory, and how many bytes were fetched to bring it there."""

    directory: str
    bytes: int = 0


class Loaded(NamedTuple):
    """Seconds that generation stood still, of them those of the load, and those until the weights were proved; the
    probe's difference."""

    pause_s: float
    load_s: float
    prove_s: float
    probe_diff: float | None


class Stages(Protocol):
    """Brings a version to where a server can read it (`depot.Stager`)."""

    async def stage(self, weights: Published) -> Staged: ...

    def beside(self, url: str) -> Stages: ...


# Gives a server the arrays of a version, under its label; the last argument: whether it forgets what it has cached.
Handover = Callable[["Server", Published, bool], Awaitable[None]]


def _set() -> asyncio.Event:
    event = asyncio.Event()
    event.set()
    return event


@dataclass(eq=False)
class Server:
    """One server: its address, and what the fleet knows of it.

    Attributes:
      url: without a trailing slash.
      labels: weight labels it may report, in the order they were given to it.
      admitted: index in `labels` of the newest one that was verified.
      seeded: it honours `sampling_seed`.
      stages: it can read new weights beside those in use, before it is paused for them.
      ranks: processes that share its weights, each of which is given them.
      layout: how it holds weights (dtype, quantisation, parallelism): servers alike have the same checksums.
      stager: fetches versions to where it can read them; None where it sees the trainer's files.
      handover: gives it the arrays of a version that has some; None = it reads the directory.
      prepare: makes such arrays ready beside the weights in use, before it is paused for them.
      checker: it may have checksums of its weights.
      proved: set unless it has weights that are yet to be proved; its answers wait for that.
      state: healthy; resting (it gave its memory back, until the next push); suspect (a connection failed); poisoned (a
        push failed half-way); stale (it has other weights); dead (it does not answer); restarting; leaving.
      why: what took it out of `healthy` last.
      tending: what brings it back, while it is not healthy.
      restarts: when it was restarted lately.
      released: it may have given its memory back, which it then needs again before it loads.
      draining: it gets no new requests until it has new weights.
      held: of requests of ours, over time; `load` is how many it holds now, `running` are their tasks.
      slots: sequences that it generates at a time; 0 where it does not say.
      cached: prompts of which it should have the keys and values.
      limit: how many requests it gets at a time, below the fleet's bound.
      pauses: how often it was paused for new weights.
      base: where versions are adapters, the label of the weights under them, which it reports.
      adapters: names of those that requests may use, the newest last; `using` counts requests by adapter.
    """

    url: str
    http: aiohttp.ClientSession
    labels: list[str] = field(default_factory=list)
    admitted: int = 0
    seeded: bool = False
    stages: bool = False
    ranks: int = 1
    layout: str = ""
    stager: Stages | None = None
    handover: Handover | None = None
    prepare: Callable[[Published], Awaitable[None]] | None = None
    checker: bool = True
    proved: asyncio.Event = field(default_factory=_set)
    state: State = "healthy"
    why: str = ""
    tending: asyncio.Task | None = None
    restarts: list[float] = field(default_factory=list)
    released: bool = False
    draining: bool = False
    running: set[asyncio.Task] = field(default_factory=set)
    held: meter.Level = field(default_factory=meter.Level)
    slots: int = 0
    cached: affinity.Cached = field(default_factory=affinity.Cached)
    limit: pressure.Limit = field(default_factory=pressure.Limit)
    pauses: int = 0
    base: str = ""
    adapters: list[str] = field(default_factory=list)
    using: collections.Counter[str] = field(default_factory=collections.Counter)

    @property
    def label(self) -> str:
        return self.labels[self.admitted]

    @property
    def load(self) -> int:
        return self.held.value

    @load.setter
    def load(self, requests: int) -> None:
        self.held.set(requests)

    def expected(self, oldest: int) -> list[str]:
        """What it may report if the oldest label in use is number `oldest`."""
        return self.labels[oldest:] + ([self.base] if self.base else [])

    async def stage(self, weights: Published) -> Staged:
        """`weights` as this server sees them, once they are there; it goes on serving meanwhile."""
        return await self.stager.stage(weights) if self.stager else Staged(weights.directory)

    async def load_weights(self, weights: Published, mode: str) -> Loaded:
        """Stage, pause, reclaim, load, see that it reports this label, continue, see that it holds these weights.

        Raises RuntimeError or ValueError where a part failed: the server may then be paused, or hold new weights under
        an old name, and what it answers after that is not let through. It is an Unreached where a part could not be
        delivered; the server is then as it was if it is neither `released` nor without a proof.
        """
        now = asyncio.get_running_loop().time
        directory = (await self.stage(weights)).directory
        files = not (self.handover and weights.arrays is not None)
        if not files and self.prepare:
            await self.prepare(weights)
        elif files and self.stages and not self.released:
            await self.stage_weights_from_disk(directory)
        paused = now()
        await self.pause(mode, reach_s=REACH_S)
        self.pauses += 1
        await self.reclaim()
        self.proved.clear()
        self.labels.append(weights.label)  # what is sampled from here on may carry it
        loading = now()
        if files:
            await self.update_weights_from_disk(directory, weights.label, flush_cache=mode != "in_place")
        elif self.handover:
            await self.handover(self, weights, mode != "in_place")
        self.cached.clear()  # what old weights computed is flushed, or not found any more
        load_s = now() - loading
        reported = await self.weight_label(reach_s=REACH_S)
        if reported != weights.label:
            raise RuntimeError(f"{self.url}: reports weights {reported!r} instead of {weights.label!r}")
        self.admitted = len(self.labels) - 1
        await self.resume()
        pause_s, going = now() - paused, now()
        difference = await proof.prove(self, weights)
        self.proved.set()
        return Loaded(pause_s, load_s, now() - going, difference)

    async def health(self, *, timeout_s: float = 20.0) -> bool:
        """Whether it answers and generates; False while it starts and while generation is paused."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._once("GET", "/health")
        except (TimeoutError, Unreached, Broken):
            return False
        return True

    async def model_info(self, *, timeout_s: float = 60.0, reach_s: float | None = None) -> dict:
        return await self.call("GET", "/model_info", timeout_s=timeout_s, reach_s=reach_s)

    async def server_info(self, *, timeout_s: float = 60.0) -> dict:
        return await self.call("GET", "/server_info", timeout_s=timeout_s)

    async def reported_load(self, *, timeout_s: float = 60.0) -> pressure.Report | None:
        """Its queue and its use of memory by its own report; None where it makes none."""
        try:
            return pressure.report(await self.call("GET", "/v1/loads", timeout_s=timeout_s))
        except (RuntimeError, ValueError):  # another look says whether it is there at all
            return None

    async def weight_label(self, *, timeout_s: float = 60.0, reach_s: float | None = None) -> str:
        """The label of the weights it serves now, by its own report."""
        label = (await self.model_info(timeout_s=timeout_s, reach_s=reach_s)).get("weight_version")
        if not isinstance(label, str):
            raise RuntimeError(f"{self.url}/model_info: no weight_version in the answer")
        return label

    async def pause(self, mode: str = "retract", *, timeout_s: float = 60.0, reach_s: float | None = None) -> None:
        """Stops generation: `abort` returns what is running, `retract` requeues it, `in_place` holds it."""
        await self.call("POST", "/pause_generation", {"mode": mode}, timeout_s=timeout_s, reach_s=reach_s)

    async def resume(self, *, timeout_s: float = 60.0) -> None:
        """Continues generation after a pause."""
        await self.call("POST", "/continue_generation", {}, timeout_s=timeout_s, reach_s=REACH_S)

    async def update_weights_from_disk(
        self, path: str, label: str, *, flush_cache: bool = True, timeout_s: float = 600.0
    ) -> None:
        """Loads the checkpoint directory `path`, as the server sees it, and names it `label`."""
        body = {"model_path": path, "weight_version": label, "flush_cache": flush_cache}
        where = "/update_weights_from_disk"
        answer = await self.call("POST", where, body, timeout_s=timeout_s, reach_s=REACH_S)
        if answer.get("success") is not True:
            raise RuntimeError(f"{self.url}{where}: {answer.get('message') or answer}")

    async def stage_weights_from_disk(self, path: str, *, timeout_s: float = 600.0) -> None:
        """Has it read the checkpoint directory `path` beside the weights in use, for an update to come."""
        where = "/stage_weights_from_disk"
        await self.call("POST", where, {"model_path": path}, timeout_s=timeout_s, reach_s=REACH_S)

    async def release_memory(self, *, timeout_s: float = 120.0) -> None:
        """Has it put back what it runs, and give its memory to others; it then needs `load_weights`.

        Raises Unreached where nothing came of it, ValueError where it refused and has its memory still, RuntimeError
        where it may be paused or have no memory.
        """
        await self.pause("retract", reach_s=REACH_S)
        self.released = True
        try:
            await self.call("POST", "/release_memory_occupation", {}, timeout_s=timeout_s, reach_s=REACH_S)
        except ValueError:
            self.released = False
            raise
        except Unreached as error:  # it is paused, and has its memory still
            self.released = False
            raise RuntimeError(str(error)) from error

    async def reclaim(self, *, timeout_s: float = 120.0) -> None:
        """Has it take its memory again, where it gave it back. SGLang does not survive being told so twice, nor being
        told so after it was started anew: then it has other weights."""
        if self.released and await self.weight_label(timeout_s=timeout_s, reach_s=REACH_S) == self.label:
            await self.call("POST", "/resume_memory_occupation", {}, timeout_s=timeout_s, reach_s=REACH_S)
        self.released = False

    async def flush_cache(self, *, timeout_s: float = 60.0) -> None:
        await self.call("POST", "/flush_cache", {}, timeout_s=timeout_s)

    async def abort(self, rid: str = "", *, timeout_s: float = 60.0) -> None:
        """Ends request `rid` with what it has; without an id, every request on this server."""
        body = {"rid": rid, "abort_all": not rid}
        await self.call("POST", "/abort_request", body, timeout_s=timeout_s)

    async def weights_checker(self, action: str = "checksum", *, timeout_s: float = 600.0) -> dict:
        """The server's own checksums of the weights it holds."""
        body = {"action": action}
        return await self.call("POST", "/weights_checker", body, timeout_s=timeout_s, reach_s=REACH_S)

    async def generate(self, body: dict, on_tokens: Callable[[list[int]], None] | None = None) -> Part:
        """One attempt at `/generate`; Unreached and Broken are the fleet's to handle.

        Args:
          on_tokens: called with the ids so far whenever there are new ones; the answer is then streamed.
        """
        if on_tokens is None:
            answer = await self._once("POST", "/generate", body)
        else:
            answer = await self._once("POST", "/generate", {**body, "stream": True}, on_tokens)
        try:
            return _part(answer)
        except (KeyError, TypeError, ValueError) as error:
            raise RuntimeError(
                f"{self.url}/generate: the answer lacks what a single request returns ({type(error).__name__}: {error})"
            ) from error
        except RuntimeError as error:
            raise RuntimeError(f"{self.url}/generate: {error}") from error

    async def call(
        self, method: str, path: str, body: dict | None = None, *, timeout_s: float, reach_s: float | None = None
    ):
        """One control call, repeated while it cannot be delivered, until `timeout_s` seconds passed.

        A GET changes nothing, so it is also repeated after a broken connection.

        Raises ValueError with the server's message for a 4xx answer, Unreached where it could not be delivered for
        `reach_s` seconds, RuntimeError otherwise.
        """
        delay, last = FIRST_DELAY_S, f"{self.url}{path}: no answer"
        clock = asyncio.get_running_loop().time
        began = clock()
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    try:
                        return await self._once(method, path, body)
                    except (Unreached, Broken) as error:
                        if isinstance(error, Broken) and method != "GET":
                            raise
                        if reach_s is not None and clock() - began + delay > reach_s:
                            raise
                        last = str(error)
                    await asyncio.sleep(delay)
                    delay = min(2 * delay, MAX_DELAY_S)
        except TimeoutError:
            raise RuntimeError(f"{last}; gave up after {timeout_s:g} s") from None

    async def _once(self, method: str, path: str, body: dict | None = None, on_tokens: Callable | None = None):
        where = f"{self.url}{path}"
        try:
            async with self.http.request(method, where, json=body) as reply:
                status = reply.status
                if on_tokens and status == 200:
                    return await _last(where, reply, on_tokens)
                text = await reply.text()
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise Unreached(f"{where}: cannot connect ({error})") from error
        except aiohttp.ClientError as error:
            raise Broken(f"{where}: connection broke ({error or type(error).__name__})") from error
        if status == 503:
            raise Busy(f"{where}: HTTP 503: {text[:200]}")
        if 400 <= status < 500:
            raise ValueError(f"{where}: HTTP {status}: {_message(text)}")
        if status != 200:
            raise RuntimeError(f"{where}: HTTP {status}: {text[:200]}")
        try:
            answer = json.loads(text)
        except ValueError:  # /flush_cache and /abort_request answer with plain text
            return {"message": text}
        if answer is None:  # /release_memory_occupation has nothing to say
            return {}
        if not isinstance(answer, dict):
            raise RuntimeError(f"{where}: the answer must be a JSON object, got {text[:200]}")
        return answer


async def _last(where: str, reply: aiohttp.ClientResponse, on_tokens: Callable[[list[int]], None]) -> dict:
    """The last event of a stream in which each has all that was generated so far."""
    last, rest = None, b""
    async for piece in reply.content.iter_any():
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            data = line.removeprefix(b"data:").strip()
            if data == b"[DONE]" and last:
                return last
            if not data or not line.startswith(b"data:"):
                continue
            last = json.loads(data)
            if "error" in last:
                kind = ValueError if last["error"].get("code") == 400 else RuntimeError
                raise kind(f"{where}: {_message(data.decode())}")
            on_tokens(last["output_ids"])
    raise Broken(f"{where}: the stream ended before its answer")


def slots(info: Mapping[str, Any]) -> int:
    """Sequences that a server generates at a time, by what it answered on /server_info; 0 where it does not say."""
    name = "effective_max_running_requests_per_dp"
    each = [state[name] for state in info.get("internal_states") or () if isinstance(state.get(name), int)]
    own = info.get("max_running_requests")  # of SGLang an option, of the embedded server what holds
    return sum(each) or (own if isinstance(own, int) else 0)


def _message(text: str) -> str:
    """The sentence in an error body, in either of the two shapes servers use."""
    try:
        body = json.loads(text)
        error = body.get("error", body)
        message = error.get("message", text) if isinstance(error, dict) else error
    except (ValueError, AttributeError):
        message = text
    return " ".join(str(message).split())[:500]


def _part(answer: Mapping[str, Any]) -> Part:
    tokens, meta = answer["output_ids"], answer["meta_info"]
    rows = meta["output_token_logprobs"]
    if [row[1] for row in rows] != tokens:
        raise RuntimeError(f"logprobs of {len(rows)} tokens do not belong to the {len(tokens)} ids")
    logp = [row[0] for row in rows]
    if not all(isinstance(value, float | int) and math.isfinite(value) for value in logp):
        raise RuntimeError("a log-probability is missing or not finite")
    if tokens and "weight_versions" not in meta:
        raise RuntimeError(
            "the answer names no weight_versions, so nobody knows which weights sampled a token; "
            "use a server that reports them (SGLang 0.5.23 does)"
        )
    bulky = (
        "input_token_logprobs", "input_top_logprobs", "output_token_logprobs", "output_top_logprobs", "weight_versions",
        "routed_experts",
    )  # fmt: skip
    routed = None
    if meta.get("routed_experts"):  # base64 of i32[read, layers, top_k]
        read = meta["prompt_tokens"] + len(tokens) - 1
        routed = np.frombuffer(base64.b64decode(meta["routed_experts"]), np.int32).reshape(read, -1)
    return Part(
        tokens=tokens,
        logp=logp,
        labels=versions.per_token(meta.get("weight_versions", ()), len(tokens)),
        finish=meta["finish_reason"]["type"],
        text=answer.get("text") or "",
        info={key: value for key, value in meta.items() if key not in bulky},
        routed=routed,
        inputs=meta.get("input_token_logprobs") or (),
        input_top=meta.get("input_top_logprobs") or (),
    )
