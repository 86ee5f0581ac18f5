"""Starts generation servers on this machine, for runs that were given no server addresses."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import sys
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import IO

from ..processes import guard, memory
from .engine_options import EngineOptions
from .types import Published

START_S = 600.0  # a large checkpoint loads and compiles for minutes
STOP_S = 20.0
PIECE = 2**16  # bytes of output read at a time
LONGEST_LINE = 500  # characters, in errors
ALONE = {"AREAX_PROCESSES": "1"}  # a server is a process by itself, also of a run of several (`multihost.processes`)


@dataclass(frozen=True)
class Serve(EngineOptions):
    """How local servers run.

    Attributes:
      inside: run one server in the trainer's process, on its first devices; new weights are copied on the devices. Not
        for evaluations, which have no trainer.
      count: number of servers, each a process with its own weights; one that dies is restarted.
      context: longest sequence, prompt and completion; the model's limit if that is lower. 0 = what the recipe needs:
        `length` in training, 2048 and `sampling.max_new_tokens` in an evaluation.
      dtype: dtype of weights and computation; auto = bfloat16 on accelerators, float32 on a CPU.
      restarts: how often one of them is restarted within an hour before the run does without it.
    """

    inside: bool = False
    count: int = 1
    context: int = 0
    dtype: str = "auto"
    restarts: int = 10

    def __post_init__(self):
        super().__post_init__()
        if self.count < 1 or self.inside and self.count > 1:
            one = "1 with --serve.inside" if self.inside else "at least 1"
            raise ValueError(f"--serve.count must be {one}, got {self.count}")
        memory.check(f"--serve.count {self.count}", self.count * memory.PROCESS)
        if self.restarts < 0:
            raise ValueError(f"--serve.restarts must be at least 0, got {self.restarts}")

    def sized(self, length: int) -> Serve:
        """These options, with a context of `length` tokens if none is given."""
        return replace(self, context=self.context or length)


def words(path: str, options: Serve) -> list[str]:
    """The arguments of `areax` for one of these servers, on any free port."""
    return ["serve", path, "--port", "0", "--dtype", options.dtype, *options.words]


class Local:
    """Servers on this machine; made by `servers`.

    Attributes:
      running: the servers' processes by address.
    """

    def __init__(self, path: str | os.PathLike, options: Serve, log: IO[str]):
        self.running: dict[str, asyncio.subprocess.Process] = {}
        self._path, self._options, self._log = os.fspath(path), options, log
        self._environs: dict[str, Mapping[str, str]] = {}  # by address, of servers that ended too: a restart has them
        self._listeners: set[asyncio.Task] = set()

    @property
    def urls(self) -> list[str]:
        return list(self.running)

    async def restart(self, url: str, weights: Published | None) -> str:
        """Kills the server at `url` and starts another, with `weights` if there are any; returns its address.

        Raises RuntimeError, with its output, if it ended before it was ready.
        """
        if process := self.running.pop(url, None):
            if process.returncode is None:
                process.kill()  # it does not respond, so it would not react to SIGTERM either
            await process.wait()
        return await self.start((weights.base or weights).directory if weights else self._path, self._environs[url])

    async def start(self, path: str, environ: Mapping[str, str]) -> str:
        """Runs `areax serve path --port 0` and returns its address once it is ready; raises as `restart`.

        Args:
          environ: changes of the environment, which show it its devices.
        """
        command = [sys.executable, "-m", "areax", *words(path, self._options)]
        # Started in a new session: Ctrl-C should reach only the run, which then ends its servers.
        process = await asyncio.create_subprocess_exec(
            *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
            start_new_session=True, env={**os.environ, **ALONE, "PYTHONUNBUFFERED": "1", **environ},
        )  # fmt: skip
        guard.process(process.pid)
        output: deque[str] = deque(maxlen=20)  # last lines
        ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        listener = asyncio.create_task(self._listen(process, output, ready))
        self._listeners.add(listener)
        listener.add_done_callback(self._listeners.discard)
        try:
            async with asyncio.timeout(START_S):
                url = await ready
            self.running[url], self._environs[url] = process, environ
            return url
        except TimeoutError:
            raise RuntimeError(
                f"the generation server was not ready in {START_S:.0f} s: {' | '.join(output)}"
            ) from None
        finally:
            if process not in self.running.values():
                await _end(process)

    async def _listen(
        self, process: asyncio.subprocess.Process, output: deque[str], ready: asyncio.Future[str]
    ) -> None:
        assert process.stdout is not None
        async for line in _lines(process.stdout):
            self._log.write(f"{line}\n")
            output.append(line := line.rstrip()[:LONGEST_LINE])
            found = re.match(r"(http://\S+) ", line)
            if found and not ready.done():
                ready.set_result(found.group(1))
        code = await process.wait()
        guard.process_ended(process.pid)
        if not ready.done():
            ready.set_exception(RuntimeError(f"the generation server exited with code {code}: {' | '.join(output)}"))

    async def close(self) -> None:
        await asyncio.gather(*map(_end, self.running.values()))
        for listener in self._listeners:
            listener.cancel()
        await asyncio.gather(*self._listeners, return_exceptions=True)


@contextlib.asynccontextmanager
async def servers(
    path: str | os.PathLike,
    options: Serve = Serve(),
    log: str | os.PathLike = os.devnull,
    environs: Sequence[Mapping[str, str]] = (),
) -> AsyncIterator[Local]:
    """Starts servers of the checkpoint `path`; yields them once they are ready and ends them on exit.

    Args:
      log: file that their output is appended to.
      environs: changes of the environment for each of them, restarts included; () = none.

    Raises:
      RuntimeError: a server ended before it was ready; with its output.
    """
    with open(log, "a", buffering=1, encoding="utf-8") as file:
        local = Local(path, options, file)
        try:
            of_each = environs or [{}] * options.count
            starting = [asyncio.create_task(local.start(os.fspath(path), environ)) for environ in of_each]
            try:
                await asyncio.gather(*starting)
            finally:
                for task in starting:
                    task.cancel()
                await asyncio.gather(*starting, return_exceptions=True)
            yield local
        finally:
            await local.close()


async def _lines(stream: asyncio.StreamReader) -> AsyncIterator[str]:
    """The lines of a stream; a line longer than PIECE in pieces, so that whatever is printed, the stream is drained."""
    rest = b""
    while piece := await stream.read(PIECE):
        *lines, rest = (rest + piece).split(b"\n")
        if len(rest) > PIECE:
            lines, rest = [*lines, rest], b""
        for line in lines:
            yield line.decode(errors="replace")
    if rest:
        yield rest.decode(errors="replace")


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(STOP_S):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()
    guard.process_ended(process.pid)
