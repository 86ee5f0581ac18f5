"""What a run trains on: one source or a mixture of several, named by `--data`, or given as an object in Python."""

import itertools
import json
import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import xxhash

from areax.adapters.data import datasets, formats
from areax.adapters.tracking import progress
from areax.parallel.multihost import agreement
from areax.recipes.shared import evaluation, many_rows, rows
from areax.recipes.shared.rows import Bad, Check
from areax.rollout.scheduling.curriculum import Adaptive, Curriculum, EasyFirst, Prompts, ordered
from areax.rollout.scheduling.mixture import Mixture
from areax.rollout.scheduling.stream import AGAIN, Stream

WEIGHT = re.compile(r"(\d+\.?\d*|\.\d+)(e[-+]?\d+)?", re.ASCII | re.IGNORECASE)
SHUFFLED = Curriculum()
SOME = 100  # rows of a source that tell whether it is the same
FIRST = 1000  # rows of a stream that are checked before anything starts

Order = Prompts | EasyFirst | Adaptive | Mixture | Stream


class Source(NamedTuple):
    name: str
    place: str
    weight: Fraction


def named(data: str) -> list[Source]:
    """The sources of `--data`, given as ROWS or as NAME=ROWS:WEIGHT,NAME=ROWS:WEIGHT; without a weight it is 1.

    Raises:
      ValueError: one of several sources has no name, two have the same, a weight is not above 0, or a number may be
        either a weight or a configuration on the hub.
    """
    # os.path: a long text, which is no file's name, is only an OSError to `Path`
    several = isinstance(data, str) and evaluation.NAMED.fullmatch(data) and not os.path.exists(data)
    texts = data.split(",") if several else [data]
    made: list[Source] = []
    for text in texts:
        found = evaluation.NAMED.fullmatch(text) if several else None
        name, place = found.groups() if found else ("", text)
        if not name and len(texts) > 1:
            raise ValueError(f"--data: each of several sources needs a name, as in math={text}, got {text}")
        place, weight = _weighted(text, place) if name else (place, Fraction(1))
        if name in [other.name for other in made]:
            raise ValueError(f"--data: sources must have different names, got {name} twice")
        made.append(Source(name, place, weight))
    return made


def _weighted(text: str, place: str) -> tuple[str, Fraction]:
    """(ROWS, WEIGHT) of a source's text; any number after the last colon is its weight."""
    rows, _, word = place.rpartition(":")
    try:
        number = float(word)
    except ValueError:  # a split, a configuration, a part of a name
        return place, Fraction(1)
    if not rows:
        return place, Fraction(1)
    if not (WEIGHT.fullmatch(word) and 0 < number < math.inf):
        raise ValueError(
            f"--data: a weight must be a number above 0, such as 2, .5 or 1e-3, got {text}; leave out a source without "
            "a share"
        )
    if word.isdecimal() and ":" not in rows and datasets.means_the_hub(rows):
        raise ValueError(
            f"--data: a whole number after a data set on the hub may be its weight or its configuration, got {text}; "
            f"write {rows}:{word}.0 for the weight, {rows}:{word}:1 for the configuration"
        )
    return rows, Fraction(word)


def opened(
    data: str, given: Any = None, row: str = "", limit: int = 0, *, check: Check, bad: Bad, recognise: bool, seed: int,
    spec: Curriculum = SHUFFLED, quiet: bool = False,
) -> Order:  # fmt: skip
    """Opens what a run trains on, in the curriculum's order; arguments as `rows.read`.

    Args:
      given: instead of `data` a list, a `datasets.Dataset` or another sequence of rows; or an iterable such as a
        `datasets.IterableDataset` or a torch DataLoader, whose order is kept.
    """
    if given is not None:
        if data:
            raise ValueError(f"rows=: must be given without --data, got both, --data {data}; write data=''")
        return _given(given, row, limit, check=check, bad=bad, recognise=recognise, seed=seed, spec=spec, quiet=quiet)
    found = named(data)
    own: dict[str, Any] = {}
    for i, source in enumerate(found):
        read = many_rows.opened(
            source.place, row, limit, check=check, bad=bad, recognise=recognise, quiet=quiet
        )  # fmt: skip
        own[source.name] = _ordered(read, spec, seed + i)
    if not found[0].name:
        return own[""]
    if spec.order == "success":
        raise ValueError("--curriculum.order success needs one source of --data, got a mixture; use another order")
    return Mixture(own, {source.name: source.weight for source in found}, seed)


def sampled(order: Order) -> list:
    """What processes compare of their rows: all of those in memory; of others their number and some of them."""
    if isinstance(order, Mixture):
        return [order.order, *(order[i] for i in range(100))]
    if isinstance(order, Stream):
        return [order[i] for i in range(100)]
    return some(order.rows)


def some(own: Sequence) -> list:
    """The rows if they are in memory, else their number and SOME of them."""
    return own if isinstance(own, list) else [len(own), *(own[i] for i in many_rows.spread(len(own), SOME))]


def identity(order: Order) -> dict[str, Any]:
    """What a run that goes on must find again: the number of rows, their order, and a hash of the rows in memory and of
    SOME of a source's others, None of a stream's."""
    owns = order.contents if isinstance(order, Mixture) else [order.rows]
    return {
        "rows": order.size,
        "order": order.order,
        "hash": None if isinstance(order, Stream) else _content([some(own) for own in owns]),
    }


def _content(owns: Iterable[Iterable]) -> str:
    """The hash of rows as JSON, one after the other: the text of all of them is as large as they are."""
    state = xxhash.xxh3_64(b"[")
    for i, own in enumerate(owns):
        state.update(b", [" if i else b"[")
        for j, row in enumerate(own):
            text = json.dumps(row, sort_keys=True, default=agreement.shown)
            state.update((f", {text}" if j else text).encode())
        state.update(b"]")
    state.update(b"]")
    return state.hexdigest()


def check_same(order: Order, then: Mapping[str, Any], data: str = "") -> None:
    """Raises ValueError if a run cannot go on because its rows or their order are others now.

    Args:
      then: the `identity` that its state was saved with.
      data: what --data is now.
    """
    now, option = identity(order), f"--data {data}".rstrip()
    was, own = (x if isinstance(x, list) else ["shuffled", x] for x in (then["order"], now["order"]))
    if was[-1] != own[-1]:
        raise ValueError(
            f"--seed must be the run's, {was[-1]}, for the same order of --data, got {own[-1]}; or name another --out"
        )
    if was != own and "mixture" in (was[0], own[0]):
        raise ValueError(
            f"{option} must have the run's sources, weights and rows, {_shown(was)}, got {_shown(own)}; or name "
            "another --out"
        )
    if now["rows"] != then["rows"]:
        raise ValueError(
            f"{option} must have the {then['rows']} rows that the run was started with, got {now['rows']}; --limit, "
            "--row, --bad-rows and what is left out as too long choose among them; or name another --out"
        )
    if was != own:
        raise ValueError(
            f"--curriculum.order and field must be the run's, {_shown(was)}, got {_shown(own)}; or name another --out"
        )
    if then.get("hash") and then["hash"] != now["hash"]:
        raise ValueError(
            f"{option} must have the rows that the run was started with, got others; or name another --out"
        )


def _shown(order: list) -> str:
    return " ".join(map(str, order[:-1]))


def _ordered(own: Sequence[dict], spec: Curriculum, seed: int) -> Prompts | EasyFirst | Adaptive:
    if spec.order != "shuffled" and not isinstance(own, list):
        raise ValueError(
            f"--curriculum.order {spec.order} needs rows in memory, at most {datasets.MANY:,} and 1 GiB, got "
            f"{len(own):,} rows; use order shuffled or --limit"
        )
    return ordered(own, spec, seed)


def _given(
    given: Any, row: str, limit: int, *, check: Check, bad: Bad, recognise: bool, seed: int, spec: Curriculum,
    quiet: bool,
) -> Prompts | EasyFirst | Adaptive | Stream:  # fmt: skip
    if isinstance(given, str | Mapping):
        raise ValueError(f"rows=: must be a list, a data set or an iterable of rows, got {type(given).__name__}")
    if hasattr(given, "to_dict") and hasattr(given, "columns"):  # of pandas, whose index and iteration give columns
        raise ValueError(
            f"rows=: must be a list, a data set or an iterable of rows, got {type(given).__name__}; give its "
            "to_dict('records')"
        )
    if not _random_access(given):
        if spec.order != "shuffled":
            raise ValueError(f"--curriculum.order {spec.order} needs rows in memory, got {type(given).__name__}")
        return _stream(given, row, limit, check, bad, recognise, quiet)
    records = datasets.given(given, limit or None)
    if len(records) > datasets.MANY or (not limit and datasets.large(given)):
        over = many_rows.over(records, "rows", row, check=check, bad=bad, recognise=recognise, quiet=quiet)
        return _ordered(over, spec, seed)
    refused: list[ValueError] = []
    read = datasets.good(list(records), "rows", refused.append if bad == "skip" else None)
    own = rows.made(read, refused, "rows", row, check=check, bad=bad, recognise=recognise, quiet=quiet)
    return _ordered(own, spec, seed)


def _random_access(given: Any) -> bool:
    """Whether rows can be read by index. Torch's IterableDataset cannot, though it has the method and may have a
    length."""
    torch = sys.modules.get("torch.utils.data")
    iterated = torch is not None and isinstance(given, torch.IterableDataset)
    return hasattr(given, "__len__") and hasattr(given, "__getitem__") and not iterated


def _stream(given: Iterable, row: str, limit: int, check: Check, bad: Bad, recognise: bool, quiet: bool) -> Stream:
    """A stream of the rows that can be used, of which the FIRST are checked."""
    own = Converted(given, row, limit, check, bad, recognise, quiet)
    stream = Stream(own)
    for i in range(FIRST):
        stream[i]
        if own.passes > 1:
            break
    return stream


class Converted:
    """The rows of an iterable of records, or of batches of them, that can be used.

    Attributes:
      passes: how often its iteration has begun.
    """

    def __init__(self, given: Iterable, row: str, limit: int, check: Check, bad: Bad, recognise: bool, quiet: bool):
        self._given, self._row, self._limit, self._check, self._bad = given, row, limit or None, check, bad
        self._recognise, self._say = recognise and not row, (lambda words: None) if quiet else progress.say
        self._use: Callable | None = None
        self._left = 0
        self.passes = 0

    def set_epoch(self, epoch: int) -> None:
        if hasattr(self._given, "set_epoch"):
            self._given.set_epoch(epoch)

    def __iter__(self) -> Iterator[dict]:
        self.passes += 1
        if self.passes > 1 and iter(self._given) is self._given:
            raise ValueError(f"rows=: an iterator cannot start anew, got a {type(self._given).__name__}; {AGAIN}")
        for i, record in enumerate(itertools.islice(_unbatched(self._given), self._limit)):
            try:
                row, why = self._read(record)
            except ValueError as error:
                if self._bad == "stop":
                    raise ValueError(f"rows: row {i + 1}: {error}") from error
                row, why = None, f"bad (--bad-rows skip), such as row {i + 1}: {error}"
            if row is not None and why is None:
                yield row
                continue
            self._left += 1
            if str(self._left).strip("0") == "1":  # 1, 10, 100, ...
                self._say(f"rows: {self._left:,} rows were left out since the start, the last {why}")

    def _read(self, record: Any) -> tuple[dict | None, str | None]:
        if not isinstance(record, dict):
            raise ValueError(f"a row must be a dict, got {type(record).__name__}")
        if self._use is None:
            row = self._row or (formats.recognised(record) or "" if self._recognise else "")
            if row != self._row:
                self._say(f"rows: rows are made of the fields {sorted(record)} by --row {row}")
            self._use = rows.reader(row, self._check, self._recognise)
        [outcome] = self._use([datasets.listed(record)])
        if isinstance(outcome, ValueError):
            raise outcome
        return outcome


def _unbatched(given: Iterable) -> Iterator:
    """The records of an iterable; those of its batches where it is a DataLoader with batches, or gives lists."""
    batched = getattr(given, "batch_size", None) is not None
    for entry in given:
        if isinstance(entry, list | tuple):
            yield from entry
        elif batched and isinstance(entry, Mapping):  # as torch collates: a list or tensor of each field
            columns = [column.tolist() if hasattr(column, "tolist") else column for column in entry.values()]
            for name, column in zip(entry, columns, strict=True):
                if not (isinstance(column, list) and all(isinstance(x, str | int | float) for x in column)):
                    raise ValueError(
                        f"rows=: a DataLoader that collates lists or dicts, such as field {name!r}, takes rows apart; "
                        "give it collate_fn=list"
                    )
            yield from (dict(zip(entry, values, strict=True)) for values in zip(*columns, strict=True))
        else:
            yield entry
