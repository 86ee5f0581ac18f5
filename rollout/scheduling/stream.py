"""Streams: rows without random access, in the order in which an iterable gives them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from .curriculum import Row

KEPT = 4096  # newest rows that stay in memory, for groups that run again
AGAIN = "give a list, a data set or another object whose iteration can start anew"


class Stream:
    """An endless sequence of an iterable's rows by ordinal; it starts anew when the iterable ends.

    Rows are read as they are needed. A row older than the KEPT newest, and the first row after a resume, is found by
    iterating from the beginning, so the iterable must give the same rows each time. If it has `set_epoch`, as those of
    `datasets` have, that is called with 0, 1, ... before each pass.
    """

    size = None  # unknown

    def __init__(self, rows: Iterable[Row]):
        self._iterable = rows
        self._start()

    def __getitem__(self, ordinal: int) -> Row:
        if ordinal < self._next - KEPT:
            if self._iterator is self._iterable:
                raise ValueError(f"Stream: an iterator cannot give row {ordinal} again, after {self._next}; {AGAIN}")
            self._start()
        while self._next <= ordinal:
            self._kept[self._next] = self._read()
            self._kept.pop(self._next - KEPT, None)
            self._next += 1
        return self._kept[ordinal]

    @property
    def rows(self) -> list[Row]:
        """The first rows, up to the KEPT, or those read last."""
        return list(self._kept.values())

    @property
    def order(self) -> list[Any]:
        return ["stream", 0]

    def _start(self) -> None:
        self._kept: dict[int, Row] = {}  # by ordinal
        self._next = self._epoch = 0
        self._iterator: Iterator[Row] = self._begin()

    def _begin(self) -> Iterator[Row]:
        if hasattr(self._iterable, "set_epoch"):
            self._iterable.set_epoch(self._epoch)
        self._fresh = True
        return iter(self._iterable)

    def _read(self) -> Row:
        for _ in range(2):
            for row in self._iterator:
                self._fresh = False
                return row
            if self._fresh:
                break
            self._epoch += 1
            self._iterator = self._begin()
        raise ValueError(
            f"Stream: the iterable must give rows, again when it ends, got none after {self._next}; {AGAIN}"
        )
