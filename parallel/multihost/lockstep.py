"""Runs functions in all processes of a job at the same time: process 0 leads, the others are its workers.

    work = {"update": update, "save": save}  # the same in every process
    if index > 0:
        lockstep.worker_loop(work)  # until process 0 leaves its block
    else:
        with lockstep.leader(work) as run_on_all:
            report = run_on_all("update", batches)  # update(batches), in every process

Each function runs the same computations over all devices in the same order, so nothing else may use the devices of the
job during `run_on_all`. Process 0 sends a name and data, never code.
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

CHUNK = 1 << 26  # bytes a broadcast; shorter ones are filled to a power of two, so that few shapes ever compile
LEAST = 1 << 16


@contextlib.contextmanager
def leader(work: Mapping[str, Callable]) -> Iterator[Callable]:
    """In process 0: yields `run_on_all(name, *data)`, which calls `work[name](*data)` in all processes and returns the
    result of process 0.

    Leaving the block ends `worker_loop` in the other processes; after an exception `processes.job` ends them. With one
    process `run_on_all` is a plain call. Data must be picklable.

    Raises:
      RuntimeError: from `run_on_all`, after a function failed in process 0 (the others may still be running it), or
        after a process ended.
    """
    if jax.process_count() == 1:
        yield lambda name, *data: work[name](*data)
        return
    failed: list[str] = []

    def run_on_all(name: str, *data):
        if failed or liveness.lost.is_set():
            why = f"{failed[0]} has failed" if failed else "a process has ended"
            raise RuntimeError(f"lockstep: {name} cannot run in all processes: {why}")
        failed.append(name)  # until it is done
        _share(pickle.dumps((name, data)))
        result = work[name](*data)
        failed.clear()
        return result

    yield run_on_all
    _share(b"")


def worker_loop(work: Mapping[str, Callable]) -> None:
    """In the other processes: runs what process 0 runs until its block ends. SIGINT and SIGTERM are ignored: process 0
    handles them.
    """
    main = threading.current_thread() is threading.main_thread()
    numbers = (signal.SIGINT, signal.SIGTERM) if main else ()
    before = {number: signal.signal(number, signal.SIG_IGN) for number in numbers}
    try:
        while message := _share():
            name, data = pickle.loads(message)
            work[name](*data)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _share(data: bytes = b"") -> bytes:
    """Process 0's bytes, in every process."""
    head = _one_to_all(np.frombuffer(len(data).to_bytes(8, "little"), np.uint8))
    size = int.from_bytes(head.tobytes(), "little")
    parts = []
    for start in range(0, size, CHUNK):
        padded = np.zeros(min(CHUNK, max(LEAST, 1 << (size - start - 1).bit_length())), np.uint8)
        own = np.frombuffer(data[start : start + CHUNK], np.uint8)
        padded[: len(own)] = own
        parts.append(_one_to_all(padded).tobytes())
    return b"".join(parts)[:size]


def _one_to_all(x: np.ndarray) -> np.ndarray:
    return np.asarray(multihost_utils.broadcast_one_to_all(x))
