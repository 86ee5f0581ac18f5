"""Rewards in worker processes: `async with pool("module:function") as reward: score = await reward(text, row)`.

A reward is a plain function `reward(text, row)` that returns a number, a dict of numbers, the rewards of steps or None;
`signatures.bind` lists other signatures. Workers receive its object path and import its module, but no JAX; a reward
that raises, hangs, crashes or leaks costs at most its sample. To combine several rewards, return a dict, whose sum
counts:

    def reward(text, row):
        return {"answer": gsm8k.reward(text, row), "form": 0.1 * match.form(text, row)}
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
import pickle
from collections import deque
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from typing import Any, Literal

from .. import object_path
from ..processes.child import Garbled
from ..processes.environment import passed
from .signatures import Score, bind, score, whole
from .worker import Call, Worker

__all__ = ["Pool", "Score", "check", "none", "pool", "score", "whole"]
log = logging.getLogger(__name__)

AHEAD = 16  # calls sent to a worker before it answers: hides the round trip of cheap rewards
CONCURRENT = 64  # calls of an `async def` that one worker runs at a time
BATCH = 256  # most calls in a batch of a batched reward
BLOCKED_S = 1.0  # after its timeout a coroutine has been cancelled, unless its event loop is blocked
USELESS = 8  # failures without a single score: this reward does not work
STARTS = 3  # attempts to replace a worker


def none(text: str, row: Any) -> float:
    """Returns 0: for runs that learn only from a teacher."""
    return 0.0


def check(name: str) -> None:
    """Raises ValueError, in one line, if the object path `name` cannot be loaded here, or names no reward."""
    bind(object_path.resolve(name), name)


@contextlib.asynccontextmanager
async def pool(
    name: str,
    *,
    workers: int = 2,
    timeout_s: float = 10.0,
    retries: int = 1,
    failed: Literal["unscorable", "zero"] = "unscorable",
    max_calls: int = 0,
    max_growth: int = 1 << 30,
    environment: Sequence[str] = (),
    as_called: bool = False,
) -> AsyncIterator[Pool]:
    """Starts worker processes that run the reward at the object path `name`; yields `async reward(text, row) -> Score`.

    A call fails if it raises, returns something that is not a reward, exceeds `timeout_s`, or its worker dies. It is
    retried `retries` times, then logged in one line, counted in `reward.counts`, and unscorable. A function that has
    failed 8 times without a single score is considered broken: every call raises its error.

    A worker that hangs is killed with all its children and replaced. Calls that ran together when their worker died, or
    in one failed batch, are retried one by one, so that only the faulty one counts as failed. A reward may therefore
    see the same text twice. `async def` rewards run 64 at a time in each worker. Rows must be picklable.

    Args:
      timeout_s: seconds per attempt, from when its worker starts it.
      retries: further attempts at a failed call; on another worker if the first died.
      failed: the score of a failed call: NaN, which training leaves out, or 0.
      max_calls: replace a worker after this many calls; 0 = never.
      max_growth: replace a worker whose memory has grown by this many bytes since its first answer. The memory of a
        single call is not bounded; to bound it, see `sandbox`.
      environment: names of environment variables that workers get in addition to `environment.PASSED`.
      as_called: the function has a signature of its own, and is called with `Pool.called`.

    Raises:
      ValueError: the name cannot be resolved in a worker; a bad option; a variable that is not set; while running, a
        reward that never works.
      RuntimeError: while running, workers that cannot be replaced.
    """
    if workers < 1 or not 0 < timeout_s < math.inf:
        raise ValueError(
            f"rewards.pool: workers must be at least 1 and timeout_s positive, got {workers} and {timeout_s}"
        )
    if min(retries, max_calls) < 0 or max_growth <= 0:
        raise ValueError(
            "rewards.pool: retries and max_calls must be at least 0 and max_growth positive, "
            f"got {retries}, {max_calls} and {max_growth}"
        )
    if failed not in ("unscorable", "zero"):
        raise ValueError(f"rewards.pool: failed must be 'unscorable' or 'zero', got {failed!r}")
    environ = passed(environment, "--reward-environment")
    value = 0.0 if failed == "zero" else math.nan
    reward = Pool(name, workers, timeout_s, retries, value, max_calls, max_growth, environ, as_called)
    try:
        await reward._start()
        yield reward
    finally:
        await reward._stop()


class Pool:
    """The workers and the queue of calls; made by `pool`.

    Attributes:
      counts: calls by outcome: scored (returned a reward), raised, late, died; retried (attempts after the first);
        recycled (workers replaced because of max_calls or max_growth).
    """

    def __init__(
        self, name: str, size: int, timeout_s: float, retries: int, failed: float, max_calls: int, max_growth: int,
        environ: Mapping[str, str], as_called: bool,
    ):  # fmt: skip
        self.name, self.size, self.timeout_s, self.retries, self.failed = name, size, timeout_s, retries, failed
        self.max_calls, self.max_growth, self.environ, self.as_called = max_calls, max_growth, environ, as_called
        self.counts = {"scored": 0, "raised": 0, "late": 0, "died": 0, "retried": 0, "recycled": 0}
        self._ids = itertools.count()
        self._waiting: deque[Call] = deque()
        self._workers: list[Worker] = []
        self._tasks: list[asyncio.Task] = []
        self._feeding: asyncio.Handle | None = None
        self._broken: Exception | None = None

    async def __call__(
        self,
        text: str,
        row: Mapping[str, Any],
        *,
        prompt: str | None = None,
        prompt_ids: Sequence[int] | None = None,
        completion_ids: Sequence[int] | None = None,
    ) -> Score:
        """The reward of the completion `text`. Templated prompt and token ids go to rewards that have parameters for
        them."""
        if self._broken:
            raise self._broken
        given = {"prompt": prompt, "prompt_ids": prompt_ids, "completion_ids": completion_ids}
        context = {name: given[name] for name in self._wants}
        message = pickle.dumps((text, row, context), protocol=pickle.HIGHEST_PROTOCOL)
        call = Call(next(self._ids), message, row, asyncio.get_running_loop().create_future())
        self._queue([call])
        return await call.answer

    async def called(self, *arguments: Any, **data: Any) -> Score:
        """The reward of a function with a signature of its own (`as_called`), called with these arguments."""
        return await self("", {"arguments": arguments, "data": data})

    async def _start(self) -> None:
        self._tasks = [asyncio.create_task(self._launch()) for _ in range(self.size)]
        workers = await asyncio.gather(*self._tasks)
        self._mode, self._wants = workers[0].mode, workers[0].wants
        self._tasks = [asyncio.create_task(self._keep(worker)) for worker in workers]
        self._tasks.append(asyncio.create_task(self._watch()))
        for task in self._tasks:
            task.add_done_callback(self._ended)

    async def _stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._feeding:
            self._feeding.cancel()
        self._broken = RuntimeError(f"reward {self.name}: the pool is closed")
        for call in self._open():
            call.answer.cancel()
        await asyncio.gather(*(worker.child.end() for worker in self._workers))

    async def _launch(self) -> Worker:
        worker = await Worker.start(self.name, self.timeout_s, self.environ, self.as_called)
        self._workers.append(worker)
        return worker

    def _queue(self, calls: Iterable[Call]) -> None:
        """Queues calls, to be sent once pending callbacks of the loop have run, so that they can share a batch."""
        self._waiting.extend(calls)
        if not self._feeding:
            self._feeding = asyncio.get_running_loop().call_soon(self._feed)

    def _feed(self) -> None:
        self._feeding = None
        while workers := [worker for worker in self._workers if not worker.retiring]:
            worker = min(workers, key=lambda worker: len(worker.running))
            if not (calls := self._next(worker)):
                return
            worker.send(calls)
            worker.retiring = 0 < self.max_calls <= worker.sent

    def _next(self, worker: Worker) -> list[Call]:
        """Takes the next calls for `worker`, the least busy one, from the queue; [] if it has no room."""
        while self._waiting and self._waiting[0].answer.done():  # its caller was cancelled
            self._waiting.popleft()
        running, waiting = len(worker.running), len(self._waiting)
        isolated = lambda: self._waiting[0].isolated or any(call.isolated for call in worker.running.values())
        if not waiting or (running and isolated()):
            return []
        if self._mode == "batched":
            if running:
                return []
            batch = itertools.takewhile(lambda call: not call.isolated, itertools.islice(self._waiting, BATCH))
            return [self._waiting.popleft() for _ in range(max(1, sum(1 for _ in batch)))]
        if self._mode == "async":
            room = CONCURRENT
        else:  # send few ahead when few are queued, so that no worker idles
            busy = sum(len(worker.running) for worker in self._workers)
            room = min(AHEAD, max(1, (waiting + busy) // (2 * len(self._workers))))
        return [self._waiting.popleft()] if running < room else []

    async def _keep(self, worker: Worker) -> None:
        """Receives the answers of a worker and replaces it when it ends."""
        while True:
            try:
                while worker.running or not worker.retiring:
                    self._settle(worker, *await worker.answers())
                self.counts["recycled"] += 1
            except Garbled as error:
                log.warning("reward %s: replacing a worker whose answers are garbled: %s", self.name, error)
            except (asyncio.IncompleteReadError, ConnectionError):  # it died
                pass
            worker.retiring = True
            self._lose(worker)
            await worker.child.end()
            self._workers.remove(worker)
            worker = await self._replace()
            self._queue([])

    async def _replace(self) -> Worker:
        for attempt in range(1, STARTS):
            try:
                return await self._launch()
            except RuntimeError as error:  # it worked before: perhaps the machine has a temporary problem
                log.warning("%s; attempt %d of %d", error, attempt, STARTS)
                await asyncio.sleep(attempt)
        return await self._launch()

    def _settle(self, worker: Worker, memory: int, answers: Sequence[tuple[Call, str, Any]]) -> None:
        shared = self._mode == "batched" and len(answers) > 1
        for call, outcome, told in answers:
            if outcome == "scored":
                self.counts["scored"] += 1
                call.settle(told)
            else:
                self._fail(call, outcome, told, guilty=not shared)
        if self._mode == "plain":
            for call in worker.suspects():
                call.since = asyncio.get_running_loop().time()
        worker.memory = worker.memory or memory
        worker.retiring = worker.retiring or memory - worker.memory > self.max_growth
        self._queue([])

    def _lose(self, worker: Worker) -> None:
        """Requeues the calls of a dead worker. The one it was running has failed; of several, none is blamed."""
        suspects = worker.suspects()
        if worker.late and worker.late not in suspects:  # the late call's answer had just arrived
            suspects = []
        for call in suspects:
            self._fail(call, "late" if worker.late else "died", "", guilty=len(suspects) == 1)
        self._waiting.extendleft(reversed([call for call in worker.running.values() if call not in suspects]))
        worker.running.clear()

    def _fail(self, call: Call, outcome: str, message: str, *, guilty: bool) -> None:
        if not guilty or call.failures < self.retries:
            call.failures += guilty
            call.isolated = call.isolated or not guilty
            self.counts["retried"] += 1
            self._queue([call])
            return
        self.counts[outcome] += 1
        how = {"late": f"took longer than {self.timeout_s:g} s", "died": "killed its worker", "raised": message}
        log.warning("reward %s: %s, on %s", self.name, how[outcome], object_path.row(call.row))
        if not self.counts["scored"] and sum(self.counts[name] for name in ("raised", "late", "died")) >= USELESS:
            what = f"the first {USELESS} calls all failed, the last: {how[outcome]}, on {object_path.row(call.row)}"
            self._break(ValueError(f"reward {self.name}: {what}"))
        call.settle(self._broken or Score(self.failed))

    def _break(self, error: Exception) -> None:
        """Fails all calls, now and from here on, with `error`."""
        self._broken = error
        for call in self._open():
            call.settle(error)
        self._waiting.clear()

    def _open(self) -> list[Call]:
        return [*self._waiting, *(call for worker in self._workers for call in worker.running.values())]

    def _ended(self, task: asyncio.Task) -> None:
        """Done callback of the pool's own tasks: an error in one must not leave callers waiting."""
        if not task.cancelled() and isinstance(error := task.exception(), Exception):
            self._break(error)

    async def _watch(self) -> None:
        """Kills workers that exceed the timeout; `_keep` then sees the end of their stream.

        The event loop processes answers that have arrived before timers, so that a busy loop does not make a worker
        look late.
        """
        clock = asyncio.get_running_loop().time
        timeout_s = self.timeout_s + (BLOCKED_S if self._mode == "async" else 0.0)
        while True:
            await asyncio.sleep(min(self.timeout_s / 10, 0.5))
            for worker in self._workers:
                oldest = min(worker.suspects(), key=lambda call: call.since, default=None)
                if oldest and clock() - oldest.since > timeout_s:
                    worker.late = oldest
                    await asyncio.to_thread(worker.child.kill)
