"""Where an exception came from: an error of areax's own needs no traceback, a bug in a user's code does."""

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
