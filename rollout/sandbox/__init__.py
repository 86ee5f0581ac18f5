"""Code that nobody has read, run in a process that is closed in: `result = await run_python(code, timeout_s=5)`.

Limits on wall-clock time, processor time, memory, processes, output and files; a clean environment; and as much of
the rest, no network among it, as this machine lets us forbid: `isolation()` says what that is.
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
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from ..errors import ServerError

log = logging.getLogger(__name__)

CONFINE = str(Path(__file__).with_name("supervisor.py"))
STOP_S = 10.0  # for the supervisor to end everything once it is told
# The last line of a traceback: MemoryError, or numpy's numpy._core._exceptions._ArrayMemoryError.
OUT_OF_MEMORY = re.compile(r"[\w.]*MemoryError\b")


@dataclass(frozen=True)
class Result:
    """What a command printed, and how it ended.

    Attributes:
      stdout, stderr: each cut at `output_bytes`; bytes that are no UTF-8 are replaced.
      code: exit status; -N if signal N ended it.
      why: the limit that ended it, "" if none did:
        "wall": `timeout_s` was over.
        "cpu": a process used `cpu_s`.
        "memory": the processes together held more than `memory_bytes`, or Python ended with a MemoryError.
        "processes": `processes` ran at the same time; the kernel had refused more.
        "output": it printed more than `output_bytes`; what came after is lost.
        "files": the kernel ended it as a file grew past `files_bytes`. Python sees an OSError instead and may go on.
    """

    stdout: str
    stderr: str
    code: int
    why: str = ""


@dataclass(frozen=True)
class Limits:
    """What a command may use.

    Attributes:
      timeout_s: from start to end, that of the supervisor (about 50 ms) included.
      cpu_s: processor time of each process, rounded up to whole seconds; None = `timeout_s`.
      memory_bytes: address space of each process, and resident memory of all together. The kernel sees to the
        first; the second is looked at 20 times a second, and shared memory that no process maps escapes it.
      output_bytes: of stdout and of stderr.
      files_bytes: of a file; where `isolation().files`, of all files together too, and 1 MiB to spare.
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
                raise ValueError(f"sandbox: {name} must be a positive number, whole for counts, got {value!r}")


@dataclass(frozen=True)
class Isolation:
    """What holds for sandboxes here, apart from the limits.

    Attributes:
      mode: "namespaces" (as root) or "user namespaces"; "own user": root's right to become another user; "same user".
      network: there is none, not even that of this machine.
      files: only the system's folders and Python's are there, to read, and a file system in memory of `files_bytes`.
        Otherwise it reads what its user may read, and a file in its folder is bounded, not their number.
      environment: memory and environment of processes outside are out of reach.
      processes: nothing that it starts can outlive it. Otherwise that holds unless it attacks its supervisor.
    """

    mode: str
    network: bool
    files: bool
    environment: bool
    processes: bool


class Sandbox(Protocol):
    """Where programs run: this module itself, `remote_sandbox.Remote`, or anything with such a `run_python`."""

    async def run_python(self, code: str, *, stdin: str = "", **limits: Any) -> Result: ...


ISOLATIONS = (  # the best that works is taken
    Isolation("namespaces", network=True, files=True, environment=True, processes=True),
    Isolation("user namespaces", network=True, files=True, environment=True, processes=True),
    Isolation("own user", network=False, files=False, environment=True, processes=True),
    Isolation("same user", network=False, files=False, environment=False, processes=False),
)


async def run_python(code: str, *, stdin: str = "", **limits: Any) -> Result:
    """Runs a program, `code`, with this process's Python in isolated mode (`-I`), in a fresh folder as `main.py`.

    It may import what is installed beside this Python. Each run starts a process anew: nothing is kept.

    Args:
      limits: fields of `Limits`.

    Raises:
      ValueError: a limit that is out of range.
      ServerError: the sandbox itself failed, or there can be none here.
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

    Its environment is PATH, HOME, TMPDIR and LANG; it inherits no descriptor. Once this returns, or is cancelled, all
    that it started is dead and the folder gone.

    Args:
      command: program and arguments; a program without a slash is looked for in the system's folders.
      files: name -> text, what lies in the folder at the start.
      limits: fields of `Limits`.

    Raises:
      ValueError: a limit that is out of range, or a name of a file with a slash.
      ServerError: the sandbox itself failed, the command cannot be run, or there can be no sandbox here.
    """
    chosen = Limits(**limits)
    for name in files or {}:
        if not name or name in (".", "..") or "/" in name or "\0" in name:
            raise ValueError(f"sandbox: a file needs a plain name, got {name!r}")
    mode = (await asyncio.to_thread(isolation)).mode
    folder = Path(tempfile.mkdtemp(prefix="areax-sandbox-"))
    try:
        _fill(folder, files or {}, stdin)
        result = await _supervised(mode, folder, list(command), chosen)
    finally:
        await asyncio.to_thread(_remove, folder)
    return _logged(result)


def _logged(result: Result) -> Result:
    if result.why:
        log.info("sandbox: ended by a limit: %s", result.why)
    return result


@functools.cache
def isolation() -> Isolation:
    """What this machine lets us forbid to sandboxes; found out by trying, once.

    Raises:
      ServerError: not even the number of processes can be bounded here.
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
    raise ServerError(f"sandbox: nothing that bounds a process works here ({'; '.join(refused)})")


def _refusal(kind: Isolation) -> str:
    """Why this isolation cannot be had here, "" if it can."""
    folder = Path(tempfile.mkdtemp(prefix="areax-sandbox-"))
    try:
        _fill(folder, {}, "")
        with _Reports() as reports:
            launch = _launch(kind.mode, folder, [sys.executable, "-I", "-c", ""], Limits(), reports.writer)
            done = subprocess.run(
                launch, **_surroundings(reports.writer), capture_output=True, timeout=STOP_S, errors="replace"
            )
            said = reports.read()
    except subprocess.TimeoutExpired:
        return f"no answer within {STOP_S:.0f} s"
    finally:
        _remove(folder)
    if said.get("code") == 0 and "error" not in said:
        return ""
    return said.get("error") or f"Python ended with {said.get('code')}: {done.stderr[-300:]}"


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
        said = reports.read()
    if "error" in said or not said and ended in done:
        raise ServerError(f"sandbox: {said.get('error') or f'the supervisor died; {stderr[-300:]}'}")
    why = "output" if full.is_set() else said["why"] if said else "wall"
    return Result(stdout, stderr, said.get("code", -signal.SIGKILL), why)


async def _read(stream: asyncio.StreamReader, most: int, full: asyncio.Event) -> bytes:
    """The first `most` bytes; the rest is read and dropped, so that whoever writes is not stuck as it ends."""
    kept = bytearray()
    while chunk := await stream.read(2**16):
        kept += chunk[: most - len(kept) + 1]
        if len(kept) > most:
            full.set()
    return bytes(kept[:most])


async def _end(process: asyncio.subprocess.Process, ended: asyncio.Task, printed: Sequence[asyncio.Task]) -> None:
    """Has the supervisor kill all that is left; what they printed is read to its end."""
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
    """A pipe to what the supervisor has to say."""

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
        except BlockingIOError:  # nothing
            return {}
        said = [json.loads(line) for line in lines]
        return {key: value for one in reversed(said) for key, value in one.items()}  # the first word counts


def _launch(mode: str, folder: Path, command: list[str], limits: Limits, report: int) -> list[str]:
    spec = {**asdict(limits), "mode": mode, "folder": str(folder / "work"), "command": command}
    spec["cpu_s"] = limits.timeout_s if limits.cpu_s is None else limits.cpu_s
    spec |= {"report": report, "parent": os.getpid(), "readable": _python_folders()}
    return [sys.executable, "-I", "-S", CONFINE, json.dumps(spec)]


def _surroundings(report: int) -> dict[str, Any]:
    return {"env": {}, "cwd": "/", "start_new_session": True, "pass_fds": (report,)}


@functools.cache
def _python_folders() -> list[str]:
    """Where this Python and its packages lie, outer folders first."""
    found = {sys.prefix, sys.exec_prefix, sys.base_prefix, sys.base_exec_prefix}
    found.add(str(Path(sys.executable).resolve().parents[1]))
    return sorted(found - {"/"})


def _fill(folder: Path, files: Mapping[str, str], stdin: str) -> None:
    folder.chmod(0o711)  # another user must get through to its own
    (folder / "work").mkdir(mode=0o700)
    for name, text in files.items():
        path = folder / "work" / name
        path.write_bytes(text.encode(errors="surrogatepass"))
        path.chmod(0o644)
    (folder / "stdin").write_bytes(stdin.encode(errors="surrogatepass"))


def _remove(folder: Path) -> None:
    """Removes the folder, also where the command has taken its rights away."""
    for path, names, _ in os.walk(folder):
        for name in names:
            inner = os.path.join(path, name)
            if not os.path.islink(inner):
                os.chmod(inner, 0o700)
    shutil.rmtree(folder)
