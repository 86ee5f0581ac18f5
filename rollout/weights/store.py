"""The directory of published versions: its location, writing versions to it, pruning.

A published version is a directory with a `manifest.json` that appears by rename, complete. Its label,
`"{version}-{8 hex digits of the manifest's hash}"`, covers every tensor, because the manifest holds the tensors'
hashes: two runs that both reached version 7 have different labels.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import TypeVar

from ..processes import folders
from ..processes.printable import printable
from ..servers.labels import MANIFEST, read_label, version_of

log = logging.getLogger(__name__)
Result = TypeVar("Result")

OWNER = "run"  # in a folder of versions: the id of the run that they belong to, locked while it publishes
ROOMS = 6  # retries on a full disk, after 1, 2, 4 ... seconds


async def written(write: Callable[[], Result], root: Path, in_use: Callable[[], Collection[str]]) -> Result:
    """Runs `write` in a thread and returns its result; on a full disk prunes older versions and retries.

    Args:
      in_use: returns the labels of versions under `root` that must stay.

    Raises OSError if there is no space after a minute.
    """
    attempt = 0
    while True:
        try:
            return await asyncio.to_thread(write)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT) or attempt == ROOMS:
                raise
            log.warning("%s: no space for a version (%s); pruning older ones and retrying", root, error.strerror)
        await asyncio.to_thread(prune, root, 1, in_use())
        await asyncio.sleep(2.0**attempt)
        attempt += 1


def choose_root(size: int = 0) -> Path:
    """Chooses a folder for versions that servers on this machine read: in memory if there is space.

    Args:
      size: bytes of one version. Three must fit: two are kept while the next is written.
    """
    memory = Path("/dev/shm")
    if memory.is_dir() and os.access(memory, os.W_OK | os.X_OK):
        if shutil.disk_usage(memory).free >= 3 * size:
            return memory
    return Path(tempfile.gettempdir())


def check_owner(root: Path, run: str) -> None:
    """Raises ValueError if a folder cannot be, or become, one for the versions of this run; creates nothing.

    Args:
      run: the run's id; "" = of a new run, to which no versions belong yet.
    """
    if root.exists() and not root.is_dir():
        raise ValueError(f"{root}: a folder for published versions is needed, got a file; name another")
    owner = root / OWNER
    if not owner.is_file() and root.is_dir() and any(root.iterdir()):
        raise ValueError(
            f"{root}: a folder for published versions must be empty or of the same run, got other files; name another, "
            "or empty it"
        )
    found = owner.read_text(encoding="utf-8", errors="replace").strip() if owner.is_file() else ""
    if found and found != run:
        raise ValueError(
            f"{root}: holds versions of another run ({printable(found):.80}, this one is {run or 'new'}); name another "
            "folder, or empty it"
        )


@contextlib.contextmanager
def owned(root: Path, run: str) -> Iterator[Path]:
    """Creates a folder for the versions of one run, keeps others out of it, and yields it.

    Args:
      run: the run's id, which stays in the folder.

    Raises:
      ValueError: as `check_owner`; or it is in use.
    """
    check_owner(root, run)
    root.mkdir(parents=True, exist_ok=True)
    held = folders.lock(root / OWNER)
    if held is None:
        raise ValueError(f"{root}: another process is publishing versions here; name another folder")
    with held:
        check_owner(root, run)  # another run may have taken it meanwhile
        held.seek(0)
        held.truncate(0)
        held.write(f"{run}\n")
        held.flush()
        yield root


def numbers(root: Path) -> list[int]:
    """The versions under `root`, complete or not."""
    return [int(path.name) for path in root.iterdir() if path.name.isdecimal()]


def remove_newer(root: Path, version: int) -> None:
    """Removes the versions after `version` under `root`, and what was being written or removed there."""
    newer = [path for path in root.iterdir() if path.name.isdecimal() and int(path.name) > version]
    for path in (*newer, *root.glob(".*.tmp"), *root.glob(".*.removing")):
        if path.is_dir():
            log.warning("%s: removed, a former process of this run left it", path)
            shutil.rmtree(path)


def prune(root: str | os.PathLike, keep: int = 2, in_use: Collection[str] = ()) -> list[Path]:
    """Removes published versions under `root`, except the newest `keep` and those labelled `in_use`.

    Ignores directories without a manifest. Each one is renamed before its files are deleted, so that nothing reads an
    incomplete version. Returns the removed directories, oldest first.
    """
    if keep < 1:
        raise ValueError(f"prune: keep must be at least 1, got {keep}")
    root = Path(root)
    for leftover in root.glob(".*.removing"):  # of a run that was interrupted here
        shutil.rmtree(leftover)
    found = [
        (read_label(path / MANIFEST), path)
        for path in root.iterdir()
        if not path.name.startswith(".") and (path / MANIFEST).is_file()
    ]
    found.sort(key=lambda pair: version_of(pair[0]))
    removed = [path for label, path in found[:-keep] if label not in in_use]
    for path in removed:
        shutil.rmtree(path.rename(root / f".{path.name}.removing"))
    return removed
