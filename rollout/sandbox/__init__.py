"""Runs untrusted code in an isolated process: `result = await run_python(code, timeout_s=5)`.

Limits wall-clock time, CPU time, memory, processes, output and files, and gives a clean environment. How much else it
forbids, network access for example, depends on the machine: see `isolation()`.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from ..errors import ServerError
from ..processes import folders
from . import launch, turns

log = logging.getLogger(__name__)

# The last line of a traceback: MemoryError, or numpy's numpy._core._exceptions._ArrayMemoryError.
OUT_OF_MEMORY = re.compile(r"[\w.]*MemoryError\b")


@dataclass(frozen=True)
class Result:
    """The output of a command, and how it ended.

    Attributes:
      stdout, stderr: each truncated to `output_bytes`; invalid UTF-8 is replaced.
      code: exit status; -N if signal N killed it.
      why: the limit that ended it, "" if none did:
        "wall": `timeout_s` elapsed.
        "cpu": a process used `cpu_s`.
        "memory": the processes together held more than `memory_bytes`, or Python ended with a MemoryError.
        "processes": `processes` were running, so the kernel refused further ones.
        "output": it printed more than `output_bytes`; the rest is lost.
        "files": the kernel killed it when a file grew past `files_bytes`. Python gets an OSError instead and may go on.
      seconds: wall-clock time from start to end.
    """

    stdout: str
    stderr: str
    code: int
    why: str = ""
    seconds: float = field(default=0.0, compare=False)


@dataclass(frozen=True)
class Limits:
    """Resource limits of a command.

    Attributes:
      timeout_s: wall-clock time, including the start of the supervisor (about 50 ms).
      cpu_s: CPU time of each process, rounded up to whole seconds; None = `timeout_s`.
      memory_bytes: address space of each process, and resident memory of all together. The kernel enforces the first;
        the second is checked 20 times a second, with 256 KiB for each open socket, in which so much may wait. Memory
        that no process needs to map (memfd_create, System V) is refused; that of files is bounded by `files_bytes`.
        Shared pages that a process has given back count only as address space.
      output_bytes: of stdout and of stderr, each.
      files_bytes: of each file; with `isolation().files` also of all files together, plus 1 MiB.
      processes: processes and threads at the same time.
    """

    timeout_s: float = 10.0
    cpu_s: float | None = None
    memory_bytes: int = 512 * 2**20
    output_bytes: int = 64 * 2**10
    files_bytes: int = 64 * 2**20
    processes: int = 64

    def __post_init__(self):
        for name, value in asdict(self).items():
            number = isinstance(value, int) or (name in ("timeout_s", "cpu_s") and isinstance(value, float))
            if not (number and 0 < value < 2**53) and not (name == "cpu_s" and value is None):
                raise ValueError(f"sandbox: {name} must be a positive number, an integer for counts, got {value!r}")


@dataclass(frozen=True)
class Isolation:
    """What sandboxes on this machine guarantee, apart from the limits.

    Attributes:
      mode: "namespaces" (as root) or "user namespaces"; "own user": as root, a separate user id; "same user".
      network: there is no network, not even loopback.
      files: only system and Python folders are visible, read-only, and an in-memory file system of `files_bytes`.
        Otherwise it can read what its user can, and the size of files is bounded, but not their number.
      environment: memory and environment of outside processes are inaccessible.
      processes: nothing it starts can outlive it. Otherwise only if it does not attack its supervisor.
    """

    mode: str
    network: bool
    files: bool
    environment: bool
    processes: bool


class Sandbox(Protocol):
    """The interface of sandboxes: this module, `remote.Remote`, or anything else with such a `run_python`."""

    async def run_python(self, code: str, *, stdin: str = "", **limits: Any) -> Result: ...


ISOLATIONS = (  # best first; the first that works is used
    Isolation("namespaces", network=True, files=True, environment=True, processes=True),
    Isolation("user namespaces", network=True, files=True, environment=True, processes=True),
    Isolation("own user", network=False, files=False, environment=True, processes=True),
    Isolation("same user", network=False, files=False, environment=False, processes=False),
)


async def run_python(code: str, *, stdin: str = "", **limits: Any) -> Result:
    """Runs the program `code` as `main.py` in a fresh folder, with this process's Python in isolated mode (`-I`).

    It may import the packages installed for this Python. Each run is a new process; nothing is kept.

    Args:
      limits: fields of `Limits`.

    Raises:
      ValueError: a limit is out of range.
      ServerError: the sandbox itself failed, or this machine supports none.
    """
    result = await run([sys.executable, "-I", "main.py"], files={"main.py": code}, stdin=stdin, **limits)
    last = result.stderr.rstrip().rpartition("\n")[2]
    if result.code == 1 and not result.why and OUT_OF_MEMORY.match(last):
        return _logged(replace(result, why="memory"))
    return result


async def run(
    command: Sequence[str], *, files: Mapping[str, str] | None = None, stdin: str = "", **limits: Any
) -> Result:
    """Runs a command in a fresh folder that is its working directory and HOME.

    Its environment is PATH, HOME, TMPDIR and LANG; it inherits no file descriptors. When this returns or is cancelled,
    all its processes are dead and the folder is removed. At most `turns.AT_ONCE` run in an event loop at a
    time; the others wait, which no limit counts.

    Args:
      command: program and arguments; a program without a slash is looked up in the system's folders.
      files: name -> text, the initial content of the folder.
      limits: fields of `Limits`.

    Raises:
      ValueError: a limit is out of range, or a file name has a slash.
      ServerError: the sandbox itself failed, the command cannot be run, or this machine supports no sandbox.
    """
    chosen = Limits(**limits)
    for name in files or {}:
        if not name or name in (".", "..") or "/" in name or "\0" in name:
            raise ValueError(f"sandbox: a file needs a name without slashes, got {name!r}")
    mode = (await asyncio.to_thread(isolation)).mode
    async with turns.turn():
        begun = time.monotonic()
        result = await _in_a_folder(mode, command, files or {}, stdin, chosen)
        return _logged(replace(result, seconds=time.monotonic() - begun))


async def _in_a_folder(
    mode: str, command: Sequence[str], files: Mapping[str, str], stdin: str, limits: Limits
) -> Result:
    folder = Path(tempfile.mkdtemp(dir=folders.of_process("sandbox")))
    try:
        launch.fill(folder, files, stdin)
        return await _supervised(mode, folder, list(command), limits)
    finally:
        await asyncio.to_thread(launch.remove, folder)


def _logged(result: Result) -> Result:
    if result.why:
        log.info("sandbox: stopped at a limit: %s", result.why)
    return result


@functools.cache
def isolation() -> Isolation:
    """The strongest isolation that works on this machine; tried out once.

    Raises:
      ServerError: not even the number of processes can be limited here.
    """
    if sys.platform != "linux":
        raise ServerError(f"sandbox: needs Linux, this is {sys.platform}; use a remote sandbox")
    refused: list[str] = []
    for kind in ISOLATIONS:
        if not (reason := _refusal(kind)):
            if refused:
                log.warning("sandbox: isolation is %s (%s)", kind, "; ".join(refused))
            return kind
        refused.append(f"{kind.mode}: {reason}")
    raise ServerError(f"sandbox: no isolation works on this machine ({'; '.join(refused)}); use a remote sandbox")


def _refusal(kind: Isolation) -> str:
    """Why this isolation does not work here, "" if it does."""
    folder = Path(tempfile.mkdtemp(dir=folders.of_process("sandbox")))
    try:
        launch.fill(folder, {}, "")
        with launch.Reports() as reports:
            empty = [sys.executable, "-I", "-c", ""]
            arguments = launch.arguments(kind.mode, folder, empty, asdict(Limits()), reports.writer)
            how = launch.surroundings(reports.writer)
            done = subprocess.run(arguments, **how, capture_output=True, timeout=launch.STOP_S, errors="replace")
            outcome = reports.read()
    except subprocess.TimeoutExpired:
        return f"no answer within {launch.STOP_S:.0f} s"
    finally:
        launch.remove(folder)
    if outcome.get("code") == 0 and "error" not in outcome:
        return ""
    return outcome.get("error") or f"Python exited with code {outcome.get('code')}: {done.stderr[-300:]}"


async def _supervised(mode: str, folder: Path, command: list[str], limits: Limits) -> Result:
    with launch.Reports() as reports, open(folder / "stdin", "rb") as stdin:
        arguments = launch.arguments(mode, folder, command, asdict(limits), reports.writer)
        process = await asyncio.create_subprocess_exec(
            *arguments, **launch.surroundings(reports.writer), stdin=stdin,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        assert process.stdout is not None and process.stderr is not None
        full = asyncio.Event()
        streams = (process.stdout, process.stderr)
        printed = [asyncio.create_task(launch.read(stream, limits.output_bytes, full)) for stream in streams]
        ended, over = asyncio.create_task(process.wait()), asyncio.create_task(full.wait())
        try:
            done, _ = await asyncio.wait({ended, over}, timeout=limits.timeout_s, return_when="FIRST_COMPLETED")
        finally:
            await launch.end(process, ended, printed)
            over.cancel()
        stdout, stderr = [task.result().decode(errors="replace") for task in printed]
        outcome = reports.read()
    if "error" in outcome or not outcome and ended in done:
        raise ServerError(f"sandbox: {outcome.get('error') or f'the supervisor died; {stderr[-300:]}'}")
    why = "output" if full.is_set() else outcome["why"] if outcome else "wall"
    return Result(stdout, stderr, outcome.get("code", -signal.SIGKILL), why)
