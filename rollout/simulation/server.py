"""A simulated generation server: models only latency, as a function of batch size and lengths.

Requests generate exactly `max_new_tokens` tokens. One decoding step gives every running request a token and takes
`step_s + running * request_s` seconds: the weights are read once per step, the key-value cache once per request.
Prefill of a prompt blocks decoding for (tokens / `read_tokens_s`) seconds, without tokens that are in the prefix cache.
Beyond `slots`, requests wait in order. If the running requests outgrow the memory, the most recently admitted one is
preempted, and prefilled again when there is room.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import json
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from ..servers.prefix_routing import BLOCK, TOKENS, Cached, chain

AHEAD = 20  # steps for which there must be room when a request is admitted and after a preemption, as in SGLang


@dataclass(frozen=True)
class Rates:
    """The speed of one server.

    Attributes:
      slots: most requests that run at a time.
      step_s: fixed seconds of a decoding step, independent of the batch size.
      request_s: seconds each running request adds to a step.
      read_tokens_s: prefill throughput in tokens per second.
      load_s: seconds to load new weights.
      memory: capacity of the key-value cache in tokens, prompts included; 0 = unlimited.
    """

    slots: int = 64
    step_s: float = 0.01
    request_s: float = 0.0001
    read_tokens_s: float = 20000.0
    load_s: float = 1.0
    memory: int = 0

    def __post_init__(self):
        for name, least in (("slots", 1), ("step_s", 0), ("request_s", 0), ("load_s", 0), ("memory", 0)):
            if not getattr(self, name) >= least:
                raise ValueError(f"rates: {name} must be at least {least}, got {getattr(self, name)}")
        if not self.read_tokens_s > 0 or not self.step(1) > 0:
            raise ValueError(
                "rates: read_tokens_s, and step_s or request_s, must be above 0, got "
                f"{self.read_tokens_s}, {self.step_s} and {self.request_s}"
            )

    def step(self, running: int) -> float:
        """Seconds of a decoding step."""
        return self.step_s + running * self.request_s

    def full(self) -> float:
        """Decoding throughput in tokens per second with all slots in use."""
        return self.slots / self.step(self.slots)


@dataclass(eq=False)
class _Request:
    ids: list[int]  # the prompt
    wanted: int  # tokens to generate
    answer: asyncio.Future
    retractions: int = 0  # how often it was preempted
    cached: int = 0  # prompt tokens found in the prefix cache
    labels: list[tuple[str, int]] = field(default_factory=list)  # (weights, tokens sampled with them)
    since: float = 0.0  # the server's progress when the request began or resumed decoding

    @property
    def done(self) -> int:
        return sum(count for _, count in self.labels)

    @property
    def context(self) -> int:
        """Tokens that must be in memory to continue it."""
        return len(self.ids) + self.done


class Server:
    """A server with these rates, on the clock of the running event loop.

    Attributes:
      label: label of its weights.
      tokens: tokens generated so far.
      read, cached: context tokens prefilled, and found in the prefix cache.
      retractions: preemptions for lack of memory.
    """

    def __init__(self, rates: Rates, label: str = "default"):
        self.rates, self.label = rates, label
        self.tokens = self.read = self.cached = self.retractions = 0
        self._prompts = Cached(rates.memory or TOKENS)
        self._held = 0.0  # sum over running requests: context when admitted, minus the progress then
        self._busy_s = 0.0
        self._progress = 0.0  # tokens that a permanently running request would have generated
        self._reading = 0.0  # seconds of prefill that still block decoding
        self._paused = False
        self._running: list[tuple[float, int, _Request]] = []  # a heap: (progress at its end, ..., request)
        self._waiting: deque[_Request] = deque()
        self._order = itertools.count()
        self._at = 0.0  # time of the last update
        self._timer: asyncio.TimerHandle | None = None

    def busy(self) -> float:
        """The integral over time of the share of decoding slots, in seconds."""
        self._look()
        return self._busy_s

    async def answer(self, path: str, body: dict | None) -> tuple[int, str]:
        """Answers a request of the HTTP API with (status, text)."""
        return 200, json.dumps(await self.reply(path, body or {}))

    async def reply(self, path: str, body: dict) -> dict[str, Any]:
        match path:
            case "/generate":
                return await self._generate(body["input_ids"], body["sampling_params"]["max_new_tokens"])
            case "/model_info":
                return {"weight_version": self.label}
            case "/weights_checker":
                return {"ranks": [{"checksums": {"weights": self.label}}]}
            case "/v1/loads":
                return {"loads": [self.load()]}
            case "/pause_generation":
                self._pause(body["mode"])
            case "/continue_generation":
                self._continue()
            case "/update_weights_from_disk":
                await asyncio.sleep(self.rates.load_s)
                self.label = body["weight_version"]
                self._prompts.clear()
        return {"success": True, "message": ""}

    def load(self) -> dict[str, Any]:
        """Its load report: queue and memory use."""
        self._look()
        rates = self.rates
        return {
            "num_running_reqs": len(self._running),
            "num_waiting_reqs": len(self._waiting),
            "max_running_requests": rates.slots,
            "token_usage": self._used() / rates.memory if rates.memory else len(self._running) / rates.slots,
        }

    async def _generate(self, ids: list[int], wanted: int) -> dict[str, Any]:
        request = _Request(ids, wanted, asyncio.get_running_loop().create_future())
        self._look()
        self._waiting.append(request)
        self._fill()
        try:
            finish = await request.answer
        except asyncio.CancelledError:
            self._drop(request)
            raise
        ends = list(itertools.accumulate(count for _, count in request.labels))
        labels = [label for label, _ in request.labels]
        done = request.done
        return {
            "text": "",
            "output_ids": [0] * done,
            "meta_info": {
                "finish_reason": {"type": finish},
                "prompt_tokens": len(ids),
                "cached_tokens": request.cached,
                "num_retractions": request.retractions,
                "output_token_logprobs": [[-1.0, 0, None]] * done,
                "weight_versions": [
                    {"version": label, "start": start, "end": end}
                    for label, start, end in zip(labels, [0, *ends], ends, strict=False)
                ],
            },
        }

    def _look(self) -> None:
        """Advances the state to the current time and ends the requests that have all their tokens."""
        now = asyncio.get_running_loop().time()
        passed, self._at = now - self._at, now
        if self._paused:
            return
        read = min(passed, self._reading)
        self._reading -= read
        if self._running:
            self._busy_s += (passed - read) * len(self._running) / self.rates.slots
            self._progress += (passed - read) / self.rates.step(len(self._running))
        while self._running and self._running[0][0] <= self._progress + 1e-6:
            request = heapq.heappop(self._running)[2]
            self._held -= request.context - request.since
            self._credit(request, request.wanted - request.done)
            self._prompts.add(chain([*request.ids, *[0] * request.done]))
            self._end(request, "length")

    def _used(self) -> float:
        """Tokens that the running requests hold in memory."""
        return self._held + len(self._running) * self._progress

    def _fits(self, more: int, running: int) -> bool:
        return not self.rates.memory or self._used() + more + AHEAD * running <= self.rates.memory

    def _fill(self) -> None:
        """Admits waiting requests to free slots; sets the timer for the next to end, or for memory to fill up."""
        if self._timer:
            self._timer.cancel()
            self._timer = None
        if self._paused:
            return
        self._squeeze()
        while self._waiting and len(self._running) < self.rates.slots:
            request = self._waiting[0]
            left = request.wanted - request.done
            if left > 0 and self._running and not self._fits(request.context, len(self._running) + 1):
                break
            self._waiting.popleft()
            if left <= 0:
                self._end(request, "length")
                continue
            self._enter(request)
        if running := len(self._running):
            steps = max(0.0, self._running[0][0] - self._progress)
            if self.rates.memory and running > 1:
                steps = min(steps, max(0.0, self.rates.memory - self._used()) / running)
            delay = self._reading + steps * self.rates.step(running)
            self._timer = asyncio.get_running_loop().call_later(delay, self._due)

    def _enter(self, request: _Request) -> None:
        hashes = chain([*request.ids, *[0] * request.done])
        found = min(self._prompts.match(hashes) * BLOCK, request.context)
        self._prompts.add(hashes)
        if not request.labels and not request.retractions:
            request.cached = found
        self.read, self.cached = self.read + request.context - found, self.cached + found
        self._reading += (request.context - found) / self.rates.read_tokens_s
        request.since = self._progress
        self._held += request.context - request.since
        left = request.wanted - request.done
        heapq.heappush(self._running, (self._progress + left, next(self._order), request))

    def _squeeze(self) -> None:
        """Preempts the most recently admitted requests while memory is full."""
        memory = self.rates.memory
        if not memory or len(self._running) < 2 or self._used() < memory - 1e-6:
            return
        self._prompts.clear()  # a full memory has no room for prefixes of other requests
        while len(self._running) > 1 and not self._fits(0, len(self._running)):
            last = max(self._running, key=lambda entry: entry[1])
            self._running.remove(last)
            self._waiting.appendleft(self._stop(last[2]))
            last[2].retractions += 1
            self.retractions += 1
        heapq.heapify(self._running)

    def _stop(self, request: _Request) -> _Request:
        """Removes the request from its slot; it keeps its tokens."""
        self._held -= request.context - request.since
        self._credit(request, min(int(self._progress - request.since + 1e-6), request.wanted - request.done))
        return request

    def _due(self) -> None:
        self._look()
        self._fill()

    def _pause(self, mode: str) -> None:
        """Pauses generation; requests keep their tokens. `abort` returns them, else they are prefilled again later."""
        self._look()
        self._paused, self._reading = True, 0.0
        stopped = [self._stop(request) for _, _, request in sorted(self._running, key=lambda entry: entry[1])]
        self._running.clear()
        if mode == "abort":
            for request in [*stopped, *self._waiting]:
                self._end(request, "abort")
            self._waiting.clear()
        else:
            for request in stopped:
                request.retractions += 1
            self._waiting.extendleft(reversed(stopped))
        self._fill()

    def _continue(self) -> None:
        self._look()
        self._paused = False
        self._fill()

    def _credit(self, request: _Request, count: int) -> None:
        if count:
            request.labels.append((self.label, count))
            self.tokens += count

    def _end(self, request: _Request, finish: str) -> None:
        if not request.answer.done():
            request.answer.set_result(finish)

    def _drop(self, request: _Request) -> None:
        self._look()
        running = [entry for entry in self._running if entry[2] is not request]
        if len(running) < len(self._running):
            self._stop(request)
        self._running = running
        heapq.heapify(self._running)
        if request in self._waiting:
            self._waiting.remove(request)
        self._fill()
