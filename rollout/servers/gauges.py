"""By the event loop's clock: how much of something there was over time, and how long things took."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

from .. import events


class LevelSnapshot(NamedTuple):
    """What a level was until `at`, in seconds of the loop's clock since it was made: differences say of an interval.

    Attributes:
      at: seconds, by the loop's clock.
      busy: seconds in which the level was above 0.
      total: its integral.
    """

    at: float
    busy: float
    total: float


class Level:
    """A number that goes up and down, such as the requests that a server holds.

    Attributes:
      value: what it is now.
      made: what `read` said at first.
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
    """How long things took, in seconds."""

    times: int = 0
    sum: float = 0.0
    max: float = 0.0


class Waits:
    """How long things took that ended since they were asked for last."""

    def __init__(self):
        self._took = Durations()

    @contextlib.contextmanager
    def timed(self) -> Iterator[None]:
        """What runs within counts, unless it raises."""
        begun = events.now()
        yield
        took, so_far = events.now() - begun, self._took
        self._took = Durations(so_far.times + 1, so_far.sum + took, max(so_far.max, took))

    def take(self) -> Durations:
        taken, self._took = self._took, Durations()
        return taken
