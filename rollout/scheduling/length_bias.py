"""Measures length bias: long groups may be stopped, or still running when a batch closes."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

WINDOW = 16  # batches in the sliding window


def mean(ended: Iterable[tuple[float, float]], cut: Iterable[float]) -> float:
    """The mean value under right-censoring (Kaplan and Meier 1958); NaN if nothing ended.

    A censored item redistributes its mass equally to all that ran longer (Efron 1967). One that outlasts every ended
    item counts as the longest of these, which biases the mean downwards.

    Args:
      ended: (duration in seconds, value) of items that ended.
      cut: durations in seconds of items that were stopped or are still running.
    """
    order = sorted([(seconds, 0, value) for seconds, value in ended] + [(seconds, 1, 0.0) for seconds in cut])
    last = max((i for i, (_, was_cut, _) in enumerate(order) if not was_cut), default=-1)
    total, share = 0.0, 1.0  # share: the mass left for the remaining items
    for i, (_, was_cut, value) in enumerate(order):
        part = share / (len(order) - i) if i < last else share
        if not was_cut:
            total, share = total + part * value, share - part
        if i == last:
            return total
    return float("nan")


class Lengths:
    """Compares tokens per episode, averaged per group, of recent groups: started ones against trained ones.

    A stopped group counts as running until its rerun has ended.
    """

    def __init__(self, groups_per_batch: int):
        self._ended: deque[tuple[float, float]] = deque(maxlen=WINDOW * groups_per_batch)  # (seconds, tokens)
        self._trained: deque[float] = deque(maxlen=WINDOW * groups_per_batch)
        self._begun: dict[int, float] = {}  # prompt: start time
        self._stopped: dict[int, float] = {}  # prompt: seconds it ran before it was stopped

    def begin(self, prompt: int, now: float) -> None:
        self._begun[prompt] = now

    def end(self, prompt: int, now: float, tokens: float | None) -> None:
        """Records that a group ended by itself; `tokens` is None if it had no samples."""
        seconds = now - self._begun.pop(prompt)
        self._stopped.pop(prompt, None)
        if tokens is not None:
            self._ended.append((seconds, tokens))

    def stop(self, prompt: int, now: float) -> None:
        """Records that a group was stopped, or was surplus after it ended, and will run again."""
        if (begun := self._begun.pop(prompt, None)) is not None:
            self._stopped[prompt] = max(now - begun, self._stopped.get(prompt, 0.0))

    def train(self, tokens: Iterable[float]) -> None:
        """Records the groups of a batch."""
        self._trained.extend(tokens)

    def report(self, now: float) -> dict[str, float]:
        """The metrics `length_begun`, mean tokens per episode of all groups that were started, and `length_bias`, the
        relative excess of those trained on; {} before the first batch."""
        if not self._trained:
            return {}
        running = {prompt: now - begun for prompt, begun in self._begun.items()}
        cut = [max(running.get(p, 0.0), self._stopped.get(p, 0.0)) for p in running.keys() | self._stopped.keys()]
        begun = mean(self._ended, cut)
        trained = sum(self._trained) / len(self._trained)
        return {"length_begun": begun, "length_bias": trained / begun - 1 if begun else 0.0}
