"""The `generate` calls of an episode, recorded while it goes on.

A process that goes on from them continues the call in the middle of which the former one was killed, and gets those
before it without generating. A call is known by its place among those of its episode and by its request, so that an
agent whose environment answers otherwise than before asks for something else, which is generated anew.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from ..types import Generated
from .store import Call, Journal

SECONDS = 10.0  # from an episode's first tokens to its first record, and between records


class Calls:
    """The calls of one attempt at an episode, in their order.

    Attributes:
      grows: calls that go on are recorded, too.
    """

    def __init__(
        self,
        journal: Journal,
        prompt: int,
        admitted: int,
        known: dict[tuple[int, int], Call],
        grows: bool,
        episode: int,
    ):
        """
        Args:
          admitted: the version at which the episode's group was admitted.
          known: by (episode, number), what a former process recorded; each is used once.
        """
        self.grows = grows
        self._put = lambda calls: journal.keep_calls(prompt, admitted, episode, calls)
        self._known, self._episode, self._number = known, episode, 0
        self._due: float | None = None
        self._new: dict[int, tuple[Callable[[], str], Generated]] = {}  # calls with tokens since the last record
        self._recorded: dict[int, Generated] = {}

    def next(self) -> OneCall:
        """The record of the next call."""
        self._number += 1
        return OneCall(self, self._number - 1)

    def begun(self, number: int, request: Callable[[], str]) -> Generated | None:
        found = self._known.pop((self._episode, number), None)
        return found.made if found and found.request == request() else None

    def keep(self, number: int, request: Callable[[], str], made: Generated) -> None:
        now = asyncio.get_running_loop().time()
        self._new[number] = request, made
        self._due = now + SECONDS if self._due is None else self._due
        if now >= self._due:
            self._put(dict(self._added(one, request(), made) for one, (request, made) in self._new.items()))
            self._new, self._due = {}, now + SECONDS

    def _added(self, number: int, request: str, made: Generated) -> tuple[tuple[int, int], Call]:
        """The tokens of a call that its former records lack, by its number and their place."""
        before = self._recorded.get(number, made.between(0, 0))
        start = n if made.between(0, n := len(before.tokens))[:3] == before[:3] else 0
        self._recorded[number] = made
        return (number, start), Call(request, made.between(start))


class OneCall:
    """One of these calls: a `types.Record`."""

    def __init__(self, calls: Calls, number: int):
        self.grows = calls.grows
        self._calls, self._number = calls, number

    def begun(self, request: Callable[[], str]) -> Generated | None:
        """What a former process recorded of the same request; None = nothing."""
        return self._calls.begun(self._number, request)

    def keep(self, request: Callable[[], str], made: Generated) -> None:
        """Records the tokens so far, if it is time to."""
        self._calls.keep(self._number, request, made)
