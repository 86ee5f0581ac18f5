"""Is what is trained on shorter than what was begun? Long groups are stopped, or still run when a batch closes."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

WINDOW = 16  # batches that are looked back upon


def mean(ended: Iterable[tuple[float, float]], cut: Iterable[float]) -> float:
    """The mean value of all, of whom some were cut off before their value was known; NaN without any who ended.

    Whoever is cut off would have gone on as those did who lasted longer: each hands its share of the mean to them, in
    equal parts (Efron 1967), which is Kaplan and Meier's estimate of the times (1958). Who outlasts all that ended
    counts as the longest of these, so that the mean is then too small.

    Args:
      ended: (seconds it took, value) of those who came to their end.
      cut: seconds after which others were cut off, or for which they have run so far.
    """
    order = sorted([(seconds, 0, value) for seconds, value in ended] + [(seconds, 1, 0.0) for seconds in cut])
    last = max((i for i, (_, was_cut, _) in enumerate(order) if not was_cut), default=-1)
    total, share = 0.0, 1.0  # share: of the mean, left for each of those behind, times their number
    for i, (_, was_cut, value) in enumerate(order):
        part = share / (len(order) - i) if i < last else share
        if not was_cut:
            total, share = total + part * value, share - part
        if i == last:
            return total
    return float("nan")


class Lengths:
    """Tokens of an episode, the mean of a group's, over the last groups that ended, run, or were trained on.

    A group that was stopped counts as running until it has run again to its end.
    """

    def __init__(self, groups_per_batch: int):
        self._ended: deque[tuple[float, float]] = deque(maxlen=WINDOW * groups_per_batch)  # (seconds, tokens)
        self._trained: deque[float] = deque(maxlen=WINDOW * groups_per_batch)
        self._begun: dict[int, float] = {}  # prompt: when
        self._stopped: dict[int, float] = {}  # prompt: seconds that it had run before

    def begin(self, prompt: int, now: float) -> None:
        self._begun[prompt] = now

    def end(self, prompt: int, now: float, tokens: float | None) -> None:
        """It ended by itself; None where it had no samples."""
        seconds = now - self._begun.pop(prompt)
        self._stopped.pop(prompt, None)
        if tokens is not None:
            self._ended.append((seconds, tokens))

    def stop(self, prompt: int, now: float) -> None:
        """It is stopped, or was left over when it had ended, and will be run again."""
        if (begun := self._begun.pop(prompt, None)) is not None:
            self._stopped[prompt] = max(now - begun, self._stopped.get(prompt, 0.0))

    def train(self, tokens: Iterable[float]) -> None:
        """Groups are handed out."""
        self._trained.extend(tokens)

    def report(self, now: float) -> dict[str, float]:
        """`length_begun`, tokens of an episode of all groups that were begun, and `length_bias`, by which part of that
        those trained on are longer; nothing before the first batch."""
        if not self._trained:
            return {}
        running = {prompt: now - begun for prompt, begun in self._begun.items()}
        cut = [max(running.get(p, 0.0), self._stopped.get(p, 0.0)) for p in running.keys() | self._stopped.keys()]
        begun = mean(self._ended, cut)
        trained = sum(self._trained) / len(self._trained)
        return {"length_begun": begun, "length_bias": trained / begun - 1 if begun else 0.0}
