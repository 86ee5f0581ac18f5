"""What work on files is measured against: reading a file's bytes, and writing them."""

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
    """So many bytes, which then need not be got from a virtual machine's host."""
    np.empty(count, np.uint8).fill(1)
