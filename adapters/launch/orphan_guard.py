"""Ends processes when what started them is gone, however it went: the last of a launcher that was killed.

    python launch_guard.py     reads lines: "+PID" a process group began, "-PID" it ended, "/FOLDER" is to be removed

When its input ends, it ends the groups that are left and removes the folders. A process of its own that has no parent:
whoever kills a launcher, and what that has started, does not meet it.
"""

import os
import shutil
import signal
import sys
import time
from collections.abc import Iterable

GRACE_S = 30.0  # for a trainer that ends its servers and removes its folders


def main(lines: Iterable[str] = sys.stdin) -> None:
    if os.fork():
        os._exit(0)
    groups, folders = set[int](), []
    for line in lines:
        if line[0] == "/":
            folders.append(line.rstrip("\n"))
        else:
            (groups.add if line[0] == "+" else groups.discard)(int(line[1:]))
    for number in (signal.SIGTERM, signal.SIGKILL):
        groups = {group for group in groups if reached(group, number)}
        deadline = time.monotonic() + GRACE_S
        while any(reached(group, 0) for group in groups) and time.monotonic() < deadline:
            time.sleep(0.05)
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def reached(group: int, number: int) -> bool:
    """Sends a signal to a process group; whether there is one."""
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


if __name__ == "__main__":
    main()
