"""Where an exception came from, and what it says: one of our own needs no traceback, a bug in a user's code does."""

from __future__ import annotations

import traceback
from types import FrameType


def raised_here(error: BaseException) -> bool:
    """Whether a module of areax raised the error."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return ours(frame)


def ours(frame: FrameType) -> bool:
    """Whether the frame runs code of areax."""
    return str(frame.f_globals.get("__name__")).split(".")[0] == __name__.split(".")[0]


def words(error: BaseException) -> str:
    """What an error says, in one line that can be encoded, whatever its own code does."""
    try:
        text = str(error)
    except Exception:  # its code may raise anything
        text = "(its text cannot be read)"
    return " ".join(text.encode(errors="backslashreplace").decode().split())
