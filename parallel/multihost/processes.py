"""Multi-process jobs: joining, agreeing, and ending together.

    with processes.job() as index:  # 0 in the leading process, and in a single process
        ...

Every process runs the same program and the same computations in the same order over all devices. Processes are
configured by three variables,

    AREAX_COORDINATOR=host:port  AREAX_PROCESSES=4  AREAX_PROCESS=2

with process 0's host and any free port there; or by Slurm, Open MPI or a TPU pod, which JAX detects.
AREAX_PROCESSES=auto leaves detection to JAX (TPU virtual machines, Kubernetes); AREAX_PROCESSES=1 is a process by
itself, whatever is there.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import NoReturn

import jax
import numpy as np
from jax._src import clusters, xla_bridge  # what JAX detects, and where gloo listens, have no public API
from jax._src.distributed import global_state
from jax._src.lib import _jax
from jax.experimental import multihost_utils

from . import agreement, liveness, meeting, service

COORDINATOR, COUNT, INDEX = "AREAX_COORDINATOR", "AREAX_PROCESSES", "AREAX_PROCESS"
_others: liveness.Watch | None = None  # of this process's job
LATE_S = 10  # for all processes to start, before each says that it waits
HEARTBEAT_S = 24 * 3600  # of JAX, which ends the job with stacks of C++; `liveness` finds a silent process sooner
COLLECTIVES = "jax_cpu_collectives_implementation"
PORTS_S = 30  # for JAX's service to start listening


def found(environ: Mapping[str, str] = os.environ) -> dict | None:
    """Arguments for `jax.distributed.initialize`: {} if JAX detects the cluster; None for a single process.

    Raises:
      ValueError: only some of the variables are set, or a value is invalid.
    """
    given = {name: environ[name] for name in (COORDINATOR, COUNT, INDEX) if environ.get(name)}
    if given == {COUNT: "auto"}:
        return {}
    if given.get(COUNT) == "1":
        return None
    if given:
        missing = [name for name in (COORDINATOR, COUNT, INDEX) if name not in given]
        if missing:
            raise ValueError(
                f"processes: {COORDINATOR}, {COUNT} and {INDEX} must be set together, got no "
                f"{' and no '.join(missing)}; set all three, or none for one process"
            )
        host, _, port = given[COORDINATOR].rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
            raise ValueError(
                f"processes: {COORDINATOR} must be host:port, with a port of 1 to 65535, got {given[COORDINATOR]!r}"
            )
        for name in (COUNT, INDEX):
            if not given[name].isdecimal():
                raise ValueError(f"processes: {name} must be an integer of at least 0, got {given[name]!r}")
        count, index = int(given[COUNT]), int(given[INDEX])
        if index >= count:
            raise ValueError(f"processes: {INDEX} must be below {COUNT} = {count}, got {index}")
        # Disable JAX's cluster detection, which would override the choice of devices.
        plain = {"num_processes": count, "process_id": index, "cluster_detection_method": "deactivate"}
        return {"coordinator_address": given[COORDINATOR], **plain} if count > 1 else None
    tasks = [
        environ.get(name, "1") for name in ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "MEGASCALE_NUM_SLICES")
    ]
    hosts = environ.get("TPU_PROCESS_ADDRESSES") or environ.get("TPU_WORKER_HOSTNAMES") or ""
    return {} if "," in hosts or any(number != "1" for number in tasks) else None


@contextlib.contextmanager
def job() -> Iterator[int]:
    """Joins the job, before JAX computes anything, and yields this process's index.

    On the CPU, processes communicate with gloo, JAX's default. When a process fails, by an error or a signal, the
    others report its name and end too: process 0 after its `finally` blocks, within `liveness.GRACE_S` seconds, all
    others immediately. An exception that leaves the block is printed to stderr and ends this process with exit code 2
    (ValueError, OSError), 130 (KeyboardInterrupt) or 1, bypassing JAX's exit handlers, which wait for the others.

    Does nothing in a single process or inside another `job`.

    Raises:
      ValueError: as `found`; JAX detects no cluster; as `agreement.same_software`.
    """
    wanted = None if jax.distributed.is_initialized() else found()
    if wanted is None:
        yield jax.process_index()
        return
    place = wanted or _detected()
    gathering = meeting.Meeting(place["coordinator_address"], meeting.here(place["process_id"], place["num_processes"]))
    with _waiting(gathering):
        met = gathering.attend()
    global _others
    _others = others = liveness.Watch(gathering, met.links)
    try:
        running = _initialize(place, met)
        agreement.same_software()
        yield jax.process_index()
    except BaseException as error:  # always: JAX must not wait at exit for processes that wait for this one
        if not isinstance(error, SystemExit) or error.code:
            others.leave(error)
        _disconnect(others, running)
        raise
    _disconnect(others, running)


def _detected() -> dict:
    """`found` where JAX detects the cluster."""
    named = os.environ.get("JAX_LOCAL_DEVICE_IDS")
    chosen = [int(number) for number in named.split(",")] if named else None
    address, count, index, devices = clusters.ClusterEnv.auto_detect_unset_distributed_params(
        os.environ.get("JAX_COORDINATOR_ADDRESS"), None, None, chosen, None, meeting.START_S
    )
    if address is None or count is None or index is None:
        raise ValueError(f"processes: JAX detects no cluster to join; set {COORDINATOR} etc.")
    plain = {"num_processes": count, "process_id": index, "cluster_detection_method": "deactivate"}
    return {"coordinator_address": address, "local_device_ids": devices, **plain}


def _initialize(place: Mapping, met: meeting.Met) -> subprocess.Popen | None:
    """Connects JAX to its service, which process 0 starts and returns, and has gloo listen where others reach this
    host: by default it takes what the hostname resolves to, which is 127.0.1.1 on Debian, or one of several addresses.
    """
    anywhere = "[::]" if socket.has_dualstack_ipv6() else "0.0.0.0"
    port, running = met.address.rpartition(":")[2], None
    if place["process_id"] == 0:
        running = service.start(f"{anywhere}:{port}", place["num_processes"], HEARTBEAT_S)
    _reach(met.address)
    with meeting.listen() as free:  # for the service that JAX starts itself in process 0, which nobody uses
        unused = f"127.0.0.1:{free.getsockname()[1]}"
    jax.distributed.initialize(
        **{**place, "coordinator_address": met.address}, heartbeat_timeout_seconds=HEARTBEAT_S,
        coordinator_bind_address=unused,
    )  # fmt: skip
    if threading.current_thread() is threading.main_thread():  # undo JAX's SIGTERM handler
        signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))

    def cpu():
        gloo = _jax.make_gloo_tcp_collectives(global_state.client, hostname=met.here)
        return xla_bridge.make_cpu_client(gloo)

    if getattr(jax.config, COLLECTIVES) == "gloo":
        xla_bridge.register_backend_factory("cpu", cpu, priority=0, fail_quietly=False)
    return running


def _reach(address: str) -> None:
    """Waits until JAX's service listens; JAX itself would end the process with stacks of C++."""
    host, _, port = address.rpartition(":")
    deadline = time.monotonic() + PORTS_S
    while True:
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=meeting.CONNECT_S).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise ValueError(
                    f"processes: hosts must reach each other on all ports, this one reaches process 0 at its "
                    f"coordinator's port, but not at {address} ({error}); open the firewall between the hosts"
                ) from error
        time.sleep(0.1)


@contextlib.contextmanager
def _waiting(gathering: meeting.Meeting) -> Iterator[None]:
    """Prints a line if the block, in which this process meets the others, takes longer than LATE_S."""
    line = lambda: f"{gathering.me} {gathering.waits}, up to {meeting.START_S} s"
    timer = threading.Timer(LATE_S, lambda: print(line(), file=sys.stderr, flush=True))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def leave(error: BaseException) -> NoReturn:
    """Ends this process of several, from any thread, as an exception that leaves its `job` does."""
    assert _others
    _others.leave(error)


def _disconnect(others: liveness.Watch, running: subprocess.Popen | None) -> None:
    others.goodbye()
    jax.distributed.shutdown()
    if running:
        service.stop(running)


def anyone(*flags: bool) -> list[bool]:
    """Whether each flag is set in any process; all processes must call it and get the same result."""
    if jax.process_count() == 1:
        return list(flags)
    return multihost_utils.process_allgather(np.array(flags)).any(axis=0).tolist()


@contextlib.contextmanager
def failing_together(leave: Callable[[], None]) -> Iterator[None]:
    """Wraps what all processes do and each may fail at: if any does, all call `leave` and raise, those that did not
    fail a ValueError. All processes must enter it."""
    whole = False
    try:
        yield
        whole = True
    finally:
        if failed := anyone(not whole)[0]:
            leave()
            anyone(True)  # waits for all: the first to end would end the others
    if failed:
        raise liveness.FailedElsewhere("another process of the job failed here; its own message says why")


def least(value: int) -> int:
    """The smallest of the processes' values; all processes must call it and get the same."""
    if jax.process_count() == 1:
        return value
    return int(multihost_utils.process_allgather(np.array(value)).min())
