"""Seconds that this process has spent compiling, from JAX's own measurements."""

import functools
import time

import jax

PHASES = "/jax/core/compile/jaxpr_to_mlir_module_duration", "/jax/core/compile/backend_compile_duration"

_total = 0.0


@functools.cache
def measure() -> None:
    """Starts measuring; call it before anything is compiled."""
    jax.monitoring.register_event_duration_secs_listener(_add)


def seconds() -> float:
    """Seconds of lowering and compiling since `measure`, over all threads."""
    return _total


def clock() -> float:
    """A monotonic clock in seconds that stands still while a program is compiled."""
    return time.monotonic() - _total


def _add(event: str, duration_secs: float, **of: str | int) -> None:
    global _total
    if event in PHASES:
        _total += duration_secs
