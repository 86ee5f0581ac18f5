"""Ends a process's children when it is gone, even if it was killed; started by guard.py.

    python orphan_guard.py     reads lines: "+PID SECONDS MARK" a process group started, "-PID" it ended,
                               ">FOLDER" to be removed, "<FOLDER" it is gone

At the end of its input, it ends the remaining groups, with SIGKILL for those that SIGTERM has not ended in SECONDS,
kills what they have started in other sessions (`kill_marked`, if there is a MARK), and removes the folders.

It is a detached process without a parent, so that killing a process and its children does not kill it.
"""

import contextlib
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterable

KILL_S = 5.0  # for killed processes to disappear
MARK = "AREAX_STARTED_BY"  # environment variable
ROUNDS = 100  # of looking for processes with a mark


def main(lines: Iterable[str] = sys.stdin) -> None:
    if os.fork():
        os._exit(0)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # asks other processes of the job for stacks
    groups, marks, folders = dict[int, float](), dict[int, str](), set[str]()
    for line in lines:
        sign, rest = line[0], line[1:].rstrip("\n")
        if sign in "<>":
            (folders.add if sign == ">" else folders.discard)(rest)
        elif sign == "+":
            group, seconds, mark = rest.split(" ")
            groups[int(group)], marks[int(group)] = float(seconds), mark
        else:
            groups.pop(int(rest), None)
            marks.pop(int(rest), None)
    end(groups)
    for mark in filter(None, marks.values()):
        kill_marked(mark)
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def end(groups: dict[int, float]) -> None:
    """Ends process groups: each by SIGTERM, and by SIGKILL after its seconds."""
    began = time.monotonic()
    running = {group: seconds for group, seconds in groups.items() if signal_group(group, signal.SIGTERM)}
    while running and time.monotonic() - began < max(running.values()) + KILL_S:
        for group, seconds in running.items():
            if time.monotonic() - began >= seconds:
                signal_group(group, signal.SIGKILL)
        time.sleep(0.05)
        running = {group: seconds for group, seconds in running.items() if signal_group(group, 0)}


def kill_marked(mark: str) -> None:
    """Kills all processes whose environment had MARK=`mark` when they started, whatever session they are in: those of
    a child that was started with it, unless they changed their environment. Does nothing without /proc."""
    entry = f"{MARK}={mark}".encode()
    for _ in range(ROUNDS):  # one may start another meanwhile
        found = [pid for pid in _processes() if pid != os.getpid() and entry in _environment(pid)]
        for pid in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if not found:
            return
        time.sleep(0.01)


def _processes() -> list[int]:
    try:
        return [int(name) for name in os.listdir("/proc") if name.isdecimal()]
    except FileNotFoundError:
        return []


def _environment(pid: int) -> list[bytes]:
    """The environment that a process started with; [] of one that is gone, or another user's."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return file.read().split(b"\0")
    except OSError:
        return []


def signal_group(group: int, number: int) -> bool:
    """Sends a signal to a process group; returns whether it exists."""
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


if __name__ == "__main__":
    main()
