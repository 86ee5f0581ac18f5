"""Limits on the CPU time of code that runs in the calling thread."""

import contextlib
import gc
import time


@contextlib.contextmanager
def limit(seconds):
    """Fails if the block takes more CPU time; other threads and garbage of earlier tests do not count."""
    gc.disable()
    try:
        start = time.thread_time()
        yield
        spent = time.thread_time() - start
    finally:
        gc.enable()
    assert spent < seconds
