"""Sandboxes that last: a policy runs commands in one for a whole episode, and finds the files that it left.

`Machine` is what an episode needs of any provider. Here is the one on this machine, with the isolation and the limits
of `sandbox`; `containers` has what those elsewhere share.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import importlib
import json
import shlex
import sys
import tempfile
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from ..errors import ServerError
from ..processes import folders
from . import Limits, Result, isolation, launch, turns

LIFETIME_S = 3600.0
PERIOD_S = 0.25  # between two checks of a machine's processes, of which many are idle
LATE_S = 10.0  # after a command's time limit, for its answer
FILE = 2**22  # bytes of a file that can be read
LARGEST = 2**23  # and of an answer
ATTENDANT = Path(__file__).with_name("attendant.py")
STATE = "/tmp/.shell"  # directory and exported variables of the last command
PROVIDERS = {"local": ".machine", "docker": ".docker", "e2b": ".e2b", "daytona": ".daytona", "modal": ".modal"}
WORKDIR, PLACES = "/app", ("/tests", "/logs")


class Ended(Exception):
    """The machine is gone, and its files with it. `why` is the limit that it exceeded (`sandbox.Result.why`), or says
    what ended it."""

    def __init__(self, why: str):
        super().__init__(f"the machine has ended: {why}")
        self.why = why


class Machine(Protocol):
    """A machine for one episode. Paths are absolute.

    Attributes:
      workdir: the directory in which its image has commands run.
    """

    workdir: str

    async def run(self, command: str, *, timeout_s: float = 60.0, cwd: str = "/") -> Result:
        """Runs a command in bash; `stdout` has both streams. A late one is killed: `why` is "wall". What it leaves in
        the background goes on. Raises Ended."""

    async def put(self, files: Mapping[str, bytes]) -> None:
        """Writes files. Raises OSError, Ended."""

    async def get(self, path: str) -> bytes:
        """Reads a file. Raises OSError, Ended."""

    async def aclose(self) -> None:
        """Ends it, with all that runs in it."""


def alone(command: str, cwd: str, env: Mapping[str, str]) -> str:
    """The command, run in a directory and with variables."""
    given = " ".join(f"{name}={shlex.quote(value)}" for name, value in env.items())
    return f"cd {shlex.quote(cwd)} && {'export ' + given if given else 'true'} && {{\n{command}\n}}"


def in_shell(command: str, cwd: str, env: Mapping[str, str]) -> str:
    """The command, run as in a shell that lasts: in the directory, and with the exported variables, that the last one
    left; the first is run as `alone`."""
    keep = f'trap \'{{ export -p; printf "cd %q\\n" "$PWD"; }} > {STATE}\' EXIT'
    return f"if [ -f {STATE} ]; then . {STATE}; else {alone('true', cwd, env)}\nfi\n{keep}\n{command}"


def provider(name: str) -> Callable[..., Awaitable[Machine]]:
    """What starts a machine, `start(image, context, memory_mb=, workdir=, **options)`:

      image: its name; "" = build it of the Dockerfile in the folder `context`.
      memory_mb: 0 = as much as the provider gives.
      workdir: where commands will run; "" = the image says so.

    Raises:
      ValueError: there is no provider of this name.
    """
    if name not in PROVIDERS:
        raise ValueError(f"provider must be {', '.join(PROVIDERS)}, got {name!r}")
    return importlib.import_module(PROVIDERS[name], __package__).start


async def start(image: str, context: Path, *, memory_mb: int = 0, workdir: str = "", **limits: Any) -> Local:
    """Starts a machine on this one. Its system is this one's, read-only, without network, whatever the image: what runs
    there has to be installed here. Its files are in memory; /tmp, `workdir`, /tests and /logs can be written to.

    Args:
      limits: fields of `sandbox.Limits`, of which `timeout_s` is the machine's whole life, an hour by default.

    Raises:
      ServerError: it cannot be started, or not isolated from the files of this machine.
      ValueError: the image has to be built; a limit is out of range.
    """
    if not image:
        raise ValueError(f"provider local has no images, and {context}/Dockerfile is one; use docker")
    where = (workdir or WORKDIR, *PLACES)
    own = f"{where[0].rstrip('/')}/"
    above = any(f"{path}/".startswith(own) for path in (*launch.SYSTEM, *PLACES, *launch.python_folders()))
    if above or own.startswith(launch.SYSTEM) or not own.startswith("/"):
        raise ValueError(f"provider local: workdir must be a folder of its own, such as {WORKDIR}, got {workdir!r}")
    if memory_mb:
        limits = {"memory_bytes": memory_mb * 2**20, **limits}
    chosen = Limits(**{"timeout_s": LIFETIME_S, "cpu_s": LIFETIME_S, **limits})
    kind = await asyncio.to_thread(isolation)
    if not kind.files:
        raise ServerError(f"sandbox: a machine needs namespaces, which this one does not grant ({kind.mode})")
    command = [sys.executable, "-I", "-S", "-c", ATTENDANT.read_text()]
    with contextlib.ExitStack() as opened:
        folder = Path(tempfile.mkdtemp(dir=folders.of_process("sandbox")))
        opened.callback(launch.remove, folder)
        reports = opened.enter_context(launch.Reports())
        launch.fill(folder, {}, "")
        process = await asyncio.create_subprocess_exec(
            *launch.arguments(kind.mode, folder, command, asdict(chosen), reports.writer, where, PERIOD_S),
            **launch.surroundings(reports.writer), stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL, limit=LARGEST,
        )  # fmt: skip
        made = Local(process, reports, chosen, opened.pop_all())
    try:
        await made.put({})  # it answers
    except Ended as error:
        await made.aclose()
        raise ServerError(f"sandbox: {error.why}") from error
    except BaseException:
        await made.aclose()
        raise
    return made


class Local:
    """A machine on this one; made by `start`."""

    workdir = WORKDIR

    def __init__(
        self, process: asyncio.subprocess.Process, reports: launch.Reports, limits: Limits,
        opened: contextlib.ExitStack,
    ):  # fmt: skip
        self._process, self._reports, self._limits, self._opened = process, reports, limits, opened
        self._lock, self._why = asyncio.Lock(), ""
        self._clock = asyncio.get_running_loop().call_later(limits.timeout_s, self._end, "wall")

    async def run(self, command: str, *, timeout_s: float = 60.0, cwd: str = "/") -> Result:
        async with turns.turn():
            began = asyncio.get_running_loop().time()
            how = dict(timeout_s=timeout_s, cwd=cwd, most=self._limits.output_bytes)
            told = await self._asked({"run": command, **how}, timeout_s)
            seconds = asyncio.get_running_loop().time() - began
        try:
            return Result(str(told["stdout"]), "", int(told["code"]), str(told["why"]), seconds)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise self._garbled(error) from error

    async def put(self, files: Mapping[str, bytes]) -> None:
        await self._asked({"put": {path: base64.b64encode(data).decode() for path, data in files.items()}}, LATE_S)

    async def get(self, path: str) -> bytes:
        told = await self._asked({"get": path, "most": FILE}, LATE_S)
        try:
            return base64.b64decode(told["content"], validate=True)
        except (KeyError, TypeError, ValueError) as error:
            raise self._garbled(error) from error

    async def aclose(self) -> None:
        self._clock.cancel()
        self._why = self._why or "it was closed"
        try:
            await launch.end(self._process, asyncio.create_task(self._process.wait()), [])
        finally:
            await asyncio.to_thread(self._opened.close)

    def _end(self, why: str) -> None:
        self._why = self._why or why
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()

    def _garbled(self, error: Exception) -> Ended:
        self._end(f"its attendant answered nonsense ({type(error).__name__})")
        return Ended(self._why)

    async def _asked(self, request: dict[str, Any], seconds: float) -> dict[str, Any]:
        """An answer of the attendant. Raises Ended if there is none, OSError if it says so."""
        assert self._process.stdin is not None and self._process.stdout is not None
        async with self._lock:
            if self._why:
                raise Ended(self._why)
            line = b""
            try:
                async with asyncio.timeout(seconds + LATE_S):
                    self._process.stdin.write(json.dumps(request).encode() + b"\n")
                    await self._process.stdin.drain()
                    line = await self._process.stdout.readline()
            except (TimeoutError, ValueError):  # no answer, or one without an end
                self._end("its attendant does not answer")
            except ConnectionError:
                pass
            except BaseException:  # an answer that nobody has read would be taken for that of the next request
                self._end("a command was cancelled")
                raise
            if not line:
                outcome = self._reports.read()
                self._end(outcome.get("why") or outcome.get("error") or "its processes were killed")
                raise Ended(self._why)
        try:
            told = json.loads(line)
            wrong = told.get("error")
        except (ValueError, AttributeError, RecursionError) as error:
            raise self._garbled(error) from error
        if wrong is not None:
            raise OSError(told.get("number"), f"{wrong!s:.200}", f"{told.get('file')!s:.200}")
        return told
