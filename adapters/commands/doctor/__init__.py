"""`areax doctor`: what is installed, which devices and kernels work, what is missing and how to get it.

packages.py reads the installed distributions, devices.py compares this machine's accelerators with those that JAX sees
(probe.py, in a process of its own that may fail or hang), machine.py measures the rest. Only the standard library is
imported here, so that it works where packages are missing.
"""

from __future__ import annotations

from collections.abc import Iterator

from . import devices, machine, packages
from .finding import Finding

__all__ = ["doctor", "findings"]


def findings() -> Iterator[Finding]:
    """Everything that is found, in the order to read it."""
    yield from packages.python()
    yield from packages.required()
    yield from devices.devices()
    yield from packages.extras()
    yield from packages.servers()
    yield from machine.machine()


def doctor() -> int:
    """Prints a line per finding; returns 1 if something is broken."""
    broken = 0
    for finding in findings():
        print(f"{finding.state:7}{finding.text}", flush=True)  # devices take seconds
        broken += finding.state == "broken"
    print(f"\n{broken} broken" if broken else "\nnothing is broken")
    return 1 if broken else 0
