"""Rows of metrics for the report: one per kind and step, and what is in them."""

from __future__ import annotations

import math
import pathlib
import sys
from collections.abc import Iterator, Sequence

from ..tracking import run_dir as tracker

LARGEST = sys.float_info.max
Rows = Sequence[dict]
Types = dict[str, tuple[type, ...]]
Steps = dict[str, dict[int, dict]]  # rows by kind and step
FIELDS: Types = {"step": (int, float), "kind": (str,), "seconds": (int, float), "nonfinite": (dict,)}
TYPES = {int: "a number", str: "a text", list: "a list", dict: "an object"}


def lines(path: pathlib.Path, fields: Types = FIELDS) -> Iterator[dict]:
    """The lines of metrics.jsonl or samples.jsonl; none without the file.

    Raises ValueError with the line number if a line is not an object, or has one of the fields in another type.
    """
    for number, line in enumerate(tracker.read_lines(path) if path.exists() else (), 1):
        yield checked(line, f"{path}:{number}", fields)


def checked(line: dict, where: str, fields: Types = FIELDS) -> dict:
    """The line. Raises ValueError, behind `where` it is, if it has one of the fields in another type."""
    for name, types in fields.items():
        if name in line and not (isinstance(line[name], types) and (int not in types or is_number(line[name]))):
            raise ValueError(f"{where}: {name} must be {TYPES[types[0]]}, got {line[name]!r:.80}; remove the line")
    return line


def read(path: pathlib.Path) -> dict[str, list[dict]]:
    """{kind: rows by increasing step} of metrics.jsonl."""
    kinds: Steps = {}
    for line in lines(path):
        add(kinds, line)
    return table(kinds)


def add(kinds: Steps, line: dict) -> None:
    """Adds a line, to the row of its kind and step."""
    rows = kinds.setdefault(str(line.get("kind", "run")), {})
    rows.setdefault(line.get("step", 0), {}).update(line)


def table(kinds: Steps) -> dict[str, list[dict]]:
    """{kind: rows by increasing step}."""
    return {kind: [rows[step] for step in sorted(rows)] for kind, rows in kinds.items()}


def names(rows: Rows) -> list[str]:
    """Names of numeric metrics in the rows, in order of appearance."""
    return list({n: None for r in rows for n, v in r.items() if n not in tracker.OURS and is_number(v)})


def is_number(value) -> bool:
    """Whether a value is a number, and no integer beyond all floats."""
    return isinstance(value, int | float) and not LARGEST < abs(value) < math.inf


def points(rows: Rows, name: str) -> list[tuple[float, float | None]]:
    """(step, value) of the rows that have the metric; value None if it was not finite."""
    return [(r["step"], r[name] if is_number(r[name]) else None) for r in rows if name in r]


def has(rows: Rows, name: str) -> bool:
    """Whether any of the rows has a number of this name."""
    return any(is_number(r.get(name)) for r in rows)


def values(rows: Rows, name: str) -> list[float]:
    """The numbers of this name."""
    return [r[name] for r in rows if is_number(r.get(name))]
