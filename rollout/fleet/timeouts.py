"""How long, and how often, a fleet tries."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Timeouts:
    """How long, and how often, a fleet tries before it gives up on a server; all `_s` are seconds.

    Attributes:
      reach_s: how long a push tries to reach a server before it goes on without it.
      lost_s: how long to wait for an unreachable server before it counts as dead.
      lost_own_s: the same for servers that we can restart.
      retry_s, max_retry_s: wait before the second attempt at a recovery, doubling up to the maximum.
      heartbeat_s: interval between checks of a healthy server.
      heartbeat_answer_s: a healthy server answers a check within this.
      load_report_s: it reports its load within this, or the report is skipped.
      resume_memory_s: time to allocate its memory again when the run ends.
      max_loads: failed recoveries after which a server that answers counts as dead.
      max_restarts, restart_window_s: most restarts of one server within so many seconds.
      push_attempts: attempts at a push that fails on all servers.
    """

    reach_s: float = 5.0
    lost_s: float = 30.0
    lost_own_s: float = 5.0
    retry_s: float = 1.0
    max_retry_s: float = 30.0
    heartbeat_s: float = 10.0
    heartbeat_answer_s: float = 30.0
    load_report_s: float = 5.0
    resume_memory_s: float = 20.0
    max_loads: int = 3
    max_restarts: int = 3
    restart_window_s: float = 3600.0
    push_attempts: int = 3

    def backoff(self, attempt: int) -> float:
        """Seconds to wait before recovery attempt number `attempt`, counted from 0."""
        return min(self.retry_s * 2**attempt, self.max_retry_s)


TIMEOUTS = Timeouts()
