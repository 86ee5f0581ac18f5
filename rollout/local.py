"""A generation server as a process of its own on this machine, for runs that were given no address."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import sys
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

START_S = 600.0  # a large checkpoint loads and compiles for minutes
STOP_S = 20.0


@dataclass(frozen=True)
class Serve:
    """How the server runs.

    Attributes:
      slots: sequences that are generated at a time.
      context: longest sequence, prompt and completion; the model's own limit if that is lower.
      dtype: of weights and computation.
    """

    slots: int = 16
    context: int = 2048
    dtype: str = "float32"


@contextlib.asynccontextmanager
async def server(
    path: str | os.PathLike, options: Serve = Serve(), log: str | os.PathLike = os.devnull
) -> AsyncIterator[str]:
    """Runs `areax serve path --port 0` with the options and yields its URL once it is ready; ends it on leaving.

    What it says is appended to the file `log`.

    Raises:
      RuntimeError: it ended before it was ready, with what it said.
    """
    command = [sys.executable, "-m", "areax", "serve", os.fspath(path), "--port", "0"]
    command += ["--slots", str(options.slots), "--context", str(options.context), "--dtype", options.dtype]
    # Ctrl-C is for the run, which then ends its server: hence a session of its own.
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT, start_new_session=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )  # fmt: skip
    said: deque[str] = deque(maxlen=20)
    url: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    file = open(log, "a", buffering=1, encoding="utf-8")  # noqa: SIM115 - closed when the server has ended

    async def listen() -> None:
        assert process.stdout is not None
        async for raw in process.stdout:
            file.write(line := raw.decode(errors="replace"))
            said.append(line := line.rstrip())
            found = re.match(r"(http://\S+) ", line)
            if found and not url.done():
                url.set_result(found.group(1))
        code = await process.wait()
        if not url.done():
            url.set_exception(RuntimeError(f"the generation server ended with code {code}: {' | '.join(said)}"))

    listener = asyncio.create_task(listen())
    try:
        try:
            yield await asyncio.wait_for(url, START_S)
        except TimeoutError:
            raise RuntimeError(f"the generation server was not ready in {START_S:.0f} s: {' | '.join(said)}") from None
    finally:
        await _end(process)
        listener.cancel()
        await asyncio.gather(listener, return_exceptions=True)
        file.close()


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is not None:
        return
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(signal.SIGTERM)
    try:
        await asyncio.wait_for(process.wait(), STOP_S)
    except TimeoutError:
        process.kill()
        await process.wait()


def folder(root: Path, name: str) -> Path:
    """A new folder for this process's published versions under `root`."""
    path = root / f"areax-{name}-{os.getpid()}"
    path.mkdir(parents=True)
    return path
