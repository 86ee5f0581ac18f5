"""Memory of a process that computes on the CPU."""

import ctypes

import jax

TRIM_THRESHOLD, MMAP_THRESHOLD, ARENA_MAX = -1, -3, -8  # of glibc's malloc.h
MOST = 2**31 - 1


def keep_memory() -> None:
    """Lets this process keep the memory of a step on the CPU for the next; to be called before JAX computes anything.

    By default each step runs in a thread of its own and the C library gives its memory back to the system, which maps
    and clears it anew for the next: 285,000 page faults a step on a model of 29M weights, 5 % of its time, or 25 % on a
    virtual machine that gives free memory back to its host. All threads share one arena, for the first alone can grow
    at will, and not only the main thread computes. Where the C library is not glibc nothing is kept.
    """
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    libc = ctypes.CDLL(None)
    # Setting the second alone would fix the first where it starts, at 128 KiB. Older versions take 32 MiB at most.
    if hasattr(libc, "mallopt") and (libc.mallopt(MMAP_THRESHOLD, MOST) or libc.mallopt(MMAP_THRESHOLD, 1 << 25)):
        libc.mallopt(TRIM_THRESHOLD, MOST)
        libc.mallopt(ARENA_MAX, 1)
