"""A generation server of which only the speed is real: how long requests take, by how many there are and how long.

Its requests generate exactly `max_new_tokens` tokens. One step gives every running request a token and takes
`step_s + running * request_s` seconds: the weights are read once a step, a key-value cache for each request. Reading a
prompt stops everybody for its tokens / `read_tokens_s`. Beyond `slots` requests wait, in order.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import json
from collections import deque
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Rates:
    """The speed of one server.

    Attributes:
      slots: most requests that run at a time.
      step_s: seconds of a decoding step, however many requests run.
      request_s: seconds that each of them adds to it.
      read_tokens_s: tokens of prompts that are read in a second.
      load_s: seconds to load new weights.
    """

    slots: int = 64
    step_s: float = 0.01
    request_s: float = 0.0001
    read_tokens_s: float = 20000.0
    load_s: float = 1.0

    def __post_init__(self):
        for name, least in (("slots", 1), ("step_s", 0), ("request_s", 0), ("load_s", 0)):
            if not getattr(self, name) >= least:
                raise ValueError(f"rates: {name} must be at least {least}, got {getattr(self, name)}")
        if not self.read_tokens_s > 0 or not self.step(1) > 0:
            raise ValueError(
                "rates: read_tokens_s, and step_s or request_s, must be above 0, got "
                f"{self.read_tokens_s}, {self.step_s} and {self.request_s}"
            )

    def step(self, running: int) -> float:
        """Seconds of a step."""
        return self.step_s + running * self.request_s

    def full(self) -> float:
        """Tokens a second with every slot taken, reading apart."""
        return self.slots / self.step(self.slots)


@dataclass(eq=False)
class _Request:
    prompt: int  # tokens
    wanted: int  # tokens to generate
    answer: asyncio.Future
    labels: list[tuple[str, int]] = field(default_factory=list)  # (weights, tokens sampled under them)
    since: float = 0.0  # progress of the server when it began to decode, or to go on

    @property
    def done(self) -> int:
        return sum(count for _, count in self.labels)


class Server:
    """A server with these rates, by the clock of the running event loop.

    Attributes:
      label: of its weights.
      tokens: generated so far.
    """

    def __init__(self, rates: Rates, label: str = "default"):
        self.rates, self.label = rates, label
        self.tokens = 0
        self._busy_s = 0.0
        self._progress = 0.0  # tokens that a request which always ran would have
        self._reading = 0.0  # seconds for which nobody decodes
        self._paused = False
        self._running: list[tuple[float, int, _Request]] = []  # a heap: (progress at its end, ..., request)
        self._waiting: deque[_Request] = deque()
        self._order = itertools.count()
        self._at = 0.0  # the time of the last look
        self._timer: asyncio.TimerHandle | None = None

    def busy(self) -> float:
        """The integral over time of the share of slots that decode, in seconds."""
        self._look()
        return self._busy_s

    async def answer(self, path: str, body: dict | None) -> tuple[int, str]:
        """(status, text) of a request of the contract."""
        return 200, json.dumps(await self.reply(path, body or {}))

    async def reply(self, path: str, body: dict) -> dict[str, Any]:
        match path:
            case "/generate":
                return await self._generate(len(body["input_ids"]), body["sampling_params"]["max_new_tokens"])
            case "/model_info":
                return {"weight_version": self.label}
            case "/pause_generation":
                self._pause(body["mode"])
            case "/continue_generation":
                self._continue()
            case "/update_weights_from_disk":
                await asyncio.sleep(self.rates.load_s)
                self.label = body["weight_version"]
        return {"success": True, "message": ""}

    async def _generate(self, prompt: int, wanted: int) -> dict[str, Any]:
        request = _Request(prompt, wanted, asyncio.get_running_loop().create_future())
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
                "output_token_logprobs": [[-1.0, 0, None]] * done,
                "weight_versions": [
                    {"version": label, "start": start, "end": end}
                    for label, start, end in zip(labels, [0, *ends], ends, strict=False)
                ],
            },
        }

    def _look(self) -> None:
        """Brings everything up to now: time went by since the last look, and who has all its tokens ends."""
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
            self._credit(request, request.wanted - request.done)
            self._end(request, "length")

    def _fill(self) -> None:
        """Gives free slots to those who wait, and sets the timer for whoever ends next."""
        if self._timer:
            self._timer.cancel()
            self._timer = None
        if self._paused:
            return
        while self._waiting and len(self._running) < self.rates.slots:
            request = self._waiting.popleft()
            left = request.wanted - request.done
            if left <= 0:
                self._end(request, "length")
                continue
            self._reading += (request.prompt + request.done) / self.rates.read_tokens_s
            request.since = self._progress
            heapq.heappush(self._running, (self._progress + left, next(self._order), request))
        if self._running:
            soonest = max(0.0, self._running[0][0] - self._progress)
            delay = self._reading + soonest * self.rates.step(len(self._running))
            self._timer = asyncio.get_running_loop().call_later(delay, self._due)

    def _due(self) -> None:
        self._look()
        self._fill()

    def _pause(self, mode: str) -> None:
        """Running requests keep what they have: `abort` answers with it, else they go on, read anew, afterwards."""
        self._look()
        self._paused, self._reading = True, 0.0
        stopped = [request for _, _, request in sorted(self._running, key=lambda entry: entry[1])]
        self._running.clear()
        for request in stopped:
            self._credit(request, min(int(self._progress - request.since + 1e-6), request.wanted - request.done))
        if mode == "abort":
            for request in [*stopped, *self._waiting]:
                self._end(request, "abort")
            self._waiting.clear()
        else:
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
        self._running = [entry for entry in self._running if entry[2] is not request]
        heapq.heapify(self._running)
        if request in self._waiting:
            self._waiting.remove(request)
        self._fill()
