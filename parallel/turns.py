"""Programs over several devices take turns in a process, such as those of a trainer and of an engine beside it.

If two threads start programs with collectives, one device may come to the first of them first and another to the
second, and both wait for each other forever. A program has its place in the queues of all its devices when its call
returns. Programs of one device wait for nobody.
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator

import jax

_lock = threading.RLock()


@contextlib.contextmanager
def taken(mesh: jax.sharding.Mesh) -> Iterator[None]:
    """During the block no other thread starts programs over several devices. Without effect if the mesh is one
    device."""
    with _lock if mesh.size > 1 else contextlib.nullcontext():
        yield


def during(mesh: jax.sharding.Mesh, fn: Callable) -> Callable:
    """The function, whose calls take a turn each."""

    @functools.wraps(fn)
    def run(*args, **options):
        with taken(mesh):
            return fn(*args, **options)

    return run
