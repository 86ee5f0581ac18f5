"""A job of several processes: joining it, agreeing in it, and ending together.

    with processes.job() as index:  # 0 in the process that leads, and where there is but one
        ...

Every process runs the same program and computes the same things in the same order over the devices of all. Who is who
is told by three variables,

    AREAX_COORDINATOR=host:port  AREAX_PROCESSES=4  AREAX_PROCESS=2

where host is that of process 0 and port any that is free there; or by Slurm, Open MPI or a TPU pod, which JAX knows by
itself. AREAX_PROCESSES=auto leaves it to JAX to find out (TPU virtual machines, Kubernetes).
"""

import contextlib
import hashlib
import os
import signal
import threading
from collections.abc import Iterator, Mapping

import jax
import numpy as np
from jax.experimental import multihost_utils

from . import liveness

COORDINATOR, COUNT, INDEX = "AREAX_COORDINATOR", "AREAX_PROCESSES", "AREAX_PROCESS"
HEARTBEAT_S = 30  # JAX ends the job when a process has been silent for so long: a host without power or network


def found(environ: Mapping[str, str] = os.environ) -> dict | None:
    """What `jax.distributed.initialize` is to be told: nothing where JAX finds out by itself; None for one process.

    Raises:
      ValueError: variables half set, or values that cannot be.
    """
    given = {name: environ[name] for name in (COORDINATOR, COUNT, INDEX) if environ.get(name)}
    if given == {COUNT: "auto"}:
        return {}
    if given:
        missing = [name for name in (COORDINATOR, COUNT, INDEX) if name not in given]
        if missing:
            raise ValueError(
                f"processes: {COORDINATOR}, {COUNT} and {INDEX} go together, got no {' and no '.join(missing)}; "
                "set all three, or none for one process"
            )
        host, _, port = given[COORDINATOR].rpartition(":")
        if not host or not port.isdecimal():
            raise ValueError(f"processes: {COORDINATOR} must be host:port, got {given[COORDINATOR]!r}")
        for name in (COUNT, INDEX):
            if not given[name].isdecimal():
                raise ValueError(f"processes: {name} must be a number from 0 on, got {given[name]!r}")
        count, index = int(given[COUNT]), int(given[INDEX])
        if index >= count:
            raise ValueError(f"processes: {INDEX} must be below {COUNT} = {count}, got {index}")
        # Not in a cluster of JAX's own finding as well, which would take its own view of the devices.
        plain = {"num_processes": count, "process_id": index, "cluster_detection_method": "deactivate"}
        return {"coordinator_address": given[COORDINATOR], **plain} if count > 1 else None
    tasks = [
        environ.get(name, "1") for name in ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "MEGASCALE_NUM_SLICES")
    ]
    hosts = environ.get("TPU_PROCESS_ADDRESSES") or environ.get("TPU_WORKER_HOSTNAMES") or ""
    return {} if "," in hosts or any(number != "1" for number in tasks) else None


@contextlib.contextmanager
def job() -> Iterator[int]:
    """Joins the job for the block, before JAX computes anything, and yields this process's index.

    On the CPU the processes talk by gloo, JAX's default. When one ends badly, by an error or by a signal, the others
    name it and end too: processes from 1 on at once, process 0 after its `finally` blocks, for at most
    `watch.GRACE_S` seconds. An exception that leaves the block is reported on stderr and ends this process with exit
    code 2 (ValueError, OSError), 130 (KeyboardInterrupt) or 1, without JAX's way out, which waits for the others.

    With one process, or inside another `job`, nothing of all this happens.

    Raises:
      ValueError: as `found`; JAX finds no cluster.
    """
    wanted = None if jax.distributed.is_initialized() else found()
    if wanted is None:
        yield jax.process_index()
        return
    try:
        jax.distributed.initialize(**wanted, heartbeat_timeout_seconds=HEARTBEAT_S)
    except ValueError as error:
        raise ValueError(f"processes: JAX finds no cluster to join ({error}); set {COORDINATOR} and so on") from error
    if threading.current_thread() is threading.main_thread():  # JAX takes SIGTERM for itself
        signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))
    index, count = jax.process_index(), jax.process_count()
    others = liveness.Watch(index, count)
    try:
        yield index
    except BaseException as error:  # whatever it is, JAX must not wait at the exit for processes that wait for this one
        if not isinstance(error, SystemExit) or error.code:
            others.leave(error)
        _part(others)
        raise
    _part(others)


def _part(others: liveness.Watch) -> None:
    others.goodbye()
    jax.distributed.shutdown()


def anyone(flag: bool) -> bool:
    """Whether the flag is set in any process; all processes ask, and all get the same answer."""
    if jax.process_count() == 1:
        return flag
    return bool(multihost_utils.process_allgather(np.array([flag])).any())


def same(what: str, *values) -> None:
    """Sees that all processes were given the same: values that print the same, sequences entry by entry.

    Raises:
      ValueError: in every process, naming those that differ from process 0.
    """
    if jax.process_count() == 1:
        return
    digest = hashlib.blake2b(digest_size=16)
    for value in values:
        for entry in value if isinstance(value, list) else [value]:
            digest.update(repr(entry).encode())
    all_ = multihost_utils.process_allgather(np.frombuffer(digest.digest(), np.uint8))
    differ = [str(i) for i, own in enumerate(all_) if (own != all_[0]).any()]
    if differ:
        raise ValueError(
            f"processes: all need the same {what}, got others in process {', '.join(differ)} than in process 0; "
            "start all with the same command and files"
        )
