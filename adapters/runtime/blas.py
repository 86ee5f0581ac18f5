"""Threads of the library that solves triangular systems on the CPU."""

import os


def one_thread() -> None:
    """Makes OpenBLAS, by which JAX solves triangular systems on the CPU, do so in the calling thread; call it before
    JAX compiles one.

    Its threads busy-wait for each other. With other processes on two cores, 112 systems of 32 equations, as delta nets
    have in their chunks, took 286 ms of CPU time, and 2.3 ms by one thread. A number in the environment is kept.
    """
    if "OMP_NUM_THREADS" not in os.environ:
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
