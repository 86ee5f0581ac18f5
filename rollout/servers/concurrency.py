"""Adaptive concurrency limit per server: AIMD, as in TCP congestion control (Chiu and Jain 1989).

A server with more requests than its memory holds preempts some and recomputes them; one with a long queue keeps
requests that another server could run. The right number depends on the lengths of answers, which are unknown in
advance. There is no limit at first, and none unless something goes wrong.

- A 503 lowers the limit to 0.9 of the requests the server had. So do preempted answers if they are more than a quarter:
  a few are the price of a full memory, and fewer requests would cost more.
- Other answers raise the limit while it binds, by one request or 1/32 per round of answers.
- Answers to requests sent before the limit was last lowered are ignored.
- Two load reports (`/v1/loads`) in a row with more waiting than running requests lower it to twice the running ones, at
  most by half; a single report may have been taken just after requests arrived.
- The limit does not rise while the last report has half as many requests waiting as running, or memory nearly full.
"""

from __future__ import annotations

import bisect
import math
from dataclasses import dataclass

BACKOFF = 0.9
GROWTH = 1 / 32  # of the limit, per round of answers; at least one request
OFTEN, MEMORY = 0.25, 16  # share of preempted answers, averaged over about 16, above which the limit is lowered
FULL = 0.9  # memory usage above which the limit is not raised


@dataclass(frozen=True)
class Report:
    """A server's load report.

    Attributes:
      running, waiting: number of requests.
      usage: share of the key-value cache that running requests use.
    """

    running: int
    waiting: int
    usage: float

    @property
    def queues(self) -> bool:
        """Whether more requests wait than run; if none runs, it has just been paused for a push."""
        return self.waiting > self.running > 0


class Limit:
    """The concurrency limit of one server.

    Attributes:
      most: most requests at a time, at least 1; inf = no limit.
    """

    def __init__(self):
        self.most = math.inf
        self._since = -math.inf  # when it was last lowered
        self._preempted = 0.0  # share of preempted answers since then, a moving average
        self._report: Report | None = None  # the last report, unless it was invalid
        # (time, requests on the server), a decreasing stack: a higher load removes earlier, lower ones
        self._peaks: list[tuple[float, int]] = []

    def sent(self, now: float, load: int) -> None:
        """Records that a request was sent, which brings the server's load to `load`."""
        while self._peaks and self._peaks[-1][1] <= load:
            self._peaks.pop()
        self._peaks.append((now, load))

    def refused(self, sent: float, now: float) -> bool:
        """Records that the server refused a request sent at `sent`; returns whether the limit was lowered."""
        return sent >= self._since and self._lower(BACKOFF * self._ran(sent), now)

    def answered(self, sent: float, load: int, now: float, *, preempted: bool) -> int:
        """Records the answer to a request sent at `sent`, one of `load`; returns -1, 0 or 1: lowered, same, raised."""
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
        """Records a load report, None if there is no valid one; returns whether the limit was lowered."""
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
        """The highest load since then, at most the number of running requests if the server reports a queue."""
        at = bisect.bisect_left(self._peaks, since, key=lambda peak: peak[0])
        peak = self._peaks[at][1] if at < len(self._peaks) else math.inf
        return min(self.most, peak, self._report.running if self._report and self._report.waiting else math.inf)
