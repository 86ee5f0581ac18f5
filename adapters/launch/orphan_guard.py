"""Ends a launcher's processes when the launcher is gone, even if it was killed.

    python orphan_guard.py     reads lines: "+PID" a process group started, "-PID" it ended, "/FOLDER" to be removed

At the end of its input, it ends the remaining groups and removes the folders. It is a detached process without a
parent, so that killing a launcher and its children does not kill it.
"""

import os
import shutil
import signal
import sys
import time
from collections.abc import Iterable

GRACE_S = 30.0  # for a trainer to end its servers and remove its folders


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
        groups = {group for group in groups if signal_group(group, number)}
        deadline = time.monotonic() + GRACE_S
        while any(signal_group(group, 0) for group in groups) and time.monotonic() < deadline:
            time.sleep(0.05)
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def signal_group(group: int, number: int) -> bool:
    """Sends a signal to a process group; returns whether it exists."""
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


if __name__ == "__main__":
    main()
