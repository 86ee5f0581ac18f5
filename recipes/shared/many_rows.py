"""Rows of data sets that are too large for memory: read, converted and checked one at a time."""

from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

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
    own = _rows(records, source, row, check, bad, recognise, quiet)
    own.check()
    return own


def every(
    source: str, row: str = "", limit: int = 0, *, check: Check = lambda row: None, bad: Bad = "stop",
    recognise: bool = False, quiet: bool = False,
) -> Sequence[dict]:  # fmt: skip
    """As `rows.read`, for evaluations: of a data set with more than `datasets.MANY` rows all are checked, none is
    replaced, and they stay on the disk."""
    records = datasets.many(source, limit=limit or None)
    if records is None:
        return rows.read(source, row, limit, check=check, bad=bad, recognise=recognise, quiet=quiet)
    return _rows(records, source, row, check, bad, recognise, quiet).usable()


def _rows(records, source, row, check, bad, recognise, quiet) -> "Rows":
    say = (lambda words: None) if quiet else progress.say
    recognise = recognise and not row
    if recognise:
        first = next((record for record, _ in records if isinstance(record, dict)), {})
        row = formats.recognised(first) or ""
        if row:
            say(f"{source}: rows are made of the fields {sorted(first)} by --row {row}")
    return Rows(records, source, rows.reader(row, check, recognise), bad, say)


def spread(size: int, count: int) -> list[int]:
    """Up to `count` indices from 0 to `size` - 1 at equal distances."""
    return sorted({i * size // count for i in range(count)})


class Rows(Sequence):
    """Rows that are read, converted and checked on access, so that memory stays flat.

    In place of a row that is left out comes another one at random, the same in every run and every process.

    Args:
      records: (record or error, its place) by index.
      use: f(records) -> the outcome of each, as `rows.reader`.
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
            row, why = self.read(at)
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
        left = Counter(why for _, why in self._outcomes(chosen) if why is not None)
        self._say(
            f"{self._source}: {len(self):,} rows stay on the disk; {len(chosen):,} spread over them are checked, the "
            "others when they are read"
        )
        self._report(left, len(chosen))

    def usable(self) -> "Usable":
        """Reads and checks all rows; prints how many are left out, and why."""
        kept, left = array("q"), Counter[str]()
        for index, (_, why) in enumerate(self._outcomes(range(len(self)))):
            if why is None:
                kept.append(index)
            else:
                left[why] += 1
        self._say(f"{self._source}: {len(kept):,} rows stay on the disk, where they are read when they are used")
        self._report(left, len(self))
        return Usable(self, kept)

    def _report(self, left: Counter[str], checked: int) -> None:
        if left.total() == checked:
            raise ValueError(
                f"{self._source}: all {checked} rows that were checked are left out, {'; '.join(left)}; at least one "
                "is needed"
            )
        for why, count in left.items():
            self._say(f"{count:,} of {checked:,} rows that were checked are left out, {why}")

    def read(self, index: int) -> tuple[dict, str | None]:
        """(row, why it is left out); raises ValueError for a bad row unless those are skipped."""
        [outcome] = self._outcomes([index])
        return outcome

    def _outcomes(self, indices: Sequence[int]) -> Iterator[tuple[dict, str | None]]:
        """What `read` returns for each of these."""
        for start in range(0, len(indices), rows.TOGETHER):
            chunk = [self._records[i] for i in indices[start : start + rows.TOGETHER]]
            made = self._use([record for record, _ in chunk if not isinstance(record, ValueError)])
            for record, place in chunk:
                if isinstance(record, ValueError):
                    yield {}, self._refuse(record)
                elif isinstance(outcome := next(made), ValueError):
                    yield {}, self._refuse(ValueError(f"{place}: {outcome}"))
                else:
                    yield outcome[0] or {}, outcome[1]

    def _refuse(self, error: ValueError) -> str:
        """Why a bad row is left out; raises the error unless bad ones are skipped."""
        if self._bad == "stop":
            raise error
        self._refused = self._refused or str(error)
        return f"bad (--bad-rows skip), the first: {self._refused}"


class Usable(Sequence):
    """The rows of `Rows` at these indices, read on access."""

    def __init__(self, rows: Rows, indices: Sequence[int]):
        self._rows, self._indices = rows, indices

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index):
        chosen = self._indices[index]
        return [self._rows.read(i)[0] for i in chosen] if isinstance(index, slice) else self._rows.read(chosen)[0]
