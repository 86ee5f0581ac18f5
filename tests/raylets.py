"""A Ray cluster of several nodes on this machine's loopback addresses."""

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import jobs

ADDRESSES = ("127.0.0.2", "127.0.0.3")  # Ray replaces 127.0.0.1 by the machine's network address
MEMORY = 80 * 2**20  # object store of a node: the minimum


@contextlib.contextmanager
def cluster(*nodes):
    """Yields the address of a cluster with a raylet per entry of `nodes`, which are arguments of `ray start`."""
    environ = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0"}
    folder = tempfile.mkdtemp(prefix="r", dir="/tmp")  # contains sockets, whose paths must be short
    with socket.create_server((ADDRESSES[0], 0)) as probe:
        address = f"{ADDRESSES[0]}:{probe.getsockname()[1]}"
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        for i, (here, words) in enumerate(zip(ADDRESSES, nodes, strict=False)):
            joins = ["--address", address]
            if i == 0:
                joins = ["--head", "--port", address.rpartition(":")[2], "--include-dashboard", "false"]
            command = [str(Path(sys.executable).with_name("ray")), "start", "--block", *joins, *words]
            command += ["--node-ip-address", here, "--object-store-memory", str(MEMORY), "--temp-dir", f"{folder}/{i}"]
            log = Path(folder, f"{i}.log")
            with open(log, "w") as file:
                raylet = subprocess.Popen(command, env=environ, stdout=file, stderr=file, start_new_session=True)
            stack.callback(end, raylet)
            jobs.until(lambda: raylet.poll() is not None or "Ray runtime started" in log.read_text())  # noqa: B023
            assert raylet.poll() is None, log.read_text()
        yield address


def end(raylet):
    """Asks a raylet to end its processes, then waits for it."""
    raylet.terminate()
    try:
        raylet.wait(60)
    except subprocess.TimeoutExpired:
        raylet.kill()
        raylet.wait()
