"""Memory: of this machine and this process, and sizes that no such machine can hold, refused in advance."""

from __future__ import annotations

import math
import os
import resource
from collections.abc import Iterator, Sequence
from typing import Any

PROCESS, WORKER = 200_000_000, 10_000_000  # bytes that a process with JAX, and one without, need at least


def of_machine() -> int:
    """This machine's memory in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def resident() -> int:
    """Bytes of memory that this process uses; the peak if the system does not report the current use."""
    try:
        with open("/proc/self/statm", "rb") as statm:
            return int(statm.read().split()[1]) * resource.getpagesize()
    except FileNotFoundError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def of_devices(local: Sequence[Any]) -> float:
    """The bytes that JAX devices of this process hold together; infinite if they do not say."""
    if local[0].platform == "cpu":  # they share it
        return of_machine()
    return sum((device.memory_stats() or {}).get("bytes_limit", math.inf) for device in local)


def check(options: str, least: int, there: float | None = None) -> None:
    """Raises ValueError with `lacking`'s sentence, if there is one."""
    for reason in lacking(options, least, there):
        raise ValueError(reason)


def lacking(options: str, least: int, there: float | None = None) -> Iterator[str]:
    """Why `options` cannot be used, one sentence, if they need more memory than there is.

    Args:
      options: as on the command line, with their values.
      least: a lower bound of the bytes that they need.
      there: the bytes that there are; None = this machine's.
    """
    there = of_machine() if there is None else there
    if least > there:
        yield f"{options} must fit into {there / 1e9:.0f} GB of memory, got at least {least / 1e9:,.0f} GB; use fewer"
