"""Runs untrusted code in an isolated process: `result = await run_python(code, timeout_s=5)`.

Limits wall-clock time, CPU time, memory, processes, output and files, and gives a clean environment. How much else it
forbids, network access for example, depends on the machine: see `isolation()`.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import logging
import os
import re
import shutil
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
from . import turns

log = logging.getLogger(__name__)

CONFINE = str(Path(__file__).with_name("supervisor.py"))
STOP_S = 10.0  # for the supervisor to kill everything once it is asked to
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
        _fill(folder, files, stdin)
        return await _supervised(mode, folder, list(command), limits)
    finally:
        await asyncio.to_thread(_remove, folder)


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
        _fill(folder, {}, "")
        with _Reports() as reports:
            launch = _launch(kind.mode, folder, [sys.executable, "-I", "-c", ""], Limits(), reports.writer)
            done = subprocess.run(
                launch, **_surroundings(reports.writer), capture_output=True, timeout=STOP_S, errors="replace"
            )
            outcome = reports.read()
    except subprocess.TimeoutExpired:
        return f"no answer within {STOP_S:.0f} s"
    finally:
        _remove(folder)
    if outcome.get("code") == 0 and "error" not in outcome:
        return ""
    return outcome.get("error") or f"Python exited with code {outcome.get('code')}: {done.stderr[-300:]}"


async def _supervised(mode: str, folder: Path, command: list[str], limits: Limits) -> Result:
    with _Reports() as reports, open(folder / "stdin", "rb") as stdin:
        process = await asyncio.create_subprocess_exec(
            *_launch(mode, folder, command, limits, reports.writer), **_surroundings(reports.writer),
            stdin=stdin, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        assert process.stdout is not None and process.stderr is not None
        full = asyncio.Event()
        streams = (process.stdout, process.stderr)
        printed = [asyncio.create_task(_read(stream, limits.output_bytes, full)) for stream in streams]
        ended, over = asyncio.create_task(process.wait()), asyncio.create_task(full.wait())
        try:
            done, _ = await asyncio.wait({ended, over}, timeout=limits.timeout_s, return_when="FIRST_COMPLETED")
        finally:
            await _end(process, ended, printed)
            over.cancel()
        stdout, stderr = [task.result().decode(errors="replace") for task in printed]
        outcome = reports.read()
    if "error" in outcome or not outcome and ended in done:
        raise ServerError(f"sandbox: {outcome.get('error') or f'the supervisor died; {stderr[-300:]}'}")
    why = "output" if full.is_set() else outcome["why"] if outcome else "wall"
    return Result(stdout, stderr, outcome.get("code", -signal.SIGKILL), why)


async def _read(stream: asyncio.StreamReader, most: int, full: asyncio.Event) -> bytes:
    """Reads the first `most` bytes; drains the rest, so that the writer does not block while it is stopped."""
    kept = bytearray()
    while chunk := await stream.read(2**16):
        kept += chunk[: most - len(kept) + 1]
        if len(kept) > most:
            full.set()
    return bytes(kept[:most])


async def _end(process: asyncio.subprocess.Process, ended: asyncio.Task, printed: Sequence[asyncio.Task]) -> None:
    """Has the supervisor kill all remaining processes; reads their output to the end."""
    if not ended.done():
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
    try:
        _, late = await asyncio.wait({ended, *printed}, timeout=STOP_S)
    finally:
        if not ended.done():
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        for task in (ended, *printed):
            task.cancel()
    if late:
        raise ServerError(f"sandbox: a command and its supervisor did not end within {STOP_S:.0f} s")


class _Reports:
    """A pipe for the supervisor's reports."""

    def __enter__(self) -> _Reports:
        self.reader, self.writer = os.pipe()
        os.set_blocking(self.reader, False)
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.reader)
        os.close(self.writer)

    def read(self) -> dict[str, Any]:
        try:
            lines = os.read(self.reader, 2**16).splitlines()
        except BlockingIOError:  # empty
            return {}
        reports = [json.loads(line) for line in lines]
        return {key: value for report in reversed(reports) for key, value in report.items()}  # the first one wins


def _launch(mode: str, folder: Path, command: list[str], limits: Limits, report: int) -> list[str]:
    spec = {**asdict(limits), "mode": mode, "folder": str(folder / "work"), "command": command}
    spec["cpu_s"] = limits.timeout_s if limits.cpu_s is None else limits.cpu_s
    spec |= {"report": report, "parent": os.getpid(), "readable": _python_folders()}
    return [sys.executable, "-I", "-S", CONFINE, json.dumps(spec)]


def _surroundings(report: int) -> dict[str, Any]:
    return {"env": {}, "cwd": "/", "start_new_session": True, "pass_fds": (report,)}


@functools.cache
def _python_folders() -> list[str]:
    """The folders of this Python and its packages, parents first."""
    found = {sys.prefix, sys.exec_prefix, sys.base_prefix, sys.base_exec_prefix}
    found.add(str(Path(sys.executable).resolve().parents[1]))
    return sorted(found - {"/"})


def _fill(folder: Path, files: Mapping[str, str], stdin: str) -> None:
    folder.chmod(0o711)  # another user must be able to enter its subfolder
    (folder / "work").mkdir(mode=0o700)
    for name, text in files.items():
        path = folder / "work" / name
        path.write_bytes(text.encode(errors="surrogatepass"))
        path.chmod(0o644)
    (folder / "stdin").write_bytes(stdin.encode(errors="surrogatepass"))


def _remove(folder: Path) -> None:
    """Removes the folder, even if the command has changed permissions."""
    for path, names, _ in os.walk(folder):
        for name in names:
            inner = os.path.join(path, name)
            if not os.path.islink(inner):
                os.chmod(inner, 0o700)
    shutil.rmtree(folder)
