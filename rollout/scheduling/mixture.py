"""Mixtures: rows of several sources, each with its share."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping
from fractions import Fraction
from typing import Any

import numpy as np

from .curriculum import EasyFirst, Prompts, Row
from .stream import Stream

LONGEST = 1_000_000  # rows of a block
FIELD = "data_source"  # of a row: its source, unless it has such a field already, as verl's rows have


class Mixture:
    """An endless sequence of rows from several sources that depends only on the ordinal.

    Every block of rows has exactly the sources' shares, in an order shuffled by the seed; a block is the shortest for
    which that is possible, as 10 rows for 0.7 and 0.3. A source that ends starts anew.
    """

    def __init__(
        self, sources: Mapping[str, Prompts | EasyFirst | Stream], weights: Mapping[str, Fraction], seed: int = 0
    ):
        shares = [weights[name] / sum(weights.values()) for name in sources]
        self._length = math.lcm(*(share.denominator for share in shares))
        if self._length > LONGEST:
            shown = ", ".join(f"{name} {float(weight):g}" for name, weight in weights.items())
            raise ValueError(
                f"Mixture: weights must be shares of at most {LONGEST:,} rows, got {shown}; write fewer digits"
            )
        self._names, self._sources, self._seed = list(sources), list(sources.values()), seed
        self._counts = tuple(int(share * self._length) for share in shares)

    def __getitem__(self, ordinal: int) -> Row:
        source, at = self._place(ordinal)
        return {FIELD: self._names[source], **self._sources[source][at]}

    def source(self, ordinal: int) -> str:
        """The name of the row's source."""
        return self._names[self._place(ordinal)[0]]

    def shares(self, ordinals: Iterable[int]) -> dict[str, float]:
        """{NAME/share: the share of these rows that its source has}."""
        names = [self.source(ordinal) for ordinal in ordinals]
        return {f"{name}/share": names.count(name) / len(names) for name in self._names}

    @property
    def rows(self) -> Any:
        """Rows of the first source."""
        return self._sources[0].rows

    @property
    def contents(self) -> list[Any]:
        """The rows of each source."""
        return [source.rows for source in self._sources]

    @property
    def size(self) -> int:
        return sum(source.size or 0 for source in self._sources)

    @property
    def order(self) -> list:
        """What the order depends on, apart from the rows."""
        parts = zip(self._names, self._counts, self._sources, strict=True)
        return ["mixture", *(f"{name}:{count}:{own.size}:{own.order}" for name, count, own in parts), self._seed]

    def _place(self, ordinal: int) -> tuple[int, int]:
        """(source, ordinal within it) of a row."""
        block, inside = divmod(ordinal, self._length)
        slots = _slots(self._counts, self._seed, block)
        source = int(slots[inside])
        return source, block * self._counts[source] + int(np.count_nonzero(slots[:inside] == source))


@functools.lru_cache(maxsize=4)
def _slots(counts: tuple[int, ...], seed: int, block: int) -> np.ndarray:
    """The source of each row of a block, i16[rows]."""
    return np.random.default_rng([seed, block]).permutation(np.repeat(np.arange(len(counts), dtype=np.int16), counts))
