"""Rewards in processes of their own: `async with pool("module:function") as reward: score = await reward(text, row)`.

A reward is a plain function `reward(text, row)` that returns a number, a dict of numbers or None. It is sent to its
workers by name, they load its module and nothing of JAX, and one that hangs or crashes costs its sample only.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import math
import os
import pickle
import signal
import socket
import subprocess
import sys
import traceback
from collections import deque
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from . import names

log = logging.getLogger(__name__)

AHEAD = 16  # calls written to a worker before it answers: hides the way there and back of cheap rewards
START_S = 120.0  # to start Python and import the reward's module, on a busy machine


@dataclass(frozen=True)
class Score:
    """A reward and its named components; a NaN value means unscorable."""

    value: float
    components: Mapping[str, float] = field(default_factory=dict)


def score(value: Any) -> Score:
    """What a reward function returned, as a Score.

    A number is the reward, None is unscorable (NaN), and a dict gives named components: its entry "reward" is the
    total, or without that entry the sum of all.

    Raises:
      ValueError: anything else, or an infinite number.
    """
    if isinstance(value, Score):
        return value
    if value is None:
        return Score(math.nan)
    if not isinstance(value, Mapping):
        return Score(_number(value))
    if not value:
        raise ValueError("a reward must be a number, a dict of numbers or None, got an empty dict")
    components = {str(name): _number(part) for name, part in value.items()}
    total = components.pop("reward", None)
    return Score(sum(components.values()) if total is None else total, components)


def _number(value: Any) -> float:
    if not hasattr(type(value), "__float__"):
        raise ValueError(f"a reward must be a number, a dict of numbers or None, got {value!r:.80}")
    if math.isinf(number := float(value)):
        raise ValueError(f"a reward must be finite, or NaN if it is unknown, got {number}")
    return number


@contextlib.asynccontextmanager
async def pool(name: str, *, workers: int = 2, timeout_s: float = 10.0) -> AsyncIterator[Pool]:
    """Worker processes that run the reward called `name`; yields `async reward(text, row) -> Score`.

    A call that takes longer than `timeout_s`, or whose worker dies, is unscorable (NaN): that worker alone is killed
    with all it started, replaced, and counted in `reward.counts`. A call that raises, or returns what is no reward,
    raises a ValueError here: a bug must not become a reward of zero. An `async def` reward is awaited in its worker,
    one call after the other. Rows must be picklable.

    Raises:
      ValueError: the name cannot be resolved in a worker; bad `workers` or `timeout_s`.
    """
    if workers < 1 or not timeout_s > 0:
        raise ValueError(
            f"rewards.pool: workers must be at least 1 and timeout_s positive, got {workers} and {timeout_s}"
        )
    reward = Pool(name, workers, timeout_s)
    try:
        await reward._start()
        yield reward
    finally:
        await reward._stop()


class Pool:
    """Calls waiting for a worker, and the workers; made by `pool`.

    Attributes:
      counts: calls by outcome: scored (returned a reward), raised, late (killed at the timeout), died.
    """

    def __init__(self, name: str, workers: int, timeout_s: float):
        self.name, self.size, self.timeout_s = name, workers, timeout_s
        self.counts = {"scored": 0, "raised": 0, "late": 0, "died": 0}
        self._waiting: deque[_Call] = deque()
        self._workers: list[_Worker] = []
        self._tasks: list[asyncio.Task] = []
        self._broken: Exception | None = None

    async def __call__(self, text: str, row: Mapping[str, Any]) -> Score:
        if self._broken:
            raise self._broken
        message = pickle.dumps((text, row), protocol=pickle.HIGHEST_PROTOCOL)
        call = _Call(message, row, asyncio.get_running_loop().create_future())
        self._waiting.append(call)
        self._feed()
        return await call.answer

    async def _start(self) -> None:
        self._tasks = [asyncio.create_task(self._launch()) for _ in range(self.size)]
        await asyncio.gather(*self._tasks)
        self._tasks = [asyncio.create_task(self._keep(worker)) for worker in self._workers]
        self._tasks.append(asyncio.create_task(self._watch()))

    async def _stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for call in [*self._waiting, *(call for worker in self._workers for call in worker.calls)]:
            call.answer.cancel()
        for worker in self._workers:
            worker.kill()
        await asyncio.gather(*(worker.writer.wait_closed() for worker in self._workers), return_exceptions=True)

    async def _launch(self) -> _Worker:
        worker = await _Worker.start(self.name)
        self._workers.append(worker)
        return worker

    def _feed(self) -> None:
        """Hands waiting calls to the least busy worker, few at a time when there are few, so that none idles."""
        busy = sum(len(worker.calls) for worker in self._workers)
        while self._waiting and self._workers:
            worker = min(self._workers, key=lambda worker: len(worker.calls))
            share = (len(self._waiting) + busy) // (2 * len(self._workers))
            if len(worker.calls) >= min(AHEAD, max(1, share)):
                return
            call = self._waiting.popleft()
            if not call.answer.done():  # else its caller was cancelled
                worker.send(call)
                busy += 1

    async def _keep(self, worker: _Worker) -> None:
        """Takes the answers of a worker, and of those that replace it."""
        while True:
            with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
                while True:
                    self._settle(worker, *await worker.receive())
                    self._feed()
            worker.kill()
            self._workers.remove(worker)
            self._lose(worker)
            try:
                worker = await self._launch()
            except (ValueError, RuntimeError) as error:  # it worked before: the machine is in trouble
                self._broken = error
                for call in self._waiting:
                    call.settle(error)
                self._waiting.clear()
                return
            self._feed()

    def _settle(self, worker: _Worker, failure: str | None, value: float, parts: dict) -> None:
        call = worker.calls.popleft()
        worker.since = asyncio.get_running_loop().time()
        self.counts["raised" if failure else "scored"] += 1
        if failure:
            call.settle(ValueError(f"reward {self.name}: {failure}, on {names.row(call.row)}"))
        else:
            call.settle(Score(value, parts))

    def _lose(self, worker: _Worker) -> None:
        """The call that a dead worker was busy with is unscorable; those written ahead go to another worker."""
        if not worker.calls:
            return
        call = worker.calls.popleft()
        self.counts["late" if worker.late else "died"] += 1
        reason = f"took longer than {self.timeout_s:g} s" if worker.late else "killed its worker"
        log.warning("reward %s %s, on %s", self.name, reason, names.row(call.row))
        call.settle(Score(math.nan))
        self._waiting.extendleft(reversed(worker.calls))
        worker.calls.clear()

    async def _watch(self) -> None:
        """Kills workers that are late; `_keep` then sees the end of their stream.

        Answers that have arrived are taken before a timer of the same moment runs, so that a busy event loop does
        not make a worker look late.
        """
        clock = asyncio.get_running_loop().time
        while True:
            await asyncio.sleep(min(self.timeout_s / 10, 0.5))
            for worker in self._workers:
                if worker.calls and clock() - worker.since > self.timeout_s:
                    worker.late = True
                    worker.kill()


@dataclass(eq=False)
class _Call:
    message: bytes
    row: Mapping[str, Any]
    answer: asyncio.Future

    def settle(self, outcome: Score | Exception) -> None:
        if self.answer.done():  # its caller was cancelled
            return
        if isinstance(outcome, Exception):
            self.answer.set_exception(outcome)
        else:
            self.answer.set_result(outcome)


@dataclass(eq=False)
class _Worker:
    """A process that runs `serve`, and the calls written to it, the first of which it is busy with since `since`."""

    process: subprocess.Popen
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    calls: deque[_Call] = field(default_factory=deque)
    since: float = 0.0
    late: bool = False

    @classmethod
    async def start(cls, name: str) -> _Worker:
        """A fresh interpreter with our import path. Unlike a spawned `multiprocessing` child it does not run the
        main script again, which may well import JAX; in a session of its own it sees no Ctrl-C, and is killed
        together with its children."""
        ours, theirs = socket.socketpair()
        with theirs:
            arguments = f"{theirs.fileno()}, {name!r}"
            process = subprocess.Popen(
                [
                    sys.executable,
                    "-c",
                    f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import serve; serve({arguments})",
                ],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        worker = cls(process, *await asyncio.open_connection(sock=ours))
        try:
            failure, *_ = await asyncio.wait_for(worker.receive(), START_S)
            if failure:
                raise ValueError(failure)
        except (asyncio.IncompleteReadError, ConnectionError, TimeoutError) as error:
            worker.kill()
            raise RuntimeError(
                f"reward {name}: its worker did not start ({type(error).__name__}); see what it printed"
            ) from error
        except BaseException:
            worker.kill()
            raise
        return worker

    def send(self, call: _Call) -> None:
        if not self.calls:
            self.since = asyncio.get_running_loop().time()
        self.calls.append(call)
        self.writer.write(len(call.message).to_bytes(4, "little") + call.message)

    async def receive(self) -> tuple[str | None, float, dict[str, float]]:
        size = int.from_bytes(await self.reader.readexactly(4), "little")
        return pickle.loads(await self.reader.readexactly(size))

    def kill(self) -> None:
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        self.writer.close()


def serve(handle: int, name: str) -> None:
    """The life of a worker: resolves the reward, then answers one call after the other until the stream ends."""
    with (
        socket.socket(fileno=handle) as connection,
        connection.makefile("rb") as calls,
        asyncio.Runner() as runner,
    ):

        def answer(failure: str | None, value: float = math.nan, parts: Mapping = {}) -> None:  # noqa: B006
            message = pickle.dumps((failure, value, dict(parts)), pickle.HIGHEST_PROTOCOL)
            connection.sendall(len(message).to_bytes(4, "little") + message)

        try:
            function = names.resolve(name)
        except BaseException as error:  # whatever it is, it must reach the process that waits
            answer(f"reward {error}" if isinstance(error, ValueError) else f"reward {name}: {_line(error)}")
            return
        answer(None)
        while len(size := calls.read(4)) == 4:
            message = calls.read(int.from_bytes(size, "little"))
            try:
                result = function(*pickle.loads(message))
                scored = score(runner.run(result) if inspect.iscoroutine(result) else result)
            except BaseException as error:  # whatever it is, it must reach the process that waits
                answer(_line(error, function))
            else:
                answer(None, scored.value, scored.components)


def _line(error: BaseException, function: Any = None) -> str:
    """An exception in one line: type, message, and the line of the function's file (or the last) that led to it."""
    frames = traceback.extract_tb(error.__traceback__)
    file = inspect.unwrap(function).__code__.co_filename if inspect.isfunction(function) else None
    own = [frame for frame in frames if frame.filename == file] or frames
    place = f" ({os.path.basename(own[-1].filename)}:{own[-1].lineno})" if own else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())}{place}"
