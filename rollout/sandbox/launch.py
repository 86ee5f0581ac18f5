"""Starts a sandbox's supervisor (`supervisor.py`), reads its reports, and ends it."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import ServerError

SUPERVISOR = str(Path(__file__).with_name("supervisor.py"))
SYSTEM = (  # folders that a sandbox has already, whatever is below them
    "/usr/", "/bin/", "/sbin/", "/lib/", "/lib32/", "/lib64/", "/libx32/", "/nix/", "/etc/", "/dev/", "/proc/", "/tmp/",
)  # fmt: skip
STOP_S = 10.0  # for the supervisor to kill everything once it is asked to


async def read(stream: asyncio.StreamReader, most: int, full: asyncio.Event) -> bytes:
    """Reads the first `most` bytes; drains the rest, so that the writer does not block while it is stopped."""
    kept = bytearray()
    while chunk := await stream.read(2**16):
        kept += chunk[: most - len(kept) + 1]
        if len(kept) > most:
            full.set()
    return bytes(kept[:most])


async def end(process: asyncio.subprocess.Process, ended: asyncio.Task, printed: Sequence[asyncio.Task]) -> None:
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


class Reports:
    """A pipe for the supervisor's reports."""

    def __enter__(self) -> Reports:
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


def arguments(
    mode: str,
    folder: Path,
    command: Sequence[str],
    limits: Mapping[str, Any],
    report: int,
    places: Sequence[str] = (),
    period_s: float = 0.05,
) -> list[str]:
    """The command line of a supervisor.

    Args:
      limits: those of `sandbox.Limits`, by name.
      report: file descriptor for its reports.
      places: absolute paths of empty folders that the command may write to, with `isolation().files`.
      period_s: seconds between two checks of the processes.
    """
    spec = {**limits, "mode": mode, "folder": str(folder / "work"), "command": list(command), "places": list(places)}
    spec["cpu_s"] = limits["timeout_s"] if limits["cpu_s"] is None else limits["cpu_s"]
    spec |= {"period_s": period_s, "report": report, "parent": os.getpid(), "readable": python_folders()}
    return [sys.executable, "-I", "-S", SUPERVISOR, json.dumps(spec)]


def surroundings(report: int) -> dict[str, Any]:
    return {"env": {}, "cwd": "/", "start_new_session": True, "pass_fds": (report,)}


@functools.cache
def python_folders() -> list[str]:
    """The folders of this Python and its packages, parents first."""
    found = {sys.prefix, sys.exec_prefix, sys.base_prefix, sys.base_exec_prefix}
    found.add(str(Path(sys.executable).resolve().parents[1]))
    return sorted(found - {"/"})


def fill(folder: Path, files: Mapping[str, str], stdin: str) -> None:
    folder.chmod(0o711)  # another user must be able to enter its subfolder
    (folder / "work").mkdir(mode=0o700)
    for name, text in files.items():
        path = folder / "work" / name
        path.write_bytes(text.encode(errors="surrogatepass"))
        path.chmod(0o644)
    (folder / "stdin").write_bytes(stdin.encode(errors="surrogatepass"))


def remove(folder: Path) -> None:
    """Removes the folder, even if the command has changed permissions."""
    for path, names, _ in os.walk(folder):
        for name in names:
            inner = os.path.join(path, name)
            if not os.path.islink(inner):
                os.chmod(inner, 0o700)
    shutil.rmtree(folder)
