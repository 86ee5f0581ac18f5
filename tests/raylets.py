"""A Ray cluster of several nodes on this machine's loopback addresses."""

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import jobs

ADDRESSES = ("127.0.0.2", "127.0.0.3", "127.0.0.4")  # Ray replaces 127.0.0.1 by the machine's network address
MEMORY = 80 * 2**20  # object store of a node: the minimum


@dataclass
class Cluster:
    """A cluster at `address`, its head; `folder` contains sockets, whose paths must be short."""

    address: str
    folder: str
    raylets: dict[str, subprocess.Popen] = field(default_factory=dict)

    def join(self, here, *words):
        """Starts a node at an address of this machine; `words` are arguments of `ray start`."""
        joins = ["--address", self.address]
        if not self.raylets:
            joins = ["--head", "--port", self.address.rpartition(":")[2], "--include-dashboard", "false"]
        command = [str(Path(sys.executable).with_name("ray")), "start", "--block", *joins, *words]
        command += ["--node-ip-address", here, "--object-store-memory", str(MEMORY)]
        log = Path(tempfile.mkdtemp(dir=self.folder, prefix="r"), "log")
        with open(log, "w") as file:
            environ = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0"}
            raylet = subprocess.Popen(
                [*command, "--temp-dir", str(log.parent)], env=environ, stdout=file, stderr=file, start_new_session=True
            )
        self.raylets[here] = raylet
        jobs.until(lambda: raylet.poll() is not None or "Ray runtime started" in log.read_text())
        assert raylet.poll() is None, log.read_text()

    def lose(self, here):
        """Kills a node: what `ray start` has started ends with it."""
        self.raylets[here].kill()
        self.raylets[here].wait()


@contextlib.contextmanager
def cluster(*nodes):
    """Yields a Cluster with a raylet per entry of `nodes`, which are arguments of `ray start`."""
    folder = tempfile.mkdtemp(prefix="r", dir="/tmp")
    with socket.create_server((ADDRESSES[0], 0)) as probe:
        made = Cluster(f"{ADDRESSES[0]}:{probe.getsockname()[1]}", folder)
    try:
        for here, words in zip(ADDRESSES, nodes, strict=False):
            made.join(here, *words)
        yield made
    finally:
        head = made.raylets[ADDRESSES[0]]
        for raylet in reversed(made.raylets.values()):
            end(raylet, 60 if head.poll() is None else 0)  # without a head it would wait for it
        shutil.rmtree(folder, ignore_errors=True)


def end(raylet, patience_s):
    """Asks a raylet to end its processes, then waits for it."""
    raylet.terminate()
    try:
        raylet.wait(patience_s)
    except subprocess.TimeoutExpired:
        raylet.kill()
        raylet.wait()
