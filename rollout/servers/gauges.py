"""Gauges on the event loop's clock: a level integrated over time, and durations."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

from .. import events


class LevelSnapshot(NamedTuple):
    """Cumulative statistics of a `Level` since it was made; the difference of two describes the interval between them.

    Attributes:
      at: time in seconds of the loop's clock.
      busy: seconds in which the level was above 0.
      total: the integral of the level over time, in seconds.
    """

    at: float
    busy: float
    total: float


class Level:
    """A number that changes over time, such as a server's requests in flight.

    Attributes:
      value: the current value.
      made: the first snapshot.
    """

    def __init__(self):
        self.value = 0
        self.made = self._held = LevelSnapshot(events.now(), 0.0, 0.0)

    def set(self, value: int) -> None:
        self._held, self.value = self.read(), value

    def read(self) -> LevelSnapshot:
        now, since = events.now(), self._held
        spent = now - since.at
        return LevelSnapshot(now, since.busy + spent * (self.value > 0), since.total + spent * self.value)


class Durations(NamedTuple):
    """Count, sum and maximum of durations, in seconds."""

    times: int = 0
    sum: float = 0.0
    max: float = 0.0


class Waits:
    """Collects durations; `take` returns those since the last call."""

    def __init__(self):
        self._took = Durations()

    @contextlib.contextmanager
    def timed(self) -> Iterator[None]:
        """Adds the duration of the block, unless it raises."""
        begun = events.now()
        yield
        took, before = events.now() - begun, self._took
        self._took = Durations(before.times + 1, before.sum + took, max(before.max, took))

    def take(self) -> Durations:
        taken, self._took = self._took, Durations()
        return taken
