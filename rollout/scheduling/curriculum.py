"""Curricula: orders of training rows, shuffled, easy to hard, or by success rates measured so far."""

from __future__ import annotations

import functools
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import xxhash

from .. import object_path
from ..types import Sample

Row = Mapping[str, Any]

TABLE = 1 << 20  # most rows of which a permutation is kept as a table
ROUNDS = 6  # of the Feistel network that permutes more


@dataclass(frozen=True)
class Curriculum:
    """The order of training rows.

    Attributes:
      order: "shuffled" = reshuffled each epoch; "easy_first" = sorted by `field` in each epoch; "success" = sampled by
        the mean rewards of their groups so far, which must lie in 0..1: rows with rates near `target` more often.
      field: a numeric field of the rows that grows with difficulty; with "success" it sets first estimates. "" = none.
      target: the preferred success rate. A group's signal is the spread of its rewards, which is largest at 0.5.
      floor: minimum weight of a row relative to one at the target, so that no row is starved.
      memory: decay of an estimate: the share kept when a group of the row ends; 0 = only the last group counts.
    """

    order: Literal["shuffled", "easy_first", "success"] = "shuffled"
    field: str = ""
    target: float = 0.5
    floor: float = 0.1
    memory: float = 0.5

    def __post_init__(self):
        for name, holds, rule in (
            ("target", 0 < self.target < 1, "lie between 0 and 1"),
            ("floor", 0 < self.floor <= 1, "be above 0 and at most 1"),
            ("memory", 0 <= self.memory < 1, "be at least 0 and below 1"),
            ("field", self.field or self.order != "easy_first", "name a field of the rows for easy_first"),
            ("field", not self.field or self.order != "shuffled", "be empty if rows are shuffled"),
        ):
            if not holds:
                raise ValueError(f"curriculum: {name} must {rule}, got {getattr(self, name)!r}")
        for name in ("target", "floor", "memory"):
            if self.order != "success" and getattr(self, name) != getattr(Curriculum, name):
                raise ValueError(
                    f"curriculum: {name} must be left out with order {self.order}, which has none, got "
                    f"{getattr(self, name)}; or use order success"
                )


def ordered(rows: Sequence[Row], spec: Curriculum = Curriculum(), seed: int = 0) -> Prompts | EasyFirst | Adaptive:
    """Puts the rows in the curriculum's order, indexed by ordinal."""
    if spec.order == "success":
        return Adaptive(rows, spec, seed)
    return EasyFirst(rows, spec.field, seed) if spec.order == "easy_first" else Prompts(rows, seed)


@dataclass(frozen=True)
class Prompts:
    """An endless sequence of rows that depends only on the ordinal: reshuffled each epoch, or in their given order."""

    rows: Sequence[Row]
    seed: int = 0
    shuffle: bool = True

    def __post_init__(self):
        if not len(self.rows):
            raise ValueError("Prompts: at least one row is needed, got an empty data set")

    def __getitem__(self, ordinal: int) -> Row:
        epoch, index = divmod(ordinal, len(self.rows))
        if self.shuffle:
            index = _shuffled(self.seed, epoch, len(self.rows), index)
        return self.rows[index]

    @property
    def size(self) -> int:
        return len(self.rows)

    @property
    def order(self) -> int | None:
        """What the order depends on, apart from the rows."""
        return self.seed if self.shuffle else None


def _shuffled(seed: int, epoch: int, size: int, index: int) -> int:
    """The index's place in the epoch's permutation of range(size).

    Above TABLE rows it is computed without a table, by a Feistel network on the next even number of bits, applied again
    while its result is not below `size` (cycle walking, Black and Rogaway 2002).
    """
    if size <= TABLE:
        return int(_permutation(seed, epoch, size)[index])
    half = ((size - 1).bit_length() + 1) // 2
    mask = (1 << half) - 1
    while True:
        left, right = index >> half, index & mask
        for number in range(ROUNDS):
            digest = xxhash.xxh3_64_intdigest(struct.pack("<4q", seed, epoch, number, right))
            left, right = right, left ^ digest & mask
        index = left << half | right
        if index < size:
            return index


@functools.lru_cache(maxsize=4)
def _permutation(seed: int, epoch: int, size: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch]).permutation(size)


def difficulties(rows: Sequence[Row], field: str) -> np.ndarray:
    """The field of every row as f64[rows]; None becomes the mean of the others.

    Raises:
      ValueError: the field is missing or not a finite number in a row, or None in all of them.
    """
    for row in rows:
        value = row.get(field, "missing")
        if isinstance(value, bool) or not (value is None or isinstance(value, int | float) and np.isfinite(value)):
            raise ValueError(f"curriculum: every row needs a number {field!r}, got {value!r}; {object_path.row(row)}")
    values = np.array([row[field] for row in rows], np.float64)
    if np.isnan(values).all():
        raise ValueError(f"curriculum: at least one row needs a number {field!r}, got None in all {len(rows)}")
    return np.where(np.isnan(values), np.nanmean(values), values)


class EasyFirst:
    """An endless sequence of rows that depends only on the ordinal: sorted by difficulty each epoch, ties shuffled."""

    def __init__(self, rows: Sequence[Row], field: str, seed: int = 0):
        self.rows, self.size, self.order = rows, len(rows), ["easy_first", field, seed]
        self._difficulty, self._seed = difficulties(rows, field), seed
        self._epoch, self._indices = -1, np.zeros(0, int)

    def __getitem__(self, ordinal: int) -> Row:
        epoch, at = divmod(ordinal, len(self.rows))
        if epoch != self._epoch:
            shuffled = _permutation(self._seed, epoch, len(self.rows))
            self._indices = shuffled[np.argsort(self._difficulty[shuffled], kind="stable")]
            self._epoch = epoch
        return self.rows[int(self._indices[at])]


class Adaptive:
    """Samples rows by estimates of their success rates, which the caller updates with `observe`.

    A row with estimate p has a weight proportional to p^(2t) (1 - p)^(2 (1 - t)), which peaks at the target t and for
    t = 0.5 is p (1 - p), the variance of a 0/1 reward; the weight is at least `floor` times the peak. Initial estimates
    are the target, or interpolated by difficulty from the easiest row (p = 0.9) to the hardest (0.1). A row with a
    pending outcome is not drawn again while there are others.

    A prompt's row is a function of the seed, its ordinal, and what was drawn and observed before it was drawn. `state`
    holds all of this, so that a resumed run draws the same rows as one that was never interrupted.
    """

    def __init__(self, rows: Sequence[Row], spec: Curriculum, seed: int = 0):
        if not len(rows):
            raise ValueError("curriculum: at least one row is needed, got an empty data set")
        self.rows, self.size, self.order = rows, len(rows), ["success", spec.field, seed]
        self.rate = np.full(len(rows), spec.target)  # estimated success rates
        if spec.field:
            values = difficulties(rows, spec.field)
            self.rate = 0.9 - 0.8 * (values - values.min()) / max(np.ptp(values), 1e-12)
        self._spec, self._seed = spec, seed
        self._weight = self._weigh(self.rate)
        self._observed: set[int] = set()  # rows
        self._drawn: dict[int, int] = {}  # {prompt: its row} while the outcome is pending

    def __getitem__(self, ordinal: int) -> Row:
        self.draw(ordinal)
        return self.rows[self._drawn[ordinal]]

    def draw(self, ordinal: int) -> None:
        """Chooses the prompt's row now, unless that was done before."""
        if ordinal not in self._drawn:
            self._drawn[ordinal] = self._draw(ordinal)

    def observe(self, prompt: int, success: float) -> None:
        """Updates the estimate of the prompt's row with the mean reward of its group, NaN if it has none."""
        index = self._drawn.pop(prompt)
        if not np.isfinite(success):
            return
        if not 0 <= success <= 1:
            raise ValueError(
                f"curriculum: order success needs rewards from 0 to 1, got a mean of {success:g}; "
                f"{object_path.row(self.rows[index])}"
            )
        memory = self._spec.memory
        self._set(index, memory * self.rate[index] + (1 - memory) * success)

    def state(self, prompts: Iterable[int]) -> dict[str, Any]:
        """The observed rates, and the rows drawn for these prompts, as JSON-serialisable values."""
        return {
            "rates": [[index, float(self.rate[index])] for index in sorted(self._observed)],
            "drawn": [[prompt, self._drawn[prompt]] for prompt in prompts if prompt in self._drawn],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continues from a `state`."""
        for index, rate in state["rates"]:
            self._set(index, rate)
        self._drawn = {prompt: index for prompt, index in state["drawn"]}

    def _set(self, index: int, rate: float) -> None:
        self.rate[index] = rate
        # Per element, as after a restart: powers of a whole array may round differently.
        self._weight[index] = self._weigh(self.rate[index])
        self._observed.add(index)

    def _draw(self, ordinal: int) -> int:
        weight = self._weight.copy()
        weight[list(self._drawn.values())] = 0.0
        total = np.cumsum(weight if weight.any() else self._weight)
        at = np.random.default_rng([self._seed, ordinal]).random() * total[-1]
        return min(int(np.searchsorted(total, at, side="right")), int(np.searchsorted(total, total[-1])))

    def _weigh(self, rate):
        a, b = 2 * self._spec.target, 2 * (1 - self._spec.target)
        most = self._spec.target**a * (1 - self._spec.target) ** b
        return np.maximum(rate**a * (1 - rate) ** b / most, self._spec.floor)


def success(samples: Sequence[Sample]) -> float:
    """The mean reward of a group's scorable rollouts; NaN if there are none."""
    scored = [s for s in samples if s.reward == s.reward]
    weight = sum(s.weight for s in scored)
    return sum(s.weight * s.reward for s in scored) / weight if weight else float("nan")
