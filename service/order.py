"""Which request of which model runs next."""

from __future__ import annotations

import bisect
from collections.abc import Iterable


class Order:
    """Requests that wait, by owner; of an owner they run by `seq`, owners take turns.

    The chunks of a client's pass arrive in any order, the first one last; anything else is sent only once all before it
    was accepted. So a request runs when all below it have, or when one that is no pass, and so tells that nothing is
    missing below itself, waits at it or above it.
    """

    def __init__(self):
        self._waiting: dict[str, list[int]] = {}  # ascending
        self._last: dict[str, int] = {}  # the highest `seq` that is not a pass
        self._next: dict[str, int] = {}
        self._skipped: dict[str, set[int]] = {}

    def begin(self, owner: str, known: Iterable[int]) -> None:
        """Takes in an owner, given what of it has run, or was refused, before."""
        self._next[owner], self._skipped[owner] = 0, set(known)
        self._advance(owner)

    def owns(self, owner: str) -> bool:
        return owner in self._next

    def passed(self, owner: str, seq: int) -> bool:
        """Whether it is too late for a request with this `seq`."""
        return seq < self._next.get(owner, 0)

    def put(self, owner: str, seq: int, is_pass: bool) -> None:
        bisect.insort(self._waiting.setdefault(owner, []), seq)
        if not is_pass:
            self._last[owner] = max(seq, self._last.get(owner, 0))

    def skip(self, owner: str, seq: int) -> None:
        """Nothing will come with this `seq`."""
        self._skipped[owner].add(seq)
        self._advance(owner)

    def drop(self, owner: str) -> None:
        """Forgets an owner and what waits of it."""
        for table in (self._waiting, self._last, self._next, self._skipped):
            table.pop(owner, None)

    def take(self) -> tuple[str, int] | None:
        """The next request to run, which waits no longer; None = none may run."""
        for owner, waiting in self._waiting.items():
            seq = waiting[0]
            if seq <= self._next[owner] or seq <= self._last.get(owner, -1):
                waiting.pop(0)
                del self._waiting[owner]
                if waiting:
                    self._waiting[owner] = waiting  # behind the others
                self._next[owner] = seq + 1
                self._advance(owner)
                return owner, seq
        return None

    def _advance(self, owner: str) -> None:
        skipped = self._skipped[owner]
        while self._next[owner] in skipped:
            skipped.discard(self._next[owner])
            self._next[owner] += 1
        skipped -= {seq for seq in skipped if seq < self._next[owner]}
