"""Consecutive failures of a stranger's code: each costs its episode, many end the run."""

from __future__ import annotations

import logging
from typing import Any

from .. import object_path
from ..processes.printable import one_line

log = logging.getLogger(__name__)

MOST = 16  # consecutive failed episodes that end the run: a bug, not an effect of the policy's output
LONGEST = 500  # characters of an error


class Failures:
    """Counts the failed episodes of `what`, such as "agent clerk.py:episode", since the last that did not fail."""

    def __init__(self, what: str):
        self._what, self._count = what, 0

    def clear(self) -> None:
        """An episode did not fail."""
        self._count = 0

    def add(self, told: str, row: Any, error: Exception) -> None:
        """Logs in one line, `told`, the error that ended an episode. Raises ValueError for the MOST-th one in a row."""
        self._count += 1
        log.warning("%s failed: %s; %s", self._what, told, object_path.row(row))
        if self._count >= MOST:
            raise ValueError(f"{self._what}: failed {MOST} times in a row; the last time: {told}") from error


def line(error: BaseException) -> str:
    """An error in one line: its type and its message."""
    return f"{type(error).__name__}: {one_line(error)}"[:LONGEST]
