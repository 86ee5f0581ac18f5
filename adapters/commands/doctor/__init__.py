"""`areax doctor`: what is installed, which devices and kernels work, what is missing and how to get it.

packages.py reads the installed distributions, devices.py compares this machine's accelerators with those that JAX sees
(probe.py, in a process of its own that may fail or hang), machine.py measures the rest. Only the standard library is
imported here, so that it works where packages are missing.
"""

from __future__ import annotations

from . import devices, machine, packages
from .finding import Finding

__all__ = ["doctor", "findings"]


def findings() -> list[Finding]:
    """Everything that was found, in the order to read it."""
    return [*packages.python(), *packages.required(), *devices.devices(), *packages.extras(), *machine.machine()]


def doctor() -> int:
    """Prints a line per finding; returns 1 if something is broken."""
    found = findings()
    for finding in found:
        print(f"{finding.state:7}{finding.text}")
    broken = sum(finding.state == "broken" for finding in found)
    print(f"\n{broken} broken" if broken else "\nnothing is broken")
    return 1 if broken else 0
