"""What `areax doctor` says: one line each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Finding:
    """One line.

    Attributes:
      state: "broken" if areax cannot do here what it is installed for; "note" if something is missing or slow.
      text: what was found, and what to do about it.
    """

    state: Literal["ok", "note", "broken"]
    text: str


def ok(text: str) -> Finding:
    return Finding("ok", text)


def note(text: str) -> Finding:
    return Finding("note", text)


def broken(text: str) -> Finding:
    return Finding("broken", text)
