"""The library that solves triangular systems starts no threads beside JAX's."""

import os
import subprocess
import sys

import pytest

# What JAX loads when it compiles a triangular solve on the CPU.
PROGRAM = """
import os, sys
from areax.adapters.runtime import blas
if "limited" in sys.argv:
    blas.one_thread()
import numpy
before = len(os.listdir("/proc/self/task"))
import scipy.linalg.cython_blas
print(len(os.listdir("/proc/self/task")) - before)
"""


@pytest.mark.slow
def test_triangular_systems_are_solved_in_one_thread():
    def started(*args, **more):
        environ = {name: x for name, x in os.environ.items() if not name.endswith("NUM_THREADS")} | more
        done = subprocess.run([sys.executable, "-c", PROGRAM, *args], env=environ, capture_output=True, check=True)
        return int(done.stdout)

    assert started("limited") == 0  # of as many as there are cores
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        assert started("limited", **{name: "2"}) == started(**{name: "2"})
