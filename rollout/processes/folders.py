"""Folders that one process or one run owns, by a lock that the kernel releases when the process ends, however it does.

A lock says who is alive where process numbers cannot: they recur, and containers that share a file system each have
their own.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import logging
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from . import guard

log = logging.getLogger(__name__)

LOCK = ".lock"
PREFIX = "areax-"


def lock(file: Path) -> IO[str] | None:
    """Opens a file, creating it, and locks it until it is closed or this process ends; None if another process has.

    On a file system without locks it warns and goes on.
    """
    handle = open(file, "a+", encoding="utf-8", errors="replace")  # noqa: SIM115 - it stays open
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        handle.close()
        return None
    except OSError as error:
        log.warning("%s: this file system has no locks (%s); do not start two runs here", file, error.strerror)
    return handle


@contextlib.contextmanager
def scratch(root: Path, name: str) -> Iterator[Path]:
    """Yields a new folder `root/areax-NAME-...`, removed at the end, or by the guard, or by the next call.

    Removes what processes that are gone have left in `root`.
    """
    sweep(root)
    held = None
    while held is None:
        path = root.absolute() / f"{PREFIX}{name}-{secrets.token_hex(6)}"
        guard.folder(path)  # first, for a process that is killed here
        path.mkdir(mode=0o700)
        held = lock(path / LOCK)
        if held and not (path / LOCK).exists():  # `sweep` of another process took it for an orphan
            held.close()
            held = None
        if held is None:  # another process has the lock, perhaps not to remove the folder
            shutil.rmtree(path, ignore_errors=True)
            guard.folder_removed(path)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)  # somebody may have removed it
        held.close()
        guard.folder_removed(path)


@functools.cache
def of_process(name: str) -> Path:
    """A folder of `scratch` that this process keeps until it ends."""
    kept = contextlib.ExitStack()
    atexit.register(kept.close)
    return kept.enter_context(scratch(Path(tempfile.gettempdir()), name))


def sweep(root: Path) -> None:
    """Removes the folders of `scratch` whose process is gone."""
    for path in root.glob(f"{PREFIX}*"):
        try:
            if path.lstat().st_uid != os.getuid() or not (path / LOCK).is_file():
                continue
            held = lock(path / LOCK)
        except OSError:  # it was removed meanwhile, or is not ours
            continue
        if held:
            log.warning("%s: removed, its process is gone", path)
            shutil.rmtree(path, ignore_errors=True)
            held.close()
