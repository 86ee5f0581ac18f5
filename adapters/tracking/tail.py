"""Follows a JSON Lines file, also if it is truncated or replaced."""

from __future__ import annotations

import json
import logging
import os
import pathlib
from typing import Any, BinaryIO, NamedTuple

import xxhash

from . import run_dir

log = logging.getLogger(__name__)


class Mark(NamedTuple):
    """A position in a file: number of bytes read, and their xxh3-128."""

    bytes: int = 0
    xxh3_128: str = ""


START = Mark()


def saved(path: pathlib.Path, **types: type) -> dict[str, Any] | None:
    """What a sink saved with its mark, or None; a damaged file is a warning, and the sink starts over.

    Args:
      types: {key: type} beside the mark's.
    """
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
        reason = "" if isinstance(state, dict) else "no JSON object"
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        reason = f"{type(error).__name__}: {error}"
    wrong = lambda: [key for key, kind in {**types, "bytes": int, "xxh3_128": str}.items()
                     if type(state.get(key)) is not kind]  # fmt: skip
    if reason or (missing := wrong()):
        log.warning("%s is damaged (%s): metrics go to a new run", path, reason or f"no {', '.join(missing)}")
        return None
    return state


class Tail:
    """Reads lines appended since the last call. The file need not exist yet.

    Attributes:
      mark: position up to which the file was read.
    """

    def __init__(self, path: str | os.PathLike, mark: Mark = START):
        """
        Args:
          mark: where to continue; if the file no longer starts with these bytes, it is read from the start.
        """
        self.path, self.mark = pathlib.Path(path), mark
        self._file: BinaryIO | None = None
        self._hash, self._lines = xxhash.xxh3_128(), 0

    def look(self) -> tuple[bool, list[dict]]:
        """(whether earlier lines are void, the new lines); if they are void, new lines are all from the start.

        Raises ValueError for a line that is not a JSON object.
        """
        void = self._file is None and self.mark.bytes == 0
        if self._file is None or self._is_another():
            try:
                file = open(self.path, "rb")  # noqa: SIM115 - kept open, so that its inode is not reused
            except FileNotFoundError:
                return False, []
            self.close()
            self._file = file
            void = not self._goes_on() or void
        data = self._file.read()
        lines = data[: data.rfind(b"\n") + 1].splitlines(keepends=True)
        self._read(b"".join(lines))
        self._file.seek(self.mark.bytes)
        found = [run_dir.parse(line, self.path, self._lines + i) for i, line in enumerate(lines, 1)]
        self._lines += len(lines)
        return void, found

    def close(self) -> None:
        if self._file:
            self._file.close()

    def _is_another(self) -> bool:
        """Whether the file was replaced, or truncated below what was read."""
        assert self._file
        opened = os.fstat(self._file.fileno())
        try:
            current = self.path.stat()
        except FileNotFoundError:
            return False  # removed; nothing newer to read
        return (opened.st_dev, opened.st_ino) != (current.st_dev, current.st_ino) or current.st_size < self.mark.bytes

    def _goes_on(self) -> bool:
        """Whether the new file starts with what was read before; seeks after that, else to the start."""
        assert self._file
        before, self.mark, self._hash = self.mark, START, xxhash.xxh3_128()
        start = self._file.read(before.bytes)
        self._read(start)
        if self.mark != before and before.bytes:
            self._file.seek(0)
            self.mark, self._hash, self._lines = START, xxhash.xxh3_128(), 0
            return False
        self._lines = start.count(b"\n")
        return True

    def _read(self, data: bytes) -> None:
        self._hash.update(data)
        self.mark = Mark(self.mark.bytes + len(data), self._hash.hexdigest())
