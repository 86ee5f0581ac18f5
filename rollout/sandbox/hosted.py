"""Machines of services on the internet: `Hosted`, whose service is known by a few functions, its start and its end.

Commands are scripts, files travel as a tar file and come back as text: what a service must do is to run a script and to
write a file.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import shlex
import socket
import ssl
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Literal, TypeVar

from ..errors import ServerError
from ..processes.printable import one_line, shown
from . import Result
from .containers import HALF, archive, late, left_out, why
from .machine import FILE, LATE_S, Ended

log = logging.getLogger(__name__)

FILES_S = 60.0  # for files on their way, and for a service to end a machine
LONGEST = 2**16 - 2**10  # bytes of a script, quoted: the least limit of the services, Modal's
NETWORK = (TimeoutError, ConnectionError, socket.gaierror, ssl.SSLError)
# What an error means: the key is missing or wrong; the service refuses what was asked, and would again; it failed; or
# "", the error is not the service's.
Kind = Literal["key", "refused", "failed", ""]
Made = TypeVar("Made")


def script(command: str, timeout_s: float, cwd: str) -> str:
    """The command of `containers.late`, for a service that keeps all of an output in memory, or waits until no process
    can write to it any more: its output is a file there, of which this prints the beginning and the end."""
    words = " ".join(map(shlex.quote, late(command, timeout_s)))
    return f"""exec 2>&1
cd -- {shlex.quote(cwd)} && out=$(mktemp -t .out.XXXXXX) || exit
exec 2>/dev/null
{words} >>"$out" 2>&1 </dev/null
code=$? size=$(stat -c %s "$out")
if [ "$size" -gt {2 * HALF} ]; then
  head -c {HALF} "$out"; printf {shlex.quote(left_out("%d"))} $((size - {2 * HALF})); tail -c {HALF} "$out"
else
  head -c {2 * HALF} "$out"
fi
rm -f "$out"
exit $code"""


def internet(provider: str, network: str) -> bool:
    """Whether a machine has a network. Raises ValueError for what is neither none nor internet."""
    if network not in ("none", "internet"):
        raise ValueError(f"provider {provider}: network must be none or internet, got {network!r}")
    return network == "internet"


def not_started(provider: str, keys: str, kind: Kind, error: Exception) -> Exception:
    """What to raise for an error of a start: ValueError if it would come again, ServerError if it may not. `keys` are
    the environment variables of the key."""
    text = f"{provider}: {_said(error)}"
    if kind in ("key", "refused"):
        return ValueError(f"{text}; set {keys}" if kind == "key" else text)
    return ServerError(text) if kind or isinstance(error, NETWORK) else error


async def owned(making: Awaitable[Made], end: Callable[[Made], Awaitable[object]]) -> Made:
    """What a request makes. If this is cancelled meanwhile, it waits for the answer as `kept` does, and ends it."""
    task = asyncio.ensure_future(making)
    try:
        return await kept(task)
    except asyncio.CancelledError:
        if task.done() and not task.cancelled() and not task.exception():
            await end(task.result())
        raise


async def kept(task: asyncio.Future[Made]) -> Made:
    """The result of a task. If this is cancelled, the task still has `LATE_S`, and then is cancelled, too."""
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task}, timeout=LATE_S)
        task.cancel()  # nothing, if it is done
        await asyncio.wait({task}, timeout=LATE_S)
        raise


async def started(machine: Hosted, workdir: str) -> Hosted:
    """The machine, which can run commands, in `workdir` or else where its image has them run.

    Raises:
      ServerError: it has ended, or its service failed.
      ValueError: its image lacks what commands need, or `workdir` cannot be made.
    """
    needed = "bash base64 head mktemp stat tail tar timeout"
    there = f"mkdir -p -- {shlex.quote(workdir)} && cd -- {shlex.quote(workdir)} && " if workdir else ""
    try:
        text = f"exec 2>&1\nfor one in {needed}; do command -v $one >/dev/null || exit; done\n{there}pwd"
        said, code = await machine.called(FILES_S, machine.execute, text, FILES_S)
        if code or not said.startswith("/"):
            rule = f"an image must have {needed}, and workdir be a folder"
            raise ValueError(
                f"provider {machine.provider}: {rule}, got exit code {code} {' '.join(said.split())[:200]}"
            )
    except Ended as error:
        await machine.aclose()
        raise ServerError(f"{machine.provider}: {error.why}") from error
    except BaseException:
        await machine.aclose()
        raise
    machine.workdir = said.rstrip("\n")
    return machine


class Hosted:
    """A machine of a service.

    Args:
      execute: runs a script in bash as root, for so many seconds at most; returns what it printed, and its exit code.
      write: writes a file.
      gone: why the machine does not run any more, "" if it does; asked after an error.
      end: ends the machine; one that is gone is no error.
      kind: what an error of these means.
      lifetime_s: after which the service ends it.
    """

    workdir = "/"

    def __init__(
        self, provider: str, *, execute: Callable[[str, float], Awaitable[tuple[str, int]]],
        write: Callable[[str, bytes], Awaitable[object]], gone: Callable[[], Awaitable[str]],
        end: Callable[[], Awaitable[object]], kind: Callable[[Exception], Kind], lifetime_s: float,
    ):  # fmt: skip
        self.provider, self.execute, self._write, self._gone, self._end = provider, execute, write, gone, end
        self._kind, self._lifetime_s, self._why = kind, lifetime_s, ""
        self._ending: asyncio.Task[None] | None = None

    async def run(self, command: str, *, timeout_s: float = 60.0, cwd: str = "/") -> Result:
        text = script(command, timeout_s, cwd)
        if len(shlex.quote(text).encode()) > LONGEST:
            raise OSError(7, "Argument list too long")
        began = time.monotonic()
        said, code = await self.called(timeout_s + LATE_S, self.execute, text, timeout_s + LATE_S)
        seconds = time.monotonic() - began
        return Result(said, "", code, why(code, seconds, timeout_s), seconds)

    async def put(self, files: Mapping[str, bytes]) -> None:
        if not files:
            return
        name = f"/tmp/.files-{uuid.uuid4().hex}.tar"
        await self.called(FILES_S, self._write, name, archive(files))
        text = f"exec 2>&1\ntar -xof {name} -C /; code=$?\nrm -f {name}\nexit $code"
        said, code = await self.called(FILES_S, self.execute, text, FILES_S)
        if code:
            raise OSError(5, f"cannot be written: {' '.join(said.split())[:200]}", next(iter(files)))

    async def get(self, path: str) -> bytes:
        name = shlex.quote(path)
        text = f"""[ -e {name} ] || exit 2
[ -f {name} ] || exit 21
set -o pipefail
text=$(timeout --signal=KILL {LATE_S} head -c {FILE + 1} -- {name} | base64 -w 0) || exit 5
printf '%d %s\\n' "${{#text}}" "$text\""""
        said, code = await self.called(FILES_S, self.execute, text, FILES_S)
        if code:
            known = {2: "No such file", 21: "is no file"}
            raise OSError(code if code in known else 5, known.get(code, "cannot be read"), path)
        try:
            count, _, encoded = said.removesuffix("\n").partition(" ")
            if len(encoded) != int(count):
                raise ValueError(f"it has {len(encoded)} characters of {count:.20}")
            content = base64.b64decode(encoded, validate=True)
        except ValueError as error:
            told = f"the file {path} did not come back as it is: {one_line(error)}"
            raise ServerError(f"{self.provider}: {told}, got {shown(said)}") from error
        if len(content) > FILE:
            raise OSError(27, f"must have at most {FILE} bytes", path)
        return content

    async def aclose(self) -> None:
        """Ends it, once. If its service fails, that is logged: the machine ends after its lifetime."""
        self._why = self._why or "it was closed"
        self._ending = self._ending or asyncio.ensure_future(self._ended())
        await kept(self._ending)

    async def _ended(self) -> None:
        try:
            async with asyncio.timeout(FILES_S):
                await self._end()
        except Exception as error:
            if not self._is_from_service(error):
                raise
            left = f"it ends by itself {self._lifetime_s:.0f} s after its start"
            log.warning("%s: a machine was not ended (%s); %s", self.provider, _said(error), left)

    async def called(self, seconds: float, function: Callable[..., Awaitable[Made]], *given: Any) -> Made:
        """What a call of the service returns.

        Raises:
          Ended: the machine is gone.
          ServerError: the service failed; in the middle of an episode also if it refuses.
        """
        if self._why:
            raise Ended(self._why)
        try:
            return await asyncio.wait_for(function(*given), seconds + LATE_S)
        except Exception as error:
            if not self._is_from_service(error):
                raise
            self._why = self._why or await self._gone_by_now()
            if self._why:
                raise Ended(self._why) from error
            raise ServerError(f"{self.provider}: {_said(error)}") from error

    async def _gone_by_now(self) -> str:
        try:
            return await asyncio.wait_for(self._gone(), LATE_S)
        except Exception as error:
            if not self._is_from_service(error):
                raise
            return ""  # nobody knows

    def _is_from_service(self, error: Exception) -> bool:
        return isinstance(error, NETWORK) or bool(self._kind(error))


def _said(error: Exception) -> str:
    return one_line(error)[:500] or "no answer in time"
