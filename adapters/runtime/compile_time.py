"""Seconds that a thread has spent compiling, from JAX's own measurements, and a clock that leaves them out.

Each thread counts its own, since threads compile at the same time: an engine in the trainer's process beside the
trainer. Together they may compile for longer than has passed.
"""

import contextlib
import functools
import threading
import time
from collections.abc import Iterator

import jax

PHASES = "/jax/core/compile/jaxpr_to_mlir_module_duration", "/jax/core/compile/backend_compile_duration"


class _Thread(threading.local):
    """What a thread has compiled.

    Attributes:
      begun: (start, `total` before it) of each measurement that is not within another.
    """

    def __init__(self) -> None:
        self.total = 0.0
        self.begun: list[tuple[float, float]] = []


_own = _Thread()
_left_out = 0.0


@functools.cache
def measure() -> None:
    """Starts measuring; call it before anything is compiled."""
    jax.monitoring.register_event_duration_secs_listener(_add)


def seconds() -> float:
    """Seconds that this thread has spent lowering and compiling since `measure`."""
    return _own.total


@contextlib.contextmanager
def left_out() -> Iterator[None]:
    """Takes what this thread compiles in the block out of `clock`. Such blocks follow each other."""
    global _left_out
    began, before = time.monotonic(), seconds()
    yield
    _left_out += min(seconds() - before, time.monotonic() - began)  # so that the clock never goes back


def clock() -> float:
    """A monotonic clock in seconds without those that are `left_out`."""
    return time.monotonic() - _left_out


def _add(event: str, duration_secs: float, **of: str | int) -> None:
    if event not in PHASES:
        return
    start = time.monotonic() - duration_secs
    while _own.begun and _own.begun[-1][0] >= start:  # within this one
        _own.total = _own.begun.pop()[1]
    _own.begun.append((start, _own.total))
    _own.total += duration_secs
