"""Baselines for file benchmarks: plain reads and writes of a file."""

from pathlib import Path

import numpy as np


def read(path: Path, memory: bytearray) -> None:
    with open(path, "rb", buffering=0) as file:
        left = memoryview(memory)
        while left:
            left = left[file.readinto(left) :]


def write(path: Path, data: bytes | bytearray) -> None:
    with open(path, "wb", buffering=0) as file:
        left = memoryview(data)
        while left:
            left = left[file.write(left) :]


def touch_memory(count: int) -> None:
    """Touches `count` bytes of memory, so that a virtual machine already has them from its host."""
    np.empty(count, np.uint8).fill(1)
