"""malloc settings for processes that compute on the CPU."""

import ctypes
import functools

import jax

TRIM_THRESHOLD, MMAP_THRESHOLD, ARENA_MAX = -1, -3, -8  # of glibc's malloc.h
MOST = 2**31 - 1
LONG_S = {  # JAX's events around compiling, by the seconds of those of large programs
    "/jax/core/compile/jaxpr_to_mlir_module_duration": 0.1,  # compiling begins
    "/jax/core/compile/backend_compile_duration": 1.0,
}


@functools.cache
def keep_memory() -> None:
    """Makes malloc reuse memory from step to step on the CPU; call it before JAX computes anything.

    By default each step runs in a new thread, and the C library returns its memory to the system, which maps and clears
    it again for the next step: 285,000 page faults per step on a model of 29M weights, 5 % of its time, or 25 % on a
    virtual machine that returns free memory to its host. All threads share one arena, since only the main arena can
    grow freely and other threads compute too. Has no effect if the C library is not glibc.
    """
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    libc = ctypes.CDLL(None)
    jax.monitoring.register_event_duration_secs_listener(_around_compiling)
    # Setting only MMAP_THRESHOLD would fix TRIM_THRESHOLD at its initial 128 KiB. Older versions allow at most 32 MiB.
    if hasattr(libc, "mallopt") and (libc.mallopt(MMAP_THRESHOLD, MOST) or libc.mallopt(MMAP_THRESHOLD, 1 << 25)):
        libc.mallopt(TRIM_THRESHOLD, MOST)
        libc.mallopt(ARENA_MAX, 1)


def return_memory() -> None:
    """Returns what is free to the system: before compiling, which would not fit into it; after it, as hundreds of MB
    are left; after the first run of a program, and before that of another, whose memory may not fit into that of the
    last. Has no effect if the C library is not glibc."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)


def _around_compiling(event: str, duration_secs: float, **of: str | int) -> None:
    if duration_secs > LONG_S.get(event, float("inf")):
        return_memory()
