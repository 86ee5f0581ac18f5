"""Lockstep execution: process 0 decides which functions all processes run, by name, with the same data.

    work = {"update": update, "save": save}  # the same in every process
    if index > 0:
        lockstep.worker_loop(work)  # until process 0 is done
    else:
        with lockstep.leader(work) as run_on_all:
            report = run_on_all("update", batches)  # update(batches), in all processes

All processes must run the same computations in the same order, so nothing else may use the job's devices during
`run_on_all`. Only a name and data are sent, never code.
"""

import contextlib
import pickle
import signal
import threading
from collections.abc import Callable, Iterator, Mapping

import jax
import numpy as np
from jax.experimental import multihost_utils

from . import liveness
from .channel import Share

CHUNK = 1 << 26  # bytes per broadcast; shorter ones are padded to a power of two, so that few shapes compile
LEAST = 1 << 16


@contextlib.contextmanager
def leader(work: Mapping[str, Callable], share: Share | None = None) -> Iterator[Callable]:
    """In process 0, yields `run_on_all(name, *data)`, which runs `work[name](*data)` in all processes and returns its
    own result.

    Leaving the block makes `worker_loop` return in the others; after an exception, `processes.job` ends them. With one
    process, `run_on_all` is a plain call. Data must be picklable: numbers, strings, arrays, lists, dataclasses.

    Args:
      share: sends names and data, as `channel.opened` yields it; None = a broadcast by the devices, which is faster for
        much data, but takes 10 ms for little, behind all that is queued there.

    Raises:
      RuntimeError: from `run_on_all`, if an earlier function failed here (others may still be in it) or a process has
        ended.
    """
    if jax.process_count() == 1:
        yield lambda name, *data: work[name](*data)
        return
    share, failed = share or _share, list[str]()

    def run_on_all(name: str, *data):
        if failed or liveness.lost.is_set():
            why = f"{failed[0]} has failed" if failed else "a process has ended"
            raise RuntimeError(f"lockstep: {name} cannot be run in all processes: {why}")
        failed.append(name)  # until it is done
        share(pickle.dumps((name, data)))
        result = work[name](*data)
        failed.clear()
        return result

    yield run_on_all
    share(b"")


def worker_loop(work: Mapping[str, Callable], share: Share | None = None) -> None:
    """In the other processes: runs what process 0 runs until it is done. SIGINT and SIGTERM are left to process 0.

    Args:
      share: as for `leader`.
    """
    share = share or _share
    main = threading.current_thread() is threading.main_thread()
    numbers = (signal.SIGINT, signal.SIGTERM) if main else ()
    before = {number: signal.signal(number, signal.SIG_IGN) for number in numbers}
    try:
        while message := share(b""):
            name, data = pickle.loads(message)
            work[name](*data)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _share(data: bytes = b"") -> bytes:
    """Broadcasts process 0's bytes to all processes."""
    head = _one_to_all(np.frombuffer(len(data).to_bytes(8, "little"), np.uint8))
    size = int.from_bytes(head.tobytes(), "little")
    parts = []
    for start in range(0, size, CHUNK):
        padded = np.zeros(min(CHUNK, max(LEAST, 1 << (size - start - 1).bit_length())), np.uint8)
        chunk = np.frombuffer(data[start : start + CHUNK], np.uint8)
        padded[: len(chunk)] = chunk
        parts.append(_one_to_all(padded).tobytes())
    return b"".join(parts)[:size]


def _one_to_all(x: np.ndarray) -> np.ndarray:
    return np.asarray(multihost_utils.broadcast_one_to_all(x))
