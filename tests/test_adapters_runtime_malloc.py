"""What a process keeps of freed memory."""

import ctypes
import os
from pathlib import Path

import pytest

from areax.adapters.runtime import malloc

libc = ctypes.CDLL(None)


def resident() -> int:
    """Bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


@pytest.mark.skipif(not hasattr(libc, "malloc_trim"), reason="malloc_trim is glibc's")
@pytest.mark.parametrize(
    ("event", "seconds", "returned"),
    [("backend_compile", 2.0, True), ("backend_compile", 0.5, False), ("jaxpr_to_mlir_module", 0.5, True)],
)
def test_free_memory_goes_back_to_the_system_before_and_after_a_long_compilation(event, seconds, returned):
    libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    size, blocks = 100_000, 1000  # smaller than what malloc maps one by one
    before = resident()
    held = [libc.malloc(size) for _ in range(blocks)]
    for block in held:
        ctypes.memset(block, 1, size)
    for block in held[:-1]:  # the last keeps the others from being the heap's top, which free returns
        libc.free(block)
    malloc._around_compiling(f"/jax/core/compile/{event}_duration", seconds)
    kept = resident() - before
    libc.free(held[-1])
    assert (kept < size * blocks / 4) == returned
