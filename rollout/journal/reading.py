"""A run's journal for reading: of a run that goes on, was killed or is complete. Nothing in its directory changes."""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from .store import FILE, Batch, _batch

BESIDE = "-wal", "-journal"  # what the last transactions are in until a process closes the database in order
HEAD = 32  # bytes of a log's header, which differs each time that the log begins anew
TRIES = 3
Result = TypeVar("Result")


class Reader:
    """The batches of a journal; made by `opened`.

    Attributes:
      versions: of the batches, in order.
    """

    def __init__(self, path: Path, scratch: Path):
        self.path, self._scratch = path, scratch
        self._db: sqlite3.Connection | None = None
        self.versions: list[int] = []
        self._retried(self._open)

    def read(self, version: int) -> Batch:
        """Reads a batch. Raises ValueError if it is missing or damaged."""

        def read() -> Batch:
            if self._db is None:
                self._open()
            assert self._db
            return _batch(self._db, self.path, version)

        return self._retried(read)

    def refresh(self) -> None:
        """Finds the batches that were added since, by a new copy if the journal is copied at all."""
        self.close()
        self._retried(self._open)

    def close(self) -> None:
        """Closes the database."""
        db, self._db = self._db, None
        if db:
            db.close()

    def _open(self) -> None:
        """Opens the file where it is, or a copy if a process has it open or did not close it: nobody else may read that
        one, and to read it means to write to it."""
        place, how = self.path, "immutable=1"
        for _ in range(TRIES if any(map(Path.exists, _beside(self.path))) else 0):
            place, how, before = self._scratch / FILE, "mode=rw", self._mark()
            for source, copy in zip((self.path, *_beside(self.path)), (place, *_beside(place)), strict=True):
                copy.unlink(missing_ok=True)
                with contextlib.suppress(FileNotFoundError):
                    shutil.copyfile(source, copy)
            if self._mark() == before:
                break
        self._db = sqlite3.connect(f"{place.absolute().as_uri()}?{how}", uri=True)
        self.versions = [version for (version,) in self._db.execute("SELECT version FROM batches ORDER BY version")]

    def _mark(self) -> tuple:
        """What changes when transactions move from the log to the database, so that copies of both may not fit each
        other; it does not when some are added to the log."""
        with contextlib.suppress(FileNotFoundError), open(_beside(self.path)[0], "rb") as log:
            return self.path.stat().st_mtime_ns, log.read(HEAD)
        return self.path.stat().st_mtime_ns, b""

    def _retried(self, read: Callable[[], Result]) -> Result:
        """The result of `read`, again on a new copy if the file changed while it was read or copied: no record is used
        whose hash differs."""
        for last in [False] * (TRIES - 1) + [True]:
            try:
                return read()
            except (sqlite3.DatabaseError, ValueError) as error:
                self.close()
                if last and isinstance(error, sqlite3.DatabaseError):
                    raise ValueError(f"{self.path}: it is damaged, or no journal ({error})") from error
                if last:
                    raise
        raise AssertionError


@contextlib.contextmanager
def opened(folder: Path) -> Iterator[Reader]:
    """Opens the journal in a run's directory.

    Raises ValueError if there is none, or if it is damaged.
    """
    path = folder / FILE
    if not path.is_file():
        raise ValueError(
            f"{folder}: needs {FILE}, which areax train grpo writes into its --out unless --journal is off, got none"
        )
    with tempfile.TemporaryDirectory() as scratch, contextlib.closing(Reader(path, Path(scratch))) as reader:
        yield reader


def _beside(path: Path) -> list[Path]:
    return [path.with_name(path.name + ending) for ending in BESIDE]
