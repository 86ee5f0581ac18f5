"""Many processes, one of which decides: the others do what it does, by name and with the same data.

    work = {"advance": advance, "save": save}  # the same in every process
    if index > 0:
        follow.follow(work)  # until process 0 is done
    else:
        with follow.lead(work) as do:
            report = do("advance", groups)  # advance(groups), here and in all other processes

Each function runs the same computations over all devices in the same order, so nothing else may touch the devices of a
job while `do` is in use. What travels is a name and data, never code.
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
def lead(work: Mapping[str, Callable]) -> Iterator[Callable]:
    """In process 0: yields `do(name, *data)`, which calls `work[name](*data)` in all processes; returns its own result.

    Leaving the block lets the others return from `follow`; leaving it by an exception leaves them to `processes.job`.
    With one process `do` is a plain call. Data are what pickle takes: numbers, texts, arrays, lists, dataclasses.

    Raises:
      RuntimeError: by `do`, after a function has failed here, for the others may be in the midst of it, or a process
        has ended.
    """
    if jax.process_count() == 1:
        yield lambda name, *data: work[name](*data)
        return
    failed: list[str] = []

    def do(name: str, *data):
        if failed or liveness.lost.is_set():
            why = f"{failed[0]} has failed" if failed else "a process has ended"
            raise RuntimeError(f"follow: {name} cannot be done in all processes, for {why}")
        failed.append(name)  # until it is done
        _share(pickle.dumps((name, data)))
        result = work[name](*data)
        failed.clear()
        return result

    yield do
    _share(b"")


def follow(work: Mapping[str, Callable]) -> None:
    """In the other processes: does what process 0 does until it is done. Signals to stop are for process 0 alone."""
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
