"""Rows of data sets that are too large for memory: read, converted and checked one at a time."""

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from areax.adapters.data import datasets, formats
from areax.adapters.tracking import progress
from areax.recipes.shared import rows
from areax.recipes.shared.rows import Bad, Check

CHECKED = 10_000  # rows that are checked before anything starts
TRIES = 1000  # rows left out one after the other that end the run


def opened(
    source: str, row: str = "", limit: int = 0, *, check: Check = lambda row: None, bad: Bad = "stop",
    recognise: bool = False, quiet: bool = False,
) -> Sequence[dict]:  # fmt: skip
    """As `rows.read`, but of a data set with more than `datasets.MANY` rows `Rows`, which stay on the disk."""
    records = datasets.many(source, limit=limit or None)
    if records is None:
        return rows.read(source, row, limit, check=check, bad=bad, recognise=recognise, quiet=quiet)
    return over(records, source, row, check=check, bad=bad, recognise=recognise, quiet=quiet)


def over(
    records: Sequence[datasets.Placed], source: str, row: str, *, check: Check, bad: Bad, recognise: bool, quiet: bool
) -> "Rows":
    """`Rows` of records, of which CHECKED, spread over all of them, are checked; arguments as `rows.read`.

    Raises ValueError for the first bad one, or if all of them are left out.
    """
    say = (lambda words: None) if quiet else progress.say
    recognise = recognise and not row
    if recognise:
        first = next((record for record, _ in records if isinstance(record, dict)), {})
        row = formats.recognised(first) or ""
        if row:
            say(f"{source}: rows are made of the fields {sorted(first)} by --row {row}")
    own = Rows(records, source, rows.reader(row, check, recognise), bad, say)
    own.check()
    return own


def spread(size: int, count: int) -> list[int]:
    """Up to `count` indices from 0 to `size` - 1 at equal distances."""
    return sorted({i * size // count for i in range(count)})


class Rows(Sequence):
    """Rows that are read, converted and checked on access, so that memory stays flat.

    In place of a row that is left out comes another one at random, the same in every run and every process.

    Args:
      records: (record or error, its place) by index.
      use: f(record) -> (row, why it is left out), as `rows.reader`.
      bad: "stop" raises for a bad row; "skip" leaves it out.
      say: prints a line.
    """

    def __init__(self, records: Sequence[datasets.Placed], source: str, use: Callable, bad: Bad, say: Callable):
        self._records, self._source, self._use, self._bad, self._say = records, source, use, bad, say
        self._left: Counter[str] = Counter()
        self._refused = ""  # why the first bad row is bad

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index):
        index = range(len(self))[index]
        for attempt in range(TRIES):
            at = int(np.random.default_rng([index, attempt]).integers(len(self))) if attempt else index
            row, why = self._read(at)
            if why is None:
                return row
            self._left[why] += 1
            if str(self._left[why]).strip("0") == "1":  # 1, 10, 100, ...
                self._say(f"{self._source}: {self._left[why]:,} rows were left out since the start, {why}")
        raise ValueError(
            f"{self._source}: {TRIES} rows one after the other are left out, the last {why}; at least one is needed"
        )

    def check(self) -> None:
        """Checks CHECKED rows; prints how many are left out, and why."""
        chosen = spread(len(self), CHECKED)
        left = Counter(why for _, why in map(self._read, chosen) if why is not None)
        self._say(
            f"{self._source}: {len(self):,} rows stay on the disk; {len(chosen):,} spread over them are checked, the "
            "others when they are read"
        )
        if left.total() == len(chosen):
            raise ValueError(
                f"{self._source}: all {len(chosen)} rows that were checked are left out, {'; '.join(left)}; at least "
                "one is needed"
            )
        for why, count in left.items():
            self._say(f"{count:,} of {len(chosen):,} rows that were checked are left out, {why}")

    def _read(self, index: int) -> tuple[dict, str | None]:
        """(row, why it is left out); raises ValueError for a bad row unless those are skipped."""
        record, place = self._records[index]
        try:
            if isinstance(record, ValueError):
                raise record
            try:
                row, why = self._use(record)
            except ValueError as error:
                raise ValueError(f"{place}: {error}") from error
        except ValueError as error:
            if self._bad == "stop":
                raise
            self._refused = self._refused or str(error)
            return {}, f"bad (--bad-rows skip), the first: {self._refused}"
        return row or {}, why
