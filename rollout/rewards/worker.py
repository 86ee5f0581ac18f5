"""Worker processes that compute rewards: the parent's handle (`Worker`) and the child's main function (`serve`).

Calls are sent pickled; answers come back as JSON, through which a compromised reward cannot execute code here.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import pickle
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, BinaryIO

from .. import object_path
from ..errors import ServerError
from ..processes import memory
from ..processes.child import Child, Garbled, opened, put
from ..sandbox import turns
from .signatures import Bound, Score, bind, bind_as_called, score

START_S = 120.0  # to start Python and import the reward's module, on a busy machine
TELL_S = 0.5  # between reports of calls that wait for the sandbox


@dataclass(eq=False)
class Call:
    """A call of the pool.

    Attributes:
      message: (text, row, context), pickled.
      failures: number of failed attempts.
      isolated: it was lost together with others, and now runs alone to find the faulty one.
      since: when its worker started it, or last reported that it waits for the sandbox, by the loop's clock.
    """

    id: int
    message: bytes
    row: Any
    answer: asyncio.Future
    failures: int = 0
    isolated: bool = False
    since: float = 0.0

    def settle(self, outcome: Score | Exception) -> None:
        if self.answer.done():  # its caller was cancelled
            return
        if isinstance(outcome, Exception):
            self.answer.set_exception(outcome)
        else:
            self.answer.set_result(outcome)


@dataclass(eq=False)
class Worker:
    """A process that runs `serve`.

    Attributes:
      mode, wants: of the reward (see `signatures.Bound`).
      running: calls sent to it, by id, in order. A plain reward is running only the first of them, others all.
      sent: number of calls sent so far.
      memory: bytes in use after its first answer, from which growth is measured.
      retiring: it gets no more calls.
      late: the call that exceeded the timeout, for which it was killed.
    """

    child: Child
    mode: str = "plain"
    wants: tuple[str, ...] = ()
    running: dict[int, Call] = field(default_factory=dict)
    sent: int = 0
    memory: int = 0
    retiring: bool = False
    late: Call | None = None

    @classmethod
    async def start(cls, name: str, timeout_s: float, environ: Mapping[str, str], as_called: bool = False) -> Worker:
        """Starts a worker with the environment `environ`. Raises ServerError; ValueError: no such reward."""
        arguments = (name, timeout_s, as_called)
        child = await Child.start(f"reward {name}", f"{__name__}:serve", arguments, environ)
        worker = cls(child)
        try:
            async with asyncio.timeout(START_S):  # wait_for may lose a cancellation that coincides with the greeting
                greeting = await child.receive()
            if "error" not in greeting:
                worker.mode, worker.wants = greeting["mode"], tuple(greeting["wants"])
        except (asyncio.IncompleteReadError, ConnectionError, TimeoutError, KeyError, TypeError) as error:
            await child.end()
            raise ServerError(
                f"reward {name}: its worker did not start ({type(error).__name__}); see its output"
            ) from error
        except BaseException:
            await child.end()
            raise
        if "error" in greeting:
            await child.end()
            raise ValueError(greeting["error"])
        return worker

    def send(self, calls: Sequence[Call]) -> None:
        now = asyncio.get_running_loop().time()
        for call in calls:
            call.since = now
            self.running[call.id] = call
        self.sent += len(calls)
        self.child.send([(call.id, call.message) for call in calls])

    async def answers(self) -> tuple[int, list[tuple[Call, str, Any]]]:
        """The memory in bytes that the worker reports, and its next answers, whose calls no longer run: (call,
        outcome, Score or message). Raises as `Child.receive`."""
        frame = await self.child.receive()
        try:
            used, told = int(frame["memory"]), [(id, str(outcome), what) for id, outcome, what in frame["answers"]]
            scores = [_score(what) if outcome == "scored" else str(what) for _, outcome, what in told]
            if not {outcome for _, outcome, _ in told} <= {"scored", "raised", "late"}:
                raise ValueError(f"outcomes of {told}")
            calls, waiting = [self.running[id] for id, _, _ in told], [self.running[id] for id in frame["waiting"]]
            if not calls and not waiting:  # it would renew the time of the running call
                raise ValueError("no answers")
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise Garbled(f"an answer to no call, or of another form ({type(error).__name__}: {error!s:.80})") from None
        for call in waiting:
            call.since = asyncio.get_running_loop().time()
        for id, _, _ in told:
            self.running.pop(id, None)
        return used, [(call, outcome, what) for call, (_, outcome, _), what in zip(calls, told, scores, strict=True)]

    def suspects(self) -> list[Call]:
        """The calls that it is running now."""
        return list(self.running.values())[: 1 if self.mode == "plain" else None]


def _score(told: Any) -> Score:
    """A Score as `_scored` sends it; raises TypeError or ValueError for anything else."""
    value, components, steps = told
    parts = score(components).components if components else {}
    return score(Score(value, parts, score(list(steps)).steps if steps else ()))


def serve(handle: int, answers: int, name: str, timeout_s: float, as_called: bool) -> None:
    """The main function of a worker: resolves the reward, then answers calls until their stream ends."""
    with opened(handle, answers) as (connection, out):
        try:
            function = object_path.resolve(name)
            bound = bind_as_called(function) if as_called else bind(function, name)
        except BaseException as error:  # any error must reach the waiting process
            text = str(error) if isinstance(error, ValueError) else f"{name}: {object_path.line(error)}"
            put(out, {"error": f"reward {text}"})
            return
        put(out, {"mode": bound.mode, "wants": bound.wants})
        if bound.mode == "async":
            asyncio.run(_many(connection, out, bound, function, timeout_s))
        else:
            with connection.makefile("rb") as stream, asyncio.Runner() as runner:
                while len(size := stream.read(4)) == 4:
                    calls = pickle.loads(stream.read(int.from_bytes(size, "little")))
                    answer = _batch if bound.mode == "batched" else _plain
                    put(out, _answers(answer(bound, function, calls, runner)))


def _plain(bound: Bound, function: Callable, calls: Sequence, runner: asyncio.Runner) -> list[tuple]:
    [(id, message)] = calls
    try:
        result = bound.call(*pickle.loads(message))
        return [(id, *_scored(runner.run(result) if inspect.iscoroutine(result) else result))]
    except BaseException as error:  # any error must reach the waiting process
        return [(id, "raised", object_path.line(error, function))]


def _batch(bound: Bound, function: Callable, calls: Sequence, runner: asyncio.Runner) -> list[tuple]:
    try:
        texts, rows, _ = zip(*(pickle.loads(message) for _, message in calls), strict=True)
        result = bound.call(list(texts), list(rows))
        results = list(runner.run(result) if inspect.iscoroutine(result) else result)
        if len(results) != len(calls):
            raise ValueError(f"a batched reward must return one reward per text, got {len(results)} for {len(calls)}")
        return [(id, *_scored(result)) for (id, _), result in zip(calls, results, strict=True)]
    except BaseException as error:  # any error must reach the waiting process
        return [(id, "raised", object_path.line(error, function)) for id, _ in calls]


async def _many(connection: socket.socket, out: BinaryIO, bound: Bound, function: Callable, timeout_s: float) -> None:
    """Runs calls of an `async def` concurrently; a late one is cancelled without affecting the others. The time that
    they wait for the sandbox does not count."""
    reader, _writer = await asyncio.open_connection(sock=connection)
    clocks: dict[int, turns.Clock] = {}

    async def one(id: int, message: bytes) -> None:
        try:
            async with asyncio.timeout(timeout_s) as limit:
                clocks[id] = turns.Clock(limit)
                turns.CLOCK.set(clocks[id])
                answer: tuple = (id, *_scored(await bound.call(*pickle.loads(message))))
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # any error must reach the waiting process
            answer = (id, "late", "") if limit.expired() else (id, "raised", object_path.line(error, function))
        del clocks[id]
        put(out, _answers([answer]))

    async def tell() -> None:
        while True:
            await asyncio.sleep(TELL_S)
            if waiting := [id for id, clock in clocks.items() if clock.waiting]:
                put(out, _answers([], waiting))

    tasks = {asyncio.create_task(tell())}
    with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
        while True:
            size = int.from_bytes(await reader.readexactly(4), "little")
            for call in pickle.loads(await reader.readexactly(size)):
                tasks.add(task := asyncio.create_task(one(*call)))
                task.add_done_callback(tasks.discard)


def _scored(result: Any) -> tuple[str, tuple]:
    made = score(result)
    return "scored", (made.value, made.components, made.steps)


def _answers(answers: Sequence[tuple], waiting: Sequence[int] = ()) -> dict[str, Any]:
    return {"memory": memory.resident(), "answers": answers, "waiting": waiting}
