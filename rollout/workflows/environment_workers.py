"""Worker processes of environments, whose code sees neither the trainer's memory nor its secrets, and may block.

A world there is a `RemoteWorld` here, which sends each call to its worker. Many worlds share a worker, whose plain
methods run in threads as in the trainer. What goes there is pickled, what comes back is JSON.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import json
import os
import pickle
import socket
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, BinaryIO

import numpy as np

from .. import object_path
from ..errors import ServerError
from ..processes.child import Child, opened, put
from ..processes.environment import passed
from . import tools

START_S = 120.0  # to start Python and import the world's module, on a busy machine
OPTION = "environment in --env-options"
SHOWN = "tools", "seats", "seat"  # attributes of a world, sent along with each answer


class Workers:
    """Workers with worlds of one class; made by `workers`.

    Args:
      world: object path of the class.
      environ: their environment variables.
    """

    def __init__(self, world: str, count: int, environ: Mapping[str, str]):
        self._world, self._environ = world, environ
        self._own: list[_Worker | None] = [None] * count
        self._old: list[_Worker] = []  # which get no more worlds
        self._lock = asyncio.Lock()

    async def begin(self, **options: Any) -> RemoteWorld:
        """A world of these options, in the worker that has the fewest. One that has ended, or in which a call was late,
        and may block others, gets no more, and ends with its last world."""
        async with self._lock:
            for i, one in enumerate(self._own):
                if one and (one.lost or one.late):
                    self._old.append(one)
                    self._own[i] = None
            for one in [one for one in self._old if one.lost or not one.worlds]:
                self._old.remove(one)
                await one.end()
            worlds = [one.worlds if one else 0 for one in self._own]
            i = worlds.index(min(worlds))
            worker = self._own[i] = self._own[i] or await _Worker.start(self._world, self._environ)
            worker.worlds += 1  # before anybody else chooses
        made = RemoteWorld(worker)
        try:
            await made.call("", options)
        except BaseException:
            worker.worlds -= 1
            worker.forget(made)
            raise
        return made

    async def end(self) -> None:
        for worker in [*filter(None, self._own), *self._old]:
            await worker.end()


@contextlib.asynccontextmanager
async def workers(world: str, count: int, environment: Sequence[str] = ()) -> AsyncIterator[Workers]:
    """Yields up to `count` workers with worlds of the class at the object path `world`, which start when first used.

    Args:
      environment: names of environment variables that they get in addition to `processes.environment.PASSED`.

    Raises:
      ValueError: one of them is not set, or a bad count.
    """
    own = Workers(world, counted(count, environment), passed(environment, OPTION))
    try:
        yield own
    finally:
        await own.end()


def counted(count: Any, environment: Any) -> int:
    """The number of workers. Raises ValueError if it is none, or there are none that could get variables."""
    if type(count) is not int or count < 0:
        raise ValueError(f"workers must be a number of at least 0, got {count!r:.80}")
    if not (isinstance(environment, list | tuple) and all(isinstance(name, str) for name in environment)):
        raise ValueError(f"environment must be a list of names of variables, got {environment!r:.80}")
    if environment and not count:
        raise ValueError(f"environment is for workers, got {list(environment)} without; set workers, too")  # fmt: skip
    return count


class _Worker:
    """A process, and the calls that wait for its answers.

    Attributes:
      worlds: that it has.
      late: calls that nobody waits for any more.
      lost: why it takes no more calls; "" = it does.
    """

    def __init__(self, child: Child):
        self.child, self.worlds, self.late, self.lost = child, 0, set[int](), ""
        self._ids = itertools.count()
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._reading = asyncio.create_task(self._read())

    @classmethod
    async def start(cls, world: str, environ: Mapping[str, str]) -> _Worker:
        child = await Child.start(f"environment {world}", f"{__name__}:serve", (world,), environ)
        try:
            async with asyncio.timeout(START_S):
                greeting = await child.receive()
        except (asyncio.IncompleteReadError, ConnectionError, TimeoutError) as error:
            await child.end()
            told = f"its process did not start ({type(error).__name__}); see its output"
            raise ServerError(f"environment {world}: {told}") from error
        except BaseException:
            await child.end()
            raise
        if "error" in greeting:
            await child.end()
            raise ValueError(f"environment {world}: {greeting['error']}")
        return cls(child)

    async def call(self, world: int, method: str, *arguments: Any) -> dict[str, Any]:
        """The answer to a call of a world.

        Raises:
          RuntimeError: what the call has raised, or its process has ended; ServerError if it has raised that.
        """
        if self.lost:
            raise RuntimeError(self.lost)
        id = next(self._ids)
        self.child.send((id, world, method, arguments))
        answer = self._waiting[id] = asyncio.get_running_loop().create_future()
        try:
            told = await answer
        except asyncio.CancelledError:
            if id in self._waiting:
                self.late.add(id)
            raise
        if "error" in told:
            raise (ServerError if told.get("server") else RuntimeError)(str(told["error"]))
        return told

    def forget(self, world: RemoteWorld) -> None:
        """Closes a world that could not be made in time, whenever it is."""
        if not self.lost:
            id = next(self._ids)
            self._waiting[id] = asyncio.get_running_loop().create_future()
            self.child.send((id, world.number, "close", ()))

    async def _read(self) -> None:
        try:
            while True:
                told = await self.child.receive()
                answer = self._waiting.pop(told["id"])
                self.late.discard(told["id"])
                if not answer.done():
                    answer.set_result(told)
        except (asyncio.IncompleteReadError, ConnectionError, KeyError, TypeError) as error:
            sent = "" if isinstance(error, asyncio.IncompleteReadError) else f", it sent something else ({error!s:.80})"
            self.lost = f"its process ended{sent}; see its output"
            for answer in self._waiting.values():
                if not answer.done():
                    answer.set_exception(RuntimeError(self.lost))

    async def end(self) -> None:
        self._reading.cancel()
        await self.child.end()


class RemoteWorld:
    """A world in a worker; as `environments.World`."""

    def __init__(self, worker: _Worker):
        self._worker, self.number = worker, next(_numbers)
        self._hangs = False  # a call was not waited for to the end
        self.tools: Any = ()
        self.seats: Any = 1
        self.seat: Any = 0

    async def reset(self, row: Mapping[str, Any]) -> Any:
        return await self.call("reset", row)

    async def step(self, message: Mapping[str, Any]) -> Any:
        return await self.call("step", message)

    async def stop(self) -> Any:
        return await self.call("stop")

    async def close(self) -> None:
        self._worker.worlds -= 1
        if self._hangs:
            self._worker.forget(self)
        elif not self._worker.lost:
            await self.call("close")

    async def call(self, method: str, *arguments: Any) -> Any:
        try:
            told = await self._worker.call(self.number, method, *arguments)
        except asyncio.CancelledError:
            self._hangs = True
            raise
        vars(self).update({name: told[name] for name in SHOWN if name in told})
        return told.get("value")


_numbers = itertools.count()


def serve(handle: int, answers: int, world: str) -> None:
    """The main function of a process: loads the class, then answers calls until their stream ends."""
    with opened(handle, answers) as (connection, out):
        try:
            make = object_path.resolve(world)
        except BaseException as error:  # any error must reach the waiting process
            put(out, {"error": line(error)})
            return
        put(out, {})
        asyncio.run(_served(connection, out, make))
        os._exit(0)  # threads that hang would keep it


async def _served(connection: socket.socket, out: BinaryIO, make: Any) -> None:
    reader, _writer = await asyncio.open_connection(sock=connection)
    worlds: dict[int, Any] = {}
    closed: set[int] = set()  # before they were made
    tasks: set[asyncio.Task[None]] = set()

    async def one(id: int, number: int, method: str, arguments: tuple[Any, ...]) -> None:
        try:
            answer = json.loads(
                json.dumps(await _answer(worlds, closed, make, number, method, arguments), default=plain)
            )
        except BaseException as error:  # any error must reach the waiting process
            answer = {"error": line(error), "server": isinstance(error, ServerError)}
        put(out, {"id": id, **answer})

    with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
        while True:
            size = int.from_bytes(await reader.readexactly(4), "little")
            tasks.add(task := asyncio.create_task(one(*pickle.loads(await reader.readexactly(size)))))
            task.add_done_callback(tasks.discard)


async def _answer(
    worlds: dict[int, Any], closed: set[int], make: Any, number: int, method: str, arguments: tuple
) -> dict[str, Any]:
    """Makes a world if there is no method; what a call of a world's returns, with its attributes."""
    if not method:
        own = worlds[number] = await tools.called(functools.partial(make, **arguments[0]))
        if number not in closed:
            return {"seats": getattr(own, "seats", 1)}
        method = "close"
    elif method == "close" and number not in worlds:
        closed.add(number)
        return {}
    own = worlds.pop(number) if method == "close" else worlds[number]
    if method in ("reset", "step"):
        value = await tools.called(getattr(own, method), *arguments)
        seat = own.seat if getattr(own, "seats", 1) != 1 else 0
        return {"value": value, "tools": list(getattr(own, "tools", ())), "seat": seat}
    function = getattr(own, method, None)
    return {"value": await tools.called(function) if function else None}


def plain(value: Any) -> Any:
    """A number of numpy as Python's; raises TypeError for anything else that is not JSON."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"must be JSON to come from a process of its own, got {type(value).__name__}")


def line(error: BaseException) -> str:
    """An error of a world, in one line."""
    return str(error) if isinstance(error, ServerError) else object_path.line(error)
