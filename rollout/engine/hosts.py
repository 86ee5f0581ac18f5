"""A server of several processes: process 0 answers requests and schedules, the others follow it on their devices.

Each process reads weights from files, its own part, while generation goes on; all agree on what they have read.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from ...parallel.multihost import channel, liveness, processes

if TYPE_CHECKING:
    from .routes.service import Service

LINE = 512  # bytes of what a process says about its weights


@contextlib.contextmanager
def joined() -> Iterator[tuple[int, channel.Share]]:
    """Joins the job, if there is one; yields this process's index, and how process 0 tells the others what to run.

    SIGINT and SIGTERM are left to process 0, with which the others end.
    """
    with processes.job() as index, channel.opened() as share:
        for number in (signal.SIGINT, signal.SIGTERM) if index > 0 else ():
            signal.signal(number, signal.SIG_IGN)
        yield index, share


def connect(service: Service, share: channel.Share) -> None:
    """Makes the engine of a service, not yet started, one over all processes of the job."""
    if jax.process_count() == 1:
        return
    reader = Reader(service)
    service.engine.device.operations |= {"read": reader.start, "agree": reader.agree}
    service.engine.share = share
    service.read = reader.read


@contextlib.contextmanager
def serving(engine: Any) -> Iterator[None]:
    """Runs an engine during the block.

    Raises RuntimeError after it if another process has ended.
    """
    engine.start()
    try:
        yield
    finally:
        if liveness.lost.is_set():  # the engine's thread may wait for that process
            raise RuntimeError("a process of the server has ended")
        engine.close()


class Reader:
    """Reads new weights in all processes."""

    def __init__(self, service: Service):
        self._engine, self._here = service.engine, service.read
        self._thread = ThreadPoolExecutor(1)
        self._made: Future

    def read(self, path: str) -> tuple[Any, dict[str, str]]:
        """In process 0: as `Service.read_here`, in all processes; those of the others are staged in their engines.

        Raises:
          ValueError: as `Service.read_here`, in any process; they have read different weights.
        """
        self._engine.run_on_all("read", path)
        made = self._made
        made.exception()  # waits, while the engine goes on
        said = self._engine.run_on_all("agree")
        try:
            for i, line in enumerate(said):
                if line.startswith("!"):
                    raise ValueError(line[1:] if i == 0 else f"process {i}: {line[1:]}")
            if other := [i for i, line in enumerate(said) if line != said[0]]:
                raise ValueError(f"{path}: has other weights in process {other[0]} than in process 0")
        except ValueError:
            self._engine.run_on_all("drop_staged")
            raise
        return made.result()

    def start(self, path: str) -> None:
        """Starts to read, in a thread."""
        self._engine.device.drop_staged()  # never three versions in memory
        self._made = self._thread.submit(self._here, path)

    def agree(self) -> list[str]:
        """What each process has read: a hash, or "!" and why it could not."""
        made, self._made = self._made, Future()
        try:
            self._engine.device.staged, checksums = made.result()
            said = hashlib.blake2b(json.dumps(checksums, sort_keys=True).encode()).hexdigest()
        except ValueError as error:
            said = f"!{error}"
        line = np.frombuffer(said.encode()[:LINE].ljust(LINE, b"\0"), np.uint8)
        return [bytes(one).rstrip(b"\0").decode(errors="ignore") for one in multihost_utils.process_allgather(line)]
