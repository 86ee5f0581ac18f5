"""Ends a process's children when it is gone, even if it was killed; started by guard.py.

    python orphan_guard.py     reads lines: "+PID SECONDS" a process group started, "-PID" it ended,
                               ">FOLDER" to be removed, "<FOLDER" it is gone

At the end of its input, it ends the remaining groups, with SIGKILL for those that SIGTERM has not ended in SECONDS, and
removes the folders. It is a detached process without a parent, so that killing a process and its children does not
kill it.
"""

import os
import shutil
import signal
import sys
import time
from collections.abc import Iterable

KILL_S = 5.0  # for killed processes to disappear


def main(lines: Iterable[str] = sys.stdin) -> None:
    if os.fork():
        os._exit(0)
    groups, folders = dict[int, float](), set[str]()
    for line in lines:
        sign, rest = line[0], line[1:].rstrip("\n")
        if sign in "<>":
            (folders.add if sign == ">" else folders.discard)(rest)
        elif sign == "+":
            group, _, seconds = rest.partition(" ")
            groups[int(group)] = float(seconds)
        else:
            groups.pop(int(rest), None)
    end(groups)
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


def signal_group(group: int, number: int) -> bool:
    """Sends a signal to a process group; returns whether it exists."""
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


if __name__ == "__main__":
    main()
