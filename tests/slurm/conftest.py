"""`make test-slurm` has these tests; it says what the machine lacks for them."""

import os
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parent))
import cluster

collect_ignore = [] if os.environ.get("AREAX_SLURM") else ["test_real.py"]


def pytest_sessionstart(session):
    if os.environ.get("AREAX_SLURM") and (lines := cluster.missing()):
        pytest.exit("make test-slurm lacks\n  " + "\n  ".join(lines), returncode=2)
