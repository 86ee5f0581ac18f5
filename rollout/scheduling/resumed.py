"""How a run goes on from its journal: the batches that a former process trained on after the last saved state, then the
groups that it had begun, then new ones."""

from __future__ import annotations

from typing import Any

from ..journal.store import Journal
from ..types import Sample
from .executor import Executor


class Resumed:
    """The batches of a run that goes on: those of its journal, then those of an executor, which begins behind them."""

    def __init__(self, journal: Journal, executor: Executor, cursor: dict[str, Any] | None):
        """
        Args:
          cursor: the position that belongs to the state.
        """
        self._journal, self._executor, self._cursor = journal, executor, cursor

    def admit(self, v: int) -> None:
        """As `Executor.admit`. Before the last recorded batch nothing is generated: the former process had newer
        weights for what comes behind it."""
        if v + 1 >= self._journal.past.batches.stop:
            self._executor.admit(v)

    async def batch(self, v: int) -> list[list[Sample]]:
        """As `Executor.batch`."""
        if v not in self._journal.past.batches:
            self._cursor = None
            return await self._executor.batch(v)
        groups, self._cursor = await self._journal.read(v)
        return groups

    def recorded(self) -> None:
        """As `Executor.recorded`."""
        self._executor.recorded()

    def cursor(self) -> dict[str, Any]:
        """As `Executor.cursor`, after the batch handed out last."""
        return self._cursor or self._executor.cursor()
