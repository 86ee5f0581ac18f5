"""Random numbers of an episode: libraries draw from the process's, which all episodes and areax share."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Iterator

import numpy as np

LOCK = threading.Lock()


class Randomness:
    """Random numbers that a seed determines: equal seeds give equal episodes, whatever runs beside them."""

    def __init__(self, seed: int):
        self._python, self._numpy = random.Random(seed).getstate(), np.random.RandomState(seed % 2**32).get_state()

    @contextlib.contextmanager
    def drawn(self) -> Iterator[None]:
        """`random` and `numpy.random` go on with these numbers in the block, and with their own after it. One block of
        the process runs at a time; what other threads draw meanwhile is drawn from these."""
        with LOCK:
            others = random.getstate(), np.random.get_state()
            random.setstate(self._python)
            np.random.set_state(self._numpy)
            try:
                yield
            finally:
                self._python, self._numpy = random.getstate(), np.random.get_state()
                random.setstate(others[0])
                np.random.set_state(others[1])
