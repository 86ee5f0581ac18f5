"""Atomic writes of whole directories."""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

AT_FDCWD, RENAME_EXCHANGE = -100, 2  # of Linux's renameat2


@contextlib.contextmanager
def replacing(path: str | os.PathLike, replaceable: Callable[[Path], bool]) -> Iterator[Path]:
    """Yields a temporary directory next to `path`, renamed to `path` if the block succeeds and deleted if it raises.

    An existing `path` is replaced atomically if it is an empty directory or `replaceable(path)` is true.

    Raises:
      ValueError: the path is a file, or a directory that is not replaceable; raised before anything is written.
    """
    path = Path(path).resolve()
    if path.exists() and not path.is_dir():
        raise ValueError(f"{path}: must be a directory or not exist yet, got a file; choose another path")
    if path.exists() and any(path.iterdir()) and not replaceable(path):
        raise ValueError(f"{path}: contains files other than a checkpoint; choose another path, or empty it first")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    temporary.mkdir()
    try:
        yield temporary
        sync_tree(temporary)
        if path.exists():
            _exchange(temporary, path)
        else:
            temporary.rename(path)
        _sync(path.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def sync_tree(path: Path) -> None:
    """Calls fsync on every file and directory below `path`."""
    for folder, _, files in os.walk(path):
        for name in files:
            _sync(Path(folder) / name)
        _sync(Path(folder))


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _exchange(one: Path, other: Path) -> None:
    """Swaps two paths: atomically where supported (Linux), else through a third name."""
    swap = getattr(ctypes.CDLL(None), "renameat2", None)
    if swap and swap(AT_FDCWD, os.fsencode(one), AT_FDCWD, os.fsencode(other), RENAME_EXCHANGE) == 0:
        return
    aside = one.with_name(one.name + ".old")
    other.rename(aside)
    one.rename(other)
    aside.rename(one)
