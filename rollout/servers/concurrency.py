"""How many requests a server gets at a time: fewer than it may have, as long as it shows that these are too many.

A server that holds more than fit in its memory throws some out and computes them anew (preemption); one with a long
queue keeps requests that another could run. Nobody knows beforehand how many are right, for it depends on how long
answers become. So the limit is looked for as TCP looks for its window, by additive increase and multiplicative decrease
(Chiu and Jain 1989). A 503 lowers it to nine tenths of what the server had, and so do preempted answers where they are
more than a quarter: a few are the price of a full memory, and fewer requests would cost more. Other answers raise it
while it binds, by a request or a 32nd when all that run have been answered. What was sent before the limit was lowered
says nothing new. The reports of a server (`/v1/loads`) lower it where two in a row say that more wait than run (one may
have met requests that had just come), to as many again as run, by half at most; the last keeps it from rising where
half as many wait, or memory is nearly full. There is none to begin with, nor ever where nothing goes wrong.
"""

from __future__ import annotations

import bisect
import math
from dataclasses import dataclass

BACKOFF = 0.9
GROWTH = 1 / 32  # of the limit, when all that run have been answered; a request at least
OFTEN, MEMORY = 0.25, 16  # share of preempted answers, of about so many, at which the limit is lowered
FULL = 0.9  # use of memory beyond which the limit is not raised


@dataclass(frozen=True)
class Report:
    """What a server says of its load.

    Attributes:
      running, waiting: requests.
      usage: share of the memory for keys and values that running requests hold.
    """

    running: int
    waiting: int
    usage: float

    @property
    def queues(self) -> bool:
        """Whether more wait than run; where none runs, it was just pushed to."""
        return self.waiting > self.running > 0


class Limit:
    """The limit of one server.

    Attributes:
      most: requests that it gets at a time, at least 1; inf = as many as it may have.
    """

    def __init__(self):
        self.most = math.inf
        self._since = -math.inf  # when it was lowered
        self._preempted = 0.0  # share of the answers since
        self._report: Report | None = None  # the last one that holds
        # (when, requests on the server), falling: a higher load hides those before it
        self._peaks: list[tuple[float, int]] = []

    def sent(self, now: float, load: int) -> None:
        """A request was sent, with which the server has `load`."""
        while self._peaks and self._peaks[-1][1] <= load:
            self._peaks.pop()
        self._peaks.append((now, load))

    def refused(self, sent: float, now: float) -> bool:
        """A request that was sent then was not taken up; whether the limit is lower now."""
        return sent >= self._since and self._lower(BACKOFF * self._ran(sent), now)

    def answered(self, sent: float, load: int, now: float, *, preempted: bool) -> int:
        """A request that was sent then, one of `load`, was answered; -1 or 1 where the limit is lower or higher now."""
        if sent < self._since:
            return 0
        self._preempted += (preempted - self._preempted) / MEMORY
        if preempted:
            return -int(self._preempted > OFTEN and self._lower(BACKOFF * self._ran(sent), now))
        tight = self._report and (2 * self._report.waiting > self._report.running or self._report.usage > FULL)
        if tight or load + 1 <= self.most:
            return 0
        self.most += max(1.0, GROWTH * self.most) / self.most
        return 1

    def reported(self, report: Report | None, load: int, now: float) -> bool:
        """The server says this, or nothing that holds; whether the limit is lower now."""
        before, self._report = self._report, report
        if report and before and report.queues and before.queues:
            return self._lower(max(2.0 * report.running, min(self.most, load) / 2), now)
        return False

    def _lower(self, most: float, now: float) -> bool:
        most = max(1.0, most)
        lower = most < self.most
        if lower:
            self.most, self._since, self._preempted = most, now, 0.0
        return lower

    def _ran(self, since: float) -> float:
        """The most that the server has had of us since then; fewer, if it says that it ran fewer."""
        at = bisect.bisect_left(self._peaks, since, key=lambda peak: peak[0])
        peak = self._peaks[at][1] if at < len(self._peaks) else math.inf
        return min(self.most, peak, self._report.running if self._report and self._report.waiting else math.inf)
