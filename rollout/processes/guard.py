"""Registers what must not outlive this process: a guard process ends and removes it, even after kill -9."""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
import threading
from pathlib import Path

from .orphan_guard import MARK

GRACE_S = 4.0  # from SIGTERM to SIGKILL

_lock = threading.Lock()
_guard: subprocess.Popen | None = None
_entries: dict[str, str] = {}  # what the guard has been told: process groups and folders


def process(pid: int, grace_s: float = GRACE_S, mark: str = "") -> None:
    """Registers a child that leads a process group (`start_new_session`).

    Args:
      mark: of its environment, as in `orphan_guard.kill_marked`; "" = none.
    """
    _add(f"{pid}", f"+{pid} {grace_s} {mark}")


def process_ended(pid: int) -> None:
    """Removes a child from the register: its number may be used again."""
    _remove(f"{pid}", f"-{pid}")


def folder(path: str | os.PathLike) -> None:
    """Registers a folder to be removed, an absolute path."""
    _add(os.fspath(path), f">{os.fspath(path)}")


def folder_removed(path: str | os.PathLike) -> None:
    """Removes a folder from the register."""
    _remove(os.fspath(path), f"<{os.fspath(path)}")


def _add(name: str, line: str) -> None:
    with _lock:
        _entries[name] = line
        _tell(line)


def _remove(name: str, line: str) -> None:
    with _lock:
        if _entries.pop(name, None):
            _tell(line)


@atexit.register
def _stop() -> None:
    """Lets the guard end what is left."""
    if _guard and _guard.stdin:
        _guard.stdin.close()


def _tell(line: str) -> None:
    """Sends the guard a line; starts a guard, and tells it all, if there is none or it was killed."""
    global _guard
    try:
        if _guard and _guard.stdin:
            _guard.stdin.write(f"{line}\n")
            return
    except BrokenPipeError:
        _guard = None
    script = Path(__file__).with_name("orphan_guard.py")
    _guard = subprocess.Popen(
        [sys.executable, "-I", str(script)], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, bufsize=1,
        start_new_session=True, cwd="/",
        env={name: value for name, value in os.environ.items() if name != MARK},  # it outlives what starts it
    )  # fmt: skip
    assert _guard.stdin is not None
    _guard.wait()  # until it has forked
    for entry in _entries.values():
        _guard.stdin.write(f"{entry}\n")
