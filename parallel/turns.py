"""Threads of a process take turns to launch programs over several devices, such as a trainer and an engine beside it.

If two threads launch programs with collectives at the same time, devices may receive them in different orders and wait
for each other forever. Once a call returns, its program is in the queues of all its devices. Programs on one device
cannot block each other like this.
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator

import jax

_lock = threading.RLock()


@contextlib.contextmanager
def taken(mesh: jax.sharding.Mesh) -> Iterator[None]:
    """During the block no other thread launches programs over several devices; no effect if `mesh` is one device."""
    with _lock if mesh.size > 1 else contextlib.nullcontext():
        yield


def during(mesh: jax.sharding.Mesh, fn: Callable) -> Callable:
    """Wraps `fn` so that each call takes a turn."""

    @functools.wraps(fn)
    def run(*args, **options):
        with taken(mesh):
            return fn(*args, **options)

    return run
