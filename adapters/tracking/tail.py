"""The lines of a file of JSON lines as they come, also where the file is cut, or another takes its place."""

from __future__ import annotations

import os
import pathlib
from typing import BinaryIO, NamedTuple

import xxhash

from . import run_dir


class Mark(NamedTuple):
    """A place in a file: behind so many bytes, and what their xxh3-128 is."""

    bytes: int = 0
    xxh3_128: str = ""


START = Mark()


class Tail:
    """Reads what was appended since the last look. The file may not be there yet.

    Attributes:
      mark: what was read so far.
    """

    def __init__(self, path: str | os.PathLike, mark: Mark = START):
        """
        Args:
          mark: where to go on; where the file no longer begins with what was read then, it is read from its beginning.
        """
        self.path, self.mark = pathlib.Path(path), mark
        self._file: BinaryIO | None = None
        self._hash, self._lines = xxhash.xxh3_128(), 0

    def look(self) -> tuple[bool, list[dict]]:
        """(whether all that was read before is void, the new lines: then those from the beginning).

        Raises ValueError for a line that is not a JSON object.
        """
        void = self._file is None and self.mark.bytes == 0
        if self._file is None or self._is_another():
            try:
                file = open(self.path, "rb")  # noqa: SIM115 - it stays open: its inode is then nobody else's
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
        """Whether the file's name stands for another one now, or it is shorter than what was read of it."""
        assert self._file
        own = os.fstat(self._file.fileno())
        try:
            there = self.path.stat()
        except FileNotFoundError:
            return False  # what is open is all there is
        return (own.st_dev, own.st_ino) != (there.st_dev, there.st_ino) or there.st_size < self.mark.bytes

    def _goes_on(self) -> bool:
        """Places the new file behind what was read, if it begins with that, else at its beginning."""
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
