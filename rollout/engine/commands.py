"""Commands of other threads, which an engine's thread runs between two dispatches."""

import collections
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

Queue = collections.deque[tuple[Callable[[], Any], Future]]


class Commands:
    """Functions to run, in order.

    Attributes:
      soon: to run at the next occasion.
      when_idle: to run once nothing is computed, such as loads of weights.
    """

    def __init__(self, lock: threading.Condition):
        """
        Args:
          lock: is held for every change of the queues.
        """
        self._lock = lock
        self.soon: Queue = collections.deque()
        self.when_idle: Queue = collections.deque()

    def add(self, act: Callable[[], Any], *, when_idle: bool) -> Future:
        """Queues a command; the lock must be held."""
        done: Future = Future()
        (self.when_idle if when_idle else self.soon).append((act, done))
        return done

    def run(self, idle: Callable[[], bool]) -> None:
        """Runs what is queued; those of `when_idle` only while `idle()`. Their ValueErrors and RuntimeErrors are
        results."""
        while True:
            with self._lock:
                if self.soon:
                    act, done = self.soon.popleft()
                elif self.when_idle and idle():
                    act, done = self.when_idle.popleft()
                else:
                    return
            try:
                done.set_result(act())
            except (ValueError, RuntimeError) as error:
                done.set_exception(error)

    def refuse(self) -> None:
        """Ends what is queued, without running it, since the engine is closed."""
        with self._lock:
            waiting = [done for _, done in (*self.soon, *self.when_idle)]
            self.soon.clear()
            self.when_idle.clear()
        for done in waiting:
            done.set_exception(RuntimeError("Engine: the engine is closed"))
